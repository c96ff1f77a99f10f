"""Counting: the operations and bytes that a part of a layer comes to, which the cost models rest on.

LayerGraph + Layer + region → multiplications, FLOPs, bytes.   No model, no weights, no clock.
What an operator costs is said by its rule (see `OperatorRule.cost`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dicompiler.base.memoize import memoized
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.operator_rule import OpCost
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.regions import Interval, Region, full_region, region_shape, volume
from dicompiler.ir.tasks import ShareTask, TaskNode
from dicompiler.partition.bounds_inference import make_share_task


def count_macs(layers: LayerGraph, layer: Layer, region: Region | None = None, reduce: Interval | None = None) -> int:
    """Multiplications (each with its addition) of a part of `layer`: convolutions, matrix products and the like.

    What the operator rules compute beyond `region` (a whole group of channels, say) is counted. Nodes whose shapes are
    not static count 0.
    """
    return count_task_macs(layers, make_share_task(layers, layer, LayerShare(region, reduce)))


def count_flops(
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
    return count_operations(layers, layer, region, reduce, merge).flops_including(pools, elementwise)


NO_COST = OpCost()


@dataclass(frozen=True)
class OpCounts:
    """What a part of a layer comes to. In FLOP: `multiply` of multiplications, `pool` of pools and reductions, `other`
    of all else, `add` of adding up partial sums. weights: bytes of weights that it reads, each piece once; what only
    picks some of them (an embedding) reads no more than it makes. moved: bytes that it reads (weights too) and writes,
    where what its nodes hand to each other stays in caches. read: those of them that it reads, weights apart."""

    multiply_flops: int
    pool_flops: int
    elementwise_flops: int
    merge_flops: int
    moved_bytes: int
    weight_bytes: int = 0
    input_bytes: int = 0

    @property
    def flops(self) -> int:
        """All of them."""
        return self.flops_including(pools=True, elementwise=True)

    def flops_including(self, pools: bool, elementwise: bool) -> int:
        """FLOP, with those of pools or without, and of elements likewise."""
        return self.multiply_flops + self.merge_flops + pools * self.pool_flops + elementwise * self.elementwise_flops


@memoized
def count_operations(
    layers: LayerGraph,
    layer: Layer,
    region: Region | None = None,
    reduce: Interval | None = None,
    merge: int = 0,
) -> OpCounts:
    """The operations and bytes of a part of `layer`; the arguments are those of `CostModel.seconds`."""
    task = make_share_task(layers, layer, LayerShare(region, reduce, merge))
    efforts = [_node_cost(layers, work) for work in task.nodes]
    multiply, pool, other = (sum(kind) for kind in zip(OpCost(), *efforts, strict=True))
    ((key, region_made), *_) = task.outputs.items()
    size = 0 if region_made is None else volume(region_made)
    weights = _weight_bytes_read(layers, task.nodes, efforts)
    partial = merge * _region_nbytes(layers, key.tensor, region_made)
    read = partial + sum(_region_nbytes(layers, need.tensor, region) for need, region in task.needs.items())
    moved = weights + activation_nbytes(layers, task) + partial
    return OpCounts(2 * multiply, pool, other, (merge - 1) * size if merge else 0, moved, weights, read)


def _weight_bytes_read(layers: LayerGraph, works: tuple[TaskNode, ...], efforts: Sequence[OpCost]) -> int:
    """`Count.weights`: see there. efforts: what each of the works costs."""
    held = _weight_regions(layers, works)
    if not held or NO_COST not in efforts:
        return sum(held.values())
    read: dict[tuple[str, Region], int] = {}
    for work, effort in zip(works, efforts, strict=True):
        made, _ = _output_and_input_regions(layers, work)
        picks = made is not None and effort == NO_COST
        most = _region_nbytes(layers, layers.cut_output(work.node), made) if picks else math.inf
        for piece, nbytes in _iterate_weight_regions(layers, work):
            read[piece] = max(read.get(piece, 0), int(min(nbytes, most)))
    return sum(read.values())


def _region_nbytes(layers: LayerGraph, tensor: str, region: Region | None) -> int:
    return 0 if region is None else raw_nbytes(layers.tensors[tensor].dtype, region_shape(region))


def activation_nbytes(layers: LayerGraph, task: ShareTask) -> int:
    """Bytes of what a task reads, weights apart, and of what it makes; nothing of tensors without static shape."""
    moved = (*task.needs.items(), *task.state_needs.items(), *task.outputs.items())
    return sum(_region_nbytes(layers, key.tensor, region) for key, region in moved)


def count_task_macs(layers: LayerGraph, task: ShareTask) -> int:
    """Multiplications of a task, see `macs`."""
    return sum(_node_cost(layers, work).multiply_adds for work in task.nodes)


def weight_regions(layers: LayerGraph, task: ShareTask) -> Mapping[tuple[str, Region], int]:
    """The pieces of constants that a task holds: (tensor, region) → bytes."""
    return _weight_regions(layers, task.nodes)


@memoized
def _weight_regions(layers: LayerGraph, works: tuple[TaskNode, ...]) -> Mapping[tuple[str, Region], int]:
    return dict(piece for work in works for piece in _iterate_weight_regions(layers, work))


def _iterate_weight_regions(layers: LayerGraph, work: TaskNode) -> Iterator[tuple[tuple[str, Region], int]]:
    """The pieces of constants that a node reads, with their bytes."""
    tensors, inputs = layers.tensors, work.node.inputs
    if any(name and tensors[name].is_constant for name in inputs):
        _, needs = _output_and_input_regions(layers, work)
        for name, need in zip(inputs, needs, strict=True):
            if name and need is not None and tensors[name].is_constant:
                yield (name, need), raw_nbytes(tensors[name].dtype, region_shape(need))


def _output_and_input_regions(layers: LayerGraph, work: TaskNode) -> tuple[Region | None, tuple[Region | None, ...]]:
    """(the region of its output that a node computes, the regions of its inputs that it reads); None: unknown."""
    if work.piece is not None:
        return work.piece.out, work.piece.needs
    operation = layers.operation_of(work.node)
    tensor = next((tensor for tensor in operation.outputs[operation.cut_output :] if tensor is not None), None)
    return None if tensor is None or tensor.shape is None else full_region(tensor.shape), operation.full_needs()


def _node_cost(layers: LayerGraph, work: TaskNode) -> OpCost:
    """What one node costs, as its rule says; nothing where shapes are not static."""
    operation = layers.operation_of(work.node)
    out, needs = _output_and_input_regions(layers, work)
    if out is None or any(tensor is not None and tensor.shape is None for tensor in operation.inputs):
        return OpCost()
    shapes = [() if need is None else region_shape(need) for need in needs]
    return layers.rule_of(work.node).cost(operation, region_shape(out), shapes)
