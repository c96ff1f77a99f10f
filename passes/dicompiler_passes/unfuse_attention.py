"""Rewrites of attention nodes with packed inputs, biases or caches, so that plans can split them by heads.

The attention node stays. Nodes are inserted before it, and it gets fewer inputs and outputs.
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
"""Number of inputs of GroupQueryAttention that `_build_caches` supports."""
_Shapes = Sequence[tuple[int, ...] | None]


class PrecedingNodes:
    """Builder of nodes that will be inserted into `graph` before `node`."""

    def __init__(self, graph: ModelGraph, node: gs.Node) -> None:
        self.graph, self.node, self.nodes = graph, node, list[gs.Node]()

    def add(self, op: str, *inputs: Any, output: Any = None, domain: str = "", **attributes: Any) -> Any:
        node = self.node.copy([], [])
        node.op, node.domain, node.attrs = op, domain, attributes
        node.name = self.graph.unused_node_name(f"{self.node.name}_{op}")
        node.inputs = list(inputs)
        if output is not None:
            output.inputs.clear()
        node.outputs = [Variable(self.graph.unused_tensor_name(f"{self.node.name}_{op}")) if output is None else output]
        self.nodes.append(node)
        return node.outputs[0]

    def add_constant(self, value: Any, dtype: Any = np.int64) -> Any:
        return self.graph.add_initializer(
            self.graph.unused_tensor_name(f"{self.node.name}_constant"), np.asarray(value, dtype)
        )

    def add_split(self, tensor: Any, sizes: Sequence[int], axis: int) -> list[Any]:
        """Add a Split into pieces of the given lengths along `axis`, and return the pieces."""
        first = self.add("Split", tensor, self.add_constant(sizes), axis=axis)
        others = [Variable(self.graph.unused_tensor_name(f"{self.node.name}_Split")) for _ in sizes[1:]]
        self.nodes[-1].outputs = [first, *others]
        return [first, *others]


def open_attention(graph: ModelGraph, node: gs.Node, tensors: Mapping[str, TensorInfo]) -> bool:
    """Rewrite an attention node so that it can be split by heads. Return True on a change.

    Attention(q, k, v, mask, past…) → y, present…  ⇒  Concat(past, k) → present; Attention(q, present…, mask) → y
    MultiHeadAttention(q, k, v, past…) → y, present…
                                                 ⇒  Concat(past, k) → present; MultiHeadAttention(q, present…) → y
    MultiHeadAttention(packed, …, bias)          ⇒  Split, Reshape, Add → q, k, v → MultiHeadAttention
    GroupQueryAttention(packed, -, -, …)         ⇒  Split → q, k, v → GroupQueryAttention
    GroupQueryAttention(q, k, v, past…) → y, present…
                                                 ⇒  RotaryEmbedding(k), Where(row, k, past) → present; … → y

    q, k and v are queries, keys and values. A packed input contains several of them. `past` and `present` are the
    key/value caches before and after this frame. The last rewrite is done only if `present` is read.
    """
    opener = _OPENERS.get((node.domain or "", node.op))
    if graph.opset < 13 or opener is None:
        return False
    preceding = PrecedingNodes(graph, node)
    changed = opener(preceding, [_static_shape(value, tensors) for value in node.inputs], tensors)
    if preceding.nodes:
        graph.insert_nodes(preceding.nodes, before=node)
    return changed


def _static_shape(value: Any, tensors: Mapping[str, TensorInfo]) -> tuple[int, ...] | None:
    constant_shape = tuple(value.shape) if isinstance(value, gs.Constant) else None
    tensor = tensors.get(value.name)
    return constant_shape if tensor is None else tensor.shape


def _has_input(node: gs.Node, index: int) -> bool:
    return index < len(node.inputs) and bool(node.inputs[index].name)


def _replace_inputs(node: gs.Node, new: Mapping[int, Any]) -> None:
    node.inputs = [new.get(index, value) for index, value in enumerate(node.inputs)] + [
        new[index] for index in sorted(new) if index >= len(node.inputs)
    ]


def _open_multi_head(preceding: PrecedingNodes, shapes: _Shapes, tensors: Mapping[str, TensorInfo]) -> bool:  # noqa: ARG001
    node, is_changed = preceding.node, False
    inputs = [index for index in range(3) if _has_input(node, index)]
    ranks = [len(shapes[index] or ()) for index in inputs]
    # The last input has the shape (batch, rows, heads, tensors, size). Its 2 or 3 tensors are keys and values, with or
    # without queries.
    if ranks in ([5], [3, 5]):
        packed = node.inputs[inputs[-1]]
        batch, rows, heads, count, size = shapes[inputs[-1]] or ()
        pieces = preceding.add_split(packed, [1] * count, 3)
        flattened = [
            preceding.add("Reshape", piece, preceding.add_constant([batch, rows, heads * size])) for piece in pieces
        ]
        _replace_inputs(node, dict(zip(range(3 - count, 3), flattened, strict=True)))
        inputs, ranks, is_changed = [0, 1, 2], [3, 3, 3], True
    if _has_input(node, 3) and ranks == [3, 3, 3] and preceding.graph.is_constant(node.inputs[3]):
        bias, widths = np.asarray(node.inputs[3].values), [int(shapes[0][2])] * 2 if shapes[0] else []
        if len(widths) == 2 and len(shapes[0] or ()) == 3:
            pieces = np.split(bias, np.cumsum(widths))
            sums = [
                preceding.add("Add", node.inputs[i], preceding.add_constant(pieces[i], bias.dtype)) for i in range(3)
            ]
            _replace_inputs(node, {**dict(enumerate(sums)), 3: gs.Variable.empty()})
            is_changed = True
    # Keep the cache of a node with a bias: after a Concat, the node would add the bias to past keys too.
    has_bias = _has_input(node, 3)
    appended = (
        None if is_changed or has_bias or node.attrs.get("unidirectional", 0) else _append_to_past(preceding, shapes, 6)
    )
    # The extended caches have an axis of heads. The node accepts them even if its queries have no such axis.
    if appended is not None:
        node.inputs = [node.inputs[0], *appended, *node.inputs[3:6]]
        node.outputs = node.outputs[:1]
    return is_changed or appended is not None


def _open_standard(preceding: PrecedingNodes, shapes: _Shapes, tensors: Mapping[str, TensorInfo]) -> bool:  # noqa: ARG001
    """Rewrite an Attention of ONNX with a cache.

    If the queries have no axis of heads, they are reshaped before the node, and the result after it.
    """
    node, query = preceding.node, shapes[0]
    has_window = any(node.attrs.get(f"{side}_window_size", -1) >= 0 for side in ("left", "right"))
    # A causal mask or window depends on the length of the past, which the rewritten node would not know.
    if node.attrs.get("is_causal", 0) or has_window or query is None:
        return False
    heads = query[1] if len(query) == 4 else node.attrs["q_num_heads"]
    appended = _append_to_past(preceding, shapes, 4)
    if appended is None:
        return False
    query_by_heads = _split_heads(preceding, node.inputs[0], query, heads)
    inputs, attributes = [query_by_heads, *appended, *node.inputs[3:4]], dict(node.attrs)
    node.outputs = node.outputs[:1]
    if len(query) == 4:
        node.inputs = inputs
        return True
    for name in ("q_num_heads", "kv_num_heads"):
        attributes.pop(name, None)
    rows = preceding.add("Transpose", preceding.add("Attention", *inputs, **attributes), perm=[0, 2, 1, 3])
    node.op, node.attrs = "Reshape", {}
    node.inputs = [rows, preceding.add_constant([query[0], query[1], -1])]
    return True


def _append_to_past(preceding: PrecedingNodes, shapes: _Shapes, first: int) -> list[Any] | None:
    """Append the new keys and values to the caches by Concats. Return the extended caches.

    The Concats compute outputs 1 and 2 of the node. The inputs `first` and `first + 1` are the past keys and values.
    The result is None if they are missing, or if the node has other inputs or outputs that the rewrite does not
    support.
    """
    node, read = preceding.node, preceding.graph.names_read()
    if any(output.name in read for output in node.outputs[3:]):
        return None
    pasts = shapes[first : first + 2]
    are_known = all(shape is not None and len(shape) == 4 for shape in pasts) and None not in shapes[1:3]
    if not are_known or len(pasts) < 2 or any(_has_input(node, index) for index in range(first + 2, len(node.inputs))):
        return None
    results, outputs = list[Any](), list(node.outputs)
    for index, past in enumerate(pasts, 1):
        by_heads = _split_heads(preceding, node.inputs[index], shapes[index] or (), (past or ())[1])
        named_output = outputs[index] if index < len(outputs) and outputs[index].name else None
        results.append(preceding.add("Concat", node.inputs[first + index - 1], by_heads, output=named_output, axis=2))
    return results


def _split_heads(preceding: PrecedingNodes, tensor: Any, shape: tuple[int, ...], heads: int) -> Any:
    """Add nodes that reshape a tensor (batch, rows, heads · size) to (batch, heads, rows, size). Return the result.

    A tensor that already has four axes is returned unchanged.
    """
    if len(shape) == 4:
        return tensor
    split = preceding.add("Reshape", tensor, preceding.add_constant([*shape[:2], heads, shape[2] // heads]))
    return preceding.add("Transpose", split, perm=[0, 2, 1, 3])


def _open_grouped_query(preceding: PrecedingNodes, shapes: _Shapes, tensors: Mapping[str, TensorInfo]) -> bool:
    node, graph = preceding.node, preceding.graph
    heads, key_heads = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    if not _has_input(node, 1) and shapes[0] is not None:
        size = shapes[0][2] // (heads + 2 * key_heads)
        pieces = preceding.add_split(node.inputs[0], [heads * size, key_heads * size, key_heads * size], 2)
        _replace_inputs(node, dict(enumerate(pieces)))
        return True
    key, past = (shapes[index] if _has_input(node, index) else None for index in (1, 3))
    is_known = not any(
        _has_input(node, index) for index in range(KNOWN_GROUP_QUERY_INPUTS, len(node.inputs))
    ) and not any("quant" in name or "bit_width" in name for name in node.attrs)
    read = graph.names_read()
    presents = {_static_shape(value, tensors) for value in node.outputs[1:] if value.name in read}
    if len(presents) != 1 or key is None or key[1] != 1 or past is None or not is_known or len(node.outputs) > 3:
        return False
    (present,) = presents
    if present is None or not 0 <= present[2] - past[2] <= 1 or present != (*past[:2], present[2], *past[3:]):
        return False
    _build_caches(preceding, key, present, present[2] - past[2], tensors[node.inputs[3].name].dtype)
    return True


def _build_caches(
    preceding: PrecedingNodes, key: tuple[int, ...], new_shape: tuple[int, ...], extra: int, dtype: int
) -> None:
    """Add nodes to `preceding` that compute the new key and value caches of a GroupQueryAttention.

    In a new cache, the row with the index `seqlens_k` (an input of the node) is the new row. The rows before it are
    copied from the old cache, and the rows after it are zeros.

    Args:
        preceding: Builder of nodes before the GroupQueryAttention.
        key: Shape of the new keys.
        new_shape: Shape of the new caches.
        extra: Number of rows that the new caches have in addition to those of the old ones.
        dtype: Element type of the caches.
    """
    node, key_heads = preceding.node, preceding.node.attrs["kv_num_heads"]
    at = preceding.add("Reshape", node.inputs[5], preceding.add_constant([key[0], 1, 1, 1]))
    rows = preceding.add_constant(np.arange(new_shape[2]).reshape(1, 1, -1, 1), np.int32)
    old, new = preceding.add("Less", rows, at), preceding.add("Equal", rows, at)
    rotated_key = node.inputs[1]
    if node.attrs.get("do_rotary", 0):
        positions = preceding.add(
            "Cast", preceding.add("Reshape", node.inputs[5], preceding.add_constant([key[0], 1])), to=7
        )
        positions = node.inputs[9] if _has_input(node, 9) else positions
        rotation = {"num_heads": key_heads, "interleaved": node.attrs.get("rotary_interleaved", 0)}
        rotated_size = 2 * int((node.inputs[7].shape or [0, 0])[1])
        if rotated_size and rotated_size < new_shape[3]:
            rotation["rotary_embedding_dim"] = rotated_size
        rotated_key = preceding.add(
            "RotaryEmbedding", rotated_key, positions, *node.inputs[7:9], domain=ORT_DOMAIN, **rotation
        )
    outputs = list(node.outputs)
    for index, row in ((1, rotated_key), (2, node.inputs[2])):
        # `row` is a single row of shape (batch, 1, heads · size), so no Transpose is needed.
        row = preceding.add("Reshape", row, preceding.add_constant([key[0], key_heads, 1, new_shape[3]]))
        zero = preceding.add_constant(0, onnx.helper.tensor_dtype_to_np_dtype(dtype))
        cache = node.inputs[2 + index]
        if extra:
            empty = preceding.add_constant(np.zeros((*new_shape[:2], extra, new_shape[3])), zero.values.dtype)
            cache = preceding.add("Concat", cache, empty, axis=2)
        kept = preceding.add("Where", old, cache, zero)
        preceding.add("Where", new, row, kept, output=outputs[index])
    fresh = [Variable(preceding.graph.unused_tensor_name(f"{node.name}_unread")) for _ in outputs[1:]]
    node.outputs = [outputs[0], *fresh]


_OPENERS: Mapping[tuple[str, str], Callable[[PrecedingNodes, _Shapes, Mapping[str, TensorInfo]], bool]] = {
    ("", "Attention"): _open_standard,
    (ORT_DOMAIN, "MultiHeadAttention"): _open_multi_head,
    (ORT_DOMAIN, "GroupQueryAttention"): _open_grouped_query,
}
