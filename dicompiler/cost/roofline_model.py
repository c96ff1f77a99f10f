"""The cost model `roofline`, which predicts times from the compute rate and the memory bandwidth of a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError
from dicompiler.base.units import BANDWIDTH, parse_quantity
from dicompiler.cost.cost_model import CostModel, seconds_at_rate
from dicompiler.cost.op_counts import count_flops, count_operations
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import LayerShare


@dataclass(frozen=True)
class RooflineModel(CostModel):
    """Time as the larger of FLOPs / compute rate and moved bytes / memory bandwidth.

    Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
    architectures", 2009. The moved bytes are those of inputs, weights and output. Tensors between the nodes of a layer
    stay in caches.
    """

    name: ClassVar[str] = "roofline"
    bandwidth: str = field(
        default="", metadata={"help": "memory bandwidth of devices for which the platform gives none, such as 4 GB/s"}
    )
    pools: bool = field(default=True, metadata={"help": "count the operations of pools; many papers do not"})
    elementwise: bool = field(
        default=True,
        metadata={"help": "count the operations of activations, additions and other element-wise operators"},
    )

    def __post_init__(self) -> None:
        if self.bandwidth:
            parse_quantity(self.bandwidth, BANDWIDTH, "option 'bandwidth' of 'roofline'")

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        return float(self.seconds_table(layers, layer, [share], [device])[0, 0])

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        operations = [count_flops(layers, layer, *s, pools=self.pools, elementwise=self.elementwise) for s in shares]
        moved_bytes = [count_operations(layers, layer, *share).moved_bytes for share in shares]
        bandwidths = np.array([[self._memory_bandwidth(device) for device in devices]], np.float64)
        memory_s = np.array(moved_bytes, np.float64).reshape(-1, 1) / bandwidths
        return np.maximum(seconds_at_rate(layers, layer, operations, devices), memory_s)

    def _memory_bandwidth(self, device: Device) -> float:
        if device.memory_bandwidth or not device.can_compute:
            return device.memory_bandwidth or math.inf
        if not self.bandwidth:
            raise DicompilerError(
                f"roofline: device {device.name!r} has no memory bandwidth: set memory_bandwidth in the platform, or "
                "one bandwidth for all devices (--cost 'roofline{bandwidth=\"4 GB/s\"}')"
            )
        return parse_quantity(self.bandwidth, BANDWIDTH, "option 'bandwidth' of 'roofline'") / 8
