"""Detection of nodes that draw random numbers, which differ between runs and devices.

model or LayerGraph ⇒ nodes and layers that draw random numbers, and the tensors that depend on them.
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
"""Operators of the standard that draw random numbers. A seed only fixes the first numbers."""


def is_random(node: NodeProto, model: onnx.ModelProto | None = None) -> bool:
    """Return True if a node can draw random numbers.

    It can by its operator, as a Dropout in training mode, or in its bodies.

    Args:
        node: The node.
        model: Its model. Functions are searched, and constants can show that a Dropout is inactive.

    Returns:
        True if it can draw random numbers.
    """
    nodes, constants = ((), ()) if model is None else (model.graph.node, model.graph.initializer)
    return _is_random(node, model, nodes, constants)


def random_layers(layers: LayerGraph) -> Mapping[str, Node]:
    """Return the first random node of each layer that has one, by layer name."""
    found = {layer.name: [node for node in layer.nodes if node.name in layers.random_nodes] for layer in layers.layers}
    return {name: nodes[0] for name, nodes in found.items() if nodes}


def random_tensors(model: onnx.ModelProto, states: Iterable[tuple[str, str]] = ()) -> Mapping[str, NodeProto]:
    """Return, for each tensor that depends on random numbers, a node that draws them.

    Args:
        model: The model.
        states: Pairs of the model input and the model output of each state.
    """
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
    """Return True if a node can draw random numbers.

    `nodes` and `constants` can define the mode of a Dropout.
    """
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
