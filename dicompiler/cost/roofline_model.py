"""The cost model `roofline`, which considers the memory bandwidth in addition to the compute rate."""

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
    """The slower of operations / rate and bytes moved / memory bandwidth.

    Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
    architectures", 2009. Operations are counted as in `analytic`. Bytes are those of the part's inputs, weights and
    output; tensors between the nodes of a layer stay in caches.
    """

    name: ClassVar[str] = "roofline"
    bandwidth: str = field(
        default="", metadata={"help": "memory bandwidth of devices for which the platform gives none, such as 4 GB/s"}
    )
    pools: bool = field(default=True, metadata={"help": "count pools; they are free in many papers"})
    elementwise: bool = field(default=True, metadata={"help": "count activations, additions and the like"})

    def __post_init__(self) -> None:
        if self.bandwidth:
            parse_quantity(self.bandwidth, BANDWIDTH, "option 'bandwidth' of 'roofline'")

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        return float(self.seconds_table(layers, layer, [share], [device])[0, 0])

    def seconds_table(
        self, layers: LayerGraph, layer: Layer, shares: Sequence[LayerShare], devices: Sequence[Device]
    ) -> NDArray[np.float64]:
        operations = [count_flops(layers, layer, *s, pools=self.pools, elementwise=self.elementwise) for s in shares]
        moved = np.array([count_operations(layers, layer, *share).moved_bytes for share in shares], np.float64).reshape(
            -1, 1
        )
        widths = np.array([[self._memory_bandwidth(device) for device in devices]], np.float64)
        return np.maximum(seconds_at_rate(operations, devices), moved / widths)

    def _memory_bandwidth(self, device: Device) -> float:
        """Return the bytes/s between the device and its memory."""
        if device.memory_bandwidth or not device.can_compute:
            return device.memory_bandwidth or math.inf
        if not self.bandwidth:
            raise DicompilerError(
                f"roofline: the memory bandwidth of device {device.name!r} is not known: give it in the platform "
                "(memory_bandwidth) or for all devices (--cost 'roofline{bandwidth=\"4 GB/s\"}')"
            )
        return parse_quantity(self.bandwidth, BANDWIDTH, "option 'bandwidth' of 'roofline'") / 8
