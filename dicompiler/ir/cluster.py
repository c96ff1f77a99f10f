"""Hosts, devices and the network of a cluster."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, TypeVar

from dicompiler.base.option_specs import parse_spec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NetworkKind = Literal["switch", "shared", "gateway"]
DEFAULT_ENGINE = "onnxruntime"
"""Engine of a device (library that computes its ONNX submodels) unless another one is chosen."""
OTHER_KINDS = "*"
"""Value of `EngineRate.kind` for the rate of all kinds of layers that have no rate of their own."""


@dataclass(frozen=True)
class Host:
    """Machine of the cluster.

    Attributes:
        name: Name of the host.
        memory: Bytes of RAM plus bytes of flash, which the devices of the host share.
        bandwidth: Bandwidth in bit/s of the host's network link in each direction; None: the network's bandwidth.
        flash: Bytes of flash, which stores the weights and nothing else; 0: no flash, so the weights are in RAM.
    """

    name: str
    memory: int
    bandwidth: float | None = None
    flash: int = 0

    @property
    def ram(self) -> int:
        """Bytes of RAM. If the host has flash, RAM stores everything except weights; otherwise it stores all data."""
        return self.memory - self.flash


def engine_name(engine: str) -> str:
    """Return the name of an engine without its options: "ncnn{precision=bf16}" ⇒ "ncnn"."""
    return engine.partition("{")[0].strip()


@functools.cache
def engine_layers(engine: str) -> tuple[str, ...]:
    """Return the layers that an engine computes, as names and patterns: "ncnn{layers=conv1,fc*}" ⇒ ("conv1", "fc*").

    The result is empty if the engine computes all layers.
    """
    return dict(parse_spec(engine, "engine").options).get("layers", ())


@functools.cache
def computes_layer(engine: str, layer: str) -> bool:
    """Return True unless the engine's option `layers` leaves a layer to onnxruntime.

    Args:
        engine: Name of the engine, possibly with options.
        layer: Name of the layer.
    """
    patterns = engine_layers(engine)
    return not patterns or any(fnmatchcase(layer, pattern) for pattern in patterns)


@dataclass(frozen=True)
class EngineRate:
    """Compute rate of a device with an engine other than onnxruntime, for one kind of layer.

    Attributes:
        engine: Name of the engine.
        kind: Kind of layer: its main operator ("Conv"), or a more specific kind ("Conv3x3"); "*": all other kinds.
        rate: Sustained compute rate in FLOP/s.
    """

    engine: str
    kind: str
    rate: float


@dataclass(frozen=True)
class Device:
    """Processing element of a host: a group of CPU cores, or a GPU.

    Attributes:
        name: Name of the device.
        host: Name of its host.
        rate: Sustained compute rate in FLOP/s (a multiply-add is two FLOP); 0: it cannot compute (a camera, a gateway).
        cores: Number of CPU cores.
        power_active: Power in W while the device computes. The power of a host is the sum over its devices.
        power_idle: Power in W while the device waits.
        gpu: True if it is a GPU.
        power_network: Additional power in W while the device sends or receives.
        memory_bandwidth: Bandwidth between cores and memory in byte/s; 0: unknown.
        engine: Engine (library) that computes its segments (ONNX submodels): its name, possibly with options.
        engine_rates: Rates with other engines than onnxruntime. With onnxruntime, the rate is `rate` for all layers.
    """

    name: str
    host: str
    rate: float
    cores: int = 1
    power_active: float = 0.0
    power_idle: float = 0.0
    gpu: bool = False
    power_network: float = 0.0
    memory_bandwidth: float = 0.0
    engine: str = DEFAULT_ENGINE
    engine_rates: tuple[EngineRate, ...] = ()

    @property
    def can_compute(self) -> bool:
        """True if the device has a compute rate above zero."""
        return self.rate > 0

    def has_rates(self, engine: str) -> bool:
        """Return True if the platform states compute rates of an engine on this device.

        Args:
            engine: Name of the engine. Options are ignored: rates apply to all precisions.

        Returns:
            True if there is at least one rate; always True for onnxruntime.
        """
        name = engine_name(engine)
        return name == DEFAULT_ENGINE or any(entry.engine == name for entry in self.engine_rates)

    def with_engine_of(self, layer: str) -> Device:
        """Return this device with the engine that computes a layer: its own engine, or onnxruntime.

        Args:
            layer: Name of the layer. The engine's option `layers` can leave it to onnxruntime.

        Returns:
            The device.
        """
        return self if computes_layer(self.engine, layer) else replace(self, engine=DEFAULT_ENGINE)

    def layer_rate(self, kinds: Sequence[str]) -> float:
        """Return the compute rate of the device's engine for a layer.

        Args:
            kinds: Kinds of the layer, the most specific one first: ("Conv3x3", "Conv").

        Returns:
            The rate in FLOP/s of the first kind that has one, or else the rate for all other kinds ("*"). Without
            either, the rate with onnxruntime, which computes the layers that an engine does not support.
        """
        name = engine_name(self.engine)
        stated = {entry.kind: entry.rate for entry in self.engine_rates if entry.engine == name}
        return next((stated[kind] for kind in (*kinds, OTHER_KINDS) if kind in stated), self.rate)


Amount = TypeVar("Amount", float, "NDArray[np.float64]")


class TransferMedium:
    """Base class of links and networks, which transfer bytes with a bandwidth in bit/s."""

    bandwidth: float

    def transfer_s(self, nbytes: Amount, message: float = 0.0) -> Amount:
        """Return the seconds for which a transfer occupies the link or network. The latency is not included.

        Args:
            nbytes: Bytes of the transfer.
            message: Fixed time per transfer in seconds.
        """
        return message + 8 * nbytes / self.bandwidth


@dataclass(frozen=True)
class Link(TransferMedium):
    """Link between two hosts. Bandwidth and latency apply to both directions.

    Attributes:
        hosts: Names of the two hosts.
        bandwidth: Bandwidth in bit/s.
        latency: Latency in seconds.
    """

    hosts: tuple[str, str]
    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Network(TransferMedium):
    """Network between the hosts. Devices of the same host exchange data through its memory instead.

    Attributes:
        kind: `switch`: every host has its own full-duplex link; `shared`: all hosts share one medium; `gateway`: all
            data passes one gateway, whose bandwidth all hosts share.
        bandwidth: Bandwidth in bit/s.
        latency: Latency in seconds.
        links: Links between two hosts whose bandwidth or latency differs from that of the network.
        message_overhead_s: Fixed time in seconds for which each transfer occupies its link, in addition to its bytes.
    """

    kind: NetworkKind
    bandwidth: float
    latency: float = 0.0
    links: tuple[Link, ...] = ()
    message_overhead_s: float = 0.0

    def link(self, a: str, b: str) -> Link | None:
        """Return the link between two hosts.

        Args:
            a: Name of the first host.
            b: Name of the second host.

        Returns:
            The entry of `links` for these hosts, or a link with the network's values; None if both are the same host.
        """
        if a == b:
            return None
        return next((x for x in self.links if {*x.hosts} == {a, b}), Link((a, b), self.bandwidth, self.latency))
