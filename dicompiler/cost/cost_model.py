"""The base class of cost models, and the cost model `analytic`.

A cost model predicts the seconds that a device needs to compute a layer, or a piece of it (a share).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.errors import UsageError
from dicompiler.cost.layer_kinds import rate_kinds
from dicompiler.cost.op_counts import count_flops, count_operations
from dicompiler.cost.runtime_overhead import RuntimeCosts, scale_to_device
from dicompiler.ir.cluster import Device, engine_name
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.weights import is_fixed_size, raw_nbytes
from dicompiler.ir.plan import LayerShare as LayerShare


class LocalBytes(NamedTuple):
    """Bytes that a share (a piece of a layer) exchanges with other layers in the same call of an engine.

    Attributes:
        inputs: Bytes of the inputs that earlier layers of the call have computed. The share reads them as they are,
            neither cut nor joined.
        outputs: Bytes of the outputs that only later layers of the call read, without cuts or joins.
    """

    inputs: int = 0
    outputs: int = 0

    @classmethod
    def of_whole_layer(cls, layers: LayerGraph, layer: Layer) -> LocalBytes:
        """Return the bytes of a whole layer in a call that computes the whole network.

        Args:
            layers: The layers of the network.
            layer: The layer.

        Returns:
            Bytes of the inputs and outputs, without inputs and outputs of the network.
        """
        inner_inputs = [name for name in layer.inputs if name not in layers.inputs]
        inner_outputs = [name for name in layer.outputs if name not in layers.outputs]
        return cls(_tensor_nbytes(layers, inner_inputs), _tensor_nbytes(layers, inner_outputs))


def _tensor_nbytes(layers: LayerGraph, names: Iterable[str]) -> int:
    """Return the bytes of tensors, without those of variable size."""
    tensors = [layers.tensors[name] for name in names]
    return sum(
        raw_nbytes(tensor.dtype, tensor.shape)
        for tensor in tensors
        if tensor.shape is not None and is_fixed_size(tensor.dtype)
    )


@dataclass(frozen=True)
class CostModel(ABC):
    """Base class of all cost models.

    A cost model is a frozen dataclass. Its fields are its options.

    Attributes:
        name: Name of the model, as in `--cost NAME`.
        is_measured: Whether predictions depend on measurements, so that they may differ after the next measurement.
        runtime: Factor by which the target's stated times of messages and calls are multiplied (0: both are free, as
            papers assume). None: the factor is derived from the speed of the device's cores.
    """

    name: ClassVar[str]
    is_measured: ClassVar[bool] = False

    runtime: float | None = field(
        default=None,
        kw_only=True,
        metadata={
            "help": "how many times longer messages and calls take than on the host where they were measured; 0: they "
            "take no time, as in the papers; default: derived from the speed of each device's cores"
        },
    )

    @abstractmethod
    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        """Return the seconds that a device needs to compute a share (a piece) of a layer, without waiting and sending.

        Args:
            layers: The layers of the network.
            layer: Layer of which the device computes a share.
            share: Region of the output, range of the reduction axis, and number of partial sums that are added up.
            device: Device that computes the share.

        Returns:
            Seconds, infinite if the device does not compute.
        """

    def seconds_in_frame(
        self,
        layers: LayerGraph,
        layer: Layer,
        share: LayerShare,
        device: Device,
        local: LocalBytes,  # noqa: ARG002
    ) -> float:
        """Return the seconds of a share (a piece of a layer) in a frame.

        An engine computes consecutive layers in one call, which changes their times. The default implementation ignores
        this and returns the result of `seconds`.

        Args:
            layers: The layers of the network.
            layer: Layer of which the device computes a share.
            share: The share of the layer.
            device: Device that computes the share.
            local: Bytes that the share exchanges with other layers in the same call of an engine.

        Returns:
            Seconds, infinite if the device does not compute.
        """
        return self.seconds(layers, layer, share, device)

    def knows_engine(self, device: Device, engine: str) -> bool:
        """Return True if the model can predict the times of an engine on a device.

        Otherwise, the model predicts the times of onnxruntime for this engine.

        Args:
            device: The device.
            engine: Name of the engine.

        Returns:
            True if the platform states rates of the engine, or if the model has measurements of it.
        """
        return device.has_rates(engine)

    def knows_layer(self, layers: LayerGraph, layer: Layer, device: Device, engine: str) -> bool:
        """Return True if the model can compare the time of a layer in an engine with its times in other engines.

        Args:
            layers: The layers of the network.
            layer: The layer.
            device: The device.
            engine: Name of the engine.

        Returns:
            True if the platform states a rate of the engine for a kind of the layer, or if the model has measurements
            of the layer in the engine.
        """
        kinds = rate_kinds(layers, layer)
        return any(entry.engine == engine_name(engine) and entry.kind in kinds for entry in device.engine_rates)

    def runtime_costs(self, device: Device, stated: RuntimeCosts, target: str) -> RuntimeCosts:  # noqa: ARG002
        """Return the time that a target's runtime needs for messages and calls on a device.

        Args:
            device: Device on which the runtime runs.
            stated: Costs that the target states for its reference host (the host on which they were measured).
            target: Name of the target.

        Returns:
            The measured costs if the model has measured them, otherwise the stated costs scaled to the device.

        Raises:
            UsageError: The option `runtime` is negative or infinite.
        """
        if self.runtime is None:
            return scale_to_device(stated, device)
        if not 0 <= self.runtime < math.inf:
            raise UsageError(f"{self.name}: runtime must be at least 0, and is {self.runtime:g}")
        return stated.scaled_by(self.runtime)

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        """Return the seconds that each device needs for each share (piece) of a layer.

        The result equals that of `seconds`; models may override this method with a faster one.

        Args:
            layers: The layers of the network.
            layer: Layer of which the shares are parts.
            shares: Shares of the layer.
            devices: Devices.

        Returns:
            Seconds as an array of shape (number of shares, number of devices).
        """
        rows = [[self.seconds(layers, layer, share, device) for device in devices] for share in shares]
        return np.array(rows, np.float64).reshape(len(shares), len(devices))


@dataclass(frozen=True)
class AnalyticModel(CostModel):
    """Time as the larger of operations / compute rate and bytes of weights / memory bandwidth.

    The rates are those of the device's engine in the platform, for each kind of layer if stated. A multiply-add is two
    FLOPs. An element of a pooling window or of another operator's output is one FLOP; moving data (Reshape, Concat) is
    none.

    Attributes:
        name: Name of the model.
        pools: Whether the FLOPs of pools are counted.
        elementwise: Whether the FLOPs of element-wise operators are counted.
        weights: Whether reading weights takes time.
    """

    name: ClassVar[str] = "analytic"
    pools: bool = field(default=True, metadata={"help": "count the operations of pools; many papers do not"})
    elementwise: bool = field(
        default=True,
        metadata={"help": "count the operations of activations, additions and other element-wise operators"},
    )
    weights: bool = field(
        default=True, metadata={"help": "count the time to read weights from memory; papers ignore it"}
    )

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        counts = count_operations(layers, layer, *share)
        memory_s = counts.weight_bytes / device.memory_bandwidth if self.weights and device.memory_bandwidth else 0.0
        rate = device.with_engine_of(layer.name).layer_rate(rate_kinds(layers, layer))
        return max(counts.flops_including(self.pools, self.elementwise) / rate if rate > 0 else math.inf, memory_s)

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        flops = [count_flops(layers, layer, *share, pools=self.pools, elementwise=self.elementwise) for share in shares]
        bandwidths = np.array([[device.memory_bandwidth or math.inf for device in devices]], np.float64)
        weight_bytes = [self.weights and count_operations(layers, layer, *share).weight_bytes for share in shares]
        compute_s = seconds_at_rate(layers, layer, flops, devices)
        return np.maximum(compute_s, np.array(weight_bytes, np.float64).reshape(-1, 1) / bandwidths)


def describe_seconds_error(seconds: Any, layer: Layer, device: Device) -> str:
    """Return a description of the error in a predicted time; '' if the time is valid.

    A time must be at least 0, and finite if the device can compute.
    """
    number = float(seconds) if isinstance(seconds, Real) else math.nan
    if number >= 0 and (number < math.inf or not device.can_compute):
        return ""
    return f"layer {layer.name!r} on {device.name} takes {seconds!r} s: give a finite number of at least 0"


def seconds_at_rate(
    layers: LayerGraph, layer: Layer, operations: Sequence[int], devices: Sequence[Device]
) -> NDArray[np.float64]:
    """Return the seconds for pieces of a layer, given their FLOPs, at the devices' rates for this kind of layer.

    The result has the shape (number of pieces, number of devices). It is infinite for devices without compute.
    """
    counts = np.array(operations, np.float64).reshape(-1, 1)
    kinds = rate_kinds(layers, layer)
    rates = np.array([[device.with_engine_of(layer.name).layer_rate(kinds) for device in devices]], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rates > 0, counts / rates, np.inf)
