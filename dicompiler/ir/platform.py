"""A Platform: hosts, devices and the network. TOML text or the name of a built-in one goes in, frozen records come out.

The file's schema is `base/schemas/platform.schema.json`; the built-in platforms are in `ir.boards`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean
from dicompiler.base.memoize import Memoizing, memoized
from dicompiler.base.schema import read_text, validate
from dicompiler.base.units import (
    BANDWIDTH,
    COMPUTE_RATE,
    MEMORY,
    POWER,
    TIME,
    format_quantity,
    parse_bytes,
    parse_quantity,
)
from dicompiler.ir.builtin_boards import BOARDS, BuiltinBoard
from dicompiler.ir.cluster import Device, Host, Link, Network, NetworkKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = "dicompiler.platform/1"


@dataclass(frozen=True)
class Platform(Memoizing):
    """A cluster. `devices` in the order in which plans count them; `description` says where the figures come from.

    Raises DicompilerError for names that stand twice, a device or a link of an unknown host, no device that computes.
    """

    name: str
    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    network: Network
    description: str = ""

    def __post_init__(self) -> None:
        _check_platform(self)

    @cached_property
    def host_of(self) -> Mapping[str, str]:
        """Device name → host name."""
        return {device.name: device.host for device in self.devices}

    @cached_property
    def _devices(self) -> Mapping[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _hosts(self) -> Mapping[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def computing_devices(self) -> tuple[Device, ...]:
        """The devices with compute, in platform order; at least one."""
        return tuple(device for device in self.devices if device.can_compute)

    @property
    def fastest_device(self) -> Device:
        """The device with the highest compute rate; of equals the first."""
        return max(self.devices, key=lambda device: device.rate)

    def device(self, name: str) -> Device:
        """The device called `name`; an error names the nearest one."""
        if name in self._devices:
            return self._devices[name]
        raise DicompilerError(f"{self.name}: unknown device {name!r}{did_you_mean(name, self.host_of)}")

    def host(self, name: str) -> Host:
        """The host called `name`; an error names the nearest one."""
        if name in self._hosts:
            return self._hosts[name]
        raise DicompilerError(f"{self.name}: unknown host {name!r}{did_you_mean(name, self._hosts)}")

    @memoized
    def link(self, a: str, b: str) -> Link | None:
        """The link between devices `a` and `b`, as wide as their hosts' own connections allow; None on one host."""
        ends = self.host(self.device(a).host), self.host(self.device(b).host)
        link = self.network.link(ends[0].name, ends[1].name)
        widths = [host.bandwidth for host in ends if host.bandwidth is not None]
        return link if link is None or not widths else replace(link, bandwidth=min(link.bandwidth, *widths))

    @memoized
    def link_shares(self, link: Link) -> tuple[float, float]:
        """What a link can take of the lines of its two hosts, each 1 at most; of a medium, the same twice."""
        if self.network.kind != "switch":
            share = min(1.0, link.bandwidth / self.network.bandwidth)
            return share, share
        a, b = (min(1.0, link.bandwidth / self._host_bandwidth(name)) for name in link.hosts)
        return a, b

    @memoized
    def _host_bandwidth(self, host: str) -> float:
        """bit/s of a host's line on a switch, in each direction: its own, else that of the network or of its widest
        link."""
        links = [one.bandwidth for one in self.network.links if host in one.hosts]
        return self.host(host).bandwidth or max([self.network.bandwidth, *links])

    @cached_property
    def transfer_times(self) -> NDArray[np.float64]:
        """(3, n, n) seconds from device to device, in platform order: that a byte takes, that a message takes beside
        its bytes, and of latency; 0 on one host."""
        import numpy as np

        links = [self.link(a.name, b.name) for a in self.devices for b in self.devices]
        once = self.network.message_overhead_s
        rows = [(0.0, 0.0, 0.0) if link is None else (link.transfer_s(1), once, link.latency) for link in links]
        return np.ascontiguousarray(np.array(rows).T).reshape(3, len(self.devices), -1)

    @staticmethod
    def load(source: str | Path | Platform, known: Iterable[PlatformFamily] | None = None) -> Platform:
        """A platform from a TOML file's path, from the name of a family's member (`rpi4x4`), or as it is.

        `known`: the families and file formats to look in; the built-in ones by default. What none of them claims is
        a TOML file where it has an ending or a directory. Raises DicompilerError for a file that is missing or wrong,
        UsageError for an unknown name.
        """
        if isinstance(source, Platform):
            return source
        doors = tuple(builtin_families() if known is None else known)
        for door in doors:
            platform = door.find(str(source))
            if platform is not None:
                return platform
        path = Path(source)
        if isinstance(source, Path) or path.suffix or len(path.parts) > 1:
            return _load_platform_file(path, doors)
        examples = [door.name.removesuffix("N") + "4" for door in doors if door.name.endswith("N")]
        close = did_you_mean(str(source), examples)
        hint = close if "did you mean" in close else ""
        names = ", ".join(door.name for door in doors)
        raise UsageError(f"unknown platform {str(source)!r}{hint}: give a TOML file or one of {names} (N: 1 to 9999)")


