"""Bounds inference: the backward walk through a layer, from the region that a part makes to what it must hold.

LayerGraph + Layer + Share → ShareTask: a Piece for every node, and what must be held of every incoming tensor;
… + Part → Task, which has a device too.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicompiler.base.remembering import remembered
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import Part, Share
from dicompiler.ir.regions import Interval, Region, Shape, bounding, full, with_interval
from dicompiler.ir.rule import Node
from dicompiler.ir.tasks import Key, Kind, ShareTask, Task, Work


def make_tasks(layers: LayerGraph, layer: Layer, parts: Sequence[Part]) -> list[Task]:
    """One task per part. Where some parts have `reduce`, those without it merge. The plan must have been checked (see
    plan_rules.check)."""
    ranges = len({part.reduce for part in parts} - {None})
    tasks = []
    for i, part in enumerate(parts):
        share = Share(part.region, part.reduce, ranges if part.reduce is None else 0)
        task = share_task(layers, layer, share)
        same = (task.layer, task.kind, task.works, task.outputs, task.needs, task.kept)
        tasks.append(Task(*same, i, part.device, part.lane))
    return tasks


def output_shape(layers: LayerGraph, layer: Layer) -> Shape:
    """The static shape of the tensor that the layer's regions speak of; the layer must not be one that stays whole."""
    shape = layers.tensors[layer.output].shape
    assert shape is not None
    return shape


def align(layers: LayerGraph, layer: Layer, region: Region) -> Region:
    """What really comes out when `region` of a layer that can be cut is asked for: its anchor's `out`, at least it."""
    return layers.piece(layer.nodes[layer.anchor], region, None).out


@remembered
def reduction(layers: LayerGraph, layer: Layer) -> int | None:
    """The length of the axis that LIP cuts in this layer, None where it has none; of a quantised layer there is none,
    because partial sums of rounded numbers are others."""
    node = layer.nodes[layer.anchor]
    if layer.anchor > 0:  # what dequantises its inputs stands before it
        return None
    measure = layers.rule(node).reduction
    return None if layer.reason or measure is None else measure(layers.operation(node))


@remembered
def cuttable(layers: LayerGraph, layer: Layer) -> tuple[int, ...]:
    """The axes of the layer's output that a plan may cut: those that the rule does not return in full when asked for
    one element of them."""
    if layer.reason:
        return ()
    whole = full(output_shape(layers, layer))
    longer = (axis for axis, (_, extent) in enumerate(whole) if extent > 1)
    return tuple([a for a in longer if align(layers, layer, with_interval(whole, a, (0, 1)))[a] != whole[a]])


@remembered
def share_task(layers: LayerGraph, layer: Layer, share: Share) -> ShareTask:
    """The task that `share` comes to; the layer's rule must allow it."""
    return _whole(layers, layer) if layer.reason else _cut(layers, layer, share)


def _whole(layers: LayerGraph, layer: Layer) -> ShareTask:
    works = tuple(Work(node, None) for node in layer.nodes)
    shapes = {name: layers.tensors[name].shape for name in (*layer.outputs, *layer.inputs)}
    regions = {name: None if shape is None else full(shape) for name, shape in shapes.items()}
    outputs = {Key(name): regions[name] for name in layer.outputs}
    needs = {Key(name): region for name in layer.inputs if (region := regions[name]) is not None}
    read = dict.fromkeys(name for node in layer.nodes for name in node.inputs if name in layers.present)
    kept = {Key(name): full(layers.tensors[name].shape or ()) for name in read}
    return ShareTask(layer.name, "plain", works, outputs, needs, kept)


def _cut(layers: LayerGraph, layer: Layer, share: Share) -> ShareTask:
    region = align(layers, layer, share.region if share.region is not None else full(output_shape(layers, layer)))
    anchor = layer.nodes[layer.anchor]
    nodes: tuple[Node, ...] = layer.nodes
    kind: Kind = "plain"
    target, key = layer.output, Key(layer.output)
    if share.reduce is not None:
        kind, nodes, target = "partial", (anchor,), layers.cut_output(anchor)
        key = Key(target, share.reduce)
    elif share.merge:
        kind, nodes = "merger", tuple(node for node in nodes if node is not anchor)
    works, demands = _walk(layers, nodes, target, region, share.reduce)
    if kind == "merger":
        del demands[layers.cut_output(anchor)]  # routing reads it range by range
    kept = {Key(name): demands.pop(name) for name in list(demands) if name in layers.present}
    needs = {Key(name): demand for name, demand in demands.items()}
    return ShareTask(layer.name, kind, works, {key: region}, needs, kept)


def _walk(
    layers: LayerGraph, nodes: tuple[Node, ...], target: str, region: Region, reduce: Interval | None
) -> tuple[tuple[Work, ...], dict[str, Region]]:
    """Backwards over `nodes`: (a piece for each, the region needed of each tensor that comes in)."""
    demands: dict[str, Region] = {target: region}
    works: list[Work] = []
    for node in reversed(nodes):
        demand = demands.pop(layers.cut_output(node), None)
        if demand is None:  # nobody reads it
            continue
        piece = layers.piece(node, demand, reduce)
        works.append(Work(node, piece))
        for name, need in zip(node.inputs, piece.needs, strict=True):
            if name and need is not None and not layers.tensors[name].constant:
                grown = bounding((demands.get(name), need))
                assert grown is not None
                demands[name] = grown
    order = dict.fromkeys(name for node in nodes for name in node.inputs if name in demands)
    order.update(dict.fromkeys(demands))
    return tuple(reversed(works)), {name: demands[name] for name in order}
