"""Cost models: how long a piece of a layer takes on a device. And the counting of operations that they rest on.

LayerGraph + Layer + region → multiplications, FLOPs;   … + Device → seconds.   No model, no weights, no clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dicompiler.layers import Layer, LayerGraph
from dicompiler.operators.rule import Operation
from dicompiler.plan import Part
from dicompiler.platform import Device
from dicompiler.regions import Interval, Region, full, shape_of, volume
from dicompiler.tasks import Kind, Task, Work, make_task
from dicompiler.weights import raw_nbytes

# These only move data, or do nothing at inference.
_MOVING = frozenset(
    "Identity Dropout Reshape Flatten Transpose Squeeze Unsqueeze Concat Slice Split Pad Constant ConstantOfShape Shape"
    " Size Gather Expand Tile SpaceToDepth DepthToSpace Cast".split()
)
_POOLS = frozenset(("MaxPool", "AveragePool", "LpPool"))
_GLOBAL_POOLS = frozenset(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"))


@dataclass(frozen=True)
class CostModel(ABC):
    """The base of all cost models. A subclass is a frozen dataclass too: its fields are its options."""

    name: ClassVar[str]

    @abstractmethod
    def seconds(
        self,
        layers: LayerGraph,
        layer: Layer,
        region: Region | None,
        reduce: Interval | None,
        device: Device,
        merge: int = 0,
    ) -> float:
        """Seconds that `device` computes on a part of `layer`, the waiting and the sending not counted.

        region: of the layer's output (None: all of it); reduce: the range of input channels of a partial sum;
        merge: how many partial sums the part adds up (0: it adds none). Endless on a compute-less device.
        """


@dataclass(frozen=True)
class Analytic(CostModel):
    """Operations / rate: two FLOP for each multiplication with its addition, one for each element of anything else.

    A pool costs one FLOP for each element of each window; what only moves data (Reshape, Concat, …) costs nothing.
    """

    name: ClassVar[str] = "analytic"
    pools: bool = field(default=True, metadata={"help": "count pools; many papers take them as free"})
    elementwise: bool = field(default=True, metadata={"help": "count activations, additions and the like"})

    def seconds(
        self,
        layers: LayerGraph,
        layer: Layer,
        region: Region | None,
        reduce: Interval | None,
        device: Device,
        merge: int = 0,
    ) -> float:
        """FLOPs of the part / the device's rate."""
        if not device.computes:
            return math.inf
        return flops(layers, layer, region, reduce, merge, pools=self.pools, elementwise=self.elementwise) / device.rate


def macs(layers: LayerGraph, layer: Layer, region: Region | None = None, reduce: Interval | None = None) -> int:
    """Multiplications (each with its addition) of a part of `layer`: Conv, ConvTranspose, Gemm and MatMul have some.

    What the operator rules compute beyond `region` (a whole group of channels, say) is counted. Nodes whose shapes are
    not static count 0.
    """
    return task_macs(layers, _task(layers, layer, region, reduce, 0))


def flops(
    layers: LayerGraph,
    layer: Layer,
    region: Region | None = None,
    reduce: Interval | None = None,
    merge: int = 0,
    *,
    pools: bool = True,
    elementwise: bool = True,
) -> int:
    """Floating-point operations of a part of `layer`, counted as `Analytic` says; the arguments are those of
    `CostModel.seconds`."""
    task = _task(layers, layer, region, reduce, merge)
    total = sum(_work_flops(layers, work, pools, elementwise) for work in task.works)
    (made, *_) = task.outputs.values()
    return total + (merge - 1) * volume(made) if merge and made is not None else total


def task_macs(layers: LayerGraph, task: Task) -> int:
    """Multiplications of a task, see `macs`."""
    return sum(_macs(layers.operation(work.node), *_regions(layers, work)) for work in task.works)


def weight_regions(layers: LayerGraph, task: Task) -> dict[tuple[str, Region], int]:
    """The pieces of constants that a task holds: (tensor, region) → bytes."""
    found = {}
    for work in task.works:
        _, needs = _regions(layers, work)
        for name, need in zip(work.node.inputs, needs, strict=True):
            if name and need is not None and layers.tensors[name].constant:
                found[name, need] = raw_nbytes(layers.tensors[name].dtype, shape_of(need))
    return found


def _task(layers: LayerGraph, layer: Layer, region: Region | None, reduce: Interval | None, merge: int) -> Task:
    kind: Kind = "merger" if merge else "plain" if reduce is None else "partial"
    return make_task(layers, layer, 0, Part("", region, reduce), kind)


def _regions(layers: LayerGraph, work: Work) -> tuple[Region | None, tuple[Region | None, ...]]:
    """(the region of its output that a node computes, the regions of its inputs that it reads); None: unknown."""
    if work.piece is not None:
        return work.piece.out, work.piece.needs
    operation = layers.operation(work.node)
    tensor = operation.outputs[operation.output] if operation.outputs else None
    return None if tensor is None or tensor.shape is None else full(tensor.shape), operation.full_needs()


def _macs(operation: Operation, out: Region | None, needs: Sequence[Region | None]) -> int:
    op = operation.node.op
    if out is None or operation.node.domain or op not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return 0
    left, right = needs[0], needs[1]
    if left is None or right is None:
        return 0
    if op == "Conv":  # weights (M, C/g, kernel…): each output element reads one filter
        return volume(out) * math.prod(shape_of(right)[1:])
    if op == "ConvTranspose":  # weights (C, M/g, kernel…): each input element goes to M/g filters
        return volume(left) * math.prod(shape_of(right)[1:])
    axis = 0 if op == "Gemm" and operation.attribute("transA", 0) else -1
    return volume(out) * shape_of(left)[axis]


def _work_flops(layers: LayerGraph, work: Work, pools: bool, elementwise: bool) -> int:
    operation = layers.operation(work.node)
    out, needs = _regions(layers, work)
    multiplications = _macs(operation, out, needs)
    op = operation.node.op
    if multiplications or out is None or op in _MOVING:
        return 2 * multiplications
    if op in _POOLS:
        return volume(out) * math.prod(operation.attribute("kernel_shape", ())) if pools else 0
    if op in _GLOBAL_POOLS or op.startswith("Reduce"):
        return volume(needs[0]) if pools and needs[0] is not None else 0
    if not elementwise:
        return 0
    if op == "LRN":
        return volume(out) * int(operation.attribute("size", 1))
    return volume(out)
