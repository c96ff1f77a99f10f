"""Quantised networks in QDQ form: which nodes belong together, so that a layer takes and gives quantised numbers.

QuantizeLinear stays with what makes its input, as any element-wise node does; DequantizeLinear goes to what reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx

from dicompiler.ir.rule import Node
from dicompiler_passes.draft import Draft, all_reads, keep

DEQUANTISE = "DequantizeLinear"


def own_dequantise(draft: Draft) -> None:
    """A DequantizeLinear of its own for every node that reads one.

    DQ → a, b  ⇒  DQ → a, DQ → b    (a graph output keeps the one that there was)
    """
    made = {node.output[0]: node for node in draft.graph.node if node.op_type == DEQUANTISE}
    if not made:
        return
    outputs, seen = draft.outputs, set[str]()
    inner = all_reads(draft.graph) - {name for node in draft.graph.node for name in node.input} - outputs
    nodes: list[onnx.NodeProto] = []
    for node in draft.graph.node:
        for index, name in enumerate(node.input):
            if name not in made or name in inner:
                continue
            if name not in seen and name not in outputs:
                seen.add(name)
                continue
            copy = onnx.NodeProto()
            copy.CopyFrom(made[name])
            copy.name, copy.output[0] = draft.node_name(made[name].name), draft.name(name)
            node.input[index] = copy.output[0]
            nodes.append(copy)
        nodes.append(node)
    keep(draft.graph.node, nodes)


def with_reader(
    nodes: Sequence[Node], readers: Mapping[str, frozenset[str]], alone: Callable[[Node], bool]
) -> dict[str, list[Node]]:
    """Name of a node → the DequantizeLinear nodes that go to its layer, in order: those that nothing else reads.

    `alone`: whether a node may be joined with others.
    """
    by_name = {node.name: node for node in nodes}
    found: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op != DEQUANTISE or node.domain or not alone(node):
            continue
        names = readers.get(node.outputs[0], frozenset())
        reader = by_name.get(next(iter(names))) if len(names) == 1 else None
        if reader is not None and reader.op != DEQUANTISE and alone(reader):
            found.setdefault(reader.name, []).append(node)
    return found
