"""Detection of nodes that draw random numbers, and of the tensors that depend on such numbers.

Random numbers differ between runs and between devices, so results that depend on them cannot be compared.
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
"""Standard operators that draw random numbers. Even with a seed, each run of a session gives other numbers."""


def is_random(node: NodeProto, model: onnx.ModelProto | None = None) -> bool:
    """Return True if a node can draw random numbers.

    Such a node is a random operator, a Dropout in training mode, or a node whose body or function contains one of them.

    Args:
        node: Node of a graph or of a function.
        model: Model of the node. Its functions are searched, and its constants can show that a Dropout is inactive.

    Returns:
        True if the node can draw random numbers.
    """
    nodes, constants = ((), ()) if model is None else (model.graph.node, model.graph.initializer)
    return _is_random(node, model, nodes, constants)


def random_layers(layers: LayerGraph) -> Mapping[str, Node]:
    """Return, for each layer with nodes that draw random numbers, the first of these nodes, by layer name."""
    names = layers.random_nodes
    nodes = {layer.name: [node for node in layer.nodes if node.name in names] for layer in layers.layers}
    return {layer_name: random_nodes[0] for layer_name, random_nodes in nodes.items() if random_nodes}


def random_tensors(model: onnx.ModelProto, states: Iterable[tuple[str, str]] = ()) -> Mapping[str, NodeProto]:
    """Return the tensors that depend on random numbers, by name, each with a node that draws these numbers.

    Args:
        model: The model.
        states: Names of the model input and the model output of each state. If the output depends on random numbers, so
            does the input, because it is the output of the previous frame.
    """
    causes, before = dict[str, NodeProto](), -1
    while len(causes) > before:
        before = len(causes)
        for node in model.graph.node:
            cause = next((causes[name] for name in tensors_read(node) if name in causes), None)
            cause = node if cause is None and is_random(node, model) else cause
            if cause is not None:
                for name in node.output:
                    causes.setdefault(name, cause)
        for past, present in states:
            if present in causes:
                causes.setdefault(past, causes[present])
    return causes


def _is_random(
    node: NodeProto, model: onnx.ModelProto | None, nodes: Sequence[NodeProto], constants: Sequence[onnx.TensorProto]
) -> bool:
    """Return True if a node can draw random numbers.

    `nodes` and `constants` (of the same graph) are searched for the training mode of a Dropout.
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
