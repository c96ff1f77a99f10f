"""Platform: hosts, devices and the network of a cluster, from a TOML file or by the name of a built-in platform."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dicompiler.base.errors import DicompilerError, UnknownNameError, UsageError, did_you_mean
from dicompiler.base.memoize import Memoizing, memoized
from dicompiler.base.option_specs import instantiate, parse_spec
from dicompiler.base.schema import read_text, validate
from dicompiler.base.units import (
    BANDWIDTH,
    COMPUTE_RATE,
    MEMORY,
    POWER,
    TIME,
    Quantity,
    format_quantity,
    parse_bytes,
    parse_quantity,
)
from dicompiler.ir.builtin_boards import BOARDS, BuiltinBoard
from dicompiler.ir.cluster import DEFAULT_ENGINE, Device, EngineRate, Host, Link, Network, NetworkKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PLATFORM_FORMAT = "dicompiler.platform/2"
THIS_HOST = "this"
"""Name of the platform that consists of this host. `dicompiler platform this` measures it and writes it to a file."""


@dataclass(frozen=True)
class Platform(Memoizing):
    """A cluster of hosts with devices, and their network.

    Attributes:
        name: Name of the platform.
        hosts: The hosts: machines, each with one or more devices.
        devices: The devices, in the order in which plans list them.
        network: The network between the hosts.
        description: Hardware of the platform, and the sources of its rates, sizes and powers.

    Raises:
        DicompilerError: A name appears twice, a device or link names an unknown host, or no device can compute.
    """

    name: str
    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    network: Network
    description: str = ""

    def __post_init__(self) -> None:
        if self.network.kind not in get_args(NetworkKind):
            kinds = ", ".join(get_args(NetworkKind))
            raise DicompilerError(f"{self.name}: unknown kind of network {self.network.kind!r}: use one of {kinds}")
        _check_names(self.name, self.hosts, self.devices, self.network)

    @cached_property
    def host_of(self) -> Mapping[str, str]:
        """Name of the host of each device, by device name."""
        return {device.name: device.host for device in self.devices}

    @cached_property
    def engines(self) -> Mapping[str, str]:
        """Name of the engine of each device that does not compute with onnxruntime, by device name."""
        return {device.name: device.engine for device in self.devices if device.engine != DEFAULT_ENGINE}

    def with_engines(self, engines: Mapping[str, str]) -> Platform:
        """Return the platform with other engines on some devices.

        Args:
            engines: Names of engines by device name. Other devices keep their engines.

        Returns:
            The platform.
        """
        devices = (replace(device, engine=engines.get(device.name, device.engine)) for device in self.devices)
        return replace(self, devices=tuple(devices))

    @cached_property
    def _devices(self) -> Mapping[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _hosts(self) -> Mapping[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def computing_devices(self) -> tuple[Device, ...]:
        """Devices that can compute, in platform order. There is at least one."""
        return tuple(device for device in self.devices if device.can_compute)

    @property
    def has_powers(self) -> bool:
        """True if the platform states the power of at least one device. Otherwise, the energies of all plans are 0."""
        return any(device.power_active or device.power_idle or device.power_network for device in self.devices)

    @property
    def fastest_device(self) -> Device:
        """The device with the highest compute rate (the first of equal ones)."""
        return max(self.devices, key=lambda device: device.rate)

    def device(self, name: str) -> Device:
        """Return the device with a name.

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
        """Return the host with a name.

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
        """Return the link between the hosts of two devices. Its bandwidth is at most that of each host.

        Args:
            a: Name of the first device.
            b: Name of the second device.

        Returns:
            The link; None if both devices are on the same host.
        """
        hosts = self.host(self.device(a).host), self.host(self.device(b).host)
        link = self.network.link(hosts[0].name, hosts[1].name)
        limits = [host.bandwidth for host in hosts if host.bandwidth is not None]
        return link if link is None or not limits else replace(link, bandwidth=min(link.bandwidth, *limits))

    @memoized
    def _link_shares(self, link: Link) -> tuple[float, float]:
        """Return the bandwidth of a link as a fraction of the bandwidth of each of its two hosts, at most 1.

        If all hosts share a medium or a gateway, both numbers are the fraction of the network's bandwidth.
        """
        if self.network.kind != "switch":
            share = min(1.0, link.bandwidth / self.network.bandwidth)
            return share, share
        a, b = (min(1.0, link.bandwidth / self._host_bandwidth(name)) for name in link.hosts)
        return a, b

    @property
    def shared_link(self) -> str:
        """Name of the medium or gateway that all hosts share, as a key in the results of `occupied_links`."""
        return f"the {self.network.kind} network"

    @memoized
    def occupied_links(self, a: str, b: str) -> Mapping[str, float]:
        """Return the links that a message from one device to another occupies while it is sent.

        On a switch, these are the outgoing link of the sender's host and the incoming link of the receiver's host.
        Otherwise it is the medium or gateway that all hosts share. A slower link between the two hosts is occupied too.

        Args:
            a: Name of the sender.
            b: Name of the receiver.

        Returns:
            Fraction of its bandwidth that the message uses, by the link's name for users. The largest fraction is 1.
            Empty if both devices are on the same host.
        """
        link = self.link(a, b)
        if link is None:
            return {}
        sender, receiver = self.host_of[a], self.host_of[b]
        names: tuple[str, ...] = (self.shared_link,)
        if self.network.kind == "switch":
            names = self.host_links(sender)[0], self.host_links(receiver)[1]
        by_host = dict(zip(link.hosts, self._link_shares(link), strict=True))
        shares = dict(zip(names, (by_host[sender], by_host[receiver]), strict=False))
        return shares if max(shares.values()) == 1 else shares | {f"the link from {sender} to {receiver}": 1.0}

    def host_links(self, host: str) -> tuple[str, ...]:
        """Return the names of the links that only one host uses, which are keys in the results of `occupied_links`.

        Args:
            host: Name of the host.

        Returns:
            The names of its outgoing and its incoming link on a switch; empty for networks of other kinds.
        """
        is_switch = self.network.kind == "switch"
        return (f"the outgoing link of {host}", f"the incoming link of {host}") if is_switch else ()

    @memoized
    def _host_bandwidth(self, host: str) -> float:
        """Return the bandwidth of a host's link to the switch in bit/s.

        If the platform does not state it, it is the largest bandwidth of the network and of the links of the host.
        """
        links = [link.bandwidth for link in self.network.links if host in link.hosts]
        return self.host(host).bandwidth or max([self.network.bandwidth, *links])

    @cached_property
    def transfer_times(self) -> NDArray[np.float64]:
        """Array of the seconds per byte, seconds per message and latency in seconds between all pairs of devices.

        Its shape is (3, devices, devices). The second index is the sender, the third the receiver, in platform order.
        Values between devices of one host are 0.
        """
        import numpy as np

        links = [self.link(a.name, b.name) for a in self.devices for b in self.devices]
        message_s = self.network.message_overhead_s
        rows = [(0.0, 0.0, 0.0) if link is None else (link.transfer_s(1), message_s, link.latency) for link in links]
        return np.ascontiguousarray(np.array(rows).T).reshape(3, len(self.devices), -1)

    @staticmethod
    def load(source: str | Path | Platform, known: Iterable[PlatformFamily] | None = None) -> Platform:
        """Return a platform from a TOML file or by the name of a built-in platform (`rpi4x4`).

        Args:
            source: Path, name, or a platform, which is returned unchanged. A name can have options, which are the
                fields of `PlatformOptions`: `rpi5x4{bandwidth="2.5 Gbit/s"}`.
            known: Families and file formats of platforms, which are searched for `source` before TOML files; default:
                the built-in families.

        Returns:
            The platform.

        Raises:
            DicompilerError: The file is missing or invalid.
            UsageError: The name or an option is unknown, or a file has options.
        """
        if isinstance(source, Platform):
            return source
        families = tuple(builtin_families() if known is None else known)
        name, options = _split_options(source)
        for family in families:
            platform = family.find(name)
            if platform is not None:
                return _apply_options(platform, str(source)) if options else platform
        path = Path(name)
        # `families` also has file formats, with names such as *.txt. The error message lists only built-in platforms.
        names = ", ".join(family.name for family in families if not family.name.startswith("*"))
        if isinstance(source, Path) or path.suffix or len(path.parts) > 1:
            if options:
                raise UsageError(f"platform {str(source)!r}: a file has no options: change the values in {name}")
            text = read_text(path, f"no such platform file (built-in platforms: {names})")
            return platform_from_toml(text, str(path))
        if name == THIS_HOST:
            raise UsageError(
                "platform 'this': this host must be measured first: run 'dicompiler platform this -o this.toml', and "
                "give the file this.toml"
            )
        digits = re.search(r"[1-9]\d{0,3}$", name)
        count = "4" if digits is None else digits[0]
        examples = [family.name.removesuffix("N") + count for family in families if family.name.endswith("N")]
        close = did_you_mean(name, examples)
        hint = close if "did you mean" in close else ""
        endings = [".toml", *(family.name.removeprefix("*") for family in families if family.name.startswith("*"))]
        files = f"a file that ends in {' or '.join(endings)}"
        if path.is_file():
            raise UsageError(f"unknown platform {str(source)!r}: there is a file of this name: give {files}")
        raise UnknownNameError(
            f"unknown platform {str(source)!r}{hint}: give {files}, or one of {names} (N: 1 to 9999)"
        )


@dataclass(frozen=True)
class PlatformOptions:
    """Options in braces after the name of a built-in platform, such as `rpi4x2{latency="0.2 ms"}`.

    Attributes:
        bandwidth: Bandwidth of the network, such as "2.5 Gbit/s"; None: the platform's value is kept, as for all
            options.
        latency: Latency of the network, such as "0.2 ms".
        network: Kind of the network.
        memory: RAM of each host, such as "16 GiB".
    """

    bandwidth: str | None = field(default=None, metadata={"help": 'bandwidth of the network, such as "2.5 Gbit/s"'})
    latency: str | None = field(default=None, metadata={"help": 'latency of the network, such as "0.2 ms"'})
    network: NetworkKind | None = field(default=None, metadata={"help": "kind of the network"})
    memory: str | None = field(default=None, metadata={"help": 'RAM of each host, such as "16 GiB"'})

    def apply(self, platform: Platform) -> Platform:
        """Return a copy of the platform in which these options replace values.

        Raises:
            DicompilerError: An option's text is not a quantity with the right unit.
        """
        old, place = platform.network, platform.name
        network = replace(
            old,
            kind=self.network or old.kind,
            bandwidth=_parse_if_given(self.bandwidth, old.bandwidth, BANDWIDTH, f"{place}: bandwidth"),
            latency=_parse_if_given(self.latency, old.latency, TIME, f"{place}: latency"),
        )
        hosts = platform.hosts
        if self.memory is not None:
            ram = parse_bytes(self.memory, f"{place}: memory")
            hosts = tuple(replace(host, memory=ram + host.flash) for host in hosts)
        given = ", ".join(f"{key} = {value}" for key, value in vars(self).items() if value is not None)
        description = f"{platform.description} Replaced values: {given}."
        return replace(platform, hosts=hosts, network=network, description=description)


def _parse_if_given(text: str | None, old: float, quantity: Quantity, place: str) -> float:
    return old if text is None else parse_quantity(text, quantity, place)


def _split_options(source: str | Path) -> tuple[str, bool]:
    """Return the name or path of a platform without its options in braces, and whether `source` has options."""
    if isinstance(source, Path) or not source.endswith("}"):
        return str(source), False
    return source.partition("{")[0], True


def _apply_options(platform: Platform, source: str) -> Platform:
    options = instantiate(PlatformOptions, parse_spec(source, "platform"))
    try:
        return options.apply(platform)
    except DicompilerError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class PlatformFamily:
    """Platforms with the same kind of board, which differ in the number of hosts and are selected by name.

    Attributes:
        name: Pattern of the names: "rpi4xN", with N in place of the number of hosts.
        description: Hardware of the platforms, and the sources of its rates, sizes and powers.
        make: Function that returns the platform with a given number of hosts.
    """

    name: str
    description: str
    make: Callable[[Any], Platform]

    def find(self, source: str) -> Platform | None:
        """Return the platform of this family with the name `source`.

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

    The attribute `name` is a pattern of file names ("*.txt"), and the function `make` gets the path of a file.
    """

    def find(self, source: str) -> Platform | None:
        """Return the platform in a file of this format.

        Args:
            source: Path of the file.

        Returns:
            The platform; None if the file name does not match the pattern.
        """
        path = Path(source)
        return self.make(path) if path.match(self.name) else None


def platform_file(source: str, families: Iterable[PlatformFamily]) -> Path | None:
    """Return the file that `Platform.load` reads for `source`; None if `source` is a built-in name such as rpi4x4."""
    name, _ = _split_options(source)
    for family in families:
        if isinstance(family, PlatformFormat):
            if Path(source).match(family.name):
                return Path(source)
        elif family.find(name) is not None:
            return None
    return Path(source)


@cache
def builtin_families() -> tuple[PlatformFamily, ...]:
    return tuple(PlatformFamily(board.name + "N", board.description, partial(_copy_board, board)) for board in BOARDS)


def _copy_board(board: BuiltinBoard, count: int) -> Platform:
    names = [f"{board.prefix}{number:02d}" for number in range(1, count + 1)]
    return Platform(
        f"{board.name}{count}",
        tuple(replace(board.host, name=name) for name in names),
        tuple(replace(device, name=name + device.name, host=name) for name in names for device in board.devices),
        board.network,
        board.description,
    )


def platform_from_toml(text: str, place: str = "platform") -> Platform:
    """Return the platform in a TOML text. Error messages start with `place`, such as the file name.

    Raises:
        DicompilerError: The text is not TOML or violates the schema. The message names the key and the allowed values.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # For a key that appears twice, Python's TOML parser only says that it cannot overwrite a value.
        hint = ": a key appears twice, or [x] is written for [[x]]" if "overwrite" in str(error) else ""
        raise DicompilerError(f"{place}: not TOML: {error}{hint}") from None
    validate(document, "platform", place)
    network = _parse_network(document["network"], document.get("link", []), place)
    devices = tuple(_parse_device(entry, f"{place}: device[{i}]") for i, entry in enumerate(document["device"]))
    hosts = tuple(_parse_host(entry, f"{place}: host[{i}]") for i, entry in enumerate(document["host"]))
    _check_names(place, hosts, devices, network)
    name = document.get("name", Path(place).stem)
    return Platform(name, hosts, devices, network, document.get("description", ""))


