"""Nodes that draw random numbers: no two runs of one, and no two devices, make the same.

In: a model, or a LayerGraph. Out: which nodes, or layers, draw, and which tensors depend on what they draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import NodeProto, numpy_helper

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.graph_structure import control_flow_bodies, tensors_read
from dicompiler.ir.operator_rule import Node

RANDOM_OPERATORS = frozenset(
    "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""The standard's operators that draw whenever they run. With a seed they begin alike, and then go on."""


def is_random(node: NodeProto, model: onnx.ModelProto | None = None) -> bool:
    """Whether a node draws, or may draw: by its operator, as a Dropout in training mode, or within its control flow.
    model: that it is of, whose functions are looked into, and whose constants say of a Dropout that it does not."""
    nodes, constants = ((), ()) if model is None else (model.graph.node, model.graph.initializer)
    return _is_random(node, model, nodes, constants)


def random_layers(layers: LayerGraph) -> Mapping[str, Node]:
    """Layer name → its first node that draws, of the layers that have one."""
    found = {layer.name: [node for node in layer.nodes if node.name in layers.random_nodes] for layer in layers.layers}
    return {name: nodes[0] for name, nodes in found.items() if nodes}


def random_tensors(model: onnx.ModelProto, states: Iterable[tuple[str, str]] = ()) -> Mapping[str, NodeProto]:
    """Tensor → a node that draws before it is made, of those that depend on one. states: (graph input, graph output) of
    what is handed on to the next frame."""
    found, before = dict[str, NodeProto](), -1
    while len(found) > before:
        before = len(found)
        for node in model.graph.node:
            cause = next((found[name] for name in tensors_read(node) if name in found), None)
            cause = node if cause is None and is_random(node, model) else cause
            if cause is not None:
                for name in node.output:
                    found.setdefault(name, cause)
        for past, present in states:
            if present in found:
                found.setdefault(past, found[present])
    return found


def _is_random(
    node: NodeProto, model: onnx.ModelProto | None, nodes: Sequence[NodeProto], constants: Sequence[onnx.TensorProto]
) -> bool:
    """nodes, constants: among which a Dropout's mode can be."""
    if node.op_type == "Dropout":
        mode = node.input[2] if len(node.input) > 2 else ""
        return bool(mode) and not _is_constant_false(mode, nodes, constants)
    if node.op_type in RANDOM_OPERATORS or any(
        _is_random(n, model, b.node, b.initializer) for b in control_flow_bodies(node) for n in b.node
    ):
        return True
    called = [f for f in (model.functions if model else ()) if (f.domain, f.name) == (node.domain, node.op_type)]
    return any(_is_random(inner, model, function.node, ()) for function in called for inner in function.node)


def _is_constant_false(name: str, nodes: Sequence[NodeProto], constants: Sequence[onnx.TensorProto]) -> bool:
    values = [tensor for tensor in constants if tensor.name == name]
    values += [
        attribute.t
        for node in nodes
        if node.op_type == "Constant" and name in node.output
        for attribute in node.attribute
        if attribute.name == "value"
    ]
    return bool(values) and not numpy_helper.to_array(values[0]).any()
