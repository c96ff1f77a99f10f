"""Layers that draw random numbers: no two runs of one, and no two devices, make the same.

In: a LayerGraph. Out: its layers that draw, and which of its tensors depend on what they draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.rule import Node, Operation

RANDOM = frozenset("Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split())
"""The standard's operators that draw whenever they run. With a seed they begin alike, and then go on."""


def trains(operation: Operation) -> bool:
    """Whether a Dropout runs, or may run, in training mode: then it draws."""
    mode = operation.value(2)
    return operation.has(2) and (mode is None or bool(mode.any()))


def drawing(layers: LayerGraph) -> Mapping[str, Node]:
    """Layer name → its first node that draws, of the layers that have one."""
    found = {layer.name: [node for node in layer.nodes if _draws(layers, node)] for layer in layers.layers}
    return {name: nodes[0] for name, nodes in found.items() if nodes}


def drawn(layers: LayerGraph) -> Mapping[str, Node]:
    """Tensor that leaves a layer → a node that draws before it is made, of those that depend on one."""
    own, found = drawing(layers), dict[str, Node]()
    for layer in layers.layers:
        cause = own.get(layer.name) or next((found[name] for name in layer.inputs if name in found), None)
        if cause is not None:
            found |= dict.fromkeys(layer.outputs, cause)
    return found


def _draws(layers: LayerGraph, node: Node) -> bool:
    if node.op == "Dropout":
        return trains(layers.operation(node))
    return node.op in RANDOM or _within(node_bodies(node))


def node_bodies(node: Node) -> list[onnx.GraphProto]:
    """The bodies of control flow."""
    return [value for value in node.attributes.values() if isinstance(value, onnx.GraphProto)]


def _within(bodies: Iterable[onnx.GraphProto]) -> bool:
    """Whether something draws in one of the bodies of control flow, or in theirs."""
    return any(
        node.op_type in RANDOM or _within(attribute.g for attribute in node.attribute if attribute.HasField("g"))
        for body in bodies
        for node in body.node
    )