def _read_quantity(table: Mapping[str, Any], key: str, kind: Quantity, place: str, default: float = 0.0) -> float:
    return parse_quantity(table[key], kind, f"{place}.{key}") if key in table else default


def _parse_device(entry: Mapping[str, Any], place: str) -> Device:
    return Device(
        entry["name"],
        entry.get("host", entry["name"]),
        _read_quantity(entry, "rate", COMPUTE_RATE, place),
        entry.get("cores", 1),
        _read_quantity(entry, "power_active", POWER, place),
        _read_quantity(entry, "power_idle", POWER, place),
        entry.get("gpu", False),
        _read_quantity(entry, "power_network", POWER, place),
        _read_quantity(entry, "memory_bandwidth", BANDWIDTH, place) / 8,
        entry.get("engine", DEFAULT_ENGINE),
        tuple(
            EngineRate(engine, kind, parse_quantity(text, COMPUTE_RATE, f"{place}.engine_rates.{engine}.{kind}"))
            for engine, rates in entry.get("engine_rates", {}).items()
            for kind, text in rates.items()
        ),
    )


def _parse_host(entry: Mapping[str, Any], place: str) -> Host:
    # In a platform file, `memory` is the RAM only, so flash is added to get `Host.memory`.
    flash = parse_bytes(entry["flash"], f"{place}.flash") if "flash" in entry else 0
    bandwidth = _read_quantity(entry, "bandwidth", BANDWIDTH, place) or None
    return Host(entry["name"], parse_bytes(entry["memory"], f"{place}.memory") + flash, bandwidth, flash)


