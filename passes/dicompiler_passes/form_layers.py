"""Forms layers: each anchor operator takes in the element-wise nodes that follow it.

Model (normalised, shapes inferred) → LayerGraph
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import onnx

from dicompiler.plugin_api import (
    STAND_IN_DOMAIN,
    Compilation,
    DicompilerError,
    Layer,
    LayerGraph,
    Model,
    Node,
    OperatorRule,
    Pass,
    Tensor,
    captures,
)
from dicompiler_passes.quantised import with_reader

_JOINED_BEFORE_4 = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
"""What Concat takes before opset 4."""


@dataclass(frozen=True)
class FormLayers(Pass):
    """Groups nodes into layers: anchor + the element-wise nodes that only it feeds.

    Conv → BatchNormalization → Relu       ⇒  one layer, anchored at Conv
    Conv → Add(shortcut) → Relu            ⇒  one layer, the shortcut comes in
    DequantizeLinear → Conv → QuantizeLinear  ⇒  one layer, anchored at Conv: quantised numbers go in and out
    A → (no static shape) → B              ⇒  one layer, always whole
    """

    name: ClassVar[str] = "form-layers"
    provides: ClassVar[tuple[str, ...]] = ("layers",)

    def run(self, compilation: Compilation) -> Compilation:
        from dicompiler.plugin_api import registry

        return replace(compilation, layers=form_layers(compilation.model, registry().rules))


def form_layers(model: Model, rules: Mapping[tuple[str, str], OperatorRule]) -> LayerGraph:
    """The layers of `model`. Raises where a graph input has no static shape, and where an output is no node's work."""
    graph = model.proto.graph
    tensors = dict(model.tensors())
    inputs = tuple(v.name for v in graph.input if not tensors[v.name].constant)
    for name in inputs:
        if tensors[name].shape is None:
            raise DicompilerError(
                f"form-layers: input {name!r} has no static shape: fix it by infer-shapes (--shape {name}=1x3x224x224)"
            )
    nodes = tuple(_nodes(model))
    for node in nodes:
        for name in (*node.inputs, *node.outputs):
            if name:
                tensors.setdefault(name, Tensor(name, onnx.TensorProto.UNDEFINED, None))
    outputs = tuple(v.name for v in graph.output)
    made = {name for node in nodes for name in node.outputs}
    for name in outputs:
        if name not in made:
            raise DicompilerError(f"form-layers: no node makes output {name!r}: run normalise before it")
    empty = LayerGraph((), tensors, inputs, outputs, rules)
    readers = _readers(nodes, outputs)
    groups = _absorb(_with_dequantise(_opaque_groups(model, nodes, tensors), readers), empty)
    layers = tuple(_layer(group, empty, readers) for group in groups)
    return replace(empty, layers=_ordered(layers))


def _nodes(model: Model) -> Iterator[Node]:
    """The graph's nodes as rules see them, in file order (ONNX demands that it is topological)."""
    opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.proto.opset_import}
    for proto in model.proto.graph.node:
        # A stand-in of the exact check is cut just as the operator that it stands for.
        domain = "" if proto.domain == "ai.onnx" else proto.domain.removeprefix(STAND_IN_DOMAIN).removeprefix(".")
        attributes = {a.name: _plain(a) for a in proto.attribute}
        opset = opsets.get(domain, 1)
        yield Node(
            proto.name,
            proto.op_type,
            domain,
            opset,
            attributes,
            (*proto.input, *sorted(captures(proto))),
            tuple(proto.output),
        )


def _plain(attribute: onnx.AttributeProto) -> Any:
    """An attribute as int, float, str, list …; strings that are no UTF-8, tensors and graphs stay as they are."""
    if attribute.type == onnx.AttributeProto.STRING:
        return attribute.s.decode("utf-8", "surrogateescape")
    return onnx.helper.get_attribute_value(attribute)


@dataclass(frozen=True)
class _Group:
    """Nodes that become a layer, with the index of the anchor among them and why it is whole ('' if it is not)."""

    nodes: tuple[Node, ...]
    anchor: int = 0
    reason: str = ""


