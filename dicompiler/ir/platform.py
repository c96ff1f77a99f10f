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

from dicompiler.base.errors import DicompilerError, UsageError, nearest
from dicompiler.base.remembering import Remembers, remembered
from dicompiler.base.schema import read_text, validate
from dicompiler.base.units import BANDWIDTH, MEMORY, POWER, RATE, TIME, parse, parse_bytes, write
from dicompiler.ir.boards import BOARDS, Board
from dicompiler.ir.devices import Device, Host, Link, Network, NetworkKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = "dicompiler.platform/1"


@dataclass(frozen=True)
class Platform(Remembers):
    """A cluster. `devices` in the order in which plans count them; `description` says where the figures come from.

    Raises DicompilerError for names that stand twice, a device or a link of an unknown host, no device that computes.
    """

    name: str
    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    network: Network
    description: str = ""

    def __post_init__(self) -> None:
        _check(self)

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
    def computing(self) -> tuple[Device, ...]:
        """The devices with compute, in platform order; at least one."""
        return tuple(device for device in self.devices if device.computes)

    @property
    def fastest(self) -> Device:
        """The device with the highest compute rate; of equals the first."""
        return max(self.devices, key=lambda device: device.rate)

    def device(self, name: str) -> Device:
        """The device called `name`; an error names the nearest one."""
        if name in self._devices:
            return self._devices[name]
        raise DicompilerError(f"{self.name}: unknown device {name!r}{nearest(name, self.host_of)}")

    def host(self, name: str) -> Host:
        """The host called `name`; an error names the nearest one."""
        if name in self._hosts:
            return self._hosts[name]
        raise DicompilerError(f"{self.name}: unknown host {name!r}{nearest(name, self._hosts)}")

    @remembered
    def link(self, a: str, b: str) -> Link | None:
        """The link between devices `a` and `b`, as wide as their hosts' own connections allow; None on one host."""
        ends = self.host(self.device(a).host), self.host(self.device(b).host)
        link = self.network.link(ends[0].name, ends[1].name)
        widths = [host.bandwidth for host in ends if host.bandwidth is not None]
        return link if link is None or not widths else replace(link, bandwidth=min(link.bandwidth, *widths))

    @remembered
    def line_shares(self, link: Link) -> tuple[float, float]:
        """What a link can take of the lines of its two hosts, each 1 at most; of a medium, the same twice."""
        if self.network.kind != "switch":
            share = min(1.0, link.bandwidth / self.network.bandwidth)
            return share, share
        a, b = (min(1.0, link.bandwidth / self._width(name)) for name in link.hosts)
        return a, b

    @remembered
    def _width(self, host: str) -> float:
        """bit/s of a host's line on a switch, in each direction: its own, else that of the network or of its widest
        link."""
        links = [one.bandwidth for one in self.network.links if host in one.hosts]
        return self.host(host).bandwidth or max([self.network.bandwidth, *links])

    @cached_property
    def times(self) -> NDArray[np.float64]:
        """(3, n, n) seconds from device to device, in platform order: that a byte takes, that a message takes beside
        its bytes, and of latency; 0 on one host."""
        import numpy as np

        links = [self.link(a.name, b.name) for a in self.devices for b in self.devices]
        once = self.network.message
        rows = [(0.0, 0.0, 0.0) if link is None else (link.seconds(1), once, link.latency) for link in links]
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
        doors = tuple(families() if known is None else known)
        for door in doors:
            platform = door.find(str(source))
            if platform is not None:
                return platform
        path = Path(source)
        if isinstance(source, Path) or path.suffix or len(path.parts) > 1:
            return _load_file(path, doors)
        examples = [door.name.removesuffix("N") + "4" for door in doors if door.name.endswith("N")]
        close = nearest(str(source), examples)
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


def file_of(source: str, known: Iterable[PlatformFamily]) -> Path | None:
    """The file that `Platform.load` reads for `source`; None where that names a member of a family."""
    for door in known:
        if isinstance(door, PlatformFormat):
            if Path(source).match(door.name):
                return Path(source)
        elif door.find(source) is not None:
            return None
    return Path(source)


@cache
def families() -> tuple[PlatformFamily, ...]:
    """The built-in families."""
    return tuple(PlatformFamily(board.name + "N", board.description, partial(_boards, board)) for board in BOARDS)


def _boards(board: Board, count: int) -> Platform:
    """`count` copies of a board's host and devices, numbered from 01; a device's name is a suffix."""
    names = [f"{board.prefix}{number:02d}" for number in range(1, count + 1)]
    return Platform(
        f"{board.name}{count}",
        tuple(replace(board.host, name=name) for name in names),
        tuple(replace(device, name=name + device.name, host=name) for name in names for device in board.devices),
        board.network,
        board.description,
    )


def _load_file(path: Path, known: Sequence[PlatformFamily]) -> Platform:
    names = ", ".join(family.name for family in known)
    return from_toml(read_text(path, f"no such platform file (files apart, there are {names})"), str(path))