def _parse_network(entry: Mapping[str, Any], link_entries: Sequence[Mapping[str, Any]], file: str) -> Network:
    place = f"{file}: network"
    bandwidth = _read_quantity(entry, "bandwidth", BANDWIDTH, place)
    latency = _read_quantity(entry, "latency", TIME, place)
    message_s = _read_quantity(entry, "message_overhead", TIME, place)
    links = []
    for index, link in enumerate(link_entries):
        place = f"{file}: link[{index}]"
        link_bandwidth = _read_quantity(link, "bandwidth", BANDWIDTH, place, bandwidth)
        links.append(Link(tuple(link["hosts"]), link_bandwidth, _read_quantity(link, "latency", TIME, place, latency)))
    return Network(entry["kind"], bandwidth, latency, tuple(links), message_s)


def _check_names(place: str, hosts: Sequence[Host], devices: Sequence[Device], network: Network) -> None:
    """Raise DicompilerError for duplicate names, unknown hosts, or if no device can compute."""
    host_names = [host.name for host in hosts]
    for key, names in (("host", host_names), ("device", [device.name for device in devices])):
        for index, name in enumerate(names):
            if name in names[:index]:
                cause = f"{name!r} is the name of an earlier {key}: rename one"
                raise DicompilerError(f"{place}: {key}[{index}].name: {cause}")
    for index, device in enumerate(devices):
        if device.host not in host_names:
            close = did_you_mean(device.host, host_names)
            raise DicompilerError(f"{place}: device[{index}].host: unknown host {device.host!r}{close}")
    seen: set[frozenset[str]] = set()
    for index, link in enumerate(network.links):
        key = f"{place}: link[{index}].hosts"
        for name in link.hosts:
            if name not in host_names:
                raise DicompilerError(f"{key}: unknown host {name!r}{did_you_mean(name, host_names)}")
        if frozenset(link.hosts) in seen:
            raise DicompilerError(f"{key}: {' and '.join(link.hosts)} have a link already: remove one of the two links")
        seen.add(frozenset(link.hosts))
    if not any(device.can_compute for device in devices):
        raise DicompilerError(f"{place}: no device can compute: give at least one device a rate above 0 FLOP/s")


