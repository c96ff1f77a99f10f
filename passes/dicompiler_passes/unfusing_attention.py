"""Attention of onnxruntime whose queries, keys and values come packed, with a bias, or with caches that are read.

In: a node, and what is known of its tensors. Out: what stands before it, so that its rule cuts it by heads. The node
stays, and reads and makes less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from dicompiler.plugin_api import Graph, Tensor, Variable

ORT = "com.microsoft"
MOST = 11
"""Inputs of GroupQueryAttention of which is known what they mean to its caches."""


class Before:
    """Nodes that are put in front of `node`; `op` adds one and gives what it makes, in `output` if that is given."""

    def __init__(self, graph: Graph, node: gs.Node) -> None:
        self.graph, self.node, self.nodes = graph, node, list[gs.Node]()

    def op(self, op: str, *inputs: Any, output: Any = None, domain: str = "", **attributes: Any) -> Any:
        made = self.node.copy([], [])
        made.op, made.domain, made.attrs = op, domain, attributes
        made.name = self.graph.unused_node(f"{self.node.name}_{op}")
        made.inputs = list(inputs)
        if output is not None:
            output.inputs.clear()
        made.outputs = [Variable(self.graph.unused(f"{self.node.name}_{op}")) if output is None else output]
        self.nodes.append(made)
        return made.outputs[0]

    def const(self, value: Any, kind: Any = np.int64) -> Any:
        return self.graph.put(self.graph.unused(f"{self.node.name}_constant"), np.asarray(value, kind))

    def parts(self, tensor: Any, sizes: Sequence[int], axis: int) -> list[Any]:
        """The tensor in pieces of these sizes: a Split, which a product before it is cut by."""
        first = self.op("Split", tensor, self.const(sizes), axis=axis)
        others = [Variable(self.graph.unused(f"{self.node.name}_Split")) for _ in sizes[1:]]
        self.nodes[-1].outputs = [first, *others]
        return [first, *others]


def opened(graph: Graph, node: gs.Node, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the node was changed.

    MultiHeadAttention(packed, …, bias)          ⇒  Split, Reshape, Add → q, k, v → MultiHeadAttention
    GroupQueryAttention(packed, -, -, …)         ⇒  Split → q, k, v → GroupQueryAttention
    GroupQueryAttention(…) → y, present (read)   ⇒  RotaryEmbedding(k), Where(row, k, past) → present; … → y
    """
    if graph.opset < 13 or node.domain != ORT or node.op not in ("MultiHeadAttention", "GroupQueryAttention"):
        return False
    before, shapes = Before(graph, node), [_shape(value, tensors) for value in node.inputs]
    changed = _multi_head(before, shapes) if node.op == "MultiHeadAttention" else _grouped(before, shapes, tensors)
    if before.nodes:
        graph.insert(before.nodes, before=node)
    return changed


def _shape(value: Any, tensors: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    known = tuple(value.shape) if isinstance(value, gs.Constant) else None
    tensor = tensors.get(value.name)
    return known if tensor is None else tensor.shape


def _given(node: gs.Node, index: int) -> bool:
    return index < len(node.inputs) and bool(node.inputs[index].name)


def _replace(node: gs.Node, new: Mapping[int, Any]) -> None:
    node.inputs = [new.get(index, value) for index, value in enumerate(node.inputs)] + [
        new[index] for index in sorted(new) if index >= len(node.inputs)
    ]


def _multi_head(before: Before, shapes: Sequence[tuple[int, ...] | None]) -> bool:
    node, changed = before.node, False
    places = [index for index in range(3) if _given(node, index)]
    ranks = [len(shapes[index] or ()) for index in places]
    if ranks in ([5], [3, 5]):  # (batch, rows, heads, 3 or 2, size)
        packed = node.inputs[places[-1]]
        batch, rows, heads, count, size = shapes[places[-1]] or ()
        pieces = before.parts(packed, [1] * count, 3)
        flat = [before.op("Reshape", piece, before.const([batch, rows, heads * size])) for piece in pieces]
        _replace(node, dict(zip(range(3 - count, 3), flat, strict=True)))
        places, ranks, changed = [0, 1, 2], [3, 3, 3], True
    if _given(node, 3) and ranks == [3, 3, 3] and before.graph.is_fixed(node.inputs[3]):
        bias, widths = np.asarray(node.inputs[3].values), [int(shapes[0][2])] * 2 if shapes[0] else []
        if len(widths) == 2 and len(shapes[0] or ()) == 3:
            pieces = np.split(bias, np.cumsum(widths))
            added = [before.op("Add", node.inputs[i], before.const(pieces[i], bias.dtype)) for i in range(3)]
            _replace(node, {**dict(enumerate(added)), 3: gs.Variable.empty()})
            changed = True
    return changed


def _grouped(before: Before, shapes: Sequence[tuple[int, ...] | None], tensors: Mapping[str, Tensor]) -> bool:
    node, graph = before.node, before.graph
    heads, shared = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    if not _given(node, 1) and shapes[0] is not None:
        size = shapes[0][2] // (heads + 2 * shared)
        pieces = before.parts(node.inputs[0], [heads * size, shared * size, shared * size], 2)
        _replace(node, dict(enumerate(pieces)))
        return True
    key, past = (shapes[index] if _given(node, index) else None for index in (1, 3))
    known = not any(_given(node, index) for index in range(MOST, len(node.inputs))) and not any(
        "quant" in name or "bit_width" in name for name in node.attrs
    )
    read = graph.read()
    alike = [_shape(value, tensors) == past for value in node.outputs[1:] if value.name in read]
    if not alike or not all(alike) or key is None or key[1] != 1 or past is None or not known or len(node.outputs) > 3:
        return False
    _presents(before, key, past, tensors[node.inputs[3].name].dtype)
    return True


def _presents(before: Before, key: tuple[int, ...], past: tuple[int, ...], dtype: int) -> None:
    """Row `seqlens_k` of a cache is the new one, those before it are the old cache's, those after it zeros."""
    node, shared = before.node, before.node.attrs["kv_num_heads"]
    at = before.op("Reshape", node.inputs[5], before.const([key[0], 1, 1, 1]))
    rows = before.const(np.arange(past[2]).reshape(1, 1, -1, 1), np.int32)
    old, new = before.op("Less", rows, at), before.op("Equal", rows, at)
    turned = node.inputs[1]
    if node.attrs.get("do_rotary", 0):
        place = before.op("Cast", before.op("Reshape", node.inputs[5], before.const([key[0], 1])), to=7)
        place = node.inputs[9] if _given(node, 9) else place
        turning = {"num_heads": shared, "interleaved": node.attrs.get("rotary_interleaved", 0)}
        part = 2 * int((node.inputs[7].shape or [0, 0])[1])
        if part and part < past[3]:
            turning["rotary_embedding_dim"] = part
        turned = before.op("RotaryEmbedding", turned, place, *node.inputs[7:9], domain=ORT, **turning)
    outputs = list(node.outputs)
    for index, row in ((1, turned), (2, node.inputs[2])):
        # One row: its heads become an axis without being moved.
        row = before.op("Reshape", row, before.const([key[0], shared, 1, past[3]]))
        zero = before.const(0, onnx.helper.tensor_dtype_to_np_dtype(dtype))
        kept = before.op("Where", old, node.inputs[2 + index], zero)
        before.op("Where", new, row, kept, output=outputs[index])
    fresh = [Variable(before.graph.unused(f"{node.name}_unread")) for _ in outputs[1:]]
    node.outputs = [outputs[0], *fresh]
