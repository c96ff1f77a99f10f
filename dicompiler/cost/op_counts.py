"""Numbers of operations and bytes of a layer or a piece of it (a share), from which cost models predict times.

`OperatorRule.cost` returns the operations of each operator. The numbers depend on shapes, but not on weight values.
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
from dicompiler.ir.regions import Interval, Region, full_region, is_empty, region_shape, volume
from dicompiler.ir.routing import ShareTask, TaskNode
from dicompiler.partition.bounds_inference import make_share_task


def count_macs(layers: LayerGraph, layer: Layer, region: Region | None = None, reduce: Interval | None = None) -> int:
    """Return the multiply-adds of a share (piece) of a layer; nodes without static shapes count as 0.

    An operator rule may compute more elements than `region`, such as a whole group of channels. Their operations are
    included.

    Args:
        layers: The layers of the network.
        layer: Layer of which the share is a part.
        region: Region of the layer's output that is computed; None for all of it.
        reduce: Range of the reduction axis if the share is a partial sum; None for the whole axis.

    Returns:
        Number of multiply-adds.
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
    """Return the FLOPs of a piece of a layer, with or without pools (and reductions) and element-wise operators.

    `region`, `reduce` and `merge` describe the piece as in `count_operations`.
    """
    return count_operations(layers, layer, region, reduce, merge).flops_including(pools, elementwise)


@dataclass(frozen=True)
class OpCounts:
    """Operations and bytes of a share (a piece) of a layer.

    Attributes:
        multiply_flops: FLOPs of multiply-adds, two for each.
        pool_flops: FLOPs of pools and reductions.
        elementwise_flops: FLOPs of all other operators.
        merge_flops: FLOPs of adding up partial sums.
        moved_bytes: Bytes that are read (with weights) and written. Tensors between the nodes of the layer are
            excluded, because they stay in caches.
        weight_bytes: Bytes of weights that are read; a region that several nodes read is counted once. A lookup in a
            table reads at most as many bytes as it returns.
        input_bytes: Bytes of inputs and partial sums that are read, without weights.
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
        """Number of all floating-point operations."""
        return self.flops_including(pools=True, elementwise=True)

    def flops_including(self, pools: bool, elementwise: bool) -> int:
        """Return the number of floating-point operations, with or without pools and element-wise operators.

        Args:
            pools: Whether to include pools and reductions.
            elementwise: Whether to include element-wise operators.

        Returns:
            Number of floating-point operations.
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
    """Count the operations and bytes of a share (a piece) of a layer.

    Args:
        layers: The layers of the network.
        layer: Layer of which the share is a part.
        region: Region of the layer's output that is computed; None for all of it.
        reduce: Range of the reduction axis if the share is a partial sum; None for the whole axis.
        merge: Number of partial sums that the share adds up; 0 if it computes from the layer's inputs.

    Returns:
        The operations and bytes.
    """
    task = make_share_task(layers, layer, LayerShare(region, reduce, merge))
    costs = [_node_cost(layers, work) for work in task.nodes]
    multiply, pool, other = (sum(kind) for kind in zip(OpCost(), *costs, strict=True))
    ((key, output_region), *_) = task.outputs.items()
    size = 0 if output_region is None else volume(output_region)
    weight_bytes = _weight_bytes_read(layers, task.nodes, costs)
    partial_bytes = merge * _region_nbytes(layers, key.tensor, output_region)
    input_bytes = partial_bytes + sum(_region_nbytes(layers, key.tensor, need) for key, need in task.needs.items())
    moved_bytes = weight_bytes + activation_nbytes(layers, task) + partial_bytes
    merge_flops = (merge - 1) * size if merge else 0
    return OpCounts(2 * multiply, pool, other, merge_flops, moved_bytes, weight_bytes, input_bytes)


