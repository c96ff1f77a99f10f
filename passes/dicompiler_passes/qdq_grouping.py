"""Quantised networks in QDQ form: which nodes belong together, so that a layer takes and gives quantised numbers.

QuantizeLinear stays with what makes its input, as any element-wise node does; DequantizeLinear goes to what reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_graphsurgeon as gs

from dicompiler.plugin_api.onnx import ModelGraph, Node, Variable

DEQUANTIZE_OP = "DequantizeLinear"


def duplicate_dequantize(graph: ModelGraph) -> None:
    """A DequantizeLinear of its own for every node that reads one.

    DQ → a, b  ⇒  DQ → a, DQ → b    (a graph output keeps the one that there was)
    """
    makers = {node.outputs[0].name: node for node in graph.nodes if node.op == DEQUANTIZE_OP}
    if not makers:
        return
    seen = {tensor.name for tensor in graph.outputs}
    nodes: list[gs.Node] = []
    for node in graph.nodes:
        for index, tensor in enumerate(node.inputs):
            if tensor.name in makers and tensor.name in seen:
                maker = makers[tensor.name]
                copy = maker.copy(maker.inputs, [Variable(graph.unused_tensor_name(tensor.name))])
                copy.name = graph.unused_node_name(maker.name)
                node.inputs[index] = copy.outputs[0]
                nodes.append(copy)
            seen.add(tensor.name)
        nodes.append(node)
    graph.nodes = nodes


def dequantize_by_reader(
    nodes: Sequence[Node], readers: Mapping[str, frozenset[str]], may_join: Callable[[Node], bool]
) -> dict[str, list[Node]]:
    """Name of a node → the DequantizeLinear nodes that go to its layer, in order: those that nothing else reads.

    `alone`: whether a node may be joined with others.
    """
    by_name = {node.name: node for node in nodes}
    found: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op != DEQUANTIZE_OP or node.domain or not may_join(node):
            continue
        names = readers.get(node.outputs[0], frozenset())
        reader = by_name.get(next(iter(names))) if len(names) == 1 else None
        if reader is not None and reader.op != DEQUANTIZE_OP and may_join(reader):
            found.setdefault(reader.name, []).append(node)
    return found