@dataclass(frozen=True)
class PlatformFamily:
    """Platforms of one kind that can be named. `name`: what their names look like, N being the number of hosts:
    "rpi4xN". `make`: that number → the platform. `description` says where its figures come from.
    """

    name: str
    description: str
    make: Callable[[Any], Platform]

    def find(self, source: str) -> Platform | None:
        """The member of this family that `source` names, or None where it names none."""
        match = re.fullmatch(re.escape(self.name.removesuffix("N")) + r"([1-9]\d{0,3})", source)
        return self.make(int(match[1])) if match else None


@dataclass(frozen=True)
class PlatformFormat(PlatformFamily):
    """A further file format. `name`: what its files are called: "*.txt". `make`: a file's path → the platform."""

    def find(self, source: str) -> Platform | None:
        """The platform in file `source`, or None where that is not called like a file of this format."""
        path = Path(source)
        return self.make(path) if path.match(self.name) else None


def platform_file(source: str, known: Iterable[PlatformFamily]) -> Path | None:
    """The file that `Platform.load` reads for `source`; None where that names a member of a family."""
    for door in known:
        if isinstance(door, PlatformFormat):
            if Path(source).match(door.name):
                return Path(source)
        elif door.find(source) is not None:
            return None
    return Path(source)


@cache
def builtin_families() -> tuple[PlatformFamily, ...]:
    """The built-in families."""
    return tuple(
        PlatformFamily(board.name + "N", board.description, partial(_make_board_platform, board)) for board in BOARDS
    )


def _make_board_platform(board: BuiltinBoard, count: int) -> Platform:
    """`count` copies of a board's host and devices, numbered from 01; a device's name is a suffix."""
    names = [f"{board.prefix}{number:02d}" for number in range(1, count + 1)]
    return Platform(
        f"{board.name}{count}",
        tuple(replace(board.host, name=name) for name in names),
        tuple(replace(device, name=name + device.name, host=name) for name in names for device in board.devices),
        board.network,
        board.description,
    )


def _load_platform_file(path: Path, known: Sequence[PlatformFamily]) -> Platform:
    names = ", ".join(family.name for family in known)
    return platform_from_toml(read_text(path, f"no such platform file (files apart, there are {names})"), str(path))


