"""Operations and bytes of a part of a layer, on which the cost models rest.

LayerGraph + Layer + region → multiply-adds, FLOPs, bytes. Needs no weights. The rules of the operators give their costs
(`OperatorRule.cost`).
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
    """Return the number of multiply-adds of a part of a layer.

    Those of convolutions, matrix products and the like are counted.

    Elements that operator rules compute in addition to `region` (such as a whole group of channels) are counted. Nodes
    without static shapes count 0.

    Args:
        layers: The layers of the network.
        layer: The layer.
        region: Region of the layer's output; None for all of it.
        reduce: Range of the reduction axis if the part is a partial sum.
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
    """Return the floating-point operations of a part of a layer, counted as in `AnalyticModel`.

    Args:
        layers: The layers of the network.
        layer: The layer.
        region: Region of the layer's output; None for all of it.
        reduce: Range of the reduction axis if the part is a partial sum.
        merge: Number of partial sums that the part adds up; 0 if it computes from inputs.
        pools: Whether to count pools and reductions.
        elementwise: Whether to count activations, additions and the like.
    """
    return count_operations(layers, layer, region, reduce, merge).flops_including(pools, elementwise)


NO_COST = OpCost()


@dataclass(frozen=True)
class OpCounts:
    """Operations and bytes of a part of a layer.

    Attributes:
        multiply_flops: FLOPs of multiply-adds, two each.
        pool_flops: FLOPs of pools and reductions.
        elementwise_flops: FLOPs of all other operators.
        merge_flops: FLOPs of adding up partial sums.
        moved_bytes: Bytes read (weights included) and written. Tensors between nodes of the layer stay in caches.
        weight_bytes: Bytes of weights that are read, each piece once. A lookup reads no more than it returns.
        input_bytes: Bytes read without weights.
    """

    multiply_flops: int
    pool_flops: int
    elementwise_flops: int
    merge_flops: int
    moved_bytes: int
    weight_bytes: int = 0
    input_bytes: int = 0

    @property
    def flops(self) -> int:
        """All floating-point operations."""
        return self.flops_including(pools=True, elementwise=True)

    def flops_including(self, pools: bool, elementwise: bool) -> int:
        """Return the FLOPs, with or without those of pools and of element-wise operators.

        Args:
            pools: Whether to include pools and reductions.
            elementwise: Whether to include element-wise operators.
        """
        return self.multiply_flops + self.merge_flops + pools * self.pool_flops + elementwise * self.elementwise_flops


@memoized
def count_operations(
    layers: LayerGraph,
    layer: Layer,
    region: Region | None = None,
    reduce: Interval | None = None,
    merge: int = 0,
) -> OpCounts:
    """Count the operations and bytes of a part of a layer.

    Args:
        layers: The layers of the network.
        layer: The layer.
        region: Region of the layer's output; None for all of it.
        reduce: Range of the reduction axis if the part is a partial sum.
        merge: Number of partial sums that the part adds up; 0 if it computes from inputs.

    Returns:
        The counts of the part.
    """
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
    """Return `OpCounts.weight_bytes`, given the cost of each node."""
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
    """Return the bytes that a task reads (without weights) and makes; 0 for dynamic shapes."""
    moved = (*task.needs.items(), *task.state_needs.items(), *task.outputs.items())
    return sum(_region_nbytes(layers, key.tensor, region) for key, region in moved)


def count_task_macs(layers: LayerGraph, task: ShareTask) -> int:
    """Return the number of multiply-adds of a task, see `count_macs`.

    Args:
        layers: The layers of the network.
        task: The task.
    """
    return sum(_node_cost(layers, work).multiply_adds for work in task.nodes)


def weight_regions(layers: LayerGraph, task: ShareTask) -> Mapping[tuple[str, Region], int]:
    """Return the pieces of constants that a task holds.

    Args:
        layers: The layers of the network.
        task: The task.

    Returns:
        Bytes by (tensor, region).
    """
    return _weight_regions(layers, task.nodes)


@memoized
def _weight_regions(layers: LayerGraph, works: tuple[TaskNode, ...]) -> Mapping[tuple[str, Region], int]:
    return dict(piece for work in works for piece in _iterate_weight_regions(layers, work))


def _iterate_weight_regions(layers: LayerGraph, work: TaskNode) -> Iterator[tuple[tuple[str, Region], int]]:
    tensors, inputs = layers.tensors, work.node.inputs
    if any(name and tensors[name].is_constant for name in inputs):
        _, needs = _output_and_input_regions(layers, work)
        for name, need in zip(inputs, needs, strict=True):
            if name and need is not None and tensors[name].is_constant:
                yield (name, need), raw_nbytes(tensors[name].dtype, region_shape(need))


def _output_and_input_regions(layers: LayerGraph, work: TaskNode) -> tuple[Region | None, tuple[Region | None, ...]]:
    """Return the region of a node's output and the read regions of its inputs; None if unknown."""
    if work.piece is not None:
        return work.piece.out, work.piece.needs
    operation = layers.operation_of(work.node)
    tensor = next((tensor for tensor in operation.outputs[operation.cut_output :] if tensor is not None), None)
    return None if tensor is None or tensor.shape is None else full_region(tensor.shape), operation.full_needs()


def _node_cost(layers: LayerGraph, work: TaskNode) -> OpCost:
    """Return the cost of a node by its rule; zero if shapes are not static."""
    operation = layers.operation_of(work.node)
    out, needs = _output_and_input_regions(layers, work)
    if out is None or any(tensor is not None and tensor.shape is None for tensor in operation.inputs):
        return OpCost()
    shapes = [() if need is None else region_shape(need) for need in needs]
    return layers.rule_of(work.node).cost(operation, region_shape(out), shapes)
