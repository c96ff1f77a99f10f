"""Base class of cost models, and the cost model `analytic`.

A cost model predicts the seconds of a part of a layer on a device.
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
    """Base class of all cost models.

    A subclass is a frozen dataclass. Its fields are its options.

    Attributes:
        name: Name of the model, as in `--cost NAME`.
        is_measured: Whether predictions rest on measurements, so that they may differ the next time.
        runtime: Slowdown of messages and calls against the host on which the target's costs were measured. 0 makes them
            free, as in the papers. None scales them by the speed of the device's cores.
    """

    name: ClassVar[str]
    is_measured: ClassVar[bool] = False

    runtime: float | None = field(
        default=None,
        kw_only=True,
        metadata={
            "help": "slowdown of messages and calls against the host where they were measured; 0: they are free, as in "
            "the papers; default: by the speed of each device's cores"
        },
    )

    @abstractmethod
    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """Return the seconds that a device computes on a part of a layer, without waiting and sending.

        Args:
            layers: The layers of the network.
            layer: The layer.
            share: The part: region, range of the reduction axis, number of merged partial sums.
            device: The device.

        Returns:
            Seconds, infinite for a device that does not compute.
        """

    def seconds_in_frame(
        self,
        layers: LayerGraph,
        layer: Layer,
        share: LayerShare,
        device: Device,
        local_bytes: int,  # noqa: ARG002
    ) -> float:
        """Return the seconds of a part that reads tensors which the same device has just computed.

        onnxruntime fuses such layers, and the tensors between them keep their memory layout. By default it is
        `seconds`.

        Args:
            layers: The layers of the network.
            layer: The layer.
            share: The part.
            device: The device.
            local_bytes: Bytes of the part's inputs that the device has just computed and that it reads unchanged.

        Returns:
            Seconds, infinite for a device that does not compute.
        """
        return self.seconds(layers, layer, share, device)

    def runtime_costs(self, device: Device, stated: RuntimeCosts, target: str) -> RuntimeCosts:  # noqa: ARG002
        """Return the costs of a target's runtime on a device.

        Args:
            device: The device.
            stated: Costs that the target states for its reference host.
            target: Name of the target.

        Returns:
            The scaled costs, or the measured ones if the model has some.

        Raises:
            UsageError: The option `runtime` is negative.
        """
        if self.runtime is None:
            return scale_to_device(stated, device)
        if not 0 <= self.runtime < math.inf:
            raise UsageError(f"{self.name}: runtime must be at least 0, and is {self.runtime:g}")
        return stated.scaled_by(self.runtime)

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        """Return `seconds` of every share on every device. A model may override it with a faster way.

        Args:
            layers: The layers of the network.
            layer: The layer.
            shares: Parts of the layer.
            devices: Devices.

        Returns:
            Seconds as an array of shape (shares, devices).
        """
        rows = [[self.seconds(layers, layer, share, device) for device in devices] for share in shares]
        return np.array(rows, np.float64).reshape(len(shares), len(devices))


@dataclass(frozen=True)
class AnalyticModel(CostModel):
    """Operations divided by the compute rate.

    There are two FLOPs for each multiply-add, and one for each element of other operators. A pool costs one FLOP for
    each element of each window. Operators that only move data (Reshape, Concat, …) are free. A part takes at least its
    bytes of weights divided by the memory bandwidth, if the platform gives one: a matrix-vector product (a token of a
    language model, a classifier) waits for its matrix.

    Attributes:
        name: Name of the model.
        pools: Whether pools are counted.
        elementwise: Whether element-wise operators are counted.
        weights: Whether reading weights takes time.
    """

    name: ClassVar[str] = "analytic"
    pools: bool = field(default=True, metadata={"help": "count pools; they are free in many papers"})
    elementwise: bool = field(default=True, metadata={"help": "count activations, additions and the like"})
    weights: bool = field(default=True, metadata={"help": "count the time to read weights; it is ignored in papers"})

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        counts = count_operations(layers, layer, *share)
        memory_s = counts.weight_bytes / device.memory_bandwidth if self.weights and device.memory_bandwidth else 0.0
        return max(
            counts.flops_including(self.pools, self.elementwise) / device.rate if device.rate > 0 else math.inf,
            memory_s,
        )

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        flops = [count_flops(layers, layer, *share, pools=self.pools, elementwise=self.elementwise) for share in shares]
        bandwidths = np.array([[device.memory_bandwidth or math.inf for device in devices]], np.float64)
        weight_bytes = [self.weights and count_operations(layers, layer, *share).weight_bytes for share in shares]
        return np.maximum(
            seconds_at_rate(flops, devices), np.array(weight_bytes, np.float64).reshape(-1, 1) / bandwidths
        )


def validate_seconds(seconds: Any, layer: Layer, device: Device) -> str:
    """Return the mistake in a predicted time, '' if there is none.

    Times must be at least 0, and finite on a device that computes.
    """
    number = float(seconds) if isinstance(seconds, Real) else math.nan
    if number >= 0 and (number < math.inf or not device.can_compute):
        return ""
    return f"layer {layer.name!r} on {device.name} takes {seconds!r} s: give a number of at least 0"


def seconds_at_rate(operations: Sequence[int], devices: Sequence[Device]) -> NDArray[np.float64]:
    """Return the seconds of FLOPs at the devices' rates, with shape (operations, devices)."""
    counts = np.array(operations, np.float64).reshape(-1, 1)
    rates = np.array([[device.rate for device in devices]], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rates > 0, counts / rates, np.inf)
