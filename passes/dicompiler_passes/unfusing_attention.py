"""Attention whose queries, keys and values come packed, with a bias, or with caches that are read.

In: a node, and what is known of its tensors. Out: what stands before it, so that its rule cuts it by heads. The node
stays, and reads and makes less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from dicompiler.plugin_api import Graph, Tensor, Variable

ORT = "com.microsoft"
MOST = 11
"""Inputs of GroupQueryAttention of which is known what they mean to its caches."""
_Shapes = Sequence[tuple[int, ...] | None]


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

    Attention(q, k, v, mask, past…) → y, present…  ⇒  Concat(past, k) → present; Attention(q, present…, mask) → y
    MultiHeadAttention(…, past…) → y, present…     ⇒  the same
    MultiHeadAttention(packed, …, bias)          ⇒  Split, Reshape, Add → q, k, v → MultiHeadAttention
    GroupQueryAttention(packed, -, -, …)         ⇒  Split → q, k, v → GroupQueryAttention
    GroupQueryAttention(…) → y, present (read)   ⇒  RotaryEmbedding(k), Where(row, k, past) → present; … → y
    """
    opener = _OPENERS.get((node.domain or "", node.op))
    if graph.opset < 13 or opener is None:
        return False
    before = Before(graph, node)
    changed = opener(before, [_shape(value, tensors) for value in node.inputs], tensors)
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


def _multi_head(before: Before, shapes: _Shapes, tensors: Mapping[str, Tensor]) -> bool:  # noqa: ARG001
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
    biased = _given(node, 3)  # the past is not
    kept = None if changed or biased or node.attrs.get("unidirectional", 0) else _continued(before, shapes, 6)
    if kept is not None:  # keys and values may be by heads where queries are not
        node.inputs = [node.inputs[0], *kept, *node.inputs[3:6]]
        node.outputs = node.outputs[:1]
    return changed or kept is not None


def _standard(before: Before, shapes: _Shapes, tensors: Mapping[str, Tensor]) -> bool:  # noqa: ARG001
    """With keys and values by heads queries must be so too: the node becomes the Reshape back where they were not.
    Rows that are counted (causal, windows) are counted from the length of the past: such a node stays."""
    node, query = before.node, shapes[0]
    windows = any(node.attrs.get(f"{side}_window_size", -1) >= 0 for side in ("left", "right"))
    if node.attrs.get("is_causal", 0) or windows or query is None:
        return False
    heads = query[1] if len(query) == 4 else node.attrs["q_num_heads"]
    kept = _continued(before, shapes, 4)
    if kept is None:
        return False
    turned = _by_heads(before, node.inputs[0], query, heads)
    inputs, attributes = [turned, *kept, *node.inputs[3:4]], dict(node.attrs)
    node.outputs = node.outputs[:1]
    if len(query) == 4:
        node.inputs = inputs
        return True
    for name in ("q_num_heads", "kv_num_heads"):
        attributes.pop(name, None)
    rows = before.op("Transpose", before.op("Attention", *inputs, **attributes), perm=[0, 2, 1, 3])
    node.op, node.attrs = "Reshape", {}
    node.inputs = [rows, before.const([query[0], query[1], -1])]
    return True


def _continued(before: Before, shapes: _Shapes, first: int) -> list[Any] | None:
    """Keys and values by heads behind those of the past, inputs `first` and the next: they are the outputs 1 and 2.
    None without such a past, with more inputs, which say how much of it counts, or where scores are read too."""
    node, read = before.node, before.graph.read()
    if any(one.name in read for one in node.outputs[3:]):
        return None
    pasts = shapes[first : first + 2]
    known = all(shape is not None and len(shape) == 4 for shape in pasts) and None not in shapes[1:3]
    if not known or len(pasts) < 2 or any(_given(node, index) for index in range(first + 2, len(node.inputs))):
        return None
    made, outputs = list[Any](), list(node.outputs)
    for index, past in enumerate(pasts, 1):
        turned = _by_heads(before, node.inputs[index], shapes[index] or (), (past or ())[1])
        named = outputs[index] if index < len(outputs) and outputs[index].name else None
        made.append(before.op("Concat", node.inputs[first + index - 1], turned, output=named, axis=2))
    return made


def _by_heads(before: Before, tensor: Any, shape: tuple[int, ...], heads: int) -> Any:
    """(batch, rows, heads · size) as (batch, heads, rows, size); what has four axes is so."""
    if len(shape) == 4:
        return tensor
    split = before.op("Reshape", tensor, before.const([*shape[:2], heads, shape[2] // heads]))
    return before.op("Transpose", split, perm=[0, 2, 1, 3])


def _grouped(before: Before, shapes: _Shapes, tensors: Mapping[str, Tensor]) -> bool:
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
    presents = {_shape(value, tensors) for value in node.outputs[1:] if value.name in read}
    if len(presents) != 1 or key is None or key[1] != 1 or past is None or not known or len(node.outputs) > 3:
        return False
    (present,) = presents
    if present is None or not 0 <= present[2] - past[2] <= 1 or present != (*past[:2], present[2], *past[3:]):
        return False
    _presents(before, key, present, present[2] - past[2], tensors[node.inputs[3].name].dtype)
    return True


def _presents(before: Before, key: tuple[int, ...], past: tuple[int, ...], more: int, dtype: int) -> None:
    """Row `seqlens_k` of a cache is the new one, those before it are the old cache's, those after it zeros. past: the
    shape of the new cache, which has `more` rows more than the old one."""
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
        cache = node.inputs[2 + index]
        if more:
            empty = before.const(np.zeros((*past[:2], more, past[3])), zero.values.dtype)
            cache = before.op("Concat", cache, empty, axis=2)
        kept = before.op("Where", old, cache, zero)
        before.op("Where", new, row, kept, output=outputs[index])
    fresh = [Variable(before.graph.unused(f"{node.name}_unread")) for _ in outputs[1:]]
    node.outputs = [outputs[0], *fresh]


_OPENERS: Mapping[tuple[str, str], Callable[[Before, _Shapes, Mapping[str, Tensor]], bool]] = {
    ("", "Attention"): _standard,
    (ORT, "MultiHeadAttention"): _multi_head,
    (ORT, "GroupQueryAttention"): _grouped,
}