def _weight_bytes_read(layers: LayerGraph, nodes: tuple[TaskNode, ...], costs: Sequence[OpCost]) -> int:
    """Return the bytes of weights that nodes read; a region that several nodes read is counted once.

    `costs` are the operations of each node. A node without operations is assumed to be a table lookup, which reads no
    more bytes than its output has.
    """
    regions = _weight_regions(layers, nodes)
    if not regions or OpCost() not in costs:
        return sum(regions.values())
    read: dict[tuple[str, Region], int] = {}
    for node, cost in zip(nodes, costs, strict=True):
        output_region, _ = _output_and_input_regions(layers, node)
        is_lookup = output_region is not None and cost == OpCost()
        max_nbytes = _region_nbytes(layers, layers.cut_output(node.node), output_region) if is_lookup else math.inf
        for piece, nbytes in _iterate_weight_regions(layers, node):
            read[piece] = max(read.get(piece, 0), int(min(nbytes, max_nbytes)))
    return sum(read.values())


def _region_nbytes(layers: LayerGraph, tensor: str, region: Region | None) -> int:
    return 0 if region is None else raw_nbytes(layers.tensors[tensor].dtype, region_shape(region))


def activation_nbytes(layers: LayerGraph, task: ShareTask) -> int:
    """Return the bytes that one device's task in a layer reads and writes, without weights.

    A tensor without a static shape counts as 0 bytes.
    """
    regions = (*task.needs.items(), *task.state_needs.items(), *task.outputs.items())
    return sum(_region_nbytes(layers, key.tensor, region) for key, region in regions)


def count_task_macs(layers: LayerGraph, task: ShareTask) -> int:
    """Return the number of multiply-adds of a task; nodes without static shapes count as 0.

    Args:
        layers: The layers of the network.
        task: The task (one device's share of a layer).

    Returns:
        Number of multiply-adds.
    """
    return sum(_node_cost(layers, node).multiply_adds for node in task.nodes)


def weight_regions(layers: LayerGraph, task: ShareTask) -> Mapping[tuple[str, Region], int]:
    """Return the pieces of constants that a task reads and that its device must therefore store.

    Args:
        layers: The layers of the network.
        task: The task (one device's share of a layer).

    Returns:
        Bytes of each piece by (tensor name, region of the tensor).
    """
    return _weight_regions(layers, task.nodes)


@memoized
def _weight_regions(layers: LayerGraph, nodes: tuple[TaskNode, ...]) -> Mapping[tuple[str, Region], int]:
    return dict(piece for node in nodes for piece in _iterate_weight_regions(layers, node))


def _iterate_weight_regions(layers: LayerGraph, task_node: TaskNode) -> Iterator[tuple[tuple[str, Region], int]]:
    tensors, inputs = layers.tensors, task_node.node.inputs
    if any(name and tensors[name].is_constant for name in inputs):
        _, needs = _output_and_input_regions(layers, task_node)
        for name, need in zip(inputs, needs, strict=True):
            if name and need is not None and tensors[name].is_constant:
                yield (name, need), raw_nbytes(tensors[name].dtype, region_shape(need))


def _output_and_input_regions(
    layers: LayerGraph, task_node: TaskNode
) -> tuple[Region | None, tuple[Region | None, ...]]:
    """Return the region that a node computes, and the region that it reads of each input. An unknown region is None."""
    if task_node.piece is not None:
        return task_node.piece.out, task_node.piece.needs
    operation = layers.operation_of(task_node.node)
    tensor = next((tensor for tensor in operation.outputs[operation.cut_output :] if tensor is not None), None)
    return None if tensor is None or tensor.shape is None else full_region(tensor.shape), operation.full_needs()


def _node_cost(layers: LayerGraph, task_node: TaskNode) -> OpCost:
    operation = layers.operation_of(task_node.node)
    out, needs = _output_and_input_regions(layers, task_node)
    is_static = all(tensor is None or tensor.shape is not None for tensor in operation.inputs)
    if out is None or is_empty(out) or not is_static:
        return OpCost()
    shapes = [() if need is None else region_shape(need) for need in needs]
    return layers.rule_of(task_node.node).cost(operation, region_shape(out), shapes)
