"""The pass `form-layers`: each anchor operator takes in the element-wise nodes that follow it.

Model (normalised, shapes inferred) ⇒ LayerGraph
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import onnx

from dicompiler.plugin_api import DicompilerError, Layer, LayerGraph, Model, OperatorRule, Pass, PipelineState, Shape
from dicompiler.plugin_api.onnx import (
    STAND_IN_DOMAIN,
    Node,
    TensorInfo,
    captured_names,
    is_fixed_size,
    is_random,
    read_states,
)
from dicompiler_passes.qdq_grouping import dequantize_by_reader

_CONCAT_TYPES_BEFORE_OPSET_4 = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
"""Types that Concat accepts before opset 4."""


@dataclass(frozen=True)
class FormLayers(Pass):
    """Group nodes into layers: an anchor and the element-wise nodes that only it feeds.

    Conv → BatchNormalization → Relu       ⇒  one layer, anchored at Conv
    Conv → Add(shortcut) → Relu            ⇒  one layer, with the shortcut as an input
    DequantizeLinear → Conv → QuantizeLinear  ⇒  one layer, anchored at Conv: its inputs and outputs are quantized
    A → (no static shape) → B              ⇒  one layer that no plan cuts
    """

    name: ClassVar[str] = "form-layers"
    provides: ClassVar[tuple[str, ...]] = ("layers",)

    def run(self, compilation: PipelineState) -> PipelineState:
        """Set the layers."""
        from dicompiler.plugin_api import registry

        return replace(compilation, layers=form_layers(compilation.model, registry().operator_rules))


def form_layers(model: Model, rules: Mapping[tuple[str, str], OperatorRule]) -> LayerGraph:
    """Return the layers of a model.

    Raises:
        DicompilerError: A graph input has no static shape, or no node makes a graph output.
    """
    graph = model.proto.graph
    tensors = {
        name: tensor if is_fixed_size(tensor.dtype) else replace(tensor, shape=None)
        for name, tensor in model.tensors().items()
    }
    states = read_states(model.proto) or ()
    inputs = tuple(v.name for v in graph.input if not tensors[v.name].is_constant)
    for name in inputs:
        if tensors[name].shape is None and is_fixed_size(tensors[name].dtype):
            raise DicompilerError(
                f"form-layers: input {name!r} has no static shape: fix it by infer-shapes (--shape {name}=1x3x224x224)"
            )
    nodes = tuple(_nodes(model))
    for node in nodes:
        for name in (*node.inputs, *node.outputs):
            if name:
                tensors.setdefault(name, TensorInfo(name, onnx.TensorProto.UNDEFINED, None))
    outputs = tuple(v.name for v in graph.output)
    made = {name for node in nodes for name in node.outputs}
    for name in outputs:
        if name not in made:
            raise DicompilerError(f"form-layers: no node makes output {name!r}: run normalise before it")
    given = tuple(name for name in inputs if name not in dict(states))
    random = frozenset(node.name for node in graph.node if is_random(node, model.proto))
    empty = LayerGraph((), tensors, given, outputs, rules, states=states, random_nodes=random)
    readers = _readers(nodes, outputs)
    groups = _absorb_elementwise(_with_dequantize_nodes(_opaque_groups(model, nodes, tensors), readers), empty)
    layers = tuple(_make_layer(group, empty, readers) for group in groups)
    return replace(empty, layers=_order_layers(layers))


def _nodes(model: Model) -> Iterator[Node]:
    """Yield the graph's nodes as rules see them, in file order, which is topological."""
    opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.proto.opset_import}
    for proto in model.proto.graph.node:
        # A stand-in of the exact check is cut just as the operator that it stands for.
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        if domain.startswith(STAND_IN_DOMAIN):  # a number tells stand-ins of one operator apart
            domain = domain.removeprefix(STAND_IN_DOMAIN).partition("#")[0].removeprefix(".")
        attributes = {a.name: _attribute_value(a) for a in proto.attribute}
        opset = opsets.get(domain, 1)
        yield Node(
            proto.name,
            proto.op_type,
            domain,
            opset,
            attributes,
            (*proto.input, *sorted(captured_names(proto))),
            tuple(proto.output),
        )


def _attribute_value(attribute: onnx.AttributeProto) -> Any:
    """Return an attribute's value; strings are decoded, and tensors and graphs stay as they are."""
    if attribute.type == onnx.AttributeProto.STRING:
        return attribute.s.decode("utf-8", "surrogateescape")
    return onnx.helper.get_attribute_value(attribute)


