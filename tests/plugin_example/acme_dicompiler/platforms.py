"""A platform family: N boards on a switch, named `acme-boardxN`."""

from __future__ import annotations

from dicompiler.plugin_api import Device, Host, Network, Platform, PlatformFamily


def boards(count: int) -> Platform:
    """Return a platform of `count` boards with 20 GFLOP/s and 2 GiB on a switch of 1 Gbit/s."""
    names = [f"board{i:02}" for i in range(1, count + 1)]
    hosts = tuple(Host(name, memory=2 * 2**30) for name in names)
    devices = tuple(Device(name, name, rate=20e9, cores=4, power_active=6.0, power_idle=2.0) for name in names)
    return Platform(f"acme-boardx{count}", hosts, devices, Network("switch", bandwidth=1e9, latency=2e-4))


BOARDS = PlatformFamily("acme-boardxN", "N Acme boards on a switch; figures of the data sheet.", boards)