def platform_to_toml(platform: Platform) -> str:
    network = platform.network
    tables = [
        _toml_table("", format=PLATFORM_FORMAT, name=platform.name, description=platform.description or None),
        _toml_table(
            "[network]\n",
            kind=network.kind,
            bandwidth=format_quantity(network.bandwidth, BANDWIDTH),
            latency=format_quantity(network.latency, TIME),
            message_overhead=_format_unless_zero(network.message_overhead_s, TIME),
        ),
    ]
    for host in platform.hosts:
        flash, bandwidth = _format_unless_zero(host.flash, MEMORY), _format_unless_zero(host.bandwidth, BANDWIDTH)
        memory = format_quantity(host.ram, MEMORY)
        tables.append(_toml_table("[[host]]\n", name=host.name, memory=memory, flash=flash, bandwidth=bandwidth))
    for device in platform.devices:
        table = _toml_table(
            "[[device]]\n",
            name=device.name,
            host=device.host,
            rate=format_quantity(device.rate, COMPUTE_RATE),
            cores=device.cores,
            power_active=format_quantity(device.power_active, POWER),
            power_idle=format_quantity(device.power_idle, POWER),
            gpu=device.gpu or None,
            power_network=_format_unless_zero(device.power_network, POWER),
            memory_bandwidth=_format_unless_zero(8 * device.memory_bandwidth, BANDWIDTH),
            engine=None if device.engine == DEFAULT_ENGINE else device.engine,
            engine_rates=_format_engine_rates(device.engine_rates),
        )
        tables.append(table)
    for link in network.links:
        bandwidth, latency = format_quantity(link.bandwidth, BANDWIDTH), format_quantity(link.latency, TIME)
        tables.append(_toml_table("[[link]]\n", hosts=link.hosts, bandwidth=bandwidth, latency=latency))
    return "\n".join(tables)


def _format_engine_rates(rates: Sequence[EngineRate]) -> dict[str, dict[str, str]] | None:
    table: dict[str, dict[str, str]] = {}
    for entry in rates:
        table.setdefault(entry.engine, {})[entry.kind] = format_quantity(entry.rate, COMPUTE_RATE)
    return table or None


def _toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _toml_table(header: str, **values: object) -> str:
    texts = {key: _toml_value(value) for key, value in values.items() if value is not None}
    # TOML strings have the escapes of JSON, but they must also escape DEL, which JSON does not.
    return header + "".join(f"{key} = {text}\n" for key, text in texts.items()).replace("\x7f", "\\u007f")


def _format_unless_zero(value: float | None, kind: Quantity) -> str | None:
    return format_quantity(value, kind) if value else None


def uniform_platform(count: int) -> Platform:
    """Return a platform of `count` equal devices d0, d1, … on separate hosts."""
    hosts = tuple(Host(f"d{i}", 2**40) for i in range(count))
    devices = tuple(Device(f"d{i}", f"d{i}", 1e9) for i in range(count))
    return Platform("uniform", hosts, devices, Network("switch", 1e9))