@dataclass(frozen=True)
class _Group:
    """Nodes that become a layer.

    Attributes:
        nodes: The nodes in order.
        anchor: Index of the anchor among them.
        reason: Why no plan can cut the layer, '' if plans can.
    """

    nodes: tuple[Node, ...]
    anchor: int = 0
    reason: str = ""


def _readers(nodes: Sequence[Node], outputs: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """Return the names of the nodes that read each tensor; '' stands for the graph output."""
    found: dict[str, set[str]] = {name: {""} for name in outputs}
    for node in nodes:
        for name in node.inputs:
            found.setdefault(name, set()).add(node.name)
    return {name: frozenset(readers) for name, readers in found.items()}


def _opaque_groups(model: Model, nodes: Sequence[Node], tensors: Mapping[str, TensorInfo]) -> list[_Group]:
    """Return one group for each node, but join nodes around edges that cannot be cut.

    All nodes between them are joined too.

    Edges without static shape, and tensors that control flow captures, cannot be cut.
    """
    producer = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
    leader = dict(enumerate(range(len(nodes))))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = i = leader[leader[i]]
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
        before: dict[int, list[int]] = {}
        for i, node in enumerate(nodes):
            before.setdefault(find(i), []).extend(find(producer[n]) for n in node.inputs if n in producer)
        for together in _cyclic_groups(before):
            leader.update(dict.fromkeys(together, min(together)))
    members: dict[int, list[Node]] = {}
    for i, node in enumerate(nodes):
        members.setdefault(find(i), []).append(node)
    reason = "what lies between its nodes has no static shape, is of words or is captured by control flow"
    return [_Group(tuple(group), len(group) - 1, reason if len(group) > 1 else "") for group in members.values()]


def _with_dequantize_nodes(groups: Sequence[_Group], readers: Mapping[str, frozenset[str]]) -> list[_Group]:
    """Move DequantizeLinear nodes into the group that reads them; the reader stays the anchor."""
    alone = {group.nodes[0].name for group in groups if len(group.nodes) == 1}
    nodes = [node for group in groups for node in group.nodes]
    before = dequantize_by_reader(nodes, readers, lambda node: node.name in alone)
    taken = {node.name for own in before.values() for node in own}
    joined = []
    for group in groups:
        own = before.get(group.nodes[0].name, []) if len(group.nodes) == 1 else []
        if group.nodes[0].name not in taken:
            joined.append(replace(group, nodes=(*own, *group.nodes), anchor=group.anchor + len(own)))
    return joined


def _cyclic_groups(before: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    """Yield the strongly connected components of groups, by Tarjan's algorithm without recursion.

    Args:
        before: Groups that each group depends on.
    """
    number: dict[int, int] = {}  # in the order of visits
    low: dict[int, int] = {}  # the earliest that is reached and open
    opened: dict[int, None] = {}
    for start in before:
        path = [] if start in number else [(start, iter(before[start]))]
        while path:
            group, others = path[-1]
            if group not in number:
                number[group] = low[group] = len(number)
                opened[group] = None
            for other in others:
                if other not in number:
                    path.append((other, iter(before.get(other, ()))))
                    break
                if other in opened:
                    low[group] = min(low[group], low[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[group])
                if low[group] == number[group]:
                    together = []
                    while group in opened:
                        together.append(opened.popitem()[0])
                    yield together


@dataclass(frozen=True)
class _NodeLinks:
    """What absorbing needs to know of nodes. Each node's inputs are visited once, however many there are.

    Attributes:
        nodes: Nodes by name.
        readers: Names of the nodes that read each tensor, see `_readers`.
        position: Position of each node.
        last_producer: For each node, the node that makes its last operand, '' for none.
        elementwise_shapes: Static shape of the one output of each element-wise node.
    """

    nodes: Mapping[str, Node]
    readers: Mapping[str, frozenset[str]]
    position: Mapping[str, int]
    last_producer: Mapping[str, str]
    elementwise_shapes: Mapping[str, Shape]

    @classmethod
    def build(cls, nodes: Sequence[Node], graph: LayerGraph) -> _NodeLinks:
        position = {node.name: i for i, node in enumerate(nodes)}
        maker = {name: node.name for node in nodes for name in node.outputs}
        last = {
            node.name: max((maker[n] for n in node.inputs if n in maker), key=position.__getitem__, default="")
            for node in nodes
        }
        fitting = {node.name: shape for node in nodes if (shape := _elementwise_shape(node, graph)) is not None}
        by_name = {node.name: node for node in nodes}
        return cls(by_name, _readers(nodes, graph.outputs), position, last, fitting)

    def ready_nodes(self, names: Sequence[str], inside: set[str]) -> list[str]:
        """Return the nodes whose last operand is made in the layer, or by another ready node.

        A residual Add so goes to the layer whose result comes last. Others wait for an operand of a later round, such
        as the last Mul of x·clip(x + 3).
        """
        asked, known = set(names), dict[str, bool]()
        for name in names:
            path, at = [], name
            while at in asked and at not in known:
                path.append(at)
                at = self.last_producer[at]
            known.update(dict.fromkeys(path, known.get(at, at in inside)))
        return [name for name in names if known[name]]


def _absorb_elementwise(groups: Sequence[_Group], graph: LayerGraph) -> list[_Group]:
    """Let each anchor take in the nodes after it, as long as one tensor leaves the layer."""
    owner = {node.name: k for k, group in enumerate(groups) for node in group.nodes}
    links = _NodeLinks.build([node for group in groups for node in group.nodes], graph)
    taken: set[int] = set()
    formed: list[_Group] = []
    for k, group in enumerate(groups):
        if k in taken:
            continue
        members = list(group.nodes)
        inside = {node.name for node in members}
        while len(members[-1].outputs) == 1 and (not group.reason):
            found = _absorbable_nodes(members[-1].outputs[0], inside, links, graph)
            if not found or any(len(groups[owner[n.name]].nodes) > 1 or owner[n.name] in taken for n in found):
                break
            members.extend(found)
            taken.update(owner[node.name] for node in found)
        formed.append(_Group(tuple(members), group.anchor, group.reason))
    return formed


def _absorbable_nodes(output: str, inside: set[str], links: _NodeLinks, graph: LayerGraph) -> list[Node]:
    """Return the element-wise nodes that read `output`, if one tensor leaves with them.

    x → Relu;   x → Add(x, shortcut);   x → Sigmoid → Mul(x, ·)  (both at once)

    The nodes are added to `inside`, even if the result is empty.
    """
    shape = graph.tensors[output].shape
    found: list[Node] = []
    leaving = {output}
    for _ in range(3):  # a branch such as x·sigmoid(x) closes after two nodes, hard-swish written out after three
        names = {r for t in leaving for r in links.readers.get(t, ())} - inside
        if shape is None or not names or any(links.elementwise_shapes.get(name) != shape for name in names):
            return []
        ready = links.ready_nodes(sorted(names, key=links.position.__getitem__), inside)
        if not ready:
            return []
        found.extend(links.nodes[name] for name in ready)
        inside.update(ready)
        leaving |= {name for node in found[-len(ready) :] for name in node.outputs if name}
        leaving = {name for name in leaving if not links.readers.get(name, frozenset()) <= inside}
        last = found[-1].outputs[0]
        if leaving <= {last} or not links.readers.get(last):
            return found if leaving == {last} else []
    return []


def _elementwise_shape(node: Node, graph: LayerGraph) -> Shape | None:
    """Return the static shape of the one output of an element-wise node; None for any other node."""
    used = [name for name in node.outputs if name]
    if not graph.rule_of(node).is_elementwise or len(used) != 1:
        return None
    static = all(graph.tensors[name].shape is not None for name in (*node.inputs, *used) if name)
    return graph.tensors[used[0]].shape if static and not _computes_whole(node, graph) else None


def _computes_whole(node: Node, graph: LayerGraph) -> bool:
    """Return True if a node of an element-wise operator computes all of its output at once nevertheless.

    In training mode a Dropout draws, and a BatchNormalization takes the mean, for the whole tensor.
    """
    corner = tuple((0, min(1, extent)) for extent in graph.operation_of(node).out_shape)
    return graph.rule_of(node).is_elementwise and graph.make_piece(node, corner).out != corner


def _make_layer(group: _Group, graph: LayerGraph, readers: Mapping[str, frozenset[str]]) -> Layer:
    inside = {node.name for node in group.nodes}
    made = {name for node in group.nodes for name in node.outputs if name}
    incoming = dict.fromkeys(
        name
        for node in group.nodes
        for name in node.inputs
        if name and name not in made and not graph.tensors[name].is_constant and name not in graph.state_output_of
    )
    outgoing = tuple(
        name for node in group.nodes for name in node.outputs if name and not readers.get(name, frozenset()) <= inside
    )
    if not outgoing:
        outgoing = tuple(name for name in group.nodes[-1].outputs if name)[:1]
    reason = group.reason or _why_whole(group, outgoing, graph)
    return Layer(group.nodes[group.anchor].name, group.nodes, group.anchor, tuple(incoming), outgoing, reason)


def _why_whole(group: _Group, outgoing: Sequence[str], graph: LayerGraph) -> str:
    """Return why the layer cannot be cut, '' if it can."""
    anchor = group.nodes[group.anchor]
    if not graph.rule_of(anchor).can_cut:
        return f"operator {anchor.domain + '::' if anchor.domain else ''}{anchor.op} has no rule"
    if len(outgoing) != 1:
        return f"{len(outgoing)} tensors leave it"
    if all(graph.cut_output(node) != outgoing[0] for node in group.nodes):
        return f"{outgoing[0]!r} is not the output that can be cut"
    if (
        0 < anchor.opset < 4
        and not anchor.domain
        and graph.tensors[outgoing[0]].dtype not in _CONCAT_TYPES_BEFORE_OPSET_4
    ):
        return f"opset {anchor.opset} cannot join pieces of its type"
    if any(graph.tensors[name].shape is None for name in (*anchor.inputs, *anchor.outputs) if name):
        words = any(not is_fixed_size(graph.tensors[name].dtype) for name in (*anchor.inputs, *anchor.outputs) if name)
        return "words or no tensors go in or out" if words else "a tensor of it has no static shape"
    used = [graph.tensors[name] for name in (*anchor.inputs, *anchor.outputs) if name]
    if any(0 in (tensor.shape or ()) for tensor in used if not (tensor.is_constant and tensor.shape == (0,))):
        return "a tensor of it is empty"  # but for a parameter: exporters write an absent one as an empty vector
    return "it runs in training mode" if _computes_whole(anchor, graph) else ""


def _order_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers in topological order, with ties in file order.

    Products of one tensor with several matrices follow each other, so that keys and values are sent together. Queries,
    which a product of tensors reads row by row, come after them, because they can wait until that is sent.
    """
    producer = {name: i for i, layer in enumerate(layers) for name in layer.outputs}
    waiting = [{producer[t] for t in layer.inputs if t in producer} for layer in layers]
    followers: list[list[int]] = [[] for _ in layers]
    for i, before in enumerate(waiting):
        for other in before:
            followers[other].append(i)
    beside: dict[str, list[int]] = {}  # tensor → its products
    for i, layer in enumerate(layers):
        if (anchor := layer.nodes[layer.anchor]).op in ("MatMul", "Gemm"):
            beside.setdefault(anchor.inputs[0], []).append(i)
    queries = _query_products(layers, producer)
    beside = {tensor: sorted(own, key=lambda i: i in queries) for tensor, own in beside.items()}
    ready = [i for i, before in enumerate(waiting) if not before]  # sorted, and so a heap
    ordered: dict[int, Layer] = {}
    while ready:
        first = heapq.heappop(ready)
        anchor = layers[first].nodes[layers[first].anchor]
        together = [i for i in beside.get(anchor.inputs[0] if anchor.inputs else "", ()) if not waiting[i]]
        for done in together if first in together else [first]:
            if done in ordered:
                continue
            ordered[done] = layers[done]
            for i in followers[done]:
                waiting[i].remove(done)
                if not waiting[i]:
                    heapq.heappush(ready, i)
    return tuple(ordered.values())


def _query_products(layers: Sequence[Layer], producer: Mapping[str, int]) -> set[int]:
    """Return the products that lead to the first operand of a product of two tensors.

    All layers between have one input.
    """
    found: set[int] = set()
    for layer in layers:
        anchor = layer.nodes[layer.anchor]
        if anchor.op != "MatMul" or any(name not in producer for name in anchor.inputs):
            continue
        at: int | None = producer[anchor.inputs[0]]
        while at is not None and len(layers[at].inputs) == 1:
            if layers[at].nodes[layers[at].anchor].op in ("MatMul", "Gemm"):
                found.add(at)
                break
            at = producer.get(layers[at].inputs[0])
    return found
