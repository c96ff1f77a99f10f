"""Addresses: reading HOST:PORT, listening and connecting, and the zones of link-local IPv6 addresses.

A link-local address (fe80::…) needs a zone: the name of a network interface, as in fe80::1%eth0. Interfaces have other
names on other hosts, so `bind_socket` and `connect` find the zone on this host.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import time
from collections.abc import Iterator, Sequence

INTERFACES_FILE = "/proc/net/if_inet6"
"""The file in which Linux lists the IPv6 addresses of this host and the interface of each."""
LINK_LOCAL_SCOPE = "20"
"""The scope (in hexadecimal) that marks link-local addresses in INTERFACES_FILE."""
LISTEN_BACKLOG = 64
CONNECT_TIMEOUT_S = 10.0
"""Maximum seconds for connecting to another host, including repeated attempts."""
ATTEMPT_TIMEOUT_S = 2.5
"""Seconds after which a connection attempt is repeated. The kernel alone would wait longer after each lost packet."""
PORT_HINT = "the key address in the hosts file sets the port"
"""Text for messages: how users choose the port at which a device listens."""
UNREACHABLE_ERRORS = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES)
"""Errors of a connection that a firewall rejects, or for which there is no route."""


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of an address; the port is 0 (any free port) if the address has none.

    Valid are "10.0.0.2", "10.0.0.2:7000", "pi01.local:7000", "fd00::2" and "[fe80::2%eth0]:7000". Raise ValueError for
    other strings.
    """
    if _is_ip_address(text):
        return text, 0
    match = re.fullmatch(r"(?:\[([^][]+)]|([^][:\s]+))(?::(\d{1,5}))?", text)
    if match is None or int(match[3] or 0) > 65535 or (match[1] and not _is_ip_address(match[1])):
        raise ValueError(f"{text!r} is not an address: expected HOST or HOST:PORT, with [HOST]:PORT for IPv6")
    return match[1] or match[2], int(match[3] or 0)


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return True if packets to this IP address stay on this host; False for a name."""
    if not _is_ip_address(host):
        return False
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_link_local(host: str) -> bool:
    address = host.partition("%")[0]
    return _is_ip_address(address) and ipaddress.ip_address(address) in ipaddress.ip_network("fe80::/10")


def bind_socket(host: str, port: int, listens: bool = True) -> socket.socket:
    """Return a socket that is bound to an address of this host; it accepts connections if `listens`.

    Raise ValueError if that is not possible.
    """
    try:
        if is_link_local(host):
            own = ipaddress.ip_address(host.partition("%")[0]).packed.hex()
            host = _with_zone(host, [zone for address, zone in _link_local_interfaces() if address == own])
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            if listens:
                bound.listen(LISTEN_BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise _listen_error(host, port, error) from None
    return bound


def connect(host: str, port: int, timeout_s: float, port_hint: str) -> socket.socket:
    """Connect to an address; repeat attempts for at most `timeout_s` and CONNECT_TIMEOUT_S seconds.

    `port_hint` is a text for the error message: which option sets the port, so that users can allow it in a firewall.
    Raise OSError with the cause and the remedy.
    """
    timeout_s = min(timeout_s, CONNECT_TIMEOUT_S)
    end = time.monotonic() + timeout_s
    remedy = f"a firewall may block the connection: allow this port in the firewall there ({port_hint})"
    while (left_s := end - time.monotonic()) > 0:
        try:
            return _try_connect(host, port, min(left_s, ATTEMPT_TIMEOUT_S))
        except TimeoutError:
            continue
        except OSError as error:
            cause = error.strerror or str(error)
            raise type(error)(f"{cause}: {remedy}" if error.errno in UNREACHABLE_ERRORS else cause) from None
    raise TimeoutError(f"no answer within {timeout_s:.3g} s: {remedy}")


def _try_connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect once; try a link-local address on each interface of this host, first on the one in its zone."""
    if not is_link_local(host):
        return socket.create_connection((host, port), timeout_s)
    zones = [zone for _, zone in _link_local_interfaces()]
    hosts = [_with_zone(host, [zone]) for zone in sorted(zones, key=lambda zone: zone != host.partition("%")[2])]
    for other in hosts[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection((other, port), timeout_s)
    return socket.create_connection((hosts[-1] if hosts else host, port), timeout_s)


def find_local_host(host: str, port: int) -> str:
    """Return this host's own address on the route to another host; raise OSError if there is no route."""
    error: OSError = OSError(errno.EHOSTUNREACH, "No route to host")
    for family, kind, _, _, address in socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # For a datagram socket, connect() selects the route and sends nothing.
                return str(probe.getsockname()[0])
        except OSError as failure:
            error = failure
    raise error


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _with_zone(host: str, zones: Sequence[str]) -> str:
    return f"{host.partition('%')[0]}%{zones[0]}" if zones else host


def _link_local_interfaces() -> Iterator[tuple[str, str]]:
    """Yield each link-local address of this host (as hexadecimal digits) and the name of its interface."""
    with contextlib.suppress(OSError), open(INTERFACES_FILE, encoding="ascii") as file:
        for line in file:
            address, _, _, scope, _, zone = line.split()
            if scope == LINK_LOCAL_SCOPE:
                yield address, zone


def _listen_error(host: str, port: int, error: OSError) -> ValueError:
    cause, remedy = error.strerror or str(error), "give an address of this host"
    if error.errno == errno.EADDRINUSE:
        cause, remedy = "the port is in use", "end the process that uses it, or choose another port (0: any)"
    return ValueError(f"{join_address(host, port)}: cannot listen there: {cause}: {remedy}")
