"""The pass `form-layers`: group each anchor operator with the element-wise nodes that follow it.

Normalised model with inferred shapes ⇒ LayerGraph
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
    """Group nodes into layers: an anchor (the main operator) and the element-wise nodes that read only its output.

    Conv → BatchNormalization → Relu       ⇒  one layer with the anchor Conv
    Conv → Add(shortcut) → Relu            ⇒  one layer with the anchor Conv; the shortcut is an input of the layer
    DequantizeLinear → Conv → QuantizeLinear  ⇒  one layer with the anchor Conv; its inputs and outputs are quantized
    A → (no static shape) → B              ⇒  one layer that no plan splits
    """

    name: ClassVar[str] = "form-layers"
    provides: ClassVar[tuple[str, ...]] = ("layers",)

    def run(self, state: PipelineState) -> PipelineState:
        from dicompiler.plugin_api import registry

        return replace(state, layers=form_layers(state.model, registry().operator_rules))


def form_layers(model: Model, rules: Mapping[tuple[str, str], OperatorRule]) -> LayerGraph:
    """Return the layers of a model in topological order.

    Args:
        model: Model that the passes `normalise` and `infer-shapes` have rewritten.
        rules: Operator rules by domain and operator name.

    Returns:
        The layer graph.

    Raises:
        DicompilerError: A graph input has no static shape, or a graph output is not computed by a node.
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
                f"form-layers: input {name!r} has no static shape: set it by infer-shapes (--shape {name}=1x3x224x224)"
            )
    nodes = tuple(_nodes(model))
    for node in nodes:
        for name in (*node.inputs, *node.outputs):
            if name:
                tensors.setdefault(name, TensorInfo(name, onnx.TensorProto.UNDEFINED, None))
    outputs = tuple(v.name for v in graph.output)
    node_outputs = {name for node in nodes for name in node.outputs}
    for name in outputs:
        if name not in node_outputs:
            raise DicompilerError(f"form-layers: no node makes output {name!r}: run normalise before form-layers")
    non_state_inputs = tuple(name for name in inputs if name not in dict(states))
    random_names = frozenset(node.name for node in graph.node if is_random(node, model.proto))
    empty = LayerGraph((), tensors, non_state_inputs, outputs, rules, states=states, random_nodes=random_names)
    readers = _readers(nodes, outputs)
    groups = _absorb_elementwise(_with_dequantize_nodes(_opaque_groups(model, nodes, tensors), readers), empty)
    layers = tuple(_make_layer(group, empty, readers) for group in groups)
    return replace(empty, layers=_order_layers(layers))


def _nodes(model: Model) -> Iterator[Node]:
    """Yield the graph's nodes in topological order, as `Node` records for operator rules."""
    opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.proto.opset_import}
    for proto in model.proto.graph.node:
        # For the exact check of `verify`, some operators are replaced by integer functions with their own domains. Use
        # the domain of the original operator here, so that its rule applies.
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        # The number after # in such a domain distinguishes several functions for one operator.
        if domain.startswith(STAND_IN_DOMAIN):
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
    if attribute.type == onnx.AttributeProto.STRING:
        return attribute.s.decode("utf-8", "surrogateescape")
    return onnx.helper.get_attribute_value(attribute)


@dataclass(frozen=True)
class _Group:
    """Nodes that will become one layer.

    Attributes:
        nodes: The nodes in topological order.
        anchor: Index of the main operator in `nodes`.
        reason: Reason why no plan can split the layer; '' if plans can split it.
    """

    nodes: tuple[Node, ...]
    anchor: int = 0
    reason: str = ""


def _readers(nodes: Sequence[Node], outputs: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """Return the names of the nodes that read each tensor. A graph output also has the reader ''."""
    readers: dict[str, set[str]] = {name: {""} for name in outputs}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, set()).add(node.name)
    return {name: frozenset(names) for name, names in readers.items()}


