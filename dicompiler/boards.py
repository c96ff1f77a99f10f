"""The built-in platforms: the number of boards goes in, a Platform comes out. Every figure has its source beside it.

Compute rates are what the boards sustain, not peaks: a plan balances by them. A profile of your own boards is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dicompiler.platform import Device, Host, Network, Platform, PlatformFamily

GIB = 2**30

_PI_NETWORK = " Network: CoopAI's gateway, 100 Mbit/s for all together; it counts no latency."
_PI3 = (
    "Raspberry Pi 3 B: four Cortex-A53 at 1.2 GHz, 1 GB (CoopAI, section V). 3.75 GFLOP/s: Linpack on 16 such boards"
    " reaches up to 60 GFLOP/s (Basford et al., Performance analysis of single board computer clusters, 2019). Power:"
    " 1.4 W idle, 3.7 W with four cores busy (Pi Dramble's measurements)." + _PI_NETWORK
)
_PI4 = (
    "Raspberry Pi 4: four Cortex-A72 at 1.5 GHz, 4 GB, 13.6 GFLOP/s (CoopAI, section V). Power: 2.7 W idle, 6.4 W with"
    " four cores busy (Pi Dramble's measurements)." + _PI_NETWORK
)
# Table II of AutoDiCE for one board: ResNet-101 (7.85 GMAC, 15.7 GFLOP) runs at 5.786 images/s on six cores and at
# 21.767 on the GPU, which are 91 and 342 GFLOP/s. Its largest energy per image times images/s of each kind is 10.7 W
# (VGG-19 on the CPU) and 22.4 W (ResNet-101 on the GPU) for the whole board; less the idle share of the other device.
_NX = (
    "NVIDIA Jetson Xavier NX: six Carmel cores and a Volta GPU on a gigabit switch (AutoDiCE, section V). Rates: what"
    " ResNet-101 sustains in its Table II, 91 GFLOP/s (six cores) and 342 GFLOP/s (GPU, whose theoretical maximum is"
    " 844.8). Active power: from the same table, 10.7 W and 22.4 W for the board. Idle power: no source, 2 W for"
    " each is an assumption. Memory: 8 GB, the smaller of the two modules on sale (NVIDIA's data sheet; the paper's"
    " boards had 16 GB)."
)


def _boards(
    family: str, description: str, prefix: str, host: Host, devices: tuple[Device, ...], network: Network
) -> Callable[[int], Platform]:
    """`make` of a family: N copies of a host and its devices, numbered from 01; a device's name is a suffix."""

    def make(count: int) -> Platform:
        names = [f"{prefix}{number:02d}" for number in range(1, count + 1)]
        return Platform(
            f"{family}{count}",
            tuple(replace(host, name=name) for name in names),
            tuple(replace(device, name=name + device.name, host=name) for name in names for device in devices),
            network,
            description,
        )

    return make


_GATEWAY = Network("gateway", 100e6)
_A53 = (Device("", "", 3.75e9, cores=4, power_active=3.7, power_idle=1.4),)
_A72 = (Device("", "", 13.6e9, cores=4, power_active=6.4, power_idle=2.7),)
_XAVIER = (
    Device("_cpu", "", 91e9, cores=6, power_active=8.7, power_idle=2.0),
    Device("_gpu", "", 342e9, cores=1, power_active=20.4, power_idle=2.0, gpu=True),
)

FAMILIES: tuple[PlatformFamily, ...] = (
    PlatformFamily("rpi3xN", _PI3, _boards("rpi3x", _PI3, "pi", Host("", 1 * GIB), _A53, _GATEWAY)),
    PlatformFamily("rpi4xN", _PI4, _boards("rpi4x", _PI4, "pi", Host("", 4 * GIB), _A72, _GATEWAY)),
    PlatformFamily(
        "jetson-nxN", _NX, _boards("jetson-nx", _NX, "nx", Host("", 8 * GIB), _XAVIER, Network("switch", 1e9))
    ),
)
