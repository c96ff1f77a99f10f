"""The stand-in of attention as one operator: keys, values and masks all have a part in what comes out.

In: what the calls have in common. Out: q, plus all rows of the keys and values of its head, plus what its row of the
masks holds, by place, plus the number of its row where a causal mask or a window counts rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import AttributeProto, NodeProto, helper

from dicompiler.verify.exact.function_builder import (
    StandInCall,
    attribute_constant,
    centred_mod,
    constant_node,
    reduce_sum,
)
from dicompiler.verify.exact.graph_facts import SIGNIFICAND_BITS, GraphFacts, get_attribute

MASK_INPUTS: Mapping[str, tuple[int, ...]] = {
    "Attention": (3,),
    "MultiHeadAttention": (4, 5),
    "GroupQueryAttention": (5, 10),
}
"""Inputs that say which keys a row sees, or are added to its scores."""
_SEQUENCE_MASK_INPUTS = {"MultiHeadAttention": 4, "GroupQueryAttention": 5}
_CAUSAL_ATTRIBUTES = {"Attention": "is_causal", "MultiHeadAttention": "unidirectional"}
_WINDOW_ATTRIBUTES = {"Attention": ("left_window_size", "right_window_size")}
_POSITION_PERIOD = 7
"""Elements of a mask, and rows, count 1 to so many times, by their place; in types of few bits once or twice."""


def causal_attribute(node: NodeProto) -> str:
    """The attribute that says that a row sees none behind it; '' of an operator that has none."""
    return _CAUSAL_ATTRIBUTES.get(node.op_type, "")


def counts_rows(node: NodeProto) -> bool:
    """Whether what a row sees depends on its number."""
    windows = (get_attribute(node, name, -1) for name in _WINDOW_ATTRIBUTES.get(node.op_type, ()))
    return bool(get_attribute(node, causal_attribute(node), 0)) or max(windows, default=-1) >= 0


def supports_masks(node: NodeProto, known: GraphFacts) -> bool:
    """Whether every mask has a row for each sequence of the batch, or more: one row of lengths and ends has not."""
    batch = known.shape(node.input[0])
    padding = known.shape(node.input[4]) if node.op_type == "MultiHeadAttention" and len(node.input) > 4 else None
    return not padding or len(padding) > 1 or (batch is not None and batch[:1] == padding)


def attention_body(call: StandInCall) -> list[NodeProto]:
    """The nodes of the function. Heads are an axis of q, k and v, or blocks of the last one."""
    flat = len(call.outputs[0][1] or (0, 0, 0)) == 3
    joined = [
        i for i in range(3) if flat and call.input_ranks[i : i + 1] != (4,)
    ]  # keys and values can be by heads alone
    own = "kv_num_heads" if "kv_num_heads" in call.nonzero_attributes else "num_heads"
    nodes = [node for i in range(3) for node in centred_mod(call, f"X{i}", f"B{i}")]
    shapes = {"one": [1], "rows": [0, 0], "rest": [-1], "flat": [0, 0, -1], "upright": [0, 1, -1, 1]}
    nodes += [constant_node(name, np.array(value, np.int64)) for name, value in shapes.items()]
    if flat:
        nodes += [
            attribute_constant("count", "value_int", own, AttributeProto.INT),
            helper.make_node("Reshape", ["count", "one"], ["heads"]),
            helper.make_node("Concat", ["rows", "heads", "rest"], ["split"], axis=0),
            *(helper.make_node("Reshape", [f"B{i}", "split"], [f"H{i}"]) for i in joined),
            *(helper.make_node("Transpose", [f"H{i}"], [f"T{i}"], perm=[0, 2, 1, 3]) for i in joined if i),
        ]
    keys, values = (f"T{i}" if i in joined else f"B{i}" for i in (1, 2))
    nodes += [
        helper.make_node("Reshape", [keys, "flat"], ["F1"]),
        helper.make_node("Reshape", [values, "flat"], ["F2"]),
        helper.make_node("Concat", ["F1", "F2"], ["pairs"], axis=2),
        *reduce_sum(call, "pairs", 2, "sum"),
    ]
    if flat:
        nodes.append(helper.make_node("Reshape", ["sum", "upright"], ["share"]))
    else:  # heads of q that share keys are neighbours
        nodes += [
            constant_node("firsts", np.arange(2)),
            helper.make_node("Shape", ["F1"], ["of_keys"]),
            helper.make_node("Gather", ["of_keys", "firsts"], ["groups"]),
            helper.make_node("Concat", ["groups", "rest"], ["split"], axis=0),
            helper.make_node("Reshape", ["B0", "split"], ["H0"]),
            helper.make_node("Reshape", ["sum", "flat"], ["share"]),
        ]
    nodes += [
        helper.make_node("Add", ["H0", "share"], ["mix"]),
        helper.make_node("Shape", ["X0"], ["shape"]),
        helper.make_node("Reshape", ["mix", "shape"], ["mixed"]),
    ]
    return [*nodes, *_add_mask_terms(call, flat), *_unread_outputs(call)]


def _unread_outputs(call: StandInCall) -> list[NodeProto]:
    return [helper.make_node("Identity", ["X0"], [f"Y{i}"]) for i in range(1, len(call.outputs))]  # nobody reads them


def _add_mask_terms(call: StandInCall, flat: bool) -> list[NodeProto]:
    """Y: `mixed` with a number on top for each head and row, (batch, heads, rows, 1), broadcast."""
    places = MASK_INPUTS.get(call.op, ()) if call.opset >= 13 else ()
    marks = [i for i in places if i < len(call.input_types) and call.input_types[i] and call.input_ranks[i]]
    nodes = [node for i in marks for node in _mask_term(call, i)]
    terms = [f"mark{i}" for i in marks]
    if (
        call.nonzero_attributes.intersection(
            (_CAUSAL_ATTRIBUTES.get(call.op, ""), *_WINDOW_ATTRIBUTES.get(call.op, ()))
        )
        and call.opset >= 13
    ):
        nodes += _row_numbers(call, flat)
        terms.append("numbers")
    last = "mixed"
    if flat and terms:  # heads apart
        nodes.append(helper.make_node("Reshape", ["mixed", "split"], ["apart"]))
        last = "apart"
    for term in terms:
        if flat:
            nodes.append(helper.make_node("Transpose", [term], [f"{term}_turned"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Add", [last, f"{term}_turned" if flat else term], [f"with_{term}"]))
        last = f"with_{term}"
    if flat and terms:
        nodes.append(helper.make_node("Reshape", [last, "shape"], ["Y"]))
        return nodes
    return [*nodes, helper.make_node("Identity", [last], ["Y"])]


def _mask_term(call: StandInCall, i: int) -> list[NodeProto]:
    """`mark{i}` (batch, heads, rows, 1): Σ over the keys of what input i holds, times a number by place."""
    m, rank = f"mark{i}", call.input_ranks[i]
    nodes = [helper.make_node("Cast", [f"X{i}"], [f"{m}_x"], to=call.dtype), *centred_mod(call, f"{m}_x", f"{m}_b")]
    marked = f"{m}_b"
    if rank > 1:
        nodes += [
            *_position_numbers(call, marked, -1, m, [-1]),
            helper.make_node("Mul", [marked, f"{m}_by"], [f"{m}_w"]),
        ]
        nodes += reduce_sum(call, f"{m}_w", rank - 1, f"{m}_s")
        marked = f"{m}_s"
    if _SEQUENCE_MASK_INPUTS.get(call.op) == i:  # it has no heads, and rows where it has three axes
        aligned = constant_node(f"{m}_to", np.array([0, 1, -1, 1] if rank == 3 else [-1, 1, 1, 1], np.int64))
        return [*nodes, aligned, helper.make_node("Reshape", [marked, f"{m}_to"], [m])]
    if rank == 4:
        return [*nodes, helper.make_node("Identity", [marked], [m])]
    axes = constant_node(f"{m}_axes", np.arange(4 - rank))
    return [*nodes, axes, helper.make_node("Unsqueeze", [marked, f"{m}_axes"], [m])]


def _position_numbers(call: StandInCall, tensor: str, axis: int, target: str, shape: list[int]) -> list[NodeProto]:
    """`{target}_by`: 1, 2, …, and again, for each place along an axis of the tensor, in this shape."""
    most = _POSITION_PERIOD if SIGNIFICAND_BITS[call.dtype] >= 24 else 2
    numbers = {"zero": 0, "step": 1, "axis": axis, "most": most}
    return [
        *(constant_node(f"{target}_{name}", np.array(value, np.int64)) for name, value in numbers.items()),
        constant_node(f"{target}_as", np.array(shape, np.int64)),
        helper.make_node("Shape", [tensor], [f"{target}_extents"]),
        helper.make_node("Gather", [f"{target}_extents", f"{target}_axis"], [f"{target}_n"], axis=0),
        helper.make_node("Range", [f"{target}_zero", f"{target}_n", f"{target}_step"], [f"{target}_range"]),
        helper.make_node("Mod", [f"{target}_range", f"{target}_most"], [f"{target}_place"]),
        helper.make_node("Add", [f"{target}_place", f"{target}_step"], [f"{target}_count"]),
        helper.make_node("Cast", [f"{target}_count"], [f"{target}_number"], to=call.dtype),
        helper.make_node("Reshape", [f"{target}_number", f"{target}_as"], [f"{target}_by"]),
    ]


def _row_numbers(call: StandInCall, flat: bool) -> list[NodeProto]:
    """`numbers` (1, 1, rows, 1): the rows' numbers where the call counts them (`counts_rows`), else zeros."""
    return [
        *_position_numbers(call, "X0", 1 if flat else 2, "row", [1, 1, -1, 1]),
        attribute_constant("flag", "value_int", _CAUSAL_ATTRIBUTES[call.op], AttributeProto.INT),
        helper.make_node("Cast", ["flag"], ["causal"], to=call.dtype),
        helper.make_node("Mul", ["row_by", "causal"], ["numbers"]),
    ]
