"""Grouping of the nodes of quantized networks into layers that read and compute quantized tensors.

In such a network (QDQ form), float operators are between DequantizeLinear and QuantizeLinear nodes. A QuantizeLinear
joins the layer of the node that computes its input, and a DequantizeLinear that of the node that reads its output. A
layer is the unit that a plan divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_graphsurgeon as gs

from dicompiler.plugin_api.onnx import ModelGraph, Node, Variable

DEQUANTIZE_OP = "DequantizeLinear"


def duplicate_dequantize(graph: ModelGraph) -> None:
    """Give each reader of a DequantizeLinear its own copy of this node.

    DequantizeLinear → a, b  ⇒  DequantizeLinear → a, DequantizeLinear → b    (a graph output keeps the original)
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
    """Return the DequantizeLinear nodes that join the layer of their reader, by name of the reader.

    Args:
        nodes: The nodes of the network.
        readers: For each tensor, the names of the nodes that read it.
        may_join: Condition for both the DequantizeLinear and its only reader.
    """
    by_name = {node.name: node for node in nodes}
    by_reader: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op != DEQUANTIZE_OP or node.domain or not may_join(node):
            continue
        reader_names = readers.get(node.outputs[0], frozenset())
        reader = by_name.get(next(iter(reader_names))) if len(reader_names) == 1 else None
        if reader is not None and reader.op != DEQUANTIZE_OP and may_join(reader):
            by_reader.setdefault(reader.name, []).append(node)
    return by_reader
