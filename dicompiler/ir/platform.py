"""Platform: hosts, devices and the network of a cluster, from a TOML file or a built-in family.

The schema is `base/schemas/platform.schema.json`; the built-in boards are in `ir.builtin_boards`.
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

FORMAT = "dicompiler.platform/2"


@dataclass(frozen=True)
class Platform(Memoizing):
    """A cluster.

    Attributes:
        name: Name of the platform.
        hosts: The hosts.
        devices: The devices, in the order in which plans list them.
        network: The network between the hosts.
        description: Sources of the numbers.

    Raises:
        DicompilerError: A name appears twice, a device or link names an unknown host, or no device can compute.
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
        """Host name by device name."""
        return {device.name: device.host for device in self.devices}

    @cached_property
    def _devices(self) -> Mapping[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _hosts(self) -> Mapping[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def computing_devices(self) -> tuple[Device, ...]:
        """Devices that can compute, in platform order; at least one."""
        return tuple(device for device in self.devices if device.can_compute)

    @property
    def fastest_device(self) -> Device:
        """The device with the highest compute rate (the first of equal ones)."""
        return max(self.devices, key=lambda device: device.rate)

    def device(self, name: str) -> Device:
        """Return a device.

        Args:
            name: Name of the device.

        Returns:
            The device.

        Raises:
            DicompilerError: There is no such device. The message suggests the nearest name.
        """
        if name in self._devices:
            return self._devices[name]
        raise DicompilerError(f"{self.name}: unknown device {name!r}{did_you_mean(name, self.host_of)}")

    def host(self, name: str) -> Host:
        """Return a host.

        Args:
            name: Name of the host.

        Returns:
            The host.

        Raises:
            DicompilerError: There is no such host. The message suggests the nearest name.
        """
        if name in self._hosts:
            return self._hosts[name]
        raise DicompilerError(f"{self.name}: unknown host {name!r}{did_you_mean(name, self._hosts)}")

    @memoized
    def link(self, a: str, b: str) -> Link | None:
        """Return the link between two devices, limited by the bandwidths of their hosts.

        Args:
            a: Name of a device.
            b: Name of a device.

        Returns:
            The link; None if both devices are on the same host.
        """
        ends = self.host(self.device(a).host), self.host(self.device(b).host)
        link = self.network.link(ends[0].name, ends[1].name)
        widths = [host.bandwidth for host in ends if host.bandwidth is not None]
        return link if link is None or not widths else replace(link, bandwidth=min(link.bandwidth, *widths))

    @memoized
    def link_shares(self, link: Link) -> tuple[float, float]:
        """Return the shares of its hosts' bandwidths that a link can use, each at most 1.

        Args:
            link: A link of the platform.

        Returns:
            The shares of both hosts; for a shared medium or a gateway, twice its share of the medium.
        """
        if self.network.kind != "switch":
            share = min(1.0, link.bandwidth / self.network.bandwidth)
            return share, share
        a, b = (min(1.0, link.bandwidth / self._host_bandwidth(name)) for name in link.hosts)
        return a, b

    @memoized
    def _host_bandwidth(self, host: str) -> float:
        """Return the bandwidth of a host's link to the switch in bit/s.

        It is the host's own, else that of the network or of its widest link.
        """
        links = [link.bandwidth for link in self.network.links if host in link.hosts]
        return self.host(host).bandwidth or max([self.network.bandwidth, *links])

    @cached_property
    def transfer_times(self) -> NDArray[np.float64]:
        """Seconds per byte, seconds per message and latency between all devices.

        The array has shape (3, n, n) in platform order; values between devices of one host are 0.
        """
        import numpy as np

        links = [self.link(a.name, b.name) for a in self.devices for b in self.devices]
        once = self.network.message_overhead_s
        rows = [(0.0, 0.0, 0.0) if link is None else (link.transfer_s(1), once, link.latency) for link in links]
        return np.ascontiguousarray(np.array(rows).T).reshape(3, len(self.devices), -1)

    @staticmethod
    def load(source: str | Path | Platform, known: Iterable[PlatformFamily] | None = None) -> Platform:
        """Return a platform from a TOML file or by the name of a member of a family (`rpi4x4`).

        Args:
            source: Path, name, or a platform, which is returned unchanged.
            known: Families and file formats to search; default: the built-in families. A source that none of them
                accepts is a TOML file if it has a suffix or a directory.

        Returns:
            The platform.

        Raises:
            DicompilerError: The file is missing or invalid.
            UsageError: The name is unknown.
        """
        if isinstance(source, Platform):
            return source
        families = tuple(builtin_families() if known is None else known)
        for family in families:
            platform = family.find(str(source))
            if platform is not None:
                return platform
        path = Path(source)
        if isinstance(source, Path) or path.suffix or len(path.parts) > 1:
            return _load_platform_file(path, families)
        examples = [family.name.removesuffix("N") + "4" for family in families if family.name.endswith("N")]
        close = did_you_mean(str(source), examples)
        hint = close if "did you mean" in close else ""
        names = ", ".join(family.name for family in families)
        raise UsageError(f"unknown platform {str(source)!r}{hint}: give a TOML file or one of {names} (N: 1 to 9999)")


@dataclass(frozen=True)
class PlatformFamily:
    """Platforms of one kind that users select by name.

    Attributes:
        name: Pattern of the names: "rpi4xN", with N as the number of hosts.
        description: Sources of the numbers.
        make: Function that returns the platform with a number of hosts.
    """

    name: str
    description: str
    make: Callable[[Any], Platform]

    def find(self, source: str) -> Platform | None:
        """Return the member of this family that `source` names.

        Args:
            source: Name of a platform.

        Returns:
            The platform; None if the name belongs to another family.
        """
        match = re.fullmatch(re.escape(self.name.removesuffix("N")) + r"([1-9]\d{0,3})", source)
        return self.make(int(match[1])) if match else None


@dataclass(frozen=True)
class PlatformFormat(PlatformFamily):
    """Additional file format of platforms.

    `name` is a pattern of file names ("*.txt"), and `make` takes the path of a file.
    """

    def find(self, source: str) -> Platform | None:
        """Return the platform in a file of this format.

        Args:
            source: Path of the file.

        Returns:
            The platform; None if the file name does not match.
        """
        path = Path(source)
        return self.make(path) if path.match(self.name) else None


def platform_file(source: str, known: Iterable[PlatformFamily]) -> Path | None:
    """Return the file that `Platform.load` reads for `source`; None if it names a member of a family."""
    for family in known:
        if isinstance(family, PlatformFormat):
            if Path(source).match(family.name):
                return Path(source)
        elif family.find(source) is not None:
            return None
    return Path(source)


@cache
def builtin_families() -> tuple[PlatformFamily, ...]:
    """Return the built-in families."""
    return tuple(
        PlatformFamily(board.name + "N", board.description, partial(_make_board_platform, board)) for board in BOARDS
    )


def _make_board_platform(board: BuiltinBoard, count: int) -> Platform:
    """Return a platform with `count` copies of a board; hosts are numbered from 01."""
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
    return platform_from_toml(read_text(path, f"no such platform file (built-in platforms: {names})"), str(path))


def platform_from_toml(text: str, place: str = "platform") -> Platform:
    """Return the platform in a TOML text.

    Args:
        text: The TOML text.
        place: Name of the file, as prefix of error messages.

    Returns:
        The platform.

    Raises:
        DicompilerError: The text is not TOML or violates the schema. The message names the key and the allowed values.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Python's message does not name the key that appears twice.
        hint = ": a key appears twice, or [x] is written for [[x]]" if "overwrite" in str(error) else ""
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
    """Return a host; in a file, `memory` is only the RAM if there is flash."""
    flash = parse_bytes(entry["flash"], f"{key}.flash") if "flash" in entry else 0
    bandwidth = parse_quantity(entry["bandwidth"], BANDWIDTH, f"{key}.bandwidth") if "bandwidth" in entry else None
    return Host(entry["name"], parse_bytes(entry["memory"], f"{key}.memory") + flash, bandwidth, flash)


def _parse_network(entry: Mapping[str, Any], links: Sequence[Mapping[str, Any]], place: str) -> Network:
    bandwidth = parse_quantity(entry["bandwidth"], BANDWIDTH, f"{place}: network.bandwidth")
    latency = parse_quantity(entry.get("latency", "0 s"), TIME, f"{place}: network.latency")
    message = parse_quantity(entry.get("message_overhead", "0 s"), TIME, f"{place}: network.message_overhead")
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
    """Raise DicompilerError for errors that a schema cannot detect."""
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
    """Return the TOML text that `platform_from_toml` turns into an equal platform.

    Args:
        platform: The platform.

    Returns:
        The TOML text.
    """
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
        lines.append(f'message_overhead = "{format_quantity(network.message_overhead_s, TIME)}"')
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
    # TOML strings have the escapes of JSON, but DEL must be escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def uniform_platform(count: int) -> Platform:
    """Return a platform of `count` equal devices d0, d1, … on separate hosts.

    It serves uses in which only the split matters.
    """
    hosts = tuple(Host(f"d{i}", 2**40) for i in range(count))
    devices = tuple(Device(f"d{i}", f"d{i}", 1e9) for i in range(count))
    return Platform("uniform", hosts, devices, Network("switch", 1e9))