def _readers(nodes: Sequence[Node], outputs: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """Tensor → names of the nodes that read it; a graph output is read by '' as well."""
    found: dict[str, set[str]] = {name: {""} for name in outputs}
    for node in nodes:
        for name in node.inputs:
            found.setdefault(name, set()).add(node.name)
    return {name: frozenset(readers) for name, readers in found.items()}


def _opaque_groups(model: Model, nodes: Sequence[Node], tensors: Mapping[str, Tensor]) -> list[_Group]:
    """One group per node, but nodes joined by an edge that cannot be cut (no static shape, or captured by control
    flow) together, with all that lies between them."""
    producer = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
    leader = list(range(len(nodes)))

    def find(i: int) -> int:
        while leader[i] != i:
            i = leader[i]
        return i

    joined = False
    for i, (node, proto) in enumerate(zip(nodes, model.proto.graph.node, strict=True)):
        captured = set(node.inputs[len(proto.input) :])
        for name in node.inputs:
            if name in producer and (tensors[name].shape is None or name in captured):
                a, b = find(producer[name]), find(i)
                leader[max(a, b)] = min(a, b)
                joined = True
    if joined:
        _condense(nodes, producer, leader, find)
    members: dict[int, list[Node]] = {}
    for i, node in enumerate(nodes):
        members.setdefault(find(i), []).append(node)
    reason = "what lies between its nodes has no static shape or is captured by control flow"
    return [_Group(tuple(group), len(group) - 1, reason if len(group) > 1 else "") for group in members.values()]


def _with_dequantise(groups: Sequence[_Group], readers: Mapping[str, frozenset[str]]) -> list[_Group]:
    """What dequantises a node's inputs goes into its group, before it; the node stays the anchor."""
    alone = {group.nodes[0].name for group in groups if len(group.nodes) == 1}
    nodes = [node for group in groups for node in group.nodes]
    before = with_reader(nodes, readers, lambda node: node.name in alone)
    taken = {node.name for own in before.values() for node in own}
    joined = []
    for group in groups:
        own = before.get(group.nodes[0].name, []) if len(group.nodes) == 1 else []
        if group.nodes[0].name not in taken:
            joined.append(replace(group, nodes=(*own, *group.nodes), anchor=group.anchor + len(own)))
    return joined


def _condense(nodes: Sequence[Node], producer: Mapping[str, int], leader: list[int], find: Any) -> None:
    """Joins groups that depend on each other both ways, until the groups are a DAG."""
    while True:
        before: dict[int, set[int]] = {}  # group → groups it depends on, directly or not
        changed = False
        for i, node in enumerate(nodes):
            own = find(i)
            for name in node.inputs:
                if name in producer and (other := find(producer[name])) != own:
                    before.setdefault(own, set()).add(other)
        closure = _closure(before)
        for group, others in closure.items():
            for other in others:
                if group in closure.get(other, ()) and find(group) != find(other):
                    a, b = find(group), find(other)
                    leader[max(a, b)] = min(a, b)
                    changed = True
        if not changed:
            return


def _closure(edges: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """Everything that each key reaches."""
    reached: dict[int, set[int]] = {}
    for start in edges:
        seen: set[int] = set()
        stack = list(edges[start])
        while stack:
            at = stack.pop()
            if at not in seen:
                seen.add(at)
                stack.extend(edges.get(at, ()))
        reached[start] = seen
    return reached


def _absorb(groups: Iterable[_Group], graph: LayerGraph) -> list[_Group]:
    """Lets each anchor take in the element-wise nodes after it, for as long as just one tensor leaves."""
    groups = list(groups)
    owner = {node.name: k for k, group in enumerate(groups) for node in group.nodes}
    position = {node.name: i for i, node in enumerate(n for group in groups for n in group.nodes)}
    all_nodes = [node for group in groups for node in group.nodes]
    order = {name: node.name for node in all_nodes for name in node.outputs}
    readers = _readers(all_nodes, graph.outputs)
    by_name = {node.name: node for node in all_nodes}
    taken: set[int] = set()
    formed: list[_Group] = []
    for k, group in enumerate(groups):
        if k in taken:
            continue
        members = list(group.nodes)
        while len(members[-1].outputs) == 1 and (not group.reason):
            found = _absorbable(members, readers, by_name, graph, position, order)
            if not found or any(len(groups[owner[n.name]].nodes) > 1 or owner[n.name] in taken for n in found):
                break
            members.extend(found)
            taken.update(owner[n.name] for n in found)
        formed.append(_Group(tuple(members), group.anchor, group.reason))
    return formed


def _absorbable(
    members: Sequence[Node],
    readers: Mapping[str, frozenset[str]],
    by_name: Mapping[str, Node],
    graph: LayerGraph,
    position: Mapping[str, int],
    produced_by: Mapping[str, str],
) -> list[Node]:
    """The element-wise nodes that read the layer's one output, if taking them all in leaves again one output.

    x → Relu;   x → Add(x, shortcut);   x → Sigmoid → Mul(x, ·)  (both at once).
    """
    inside = {node.name for node in members}
    shape = graph.tensors[members[-1].outputs[0]].shape
    found: list[Node] = []
    leaving = {members[-1].outputs[0]}
    for _ in range(3):  # a branch such as x·sigmoid(x) closes after two nodes, hard-swish written out after three
        names = sorted({r for t in leaving for r in readers.get(t, ())} - inside, key=lambda n: position.get(n, -1))
        if "" in names or not names:
            return []
        if not all(_fits(by_name[name], shape, graph) for name in names):
            return []
        # One that waits for an operand of a later round, as the last Mul of x·clip(x + 3), is taken then.
        ready, waiting = names, [""]
        while waiting:
            waiting = [n for n in ready if not _comes_last(by_name[n], inside | set(ready), position, produced_by)]
            ready = [n for n in ready if n not in waiting]
        if not ready:
            return []
        found.extend(by_name[name] for name in ready)
        inside.update(ready)
        leaving = {
            output
            for node in (*members, *found)
            for output in node.outputs
            if output and not readers.get(output, frozenset()) <= inside
        }
        last = found[-1].outputs[0]
        if leaving <= {last} or not readers.get(last):
            return found if leaving == {last} else []
    return []


def _fits(node: Node, shape: Any, graph: LayerGraph) -> bool:
    """Element-wise, with one output of the anchor's static shape."""
    used = [name for name in node.outputs if name]
    return (
        graph.rule(node).elementwise
        and len(used) == 1
        and shape is not None
        and graph.tensors[used[0]].shape == shape
        and all(graph.tensors[name].shape is not None for name in node.inputs if name)
    )


def _comes_last(node: Node, inside: set[str], position: Mapping[str, int], produced_by: Mapping[str, str]) -> bool:
    """Whether the node's last-produced operand is made inside the layer: the layer that a residual Add goes to."""
    made = [(position[produced_by[name]], produced_by[name]) for name in node.inputs if name in produced_by]
    return max(made)[1] in inside


def _layer(group: _Group, graph: LayerGraph, readers: Mapping[str, frozenset[str]]) -> Layer:
    inside = {node.name for node in group.nodes}
    made = {name for node in group.nodes for name in node.outputs if name}
    incoming = dict.fromkeys(
        name
        for node in group.nodes
        for name in node.inputs
        if name and name not in made and not graph.tensors[name].constant
    )
    outgoing = tuple(
        name for node in group.nodes for name in node.outputs if name and not readers.get(name, frozenset()) <= inside
    )
    if not outgoing:
        outgoing = tuple(name for name in group.nodes[-1].outputs if name)[:1]
    reason = group.reason or _why_whole(group, outgoing, graph)
    return Layer(group.nodes[group.anchor].name, group.nodes, group.anchor, tuple(incoming), outgoing, reason)


def _why_whole(group: _Group, outgoing: Sequence[str], graph: LayerGraph) -> str:
    """'' where the layer can be cut."""
    anchor = group.nodes[group.anchor]
    if not graph.rule(anchor).cuts:
        return f"operator {anchor.domain + '::' if anchor.domain else ''}{anchor.op} has no rule"
    if len(outgoing) != 1:
        return f"{len(outgoing)} tensors leave it"
    if all(graph.cut_output(node) != outgoing[0] for node in group.nodes):
        return f"{outgoing[0]!r} is not the output that can be cut"
    if 0 < anchor.opset < 4 and not anchor.domain and graph.tensors[outgoing[0]].dtype not in _JOINED_BEFORE_4:
        return f"opset {anchor.opset} cannot join pieces of its type"
    if any(graph.tensors[name].shape is None for name in (*anchor.inputs, *anchor.outputs) if name):
        return "a tensor of it has no static shape"
    used = [graph.tensors[name] for name in (*anchor.inputs, *anchor.outputs) if name]
    if any(0 in (tensor.shape or ()) for tensor in used if not (tensor.constant and tensor.shape == (0,))):
        return "a tensor of it is empty"  # but for a parameter: exporters write an absent one as an empty vector
    return ""


def _ordered(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Topological order, ties by the order in the file: a layer may wait for a shortcut that comes in late."""
    producer = {name: layer.name for layer in layers for name in layer.outputs}
    waiting = {layer.name: {producer[t] for t in layer.inputs if t in producer} for layer in layers}
    ordered: list[Layer] = []
    done: set[str] = set()
    remaining = list(layers)
    while remaining:
        ready = next(layer for layer in remaining if waiting[layer.name] <= done)
        remaining.remove(ready)
        done.add(ready.name)
        ordered.append(ready)
    return tuple(ordered)
