"""Built-in platforms have any number of boards, and state the sources of their numbers."""

from __future__ import annotations

import pytest

from dicompiler.base.errors import UsageError
from dicompiler.ir.cluster import Host, Network
from dicompiler.ir.platform import Platform, builtin_families, platform_from_toml, platform_to_toml


@pytest.mark.parametrize("name", ["rpi3x1", "rpi4x4", "jetson-nx12", "rpi4x150"])
def test_built_in_platforms_round_trip(name: str) -> None:
    platform = Platform.load(name)
    assert platform.name == name
    assert platform_from_toml(platform_to_toml(platform), "x.toml") == platform


def test_built_in_platforms_have_the_numbers_of_the_papers() -> None:
    pi = Platform.load("rpi4x4")
    assert [host.name for host in pi.hosts] == ["pi01", "pi02", "pi03", "pi04"]
    assert {device.rate for device in pi.devices} == {13.6e9}
    assert (pi.hosts[0].memory, pi.network) == (4 * 2**30, Network("gateway", 1e8))
    nx = Platform.load("jetson-nx2")
    assert [device.name for device in nx.devices] == ["nx01_cpu", "nx01_gpu", "nx02_cpu", "nx02_gpu"]
    assert [device.gpu for device in nx.devices] == [False, True, False, True]
    assert nx.network == Network("switch", 1e9)
    assert Platform.load("rpi3x1").hosts == (Host("pi01", 2**30),)
    for family, paper in zip(builtin_families()[:3], ("CoopAI", "CoopAI", "AutoDiCE"), strict=True):
        assert paper in family.description


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rpi4x0", "rpi4x4"),
        ("rpi44", "rpi4x4"),
        ("jetson-nxx4", "jetson-nx4"),
        ("quantum", "rpi3xN, rpi4xN, jetson-nxN"),
    ],
)
def test_suggests_the_nearest_platform_name(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Platform.load(name)
    assert f"unknown platform {name!r}" in str(caught.value)
    assert hint in str(caught.value)


def test_built_in_microcontrollers_have_the_vendors_numbers() -> None:
    names = ("nano33x2", "stm32f746x1", "stm32h743x3", "esp32s3x1", "rp2040x4")
    found = [Platform.load(name) for name in names]
    assert [(platform.hosts[0].ram, platform.hosts[0].flash) for platform in found] == [
        (256 * 2**10, 2**20), (320 * 2**10, 2**20), (512 * 2**10, 2 * 2**20), (512 * 2**10, 8 * 2**20),
        (264 * 2**10, 2 * 2**20),
    ]  # fmt: skip
    assert all("data sheet" in p.description or "product specification" in p.description for p in found)
