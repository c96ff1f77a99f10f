"""Built-in platforms have any number of boards, and state the sources of their numbers."""

from __future__ import annotations

import pytest

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.ir.cluster import Host, Network
from dicompiler.ir.platform import Platform, builtin_families, platform_file, platform_from_toml, platform_to_toml


@pytest.mark.parametrize(
    "name",
    [
        "rpi3-gateway-x1",
        "rpi4-gateway-x4",
        "jetson-nx12",
        "rpi4x4",
        "rpi4x150",
        "rpi5x4",
        "orangepi5x2",
        "n100x3",
        "orin-nano-x2",
    ],
)
def test_built_in_platforms_round_trip(name: str) -> None:
    platform = Platform.load(name)
    assert platform.name == name
    assert platform_from_toml(platform_to_toml(platform), "x.toml") == platform


def test_built_in_platforms_have_the_numbers_of_the_papers() -> None:
    pi = Platform.load("rpi4-gateway-x4")
    assert [host.name for host in pi.hosts] == ["pi01", "pi02", "pi03", "pi04"]
    assert {device.rate for device in pi.devices} == {13.6e9}
    assert (pi.hosts[0].memory, pi.network) == (4 * 2**30, Network("gateway", 1e8))
    nx = Platform.load("jetson-nx2")
    assert [device.name for device in nx.devices] == ["nx01_cpu", "nx01_gpu", "nx02_cpu", "nx02_gpu"]
    assert [device.gpu for device in nx.devices] == [False, True, False, True]
    assert nx.network == Network("switch", 1e9)
    assert Platform.load("rpi3-gateway-x1").hosts == (Host("pi01", 2**30),)
    papers = {"rpi3-gateway-xN": "CoopAI", "rpi4-gateway-xN": "CoopAI", "jetson-nxN": "AutoDiCE"}
    descriptions = {family.name: family.description for family in builtin_families()}
    for family, paper in papers.items():
        assert paper in descriptions[family]


def test_both_platforms_of_raspberry_pi_4_have_the_same_boards() -> None:
    switch, gateway = Platform.load("rpi4x4"), Platform.load("rpi4-gateway-x4")
    assert (switch.hosts, switch.devices) == (gateway.hosts, gateway.devices)
    assert switch.network == Network("switch", 941e6, 0.1e-3)


def test_options_replace_the_network_and_memory() -> None:
    plain = Platform.load("rpi5x4")
    assert plain.network == Network("switch", 941e6, 0.1e-3)
    faster = Platform.load('rpi5x4{bandwidth="2.5 Gbit/s" latency="0.2 ms" memory="16 GiB"}')
    assert faster.network == Network("switch", 2.5e9, 0.2e-3) and faster.devices == plain.devices
    assert {host.memory for host in faster.hosts} == {16 * 2**30}
    assert "bandwidth = 2.5 Gbit/s" in faster.description
    assert Platform.load("rpi5x2{network=shared}").network == Network("shared", 941e6, 0.1e-3)
    assert Platform.load('nano33x1{memory="128 KiB"}').hosts[0] == Host("nano01", 2**17 + 2**20, flash=2**20)
    assert platform_file("rpi5x4{network=shared}", builtin_families()) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rpi5x4{bandwith=1}", "unknown option 'bandwith' of 'rpi5x4' (did you mean 'bandwidth'?)"),
        ('rpi5x4{bandwidth="fast"}', "rpi5x4: bandwidth: 'fast'"),
        ('rpi5x4{bandwidth="0 Gbit/s"}', "rpi5x4: bandwidth: '0 Gbit/s'"),
        ("rpi5x4{network=star}", "option 'network' of 'rpi5x4': expected switch|shared|gateway, got star"),
        ("rpi5y4{network=shared}", "unknown platform 'rpi5y4{network=shared}' (did you mean 'rpi5x4'?)"),
        ("pis.toml{network=shared}", "a file has no options: change the values in pis.toml"),
        ("this", "run 'dicompiler platform this -o this.toml'"),
    ],
)
def test_wrong_options_are_named(name: str, message: str) -> None:
    with pytest.raises(DicompilerError) as caught:
        Platform.load(name)
    assert message in str(caught.value)


def test_new_boards_name_their_sources() -> None:
    for name in ("rpi5x1", "orangepi5x1", "n100x1", "orin-nano-x1"):
        assert "Linpack" in Platform.load(name).description and "assumption" in Platform.load(name).description


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rpi4x0", "rpi4x4"),
        ("rpi44", "rpi4x4"),
        ("jetson-nxx4", "jetson-nx4"),
        ("quantum", "rpi5xN, rpi4xN, orangepi5xN"),
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
