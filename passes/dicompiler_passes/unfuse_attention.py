"""Preparation of attention with packed inputs, biases or caches, so that it is cut by heads.

The attention node stays. Nodes are put in front of it, and it reads and makes less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from dicompiler.plugin_api.onnx import ModelGraph, TensorInfo, Variable

ORT_DOMAIN = "com.microsoft"
KNOWN_GROUP_QUERY_INPUTS = 11
"""Number of inputs of GroupQueryAttention whose effect on its caches is known."""
_Shapes = Sequence[tuple[int, ...] | None]


class PrecedingNodes:
    """Nodes to be put in front of `node`."""

    def __init__(self, graph: ModelGraph, node: gs.Node) -> None:
        self.graph, self.node, self.nodes = graph, node, list[gs.Node]()

    def add(self, op: str, *inputs: Any, output: Any = None, domain: str = "", **attributes: Any) -> Any:
        made = self.node.copy([], [])
        made.op, made.domain, made.attrs = op, domain, attributes
        made.name = self.graph.unused_node_name(f"{self.node.name}_{op}")
        made.inputs = list(inputs)
        if output is not None:
            output.inputs.clear()
        made.outputs = [Variable(self.graph.unused_tensor_name(f"{self.node.name}_{op}")) if output is None else output]
        self.nodes.append(made)
        return made.outputs[0]

    def add_constant(self, value: Any, kind: Any = np.int64) -> Any:
        return self.graph.add_initializer(
            self.graph.unused_tensor_name(f"{self.node.name}_constant"), np.asarray(value, kind)
        )

    def add_split(self, tensor: Any, sizes: Sequence[int], axis: int) -> list[Any]:
        """Return the tensor in pieces of these sizes: a Split, by which a product before it can be cut."""
        first = self.add("Split", tensor, self.add_constant(sizes), axis=axis)
        others = [Variable(self.graph.unused_tensor_name(f"{self.node.name}_Split")) for _ in sizes[1:]]
        self.nodes[-1].outputs = [first, *others]
        return [first, *others]


def open_attention(graph: ModelGraph, node: gs.Node, tensors: Mapping[str, TensorInfo]) -> bool:
    """Rewrite an attention node; return True if it was changed.

    Attention(q, k, v, mask, past…) → y, present…  ⇒  Concat(past, k) → present; Attention(q, present…, mask) → y
    MultiHeadAttention(…, past…) → y, present…     ⇒  the same
    MultiHeadAttention(packed, …, bias)          ⇒  Split, Reshape, Add → q, k, v → MultiHeadAttention
    GroupQueryAttention(packed, -, -, …)         ⇒  Split → q, k, v → GroupQueryAttention
    GroupQueryAttention(…) → y, present (read)   ⇒  RotaryEmbedding(k), Where(row, k, past) → present; … → y
    """
    opener = _OPENERS.get((node.domain or "", node.op))
    if graph.opset < 13 or opener is None:
        return False
    before = PrecedingNodes(graph, node)
    changed = opener(before, [_static_shape(value, tensors) for value in node.inputs], tensors)
    if before.nodes:
        graph.insert_nodes(before.nodes, before=node)
    return changed


def _static_shape(value: Any, tensors: Mapping[str, TensorInfo]) -> tuple[int, ...] | None:
    known = tuple(value.shape) if isinstance(value, gs.Constant) else None
    tensor = tensors.get(value.name)
    return known if tensor is None else tensor.shape


def _has_input(node: gs.Node, index: int) -> bool:
    return index < len(node.inputs) and bool(node.inputs[index].name)


def _replace_inputs(node: gs.Node, new: Mapping[int, Any]) -> None:
    node.inputs = [new.get(index, value) for index, value in enumerate(node.inputs)] + [
        new[index] for index in sorted(new) if index >= len(node.inputs)
    ]


def _open_multi_head(before: PrecedingNodes, shapes: _Shapes, tensors: Mapping[str, TensorInfo]) -> bool:  # noqa: ARG001
    node, changed = before.node, False
    places = [index for index in range(3) if _has_input(node, index)]
    ranks = [len(shapes[index] or ()) for index in places]
    if ranks in ([5], [3, 5]):  # (batch, rows, heads, 3 or 2, size)
        packed = node.inputs[places[-1]]
        batch, rows, heads, count, size = shapes[places[-1]] or ()
        pieces = before.add_split(packed, [1] * count, 3)
        flat = [before.add("Reshape", piece, before.add_constant([batch, rows, heads * size])) for piece in pieces]
        _replace_inputs(node, dict(zip(range(3 - count, 3), flat, strict=True)))
        places, ranks, changed = [0, 1, 2], [3, 3, 3], True
    if _has_input(node, 3) and ranks == [3, 3, 3] and before.graph.is_constant(node.inputs[3]):
        bias, widths = np.asarray(node.inputs[3].values), [int(shapes[0][2])] * 2 if shapes[0] else []
        if len(widths) == 2 and len(shapes[0] or ()) == 3:
            pieces = np.split(bias, np.cumsum(widths))
            added = [before.add("Add", node.inputs[i], before.add_constant(pieces[i], bias.dtype)) for i in range(3)]
            _replace_inputs(node, {**dict(enumerate(added)), 3: gs.Variable.empty()})
            changed = True
    biased = _has_input(node, 3)  # the past is not
    kept = None if changed or biased or node.attrs.get("unidirectional", 0) else _append_to_past(before, shapes, 6)
    if kept is not None:  # keys and values may be by heads where queries are not
        node.inputs = [node.inputs[0], *kept, *node.inputs[3:6]]
        node.outputs = node.outputs[:1]
    return changed or kept is not None


def _open_standard(before: PrecedingNodes, shapes: _Shapes, tensors: Mapping[str, TensorInfo]) -> bool:  # noqa: ARG001
    """Open the standard Attention. The node becomes the Reshape back if its queries had no axis of heads.

    Causal masks and windows count rows from the length of the past, so such a node stays.
    """
    node, query = before.node, shapes[0]
    windows = any(node.attrs.get(f"{side}_window_size", -1) >= 0 for side in ("left", "right"))
    if node.attrs.get("is_causal", 0) or windows or query is None:
        return False
    heads = query[1] if len(query) == 4 else node.attrs["q_num_heads"]
    kept = _append_to_past(before, shapes, 4)
    if kept is None:
        return False
    turned = _split_heads(before, node.inputs[0], query, heads)
    inputs, attributes = [turned, *kept, *node.inputs[3:4]], dict(node.attrs)
    node.outputs = node.outputs[:1]
    if len(query) == 4:
        node.inputs = inputs
        return True
    for name in ("q_num_heads", "kv_num_heads"):
        attributes.pop(name, None)
    rows = before.add("Transpose", before.add("Attention", *inputs, **attributes), perm=[0, 2, 1, 3])
    node.op, node.attrs = "Reshape", {}
    node.inputs = [rows, before.add_constant([query[0], query[1], -1])]
    return True


def _append_to_past(before: PrecedingNodes, shapes: _Shapes, first: int) -> list[Any] | None:
    """Append keys and values by heads to those of the past; they become outputs 1 and 2.

    None without such a past, with inputs that tell how much of it counts, or if scores are read too.
    """
    node, read = before.node, before.graph.names_read()
    if any(one.name in read for one in node.outputs[3:]):
        return None
    pasts = shapes[first : first + 2]
    known = all(shape is not None and len(shape) == 4 for shape in pasts) and None not in shapes[1:3]
    if not known or len(pasts) < 2 or any(_has_input(node, index) for index in range(first + 2, len(node.inputs))):
        return None
    made, outputs = list[Any](), list(node.outputs)
    for index, past in enumerate(pasts, 1):
        turned = _split_heads(before, node.inputs[index], shapes[index] or (), (past or ())[1])
        named = outputs[index] if index < len(outputs) and outputs[index].name else None
        made.append(before.add("Concat", node.inputs[first + index - 1], turned, output=named, axis=2))
    return made


def _split_heads(before: PrecedingNodes, tensor: Any, shape: tuple[int, ...], heads: int) -> Any:
    """Return (batch, rows, heads · size) as (batch, heads, rows, size), if it is not so already."""
    if len(shape) == 4:
        return tensor
    split = before.add("Reshape", tensor, before.add_constant([*shape[:2], heads, shape[2] // heads]))
    return before.add("Transpose", split, perm=[0, 2, 1, 3])


def _open_grouped_query(before: PrecedingNodes, shapes: _Shapes, tensors: Mapping[str, TensorInfo]) -> bool:
    node, graph = before.node, before.graph
    heads, shared = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    if not _has_input(node, 1) and shapes[0] is not None:
        size = shapes[0][2] // (heads + 2 * shared)
        pieces = before.add_split(node.inputs[0], [heads * size, shared * size, shared * size], 2)
        _replace_inputs(node, dict(enumerate(pieces)))
        return True
    key, past = (shapes[index] if _has_input(node, index) else None for index in (1, 3))
    known = not any(_has_input(node, index) for index in range(KNOWN_GROUP_QUERY_INPUTS, len(node.inputs))) and not any(
        "quant" in name or "bit_width" in name for name in node.attrs
    )
    read = graph.names_read()
    presents = {_static_shape(value, tensors) for value in node.outputs[1:] if value.name in read}
    if len(presents) != 1 or key is None or key[1] != 1 or past is None or not known or len(node.outputs) > 3:
        return False
    (present,) = presents
    if present is None or not 0 <= present[2] - past[2] <= 1 or present != (*past[:2], present[2], *past[3:]):
        return False
    _build_caches(before, key, present, present[2] - past[2], tensors[node.inputs[3].name].dtype)
    return True


def _build_caches(before: PrecedingNodes, key: tuple[int, ...], past: tuple[int, ...], more: int, dtype: int) -> None:
    """Make the caches of a GroupQueryAttention from other nodes.

    Row `seqlens_k` of a cache is the new one, those before it come from the old cache, and those after it are zeros.

    Args:
        before: The nodes in front of the attention.
        key: Shape of the keys.
        past: Shape of the new cache.
        more: Rows that the new cache has more than the old one.
        dtype: ONNX type of the cache.
    """
    node, shared = before.node, before.node.attrs["kv_num_heads"]
    at = before.add("Reshape", node.inputs[5], before.add_constant([key[0], 1, 1, 1]))
    rows = before.add_constant(np.arange(past[2]).reshape(1, 1, -1, 1), np.int32)
    old, new = before.add("Less", rows, at), before.add("Equal", rows, at)
    turned = node.inputs[1]
    if node.attrs.get("do_rotary", 0):
        place = before.add("Cast", before.add("Reshape", node.inputs[5], before.add_constant([key[0], 1])), to=7)
        place = node.inputs[9] if _has_input(node, 9) else place
        turning = {"num_heads": shared, "interleaved": node.attrs.get("rotary_interleaved", 0)}
        part = 2 * int((node.inputs[7].shape or [0, 0])[1])
        if part and part < past[3]:
            turning["rotary_embedding_dim"] = part
        turned = before.add("RotaryEmbedding", turned, place, *node.inputs[7:9], domain=ORT_DOMAIN, **turning)
    outputs = list(node.outputs)
    for index, row in ((1, turned), (2, node.inputs[2])):
        # One row: its heads become an axis without being moved.
        row = before.add("Reshape", row, before.add_constant([key[0], shared, 1, past[3]]))
        zero = before.add_constant(0, onnx.helper.tensor_dtype_to_np_dtype(dtype))
        cache = node.inputs[2 + index]
        if more:
            empty = before.add_constant(np.zeros((*past[:2], more, past[3])), zero.values.dtype)
            cache = before.add("Concat", cache, empty, axis=2)
        kept = before.add("Where", old, cache, zero)
        before.add("Where", new, row, kept, output=outputs[index])
    fresh = [Variable(before.graph.unused_tensor_name(f"{node.name}_unread")) for _ in outputs[1:]]
    node.outputs = [outputs[0], *fresh]


_OPENERS: Mapping[tuple[str, str], Callable[[PrecedingNodes, _Shapes, Mapping[str, TensorInfo]], bool]] = {
    ("", "Attention"): _open_standard,
    (ORT_DOMAIN, "MultiHeadAttention"): _open_multi_head,
    (ORT_DOMAIN, "GroupQueryAttention"): _open_grouped_query,
}
