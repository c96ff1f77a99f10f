"""Cost models: how long a piece of a layer takes on a device. The base of all of them, and the analytic one.

LayerGraph + Layer + region + Device → seconds.   `roofline`, `linear` and `profile` are in modules of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.errors import UsageError
from dicompiler.cost.op_counts import count_flops, count_operations
from dicompiler.cost.runtime_overhead import RuntimeCosts, scale_to_device
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import LayerShare as LayerShare


@dataclass(frozen=True)
class CostModel(ABC):
    """The base of all cost models. A subclass is a frozen dataclass too: its fields are its options.

    measured: whether what it says rests on measurements, so that it may differ the next time.
    """

    name: ClassVar[str]
    is_measured: ClassVar[bool] = False

    runtime: float | None = field(
        default=None,
        kw_only=True,
        metadata={
            "help": "what messages and calls take, in times of the host where that was measured: 0: nothing, as in the "
            "papers; by default as each device's cores are slower"
        },
    )

    @abstractmethod
    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """Seconds that `device` computes on a part of `layer`, the waiting and the sending not counted. Endless on a
        compute-less device."""

    def seconds_in_frame(
        self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device, local_bytes: int
    ) -> float:
        """As `seconds`, where of what the part reads the device has just computed so many bytes (`inside`) and reads
        them as they are: onnxruntime fuses both then, and what lies between keeps its layout. The same unless a model
        has measured that."""
        return self.seconds(layers, layer, share, device)

    def runtime_costs(self, device: Device, stated: RuntimeCosts, target: str) -> RuntimeCosts:  # noqa: ARG002
        """What the runtime of `target` costs on `device`; stated: what the target says of the host on which that was
        measured. A model that has measured it on the device says that. UsageError for a factor below 0."""
        if self.runtime is None:
            return scale_to_device(stated, device)
        if not 0 <= self.runtime < math.inf:
            raise UsageError(f"{self.name}: runtime must be at least 0, and is {self.runtime:g}")
        return stated.scaled_by(self.runtime)

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        """`seconds` of every share on every device: an array (shares, devices). A model may have a quicker way."""
        rows = [[self.seconds(layers, layer, share, device) for device in devices] for share in shares]
        return np.array(rows, np.float64).reshape(len(shares), len(devices))


@dataclass(frozen=True)
class AnalyticModel(CostModel):
    """Operations / rate: two FLOP for each multiplication with its addition, one for each element of anything else.

    A pool costs one FLOP for each element of each window; what only moves data (Reshape, Concat, …) costs nothing. A
    part takes at least its bytes of weights / memory bandwidth, where the platform gives one: a product with a vector
    (a token of a language model, a classifier) waits for its matrix.
    """

    name: ClassVar[str] = "analytic"
    pools: bool = field(default=True, metadata={"help": "count pools; many papers take them as free"})
    elementwise: bool = field(default=True, metadata={"help": "count activations, additions and the like"})
    weights: bool = field(default=True, metadata={"help": "count the weights that are read; papers take them as free"})

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """FLOPs of the part / the device's rate, or bytes of weights / memory bandwidth if that is more."""
        counted = count_operations(layers, layer, *share)
        wait = counted.weight_bytes / device.memory_bandwidth if self.weights and device.memory_bandwidth else 0.0
        return max(
            counted.flops_including(self.pools, self.elementwise) / device.rate if device.rate > 0 else math.inf, wait
        )

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        """As `CostModel.fill`: the operations and weights of each share are counted once."""
        operations = [
            count_flops(layers, layer, *share, pools=self.pools, elementwise=self.elementwise) for share in shares
        ]
        widths = np.array([[device.memory_bandwidth or math.inf for device in devices]], np.float64)
        read = [self.weights and count_operations(layers, layer, *share).weight_bytes for share in shares]
        return np.maximum(seconds_at_rate(operations, devices), np.array(read, np.float64).reshape(-1, 1) / widths)


def validate_seconds(given: Any, layer: Layer, device: Device) -> str:
    """What is wrong with what a model says that a part of `layer` takes; '' where it is at least 0, and finite on a
    device that computes."""
    number = float(given) if isinstance(given, Real) else math.nan
    if number >= 0 and (number < math.inf or not device.can_compute):
        return ""
    return f"layer {layer.name!r} on {device.name} takes {given!r} s: give a number of at least 0"


def seconds_at_rate(operations: Sequence[int], devices: Sequence[Device]) -> NDArray[np.float64]:
    """Seconds (operations, devices) of numbers of FLOP at the devices' rates; endless without compute."""
    counts = np.array(operations, np.float64).reshape(-1, 1)
    rates = np.array([[device.rate for device in devices]], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rates > 0, counts / rates, np.inf)
