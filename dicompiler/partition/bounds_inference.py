"""Bounds inference: from the region that a part of a layer computes, backwards to the regions that it needs.

The results include halos: rows, columns or channels that a part reads beyond its own position.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicompiler.base.memoize import memoized
from dicompiler.ir.layers import Layer, LayerGraph, TensorKey
from dicompiler.ir.operator_rule import Node
from dicompiler.ir.plan import LayerShare, Part
from dicompiler.ir.regions import Interval, Region, Shape, bounding_region, full_region, with_interval
from dicompiler.ir.routing import ShareTask, Task, TaskKind, TaskNode


def make_tasks(layers: LayerGraph, layer: Layer, parts: Sequence[Part]) -> list[Task]:
    """Return the computation (nodes and needed regions) of each part of a layer, in the order of the parts.

    Parts with a range of the reduction axis (`reduce`) compute partial sums. If there are such parts, the parts without
    `reduce` add these sums up.
    """
    range_count = len({part.reduce for part in parts} - {None})
    tasks = []
    for i, part in enumerate(parts):
        share = LayerShare(part.region, part.reduce, range_count if part.reduce is None else 0)
        task = make_share_task(layers, layer, share)
        share_fields = (task.layer, task.kind, task.nodes, task.outputs, task.needs, task.state_needs)
        tasks.append(Task(*share_fields, i, part.device, part.lane))
    return tasks


def output_shape(layers: LayerGraph, layer: Layer) -> Shape:
    """Return the static shape of a layer's output, which a plan divides.

    Args:
        layers: The model's layers.
        layer: A layer that can be divided.

    Returns:
        The shape.
    """
    shape = layers.tensors[layer.output].shape
    assert shape is not None
    return shape


def align_region(layers: LayerGraph, layer: Layer, region: Region) -> Region:
    """Return the region that a layer computes if `region` is requested; it contains the requested region.

    An operator that computes only whole groups of channels, for example, extends the region to whole groups.

    Args:
        layers: The model's layers.
        layer: A layer that can be divided.
        region: Requested region of the layer's output.

    Returns:
        The computed region.
    """
    return layers.make_piece(layer.nodes[layer.anchor], region, None).out


@memoized
def reduction_length(layers: LayerGraph, layer: Layer) -> int | None:
    """Return the length of the axis over which a layer sums, such as input channels, if partial sums can divide it.

    Args:
        layers: The model's layers.
        layer: One of the layers.

    Returns:
        Number of elements; None if the layer has no such axis, or is quantized: partial sums of rounded numbers would
        give other results.
    """
    node = layer.nodes[layer.anchor]
    if layer.anchor > 0:  # Nodes before the anchor (main operator) dequantize its inputs, so the layer is quantized.
        return None
    measure = layers.rule_of(node).reduction_length
    return None if layer.whole_reason or measure is None else measure(layers.operation_of(node))


@memoized
def cuttable_axes(layers: LayerGraph, layer: Layer) -> tuple[int, ...]:
    """Return the axes of a layer's output along which a plan may divide it.

    All other axes stay whole, because the operator rule extends each requested region to the full axis.

    Args:
        layers: The model's layers.
        layer: One of the layers.

    Returns:
        Axes in ascending order.
    """
    if layer.whole_reason:
        return ()
    whole = full_region(output_shape(layers, layer))
    axes = (axis for axis, (_, extent) in enumerate(whole) if extent > 1)
    return tuple([a for a in axes if align_region(layers, layer, with_interval(whole, a, (0, 1)))[a] != whole[a]])


@memoized
def make_share_task(layers: LayerGraph, layer: Layer, share: LayerShare) -> ShareTask:
    """Return the computation of a share (a piece of a layer): its nodes, and the regions that they compute and need.

    Args:
        layers: The model's layers.
        layer: Layer of which the share is a part.
        share: Region of the layer's output, and range of the reduction axis.

    Returns:
        The computation.
    """
    return _make_whole_task(layers, layer) if layer.whole_reason else _make_partial_task(layers, layer, share)


def _make_whole_task(layers: LayerGraph, layer: Layer) -> ShareTask:
    shapes = {name: layers.tensors[name].shape for name in (*layer.outputs, *layer.inputs)}
    regions = {name: None if shape is None else full_region(shape) for name, shape in shapes.items()}
    outputs = {TensorKey(name): regions[name] for name in layer.outputs}
    needs = {TensorKey(name): region for name in layer.inputs if (region := regions[name]) is not None}
    states = dict.fromkeys(name for node in layer.nodes for name in node.inputs if name in layers.state_output_of)
    state_needs = {TensorKey(name): full_region(layers.tensors[name].shape or ()) for name in states}
    nodes = tuple(TaskNode(node, None) for node in layer.nodes)
    return ShareTask(layer.name, "plain", nodes, outputs, needs, state_needs)


def _make_partial_task(layers: LayerGraph, layer: Layer, share: LayerShare) -> ShareTask:
    requested = full_region(output_shape(layers, layer)) if share.region is None else share.region
    region = align_region(layers, layer, requested)
    anchor = layer.nodes[layer.anchor]
    nodes: tuple[Node, ...] = layer.nodes
    kind: TaskKind = "plain"
    target, key = layer.output, TensorKey(layer.output)
    if share.reduce is not None:
        kind, nodes, target = "partial", (anchor,), layers.cut_output(anchor)
        key = TensorKey(target, share.reduce)
    elif share.merge_count:
        kind, nodes = "merger", tuple(node for node in nodes if node is not anchor)
    task_nodes, demands = _infer_bounds(layers, nodes, target, region, share.reduce)
    if kind == "merger":
        # A merger adds up partial sums of the output of the anchor (the layer's main operator), and does not read this
        # output itself. Routing, a later step, determines which partial sums it reads.
        del demands[layers.cut_output(anchor)]
    state_needs = {TensorKey(name): demands.pop(name) for name in list(demands) if name in layers.state_output_of}
    needs = {TensorKey(name): demand for name, demand in demands.items()}
    return ShareTask(layer.name, kind, task_nodes, {key: region}, needs, state_needs)


def _infer_bounds(
    layers: LayerGraph, nodes: tuple[Node, ...], target: str, region: Region, reduce: Interval | None
) -> tuple[tuple[TaskNode, ...], dict[str, Region]]:
    """Return the nodes and pieces that compute a region of a tensor, and the region that they read of each input.

    A piece is the region of its output that a node computes, with the regions that the node reads.

    Args:
        layers: The model's layers.
        nodes: Nodes of one layer, in topological order.
        target: Name of the tensor.
        region: Region of the tensor.
        reduce: Range of the reduction axis, if the region is a partial sum.
    """
    demands: dict[str, Region] = {target: region}
    task_nodes: list[TaskNode] = []
    for node in reversed(nodes):
        demand = demands.pop(layers.cut_output(node), None)
        if demand is None:  # Nothing reads the output of `node`.
            continue
        piece = layers.make_piece(node, demand, reduce)
        task_nodes.append(TaskNode(node, piece))
        for name, need in zip(node.inputs, piece.needs, strict=True):
            if name and need is not None and not layers.tensors[name].is_constant:
                bound = bounding_region((demands.get(name), need))
                assert bound is not None
                demands[name] = bound
    order = dict.fromkeys(name for node in nodes for name in node.inputs if name in demands)
    order.update(dict.fromkeys(demands))
    return tuple(reversed(task_nodes)), {name: demands[name] for name in order}
