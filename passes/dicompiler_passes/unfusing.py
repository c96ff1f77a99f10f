"""What onnxruntime's optimiser fused so that it cannot be cut is taken apart into what can.

In: a graph of which shapes are known. Out: the same numbers, from operators whose rules cut them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from dicompiler.plugin_api import Graph, Tensor, Variable
from dicompiler_passes.unfusing_attention import ORT, opened
from dicompiler_passes.unfusing_products import divided

KEPT = ("num_heads", "unidirectional", "scale", "mask_filter_value")
"""Attributes that Attention and MultiHeadAttention share."""
SKIPS = {
    "SkipLayerNormalization": "LayerNormalization",
    "SkipSimplifiedLayerNormalization": "SimplifiedLayerNormalization",
}


def unfuse(graph: Graph, tensors: Mapping[str, Tensor]) -> bool:
    """Attention of onnxruntime becomes three products and a MultiHeadAttention, where it has no past; a normalisation
    of a sum becomes both where the sum is read as well; other attention is opened up (`opened`), products and their
    activations are divided (`divided`), those of few bits get scales that can be cut (`_in_rows`). Whether one was.

    Attention(x, w, b, mask)                 ⇒  MatMul, Add → q, k, v → MultiHeadAttention
    SkipLayerNormalization(x, y) → n, s      ⇒  Add(x, y) → s → LayerNormalization → n
    MatMulNBits(x, w, scales: N·B)           ⇒  MatMulNBits(x, w, scales: N × B)
    """
    changed = False
    for node in [node for node in graph.nodes if node.domain == ORT or node.op == "Attention"]:
        if opened(graph, node, tensors) or divided(graph, node, tensors) or _in_rows(graph, node):
            changed = True
            continue
        if node.domain != ORT:
            continue
        if node.op == "Attention" and _plain(graph, node, tensors):
            made = _attention(graph, node)
        elif node.op in SKIPS and [i for i, one in enumerate(node.outputs) if one.name in graph.read()] in (
            [0, 3],
            [3],
        ):
            made = _sum_and_norm(graph, node)
        else:
            continue
        graph.insert(made, before=node)
        graph.remove([node])
        changed = True
    return changed


def _in_rows(graph: Graph, node: gs.Node) -> bool:
    """Whether constant scales or zero points of a product of few bits were a vector and are a matrix now, a row for
    each column of the product: so ranges of blocks can be cut."""
    if node.op != "MatMulNBits":
        return False
    count, changed = node.attrs.get("N") or 1, False
    for index, one in enumerate(node.inputs[:4]):
        if index > 1 and graph.is_fixed(one) and len(one.shape) == 1 and one.shape[0] % count == 0:
            rows = np.asarray(one.values).reshape(count, -1)
            node.inputs[index] = graph.put(graph.unused(f"{one.name}_rows"), rows)
            changed = True
    return changed


def _plain(graph: Graph, node: gs.Node, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an Attention has constant weights, no past, and a mask that MultiHeadAttention takes too."""
    inputs, read = node.inputs, graph.read()
    weights = [value for value in inputs[1:3] if value.name]
    given = {index for index, value in enumerate(inputs) if value.name}
    x, mask = (tensors.get(inputs[i].name) if i in given else None for i in (0, 3))
    shape = None if mask is None else mask.shape
    lengths = x is not None and x.shape is not None and shape == x.shape[:1]
    taken = 3 not in given or lengths or (shape is not None and len(shape) in (2, 3))
    one = all(output.name not in read for output in node.outputs[1:])
    known = not set(node.attrs) - {*KEPT, "qkv_hidden_sizes"}
    return one and taken and known and given <= {0, 1, 2, 3, 5} and all(map(graph.is_fixed, weights)) and 1 in given


def _node(
    graph: Graph, like: gs.Node, op: str, inputs: Sequence[Any], output: Any, domain: str, **attrs: Any
) -> gs.Node:
    """A node that is named after `like`, of another operator."""
    node = like.copy(list(inputs), [output])
    node.op, node.domain, node.attrs = op, domain, attrs
    node.name = graph.unused_node(f"{like.name}_{op}")
    return node


def _attention(graph: Graph, node: gs.Node) -> list[gs.Node]:
    weight = np.asarray(node.inputs[1].values)
    bias = np.asarray(node.inputs[2].values) if len(node.inputs) > 2 and node.inputs[2].name else None
    sizes = node.attrs.get("qkv_hidden_sizes") or [weight.shape[1] // 3] * 3
    ends = np.cumsum(sizes)
    made, parts = list[gs.Node](), list[Any]()
    for kind, stop, size in zip("qkv", ends, sizes, strict=True):
        for op, values in (("MatMul", weight), ("Add", bias)):
            if values is not None:
                own = graph.put(
                    graph.unused(f"{node.name}_{kind}_{op}_weight"),
                    np.ascontiguousarray(values[..., stop - size : stop]),
                )
                before = node.inputs[0] if op == "MatMul" else parts.pop()
                parts.append(Variable(graph.unused(f"{node.name}_{kind}_{op}")))
                made.append(_node(graph, node, op, [before, own], parts[-1], ""))
    absent = gs.Variable.empty()
    mask, bias_of = (node.inputs[i] if len(node.inputs) > i and node.inputs[i].name else absent for i in (3, 5))
    kept = {key: node.attrs[key] for key in KEPT if key in node.attrs}
    inputs = [*parts, absent, mask, bias_of]
    while not inputs[-1].name:
        inputs.pop()
    output = node.outputs[0]
    output.inputs.clear()
    return [*made, _node(graph, node, "MultiHeadAttention", inputs, output, ORT, **kept)]


def _sum_and_norm(graph: Graph, node: gs.Node) -> list[gs.Node]:
    simple = node.op == "SkipSimplifiedLayerNormalization"
    norm, total = node.outputs[0], node.outputs[3]
    place = 3 if simple else 4
    bias = node.inputs[place] if len(node.inputs) > place and node.inputs[place].name else None
    shift = [] if simple else [value for value in node.inputs[3:4] if value.name]
    for output in (norm, total):
        output.inputs.clear()
    first = total if bias is None else Variable(graph.unused(f"{node.name}_unbiased"))
    made = [_node(graph, node, "Add", node.inputs[:2], first, "")]
    if bias is not None:
        made.append(_node(graph, node, "Add", [first, bias], total, ""))
    attributes = {"axis": -1, "epsilon": node.attrs.get("epsilon", 1e-12)}
    return [*made, _node(graph, node, SKIPS[node.op], [total, node.inputs[2], *shift], norm, "", **attributes)]