def _opaque_groups(model: Model, nodes: Sequence[Node], tensors: Mapping[str, TensorInfo]) -> list[_Group]:
    """Return groups of nodes such that plans can split each tensor between two groups.

    Most groups have one node. Nodes are joined if the tensor between them has no static shape, or if control flow
    captures it. Nodes on a path between joined nodes are joined too.
    """
    producer = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
    leaders = dict(enumerate(range(len(nodes))))

    def find(i: int) -> int:
        while leaders[i] != i:
            leaders[i] = i = leaders[leaders[i]]
        return i

    is_joined = False
    for i, (node, proto) in enumerate(zip(nodes, model.proto.graph.node, strict=True)):
        captured_names = set(node.inputs[len(proto.input) :])
        for name in node.inputs:
            if name in producer and (tensors[name].shape is None or name in captured_names):
                a, b = find(producer[name]), find(i)
                leaders[max(a, b)] = min(a, b)
                is_joined = True
    if is_joined:
        dependencies: dict[int, list[int]] = {}
        for i, node in enumerate(nodes):
            dependencies.setdefault(find(i), []).extend(find(producer[n]) for n in node.inputs if n in producer)
        for component in _strongly_connected_components(dependencies):
            leaders.update(dict.fromkeys(component, min(component)))
    nodes_by_leader: dict[int, list[Node]] = {}
    for i, node in enumerate(nodes):
        nodes_by_leader.setdefault(find(i), []).append(node)
    reason = "a tensor between its nodes has no static shape, holds strings or is captured by control flow"
    return [
        _Group(tuple(group), len(group) - 1, reason if len(group) > 1 else "") for group in nodes_by_leader.values()
    ]


def _with_dequantize_nodes(groups: Sequence[_Group], readers: Mapping[str, frozenset[str]]) -> list[_Group]:
    """Move each DequantizeLinear into the group of its only reader, in front of the other nodes."""
    single_nodes = {group.nodes[0].name for group in groups if len(group.nodes) == 1}
    nodes = [node for group in groups for node in group.nodes]
    by_reader = dequantize_by_reader(nodes, readers, lambda node: node.name in single_nodes)
    moved = {node.name for dequantize_nodes in by_reader.values() for node in dequantize_nodes}
    joined = []
    for group in groups:
        dequantize_nodes = by_reader.get(group.nodes[0].name, []) if len(group.nodes) == 1 else []
        if group.nodes[0].name not in moved:
            joined.append(
                replace(group, nodes=(*dequantize_nodes, *group.nodes), anchor=group.anchor + len(dequantize_nodes))
            )
    return joined