def platform_from_toml(text: str, place: str = "platform") -> Platform:
    """The platform that a TOML text describes. An error opens with `place` and names the key and what is allowed."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Python's words for it do not tell what stands twice.
        hint = ": a key stands twice, or [x] where [[x]] is meant" if "overwrite" in str(error) else ""
        raise DicompilerError(f"{place}: not TOML: {error}{hint}") from None
    validate(document, "platform", place)
    network = _parse_network(document["network"], document.get("link", []), place)
    devices = []
    for index, entry in enumerate(document["device"]):
        key = f"{place}: device[{index}]"
        devices.append(
            Device(
                entry["name"],
                entry.get("host", entry["name"]),
                parse_quantity(entry["rate"], COMPUTE_RATE, f"{key}.rate"),
                entry.get("cores", 1),
                parse_quantity(entry.get("power_active", "0 W"), POWER, f"{key}.power_active"),
                parse_quantity(entry.get("power_idle", "0 W"), POWER, f"{key}.power_idle"),
                entry.get("gpu", False),
                parse_quantity(entry.get("power_network", "0 W"), POWER, f"{key}.power_network"),
                parse_quantity(entry["memory_bandwidth"], BANDWIDTH, f"{key}.memory_bandwidth") / 8
                if "memory_bandwidth" in entry
                else 0.0,
            )
        )
    hosts = tuple(_parse_host(entry, f"{place}: host[{index}]") for index, entry in enumerate(document["host"]))
    _check_names(place, hosts, devices, network)
    name = document.get("name", Path(place).stem)
    return Platform(name, hosts, tuple(devices), network, document.get("description", ""))


def _parse_host(entry: Mapping[str, Any], key: str) -> Host:
    """In a file `memory` is RAM alone where there is flash."""
    flash = parse_bytes(entry["flash"], f"{key}.flash") if "flash" in entry else 0
    bandwidth = parse_quantity(entry["bandwidth"], BANDWIDTH, f"{key}.bandwidth") if "bandwidth" in entry else None
    return Host(entry["name"], parse_bytes(entry["memory"], f"{key}.memory") + flash, bandwidth, flash)


def _parse_network(entry: Mapping[str, Any], links: Sequence[Mapping[str, Any]], place: str) -> Network:
    bandwidth = parse_quantity(entry["bandwidth"], BANDWIDTH, f"{place}: network.bandwidth")
    latency = parse_quantity(entry.get("latency", "0 s"), TIME, f"{place}: network.latency")
    message = parse_quantity(entry.get("message", "0 s"), TIME, f"{place}: network.message")
    overrides = []
    for index, link in enumerate(links):
        key = f"{place}: link[{index}]"
        overrides.append(
            Link(
                (link["hosts"][0], link["hosts"][1]),
                parse_quantity(link["bandwidth"], BANDWIDTH, f"{key}.bandwidth") if "bandwidth" in link else bandwidth,
                parse_quantity(link["latency"], TIME, f"{key}.latency") if "latency" in link else latency,
            )
        )
    return Network(entry["kind"], bandwidth, latency, tuple(overrides), message)


def _check_platform(platform: Platform) -> None:
    if platform.network.kind not in get_args(NetworkKind):
        raise DicompilerError(f"{platform.name}: unknown network {platform.network.kind!r}")
    _check_names(platform.name, platform.hosts, platform.devices, platform.network)


def _check_names(place: str, hosts: Sequence[Host], devices: Sequence[Device], network: Network) -> None:
    """What a schema cannot say. `place` opens the errors."""
    host_names = [host.name for host in hosts]
    for key, names in (("host", host_names), ("device", [device.name for device in devices])):
        for index, name in enumerate(names):
            if name in names[:index]:
                raise DicompilerError(f"{place}: {key}[{index}].name: {name!r} is the name of an earlier {key}")
    for index, device in enumerate(devices):
        if device.host not in host_names:
            close = did_you_mean(device.host, host_names)
            raise DicompilerError(f"{place}: device[{index}].host: unknown host {device.host!r}{close}")
    seen: set[frozenset[str]] = set()
    for index, link in enumerate(network.links):
        for name in link.hosts:
            if name not in host_names:
                raise DicompilerError(
                    f"{place}: link[{index}].hosts: unknown host {name!r}{did_you_mean(name, host_names)}"
                )
        if frozenset(link.hosts) in seen:
            raise DicompilerError(f"{place}: link[{index}].hosts: {' and '.join(link.hosts)} have a link already")
        seen.add(frozenset(link.hosts))
    if not any(device.can_compute for device in devices):
        raise DicompilerError(f"{place}: no device computes: give at least one a rate above 0 FLOP/s")


def platform_to_toml(platform: Platform) -> str:
    """The TOML text that `from_toml` turns into an equal platform."""
    lines = [f'format = "{FORMAT}"', f"name = {_toml_string(platform.name)}"]
    if platform.description:
        lines.append(f"description = {_toml_string(platform.description)}")
    network = platform.network
    lines += [
        "",
        "[network]",
        f'kind = "{network.kind}"',
        f'bandwidth = "{format_quantity(network.bandwidth, BANDWIDTH)}"',
    ]
    lines.append(f'latency = "{format_quantity(network.latency, TIME)}"')
    if network.message_overhead_s:
        lines.append(f'message = "{format_quantity(network.message_overhead_s, TIME)}"')
    for host in platform.hosts:
        lines += [
            "",
            "[[host]]",
            f"name = {_toml_string(host.name)}",
            f'memory = "{format_quantity(host.ram, MEMORY)}"',
        ]
        if host.flash:
            lines.append(f'flash = "{format_quantity(host.flash, MEMORY)}"')
        if host.bandwidth is not None:
            lines.append(f'bandwidth = "{format_quantity(host.bandwidth, BANDWIDTH)}"')
    for device in platform.devices:
        lines += ["", "[[device]]", f"name = {_toml_string(device.name)}", f"host = {_toml_string(device.host)}"]
        lines += [f'rate = "{format_quantity(device.rate, COMPUTE_RATE)}"', f"cores = {device.cores}"]
        lines.append(f'power_active = "{format_quantity(device.power_active, POWER)}"')
        lines.append(f'power_idle = "{format_quantity(device.power_idle, POWER)}"')
        if device.gpu:
            lines.append("gpu = true")
        if device.power_network:
            lines.append(f'power_network = "{format_quantity(device.power_network, POWER)}"')
        if device.memory_bandwidth:
            lines.append(f'memory_bandwidth = "{format_quantity(8 * device.memory_bandwidth, BANDWIDTH)}"')
    for link in network.links:
        lines += ["", "[[link]]", f"hosts = [{', '.join(map(_toml_string, link.hosts))}]"]
        lines += [
            f'bandwidth = "{format_quantity(link.bandwidth, BANDWIDTH)}"',
            f'latency = "{format_quantity(link.latency, TIME)}"',
        ]
    return "\n".join(lines) + "\n"


def _toml_string(value: str) -> str:
    # A TOML basic string has JSON's escapes, but for DEL, which TOML wants escaped as well.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def uniform_platform(count: int) -> Platform:
    """`count` devices d0, d1, … of equal rate, each on a host of its own: where only the split matters."""
    hosts = tuple(Host(f"d{i}", 2**40) for i in range(count))
    devices = tuple(Device(f"d{i}", f"d{i}", 1e9) for i in range(count))
    return Platform("nameless", hosts, devices, Network("switch", 1e9))
