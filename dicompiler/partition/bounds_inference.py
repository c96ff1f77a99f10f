"""Bounds inference: the backward walk from the region of a part to the regions that it needs.

    LayerGraph + Layer + LayerShare ⇒ ShareTask: a Piece for each node, and the region needed of each input tensor
    LayerGraph + Layer + Parts      ⇒ Tasks, which also have devices

The needed region of a tensor is the bounding box of the regions that nodes read. This gives halos through any DAG.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicompiler.base.memoize import memoized
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.operator_rule import Node
from dicompiler.ir.plan import LayerShare, Part
from dicompiler.ir.regions import Interval, Region, Shape, bounding_region, full_region, with_interval
from dicompiler.ir.tasks import ShareTask, Task, TaskKind, TaskNode, TensorKey


def make_tasks(layers: LayerGraph, layer: Layer, parts: Sequence[Part]) -> list[Task]:
    """Return one task per part of a layer; parts without `reduce` merge the partial sums of the others.

    Args:
        layers: The layers.
        layer: The layer.
        parts: Its parts in a valid plan (see `plan_validation.check_plan`).

    Returns:
        Tasks, in the order of the parts.
    """
    ranges = len({part.reduce for part in parts} - {None})
    tasks = []
    for i, part in enumerate(parts):
        share = LayerShare(part.region, part.reduce, ranges if part.reduce is None else 0)
        task = make_share_task(layers, layer, share)
        share_fields = (task.layer, task.kind, task.nodes, task.outputs, task.needs, task.state_needs)
        tasks.append(Task(*share_fields, i, part.device, part.lane))
    return tasks


def output_shape(layers: LayerGraph, layer: Layer) -> Shape:
    """Return the static shape of a layer's output, which a plan divides.

    Args:
        layers: The layers.
        layer: A layer that can be divided.

    Returns:
        The shape.
    """
    shape = layers.tensors[layer.output].shape
    assert shape is not None
    return shape


def align_region(layers: LayerGraph, layer: Layer, region: Region) -> Region:
    """Return the region that is computed if `region` is requested.

    It contains the requested region, and is aligned by the anchor's rule.

    Args:
        layers: The layers.
        layer: A layer that can be divided.
        region: Requested region of its output.

    Returns:
        The aligned region.
    """
    return layers.make_piece(layer.nodes[layer.anchor], region, None).out


@memoized
def reduction_length(layers: LayerGraph, layer: Layer) -> int | None:
    """Return the length of the axis that LIP cuts in a layer.

    Quantized layers have none, because partial sums of rounded numbers would give other results.

    Args:
        layers: The layers.
        layer: The layer.

    Returns:
        Number of elements; None if the layer has no such axis.
    """
    node = layer.nodes[layer.anchor]
    if layer.anchor > 0:  # Nodes before the anchor dequantize its inputs.
        return None
    measure = layers.rule_of(node).reduction_length
    return None if layer.whole_reason or measure is None else measure(layers.operation_of(node))


@memoized
def cuttable_axes(layers: LayerGraph, layer: Layer) -> tuple[int, ...]:
    """Return the axes of a layer's output that a plan may cut.

    These are the axes that the rule does not extend to their full length if one element is requested.

    Args:
        layers: The layers.
        layer: The layer.

    Returns:
        Axes in ascending order.
    """
    if layer.whole_reason:
        return ()
    whole = full_region(output_shape(layers, layer))
    longer = (axis for axis, (_, extent) in enumerate(whole) if extent > 1)
    return tuple([a for a in longer if align_region(layers, layer, with_interval(whole, a, (0, 1)))[a] != whole[a]])


@memoized
def make_share_task(layers: LayerGraph, layer: Layer, share: LayerShare) -> ShareTask:
    """Return the task of a share; the layer's rule must allow it.

    Args:
        layers: The layers.
        layer: The layer.
        share: Region and reduction range.

    Returns:
        The task.
    """
    return _make_whole_task(layers, layer) if layer.whole_reason else _make_partial_task(layers, layer, share)


def _make_whole_task(layers: LayerGraph, layer: Layer) -> ShareTask:
    works = tuple(TaskNode(node, None) for node in layer.nodes)
    shapes = {name: layers.tensors[name].shape for name in (*layer.outputs, *layer.inputs)}
    regions = {name: None if shape is None else full_region(shape) for name, shape in shapes.items()}
    outputs = {TensorKey(name): regions[name] for name in layer.outputs}
    needs = {TensorKey(name): region for name in layer.inputs if (region := regions[name]) is not None}
    read = dict.fromkeys(name for node in layer.nodes for name in node.inputs if name in layers.state_output_of)
    kept = {TensorKey(name): full_region(layers.tensors[name].shape or ()) for name in read}
    return ShareTask(layer.name, "plain", works, outputs, needs, kept)


def _make_partial_task(layers: LayerGraph, layer: Layer, share: LayerShare) -> ShareTask:
    region = align_region(
        layers, layer, share.region if share.region is not None else full_region(output_shape(layers, layer))
    )
    anchor = layer.nodes[layer.anchor]
    nodes: tuple[Node, ...] = layer.nodes
    kind: TaskKind = "plain"
    target, key = layer.output, TensorKey(layer.output)
    if share.reduce is not None:
        kind, nodes, target = "partial", (anchor,), layers.cut_output(anchor)
        key = TensorKey(target, share.reduce)
    elif share.merge_count:
        kind, nodes = "merger", tuple(node for node in nodes if node is not anchor)
    works, demands = _infer_bounds(layers, nodes, target, region, share.reduce)
    if kind == "merger":
        del demands[layers.cut_output(anchor)]  # Routing adds the reads of partial sums, range by range.
    kept = {TensorKey(name): demands.pop(name) for name in list(demands) if name in layers.state_output_of}
    needs = {TensorKey(name): demand for name, demand in demands.items()}
    return ShareTask(layer.name, kind, works, {key: region}, needs, kept)


def _infer_bounds(
    layers: LayerGraph, nodes: tuple[Node, ...], target: str, region: Region, reduce: Interval | None
) -> tuple[tuple[TaskNode, ...], dict[str, Region]]:
    """Return a piece for each node, and the region needed of each input tensor."""
    demands: dict[str, Region] = {target: region}
    works: list[TaskNode] = []
    for node in reversed(nodes):
        demand = demands.pop(layers.cut_output(node), None)
        if demand is None:  # No node of the task reads this output.
            continue
        piece = layers.make_piece(node, demand, reduce)
        works.append(TaskNode(node, piece))
        for name, need in zip(node.inputs, piece.needs, strict=True):
            if name and need is not None and not layers.tensors[name].is_constant:
                bound = bounding_region((demands.get(name), need))
                assert bound is not None
                demands[name] = bound
    order = dict.fromkeys(name for node in nodes for name in node.inputs if name in demands)
    order.update(dict.fromkeys(demands))
    return tuple(reversed(works)), {name: demands[name] for name in order}