def from_toml(text: str, place: str = "platform") -> Platform:
    """The platform that a TOML text describes. An error opens with `place` and names the key and what is allowed."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Python's words for it do not tell what stands twice.
        hint = ": a key stands twice, or [x] where [[x]] is meant" if "overwrite" in str(error) else ""
        raise DicompilerError(f"{place}: not TOML: {error}{hint}") from None
    validate(document, "platform", place)
    network = _network(document["network"], document.get("link", []), place)
    devices = []
    for index, entry in enumerate(document["device"]):
        key = f"{place}: device[{index}]"
        devices.append(
            Device(
                entry["name"],
                entry.get("host", entry["name"]),
                parse(entry["rate"], RATE, f"{key}.rate"),
                entry.get("cores", 1),
                parse(entry.get("power_active", "0 W"), POWER, f"{key}.power_active"),
                parse(entry.get("power_idle", "0 W"), POWER, f"{key}.power_idle"),
                entry.get("gpu", False),
                parse(entry.get("power_network", "0 W"), POWER, f"{key}.power_network"),
                parse(entry["memory_bandwidth"], BANDWIDTH, f"{key}.memory_bandwidth") / 8
                if "memory_bandwidth" in entry
                else 0.0,
            )
        )
    hosts = tuple(_host(entry, f"{place}: host[{index}]") for index, entry in enumerate(document["host"]))
    _check_names(place, hosts, devices, network)
    name = document.get("name", Path(place).stem)
    return Platform(name, hosts, tuple(devices), network, document.get("description", ""))


def _host(entry: Mapping[str, Any], key: str) -> Host:
    """In a file `memory` is RAM alone where there is flash."""
    flash = parse_bytes(entry["flash"], f"{key}.flash") if "flash" in entry else 0
    bandwidth = parse(entry["bandwidth"], BANDWIDTH, f"{key}.bandwidth") if "bandwidth" in entry else None
    return Host(entry["name"], parse_bytes(entry["memory"], f"{key}.memory") + flash, bandwidth, flash)


def _network(entry: Mapping[str, Any], links: Sequence[Mapping[str, Any]], place: str) -> Network:
    bandwidth = parse(entry["bandwidth"], BANDWIDTH, f"{place}: network.bandwidth")
    latency = parse(entry.get("latency", "0 s"), TIME, f"{place}: network.latency")
    message = parse(entry.get("message", "0 s"), TIME, f"{place}: network.message")
    overrides = []
    for index, link in enumerate(links):
        key = f"{place}: link[{index}]"
        overrides.append(
            Link(
                (link["hosts"][0], link["hosts"][1]),
                parse(link["bandwidth"], BANDWIDTH, f"{key}.bandwidth") if "bandwidth" in link else bandwidth,
                parse(link["latency"], TIME, f"{key}.latency") if "latency" in link else latency,
            )
        )
    return Network(entry["kind"], bandwidth, latency, tuple(overrides), message)


def _check(platform: Platform) -> None:
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
            close = nearest(device.host, host_names)
            raise DicompilerError(f"{place}: device[{index}].host: unknown host {device.host!r}{close}")
    seen: set[frozenset[str]] = set()
    for index, link in enumerate(network.links):
        for name in link.hosts:
            if name not in host_names:
                raise DicompilerError(f"{place}: link[{index}].hosts: unknown host {name!r}{nearest(name, host_names)}")
        if frozenset(link.hosts) in seen:
            raise DicompilerError(f"{place}: link[{index}].hosts: {' and '.join(link.hosts)} have a link already")
        seen.add(frozenset(link.hosts))
    if not any(device.computes for device in devices):
        raise DicompilerError(f"{place}: no device computes: give at least one a rate above 0 FLOP/s")


def to_toml(platform: Platform) -> str:
    """The TOML text that `from_toml` turns into an equal platform."""
    lines = [f'format = "{FORMAT}"', f"name = {_text(platform.name)}"]
    if platform.description:
        lines.append(f"description = {_text(platform.description)}")
    network = platform.network
    lines += ["", "[network]", f'kind = "{network.kind}"', f'bandwidth = "{write(network.bandwidth, BANDWIDTH)}"']
    lines.append(f'latency = "{write(network.latency, TIME)}"')
    if network.message:
        lines.append(f'message = "{write(network.message, TIME)}"')
    for host in platform.hosts:
        lines += ["", "[[host]]", f"name = {_text(host.name)}", f'memory = "{write(host.ram, MEMORY)}"']
        if host.flash:
            lines.append(f'flash = "{write(host.flash, MEMORY)}"')
        if host.bandwidth is not None:
            lines.append(f'bandwidth = "{write(host.bandwidth, BANDWIDTH)}"')
    for device in platform.devices:
        lines += ["", "[[device]]", f"name = {_text(device.name)}", f"host = {_text(device.host)}"]
        lines += [f'rate = "{write(device.rate, RATE)}"', f"cores = {device.cores}"]
        lines.append(f'power_active = "{write(device.power_active, POWER)}"')
        lines.append(f'power_idle = "{write(device.power_idle, POWER)}"')
        if device.gpu:
            lines.append("gpu = true")
        if device.power_network:
            lines.append(f'power_network = "{write(device.power_network, POWER)}"')
        if device.memory_bandwidth:
            lines.append(f'memory_bandwidth = "{write(8 * device.memory_bandwidth, BANDWIDTH)}"')
    for link in network.links:
        lines += ["", "[[link]]", f"hosts = [{', '.join(map(_text, link.hosts))}]"]
        lines += [f'bandwidth = "{write(link.bandwidth, BANDWIDTH)}"', f'latency = "{write(link.latency, TIME)}"']
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    # A TOML basic string has JSON's escapes, but for DEL, which TOML wants escaped as well.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def nameless(count: int) -> Platform:
    """`count` devices d0, d1, … of equal rate, each on a host of its own: where only the split matters."""
    hosts = tuple(Host(f"d{i}", 2**40) for i in range(count))
    devices = tuple(Device(f"d{i}", f"d{i}", 1e9) for i in range(count))
    return Platform("nameless", hosts, devices, Network("switch", 1e9))
