"""Platforms are read from TOML and round-trip; errors have one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.ir.cluster import Device, Host, Link, Network, NetworkKind
from dicompiler.ir.platform import (
    Platform,
    PlatformFamily,
    PlatformFormat,
    builtin_families,
    platform_file,
    platform_from_toml,
    platform_to_toml,
    uniform_platform,
)

TOML = """
name = "lab"

[network]
kind = "switch"
bandwidth = "100 Mbit/s"
latency = "0.5 ms"

[[host]]
name = "cam"
memory = "64 MiB"

[[host]]
name = "pi01"
memory = "4 GiB"

[[device]]
name = "cam"
rate = "0 FLOP/s"

[[device]]
name = "pi01_a"
host = "pi01"
rate = "13.6 GFLOP/s"
cores = 3
power_active = "6 W"
power_idle = "2.7 W"

[[device]]
name = "pi01_gpu"
host = "pi01"
rate = "20 GFLOP/s"
gpu = true

[[link]]
hosts = ["pi01", "cam"]
bandwidth = "20 Mbit/s"
"""


def test_reads_hosts_devices_and_network() -> None:
    platform = platform_from_toml(TOML, "lab.toml")
    assert platform.name == "lab"
    assert platform.hosts == (Host("cam", 64 * 2**20), Host("pi01", 4 * 2**30))
    assert platform.devices == (
        Device("cam", "cam", 0.0),
        Device("pi01_a", "pi01", 13.6e9, 3, 6.0, 2.7),
        Device("pi01_gpu", "pi01", 20e9, gpu=True),
    )
    assert platform.network == Network("switch", 1e8, 0.0005, (Link(("pi01", "cam"), 2e7, 0.0005),))
    assert platform.host_of == {"cam": "cam", "pi01_a": "pi01", "pi01_gpu": "pi01"}
    assert [device.name for device in platform.computing_devices] == ["pi01_a", "pi01_gpu"]
    assert platform.fastest_device.name == "pi01_gpu"


def test_links_are_symmetric_and_none_within_a_host() -> None:
    platform = platform_from_toml(TOML)
    assert platform.link("cam", "pi01_a") == platform.link("pi01_a", "cam") == Link(("pi01", "cam"), 2e7, 0.0005)
    assert platform.link("pi01_a", "pi01_gpu") is None


def test_bytes_and_messages_occupy_a_link_without_its_latency() -> None:
    assert Link(("a", "b"), 8e6, 0.25).transfer_s(1_000_000) == 1.0
    assert Link(("a", "b"), 8e6, 0.25).transfer_s(1_000_000, 0.5) == 1.5
    assert Network("switch", 8e6).transfer_s(np.array([0.0, 1e6, 2e6])).tolist() == [0.0, 1.0, 2.0]


def test_transfer_times_are_those_of_the_links() -> None:
    platform = platform_from_toml(TOML)
    byte, message, latency = platform.transfer_times
    assert byte.tolist() == [[0.0, 4e-7, 4e-7], [4e-7, 0.0, 0.0], [4e-7, 0.0, 0.0]]
    assert not message.any()
    assert latency.tolist() == [[0.0, 5e-4, 5e-4], [5e-4, 0.0, 0.0], [5e-4, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            'host = "pi01"\nrate = "13',
            'host = "pi1"\nrate = "13',
            "device[1].host: unknown host 'pi1' (did you mean 'pi01'?)",
        ),
        ('["pi01", "cam"]', '["pi01", "camera"]', "link[0].hosts: unknown host 'camera' (did you mean 'cam'?)"),
        ('name = "pi01_gpu"', 'name = "pi01_a"', "device[2].name: 'pi01_a' is the name of an earlier device"),
        ('name = "pi01"\nmemory', 'name = "cam"\nmemory', "host[1].name: 'cam' is the name of an earlier host"),
        ('"64 MiB"', '"0 MiB"', "host[0].memory: '0 MiB': a memory size must be more than zero"),
        (
            '"64 MiB"',
            "64",
            'host[0].memory: expected a text such as "13.6 GFLOP/s" or "100 Mbit/s" or "64 MiB" or "0.1 ms", got 64',
        ),
        ('"13.6 GFLOP/s"', '"13.6"', "device[1].rate: '13.6' has no unit"),
        ('"0.5 ms"', '"0.5 m"', "network.latency: unknown unit 'm' for a time"),
        ("cores = 3", "cores = 0", "device[1].cores: 0 is too small (allowed: 1 or more)"),
        ("cores = 3", "core = 3", "device[1]: unknown key 'core' (did you mean 'cores'?); allowed: name, host, rate,"),
        ('kind = "switch"', "", "network: missing key 'kind' (required: kind, bandwidth)"),
        ('kind = "switch"', 'kind = "hub"', "(allowed: switch, shared, gateway)"),
        ('"20 Mbit/s"', '"0 Mbit/s"', "link[0].bandwidth: '0 Mbit/s': a bandwidth must be more than zero"),
        ('bandwidth = "20 Mbit/s"', "", "link[0]: "),
        (
            'name = "lab"',
            'format = "dicompiler.platform/1"',
            "is not supported (this version reads dicompiler.platform/2)",
        ),
        ('name = "lab"', "name = lab", "not TOML: "),
        ('name = "pi01_gpu"', 'name = "pi 01"', "device[2].name: "),
    ],
)
def test_file_errors_have_one_line(old: str, new: str, expected: str) -> None:
    assert TOML.count(old) == 1
    with pytest.raises(DicompilerError) as caught:
        platform_from_toml(TOML.replace(old, new), "lab.toml")
    message = str(caught.value)
    assert message.startswith("lab.toml: ")
    assert expected in message
    assert "\n" not in message


def test_rejects_two_links_between_the_same_hosts() -> None:
    text = TOML + '\n[[link]]\nhosts = ["cam", "pi01"]\nlatency = "1 s"\n'
    with pytest.raises(DicompilerError, match=r"link\[1\]\.hosts: cam and pi01 have a link already"):
        platform_from_toml(text)


def test_rejects_platforms_without_compute() -> None:
    text = TOML.replace("13.6 GFLOP/s", "0 FLOP/s").replace("20 GFLOP/s", "0 FLOP/s")
    with pytest.raises(DicompilerError, match="no device can compute: give at least one device a rate above 0 FLOP/s"):
        platform_from_toml(text, "lab.toml")


def test_suggests_the_nearest_device_or_host() -> None:
    platform = platform_from_toml(TOML)
    with pytest.raises(DicompilerError, match=r"unknown device 'pi01_b' \(did you mean 'pi01_a'\?\)"):
        platform.device("pi01_b")
    with pytest.raises(DicompilerError, match=r"unknown host 'pi02' \(did you mean 'pi01'\?\)"):
        platform.host("pi02")


def test_platforms_are_named_after_their_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TOML.replace('name = "lab"', ""), encoding="utf-8")
    assert Platform.load(str(path)) == Platform.load(path)
    assert Platform.load(path).name == "cluster"
    assert Platform.load(Platform.load(path)) == Platform.load(path)
    with pytest.raises(DicompilerError, match=r"other\.toml: no such platform file"):
        Platform.load(tmp_path / "other.toml")
    with pytest.raises(DicompilerError, match="cannot be read: Is a directory"):
        Platform.load(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(DicompilerError, match="not UTF-8 text"):
        Platform.load(tmp_path / "bytes.toml")


def test_loads_from_additional_families_and_formats(tmp_path: Path) -> None:
    families = (
        PlatformFamily("tinyxN", "", uniform_platform),
        PlatformFormat("*.hosts", "", lambda path: uniform_platform(len(path.stem))),
    )
    assert len(Platform.load("tinyx3", families).devices) == 3
    assert len(Platform.load(tmp_path / "abcd.hosts", families).devices) == 4
    with pytest.raises(
        UsageError, match=r"give a file that ends in \.toml or \.hosts, or one of tinyxN \(N: 1 to 9999\)$"
    ):
        Platform.load("rpi4x4", families)


def test_file_without_ending_is_not_mistaken_for_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("boards").write_text(platform_to_toml(Platform.load("rpi4x2")))
    text = r"^unknown platform 'boards': there is a file of this name: give a file that ends in \.toml"
    with pytest.raises(UsageError, match=text):
        Platform.load("boards")


def test_uniform_platform_has_equal_devices_on_separate_hosts() -> None:
    platform = uniform_platform(3)
    assert [device.name for device in platform.devices] == ["d0", "d1", "d2"]
    assert len({device.rate for device in platform.devices}) == 1
    assert len(set(platform.host_of.values())) == 3
    assert platform_from_toml(platform_to_toml(platform)) == platform


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,6}", fullmatch=True)


AMOUNTS = st.floats(1e-9, 1e18)


@st.composite
def platforms(draw: st.DrawFn) -> Platform:
    hosts = tuple(
        Host(name, draw(st.integers(2, 2**50)), flash=draw(st.integers(0, 1)))
        for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    )
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    pick = st.sampled_from([host.name for host in hosts])
    devices = tuple(
        Device(
            name,
            draw(pick),
            draw(AMOUNTS | st.just(0.0)),
            draw(st.integers(1, 64)),
            draw(AMOUNTS),
            draw(AMOUNTS),
            draw(st.booleans()),
        )
        for name in names
    )
    devices = (replace(devices[0], rate=draw(AMOUNTS)), *devices[1:])
    links: tuple[Link, ...] = ()
    if len(hosts) > 1:
        links = (Link((hosts[1].name, hosts[0].name), draw(AMOUNTS), draw(AMOUNTS | st.just(0.0))),)
    kind: NetworkKind = draw(st.sampled_from(["switch", "shared", "gateway"]))
    network = Network(kind, draw(AMOUNTS), draw(AMOUNTS | st.just(0.0)), links)
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
    return Platform(draw(text), hosts, devices, network, draw(text | st.just("")))


@given(platforms())
def test_platforms_round_trip(platform: Platform) -> None:
    assert platform_from_toml(platform_to_toml(platform), "x.toml") == platform


def test_with_flash_memory_is_only_ram() -> None:
    text = 'network = {kind = "switch", bandwidth = "1 Mbit/s"}\n'
    text += 'host = [{name = "a", memory = "256 KiB", flash = "2 MiB"}]\ndevice = [{name = "a", rate = "1 MFLOP/s"}]\n'
    host = platform_from_toml(text, "x.toml").hosts[0]
    assert (host.ram, host.flash, host.memory) == (2**18, 2**21, 2**18 + 2**21)
    with pytest.raises(DicompilerError, match=r"host\[0\]\.flash: '0 KiB': a memory size must be more than zero"):
        platform_from_toml(text.replace("2 MiB", "0 KiB"), "x.toml")


def test_unknown_names_are_files() -> None:
    doors = (*builtin_families(), PlatformFormat("*.txt", "", lambda path: path))
    assert platform_file("rpi4x2", doors) is None
    for name in ("rpi4x2.toml", "dir/rpi4x2", "hosts.txt", "unknown"):
        assert platform_file(name, doors) == Path(name)
