"""Addresses that users write: with and without port, names, IPv6 with a zone."""

from __future__ import annotations

import ipaddress

import pytest

from dicompiler.base import addresses
from dicompiler_targets.sockets.runtime import addresses as runtime_addresses

VALID = {
    "10.0.0.2": ("10.0.0.2", 0),
    "10.0.0.2:7000": ("10.0.0.2", 7000),
    "pi01.local": ("pi01.local", 0),
    "pi01:7000": ("pi01", 7000),
    "::1": ("::1", 0),
    "[::1]": ("::1", 0),
    "[::1]:70": ("::1", 70),
    "fd00::2": ("fd00::2", 0),
    "fe80::1%eth0": ("fe80::1%eth0", 0),
    "[fe80::1%eth0]:7000": ("fe80::1%eth0", 7000),
}
INVALID = (
    "",
    ":7",
    "pi01:x",
    "pi01:70000",
    "pi01:-1",
    "[::1",
    "[pi01]:7",
    "::1]:7",
    "fd00::g",
    "pi 01",
    "10.0.0.2:7:8",
)


@pytest.mark.parametrize("module", [addresses, runtime_addresses], ids=["compiler", "runtime"])
def test_both_readers_accept_the_same_addresses(module: type[addresses]) -> None:
    for text, expected in VALID.items():
        assert module.split_address(text) == expected
        assert module.split_address(module.join_address(*expected)) == expected
    for text in INVALID:
        with pytest.raises(ValueError, match="is not an address"):
            module.split_address(text)


def test_numbers_are_not_a_host_name() -> None:
    for text in ("10.0.0", "10.0.0.300", "7000"):
        with pytest.raises(ValueError, match="is not an address"):
            addresses.split_address(text)


def test_resolves_names_only() -> None:
    assert ipaddress.ip_address(addresses.resolve_host("localhost")).is_loopback
    assert addresses.resolve_host("fe80::1%eth0") == "fe80::1%eth0"
    with pytest.raises(OSError, match=r"(?i)name"):
        addresses.resolve_host("no.such.board.invalid")


def test_prefers_addresses_that_other_hosts_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["127.0.1.1", "fe80::2%wlan0", "fd00::2", "10.0.0.2"]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (host, 0)) for host in found])
    assert addresses.resolve_host("pi01") == "fd00::2"
    del found[2:]
    assert addresses.resolve_host("pi01") == "fe80::2"
