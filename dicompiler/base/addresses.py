"""Network addresses in the notation HOST:PORT, and the resolution of host names."""

from __future__ import annotations

import ipaddress
import re
import socket


def split_address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address such as "pi01.local:7000"; the port is 0 if the text has none.

    An IPv6 address needs brackets only if a port follows it: "fd00::2", "[fe80::2%eth0]:7000".

    Raises:
        ValueError: The text is not an address.
    """
    if is_ip_address(text):
        return text, 0
    match = re.fullmatch(r"(?:\[([^][]+)]|([^][:\s]+))(?::(\d{1,5}))?", text)
    if match is None or int(match[3] or 0) > 65535 or (match[1] and not is_ip_address(match[1])):
        raise ValueError(f"{text!r} is not an address")
    host = match[1] or match[2]
    if not is_ip_address(host) and re.fullmatch(r"[\d.]+", host):
        raise ValueError(f"{host!r} is not an address")
    return host, int(match[3] or 0)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolve_host(host: str) -> str:
    """Return an IP address of a host that other hosts can use.

    If a name has several addresses, an ordinary one is preferred to a link-local one, and both to a loopback address.

    Args:
        host: A name, or an IP address, which is returned unchanged.

    Returns:
        The first address of the preferred kind. A link-local address has no zone (such as %eth0), because each host
        numbers its interfaces itself.

    Raises:
        OSError: The name cannot be resolved.
    """
    if is_ip_address(host):
        return host
    found = [str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    addresses = map(ipaddress.ip_address, found)
    return str(min(addresses, key=lambda address: (address.is_loopback, address.is_link_local)))