def _strongly_connected_components(dependencies: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    """Yield the strongly connected components of a graph (Tarjan's algorithm without recursion).

    Args:
        dependencies: For each vertex, the vertices to which its edges lead.
    """
    order: dict[int, int] = {}  # For each vertex, its number in the order of visits.
    low: dict[int, int] = {}  # For each vertex, the smallest such number among the open vertices that it reaches.
    open_vertices: dict[int, None] = {}
    for start in dependencies:
        path = [] if start in order else [(start, iter(dependencies[start]))]
        while path:
            vertex, remaining = path[-1]
            if vertex not in order:
                order[vertex] = low[vertex] = len(order)
                open_vertices[vertex] = None
            for other in remaining:
                if other not in order:
                    path.append((other, iter(dependencies.get(other, ()))))
                    break
                if other in open_vertices:
                    low[vertex] = min(low[vertex], low[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[vertex])
                if low[vertex] == order[vertex]:
                    component = []
                    while vertex in open_vertices:
                        component.append(open_vertices.popitem()[0])
                    yield component


@dataclass(frozen=True)
class _NodeLinks:
    """Lookup tables for the neighbours of nodes.

    Attributes:
        nodes: Nodes by name.
        readers: Names of the nodes that read each tensor, from `_readers`.
        position: Topological position of each node.
        last_producer: For each node, the topologically last node that computes one of its inputs; '' if there is none.
        elementwise_shapes: Static output shape of each element-wise node with one output.
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
        """Return the nodes of `names` that can join a layer now.

        A node can join if the last producer of its inputs is in the layer, or can join too. A residual Add therefore
        joins the layer that computes its last input.

        Args:
            names: Candidates, in topological order.
            inside: Names of the layer's nodes.
        """
        candidates, is_ready = set(names), dict[str, bool]()
        for name in names:
            path, at = [], name
            while at in candidates and at not in is_ready:
                path.append(at)
                at = self.last_producer[at]
            is_ready.update(dict.fromkeys(path, is_ready.get(at, at in inside)))
        return [name for name in names if is_ready[name]]


def _absorb_elementwise(groups: Sequence[_Group], graph: LayerGraph) -> list[_Group]:
    """Add element-wise nodes to the group before them, if other nodes then read only one tensor of the group."""
    owner = {node.name: k for k, group in enumerate(groups) for node in group.nodes}
    links = _NodeLinks.build([node for group in groups for node in group.nodes], graph)
    absorbed_groups: set[int] = set()
    formed: list[_Group] = []
    for k, group in enumerate(groups):
        if k in absorbed_groups:
            continue
        members = list(group.nodes)
        inside = {node.name for node in members}
        while len(members[-1].outputs) == 1 and (not group.reason):
            absorbed = _absorbable_nodes(members[-1].outputs[0], inside, links, graph)
            if not absorbed or any(
                len(groups[owner[n.name]].nodes) > 1 or owner[n.name] in absorbed_groups for n in absorbed
            ):
                break
            members.extend(absorbed)
            absorbed_groups.update(owner[node.name] for node in absorbed)
        formed.append(_Group(tuple(members), group.anchor, group.reason))
    return formed


def _absorbable_nodes(output: str, inside: set[str], links: _NodeLinks, graph: LayerGraph) -> list[Node]:
    """Return the element-wise nodes after the tensor `output` that can join the layer of this tensor.

    They can join if other layers then read only one tensor of the layer. Examples, with x = `output`:

    x → Relu;   x → Add(x, shortcut);   x → Sigmoid → Mul(x, ·)  (both nodes at once)

    `inside` has the names of the layer's nodes. The function adds names to it, even if it returns no nodes.
    """
    shape = graph.tensors[output].shape
    absorbed: list[Node] = []
    leaving = {output}
    # In each round, the readers of the layer's tensors join: two rounds for x·sigmoid(x), three for a hard-swish.
    for _ in range(3):
        names = {r for t in leaving for r in links.readers.get(t, ())} - inside
        if shape is None or not names or any(links.elementwise_shapes.get(name) != shape for name in names):
            return []
        ready = links.ready_nodes(sorted(names, key=links.position.__getitem__), inside)
        if not ready:
            return []
        absorbed.extend(links.nodes[name] for name in ready)
        inside.update(ready)
        leaving |= {name for node in absorbed[-len(ready) :] for name in node.outputs if name}
        leaving = {name for name in leaving if not links.readers.get(name, frozenset()) <= inside}
        last = absorbed[-1].outputs[0]
        if leaving <= {last} or not links.readers.get(last):
            return absorbed if leaving == {last} else []
    return []


def _elementwise_shape(node: Node, graph: LayerGraph) -> Shape | None:
    """Return the static output shape of an element-wise node with one output; None for other nodes."""
    used = [name for name in node.outputs if name]
    if not graph.rule_of(node).is_elementwise or len(used) != 1:
        return None
    static = all(graph.tensors[name].shape is not None for name in (*node.inputs, *used) if name)
    return graph.tensors[used[0]].shape if static and not _needs_whole_tensor(node, graph) else None


def _needs_whole_tensor(node: Node, graph: LayerGraph) -> bool:
    """Return True if an element-wise node depends on its whole tensor, because it runs in training mode.

    Examples are a Dropout, which draws random numbers, and a BatchNormalization, which computes a mean.
    """
    corner = tuple((0, min(1, extent)) for extent in graph.operation_of(node).out_shape)
    return graph.rule_of(node).is_elementwise and graph.make_piece(node, corner).out != corner


def _make_layer(group: _Group, graph: LayerGraph, readers: Mapping[str, frozenset[str]]) -> Layer:
    inside = {node.name for node in group.nodes}
    node_outputs = {name for node in group.nodes for name in node.outputs if name}
    incoming = dict.fromkeys(
        name
        for node in group.nodes
        for name in node.inputs
        if name
        and name not in node_outputs
        and not graph.tensors[name].is_constant
        and name not in graph.state_output_of
    )
    outgoing = tuple(
        name for node in group.nodes for name in node.outputs if name and not readers.get(name, frozenset()) <= inside
    )
    if not outgoing:
        outgoing = tuple(name for name in group.nodes[-1].outputs if name)[:1]
    reason = group.reason or _why_whole(group, outgoing, graph)
    return Layer(group.nodes[group.anchor].name, group.nodes, group.anchor, tuple(incoming), outgoing, reason)


def _why_whole(group: _Group, outgoing: Sequence[str], graph: LayerGraph) -> str:
    """Return the reason why plans cannot split the layer of a group; '' if they can.

    `outgoing` are the tensors of the layer that other layers or the caller read.
    """
    anchor = group.nodes[group.anchor]
    if not graph.rule_of(anchor).can_cut:
        return f"operator {anchor.domain + '::' if anchor.domain else ''}{anchor.op} has no rule"
    if len(outgoing) != 1:
        return f"it has {len(outgoing)} output tensors"
    if all(graph.cut_output(node) != outgoing[0] for node in group.nodes):
        return f"its output {outgoing[0]!r} cannot be cut"
    if (
        0 < anchor.opset < 4
        and not anchor.domain
        and graph.tensors[outgoing[0]].dtype not in _CONCAT_TYPES_BEFORE_OPSET_4
    ):
        return f"the Concat of opset {anchor.opset} does not support its element type"
    if any(graph.tensors[name].shape is None for name in (*anchor.inputs, *anchor.outputs) if name):
        has_strings = any(
            not is_fixed_size(graph.tensors[name].dtype) for name in (*anchor.inputs, *anchor.outputs) if name
        )
        return (
            "it has inputs or outputs that are strings or not tensors"
            if has_strings
            else "one of its tensors has no static shape"
        )
    used = [graph.tensors[name] for name in (*anchor.inputs, *anchor.outputs) if name]
    if any(0 in (tensor.shape or ()) for tensor in used if not (tensor.is_constant and tensor.shape == (0,))):
        return (
            # Constants of shape (0,) are allowed, because some exporters write them for omitted inputs.
            "one of its tensors is empty"
        )
    return "it runs in training mode" if _needs_whole_tensor(anchor, graph) else ""


def _order_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers in topological order, and otherwise in file order, with one exception.

    Matrix products of the same tensor follow each other, with products for queries of attention last. Keys and values
    are then sent together, while a device computes its queries.
    """
    producer = {name: i for i, layer in enumerate(layers) for name in layer.outputs}
    waiting = [{producer[t] for t in layer.inputs if t in producer} for layer in layers]
    followers: list[list[int]] = [[] for _ in layers]
    for i, missing in enumerate(waiting):
        for other in missing:
            followers[other].append(i)
    # Indices of the layers that are matrix products, by the tensor that they read.
    products_by_input: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        if (anchor := layer.nodes[layer.anchor]).op in ("MatMul", "Gemm"):
            products_by_input.setdefault(anchor.inputs[0], []).append(i)
    queries = _query_products(layers, producer)
    products_by_input = {
        tensor: sorted(members, key=lambda i: i in queries) for tensor, members in products_by_input.items()
    }
    ready = [i for i, missing in enumerate(waiting) if not missing]  # A sorted list is a valid heap.
    ordered: dict[int, Layer] = {}
    while ready:
        first = heapq.heappop(ready)
        anchor = layers[first].nodes[layers[first].anchor]
        group = [i for i in products_by_input.get(anchor.inputs[0] if anchor.inputs else "", ()) if not waiting[i]]
        for member in group if first in group else [first]:
            if member in ordered:
                continue
            ordered[member] = layers[member]
            for i in followers[member]:
                waiting[i].remove(member)
                if not waiting[i]:
                    heapq.heappush(ready, i)
    return tuple(ordered.values())


def _query_products(layers: Sequence[Layer], producer: Mapping[str, int]) -> set[int]:
    """Return the indices of layers that compute queries of attention.

    Such a layer is a matrix product. A chain of layers with one input each leads from it to the first operand of a
    MatMul of two computed tensors.
    """
    queries: set[int] = set()
    for layer in layers:
        anchor = layer.nodes[layer.anchor]
        if anchor.op != "MatMul" or any(name not in producer for name in anchor.inputs):
            continue
        current: int | None = producer[anchor.inputs[0]]
        while current is not None and len(layers[current].inputs) == 1:
            if layers[current].nodes[layers[current].anchor].op in ("MatMul", "Gemm"):
                queries.add(current)
                break
            current = producer.get(layers[current].inputs[0])
    return queries
