"""Integer function that replaces attention operators in the exact check.

Every element of queries, keys, values and masks affects its result. The result for a row of the query is the sum of:

- the row itself;
- all keys and values of the head;
- the row's mask elements, multiplied by weights that depend on their positions;
- the index of the row plus 1, if the operator has a causal mask or a window.
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
"""Indices of the mask inputs, by operator type."""
_SEQUENCE_MASK_INPUTS = {"MultiHeadAttention": 4, "GroupQueryAttention": 5}
_CAUSAL_ATTRIBUTES = {"Attention": "is_causal", "MultiHeadAttention": "unidirectional"}
_WINDOW_ATTRIBUTES = {"Attention": ("left_window_size", "right_window_size")}
_POSITION_PERIOD = 7
"""Largest weight of a mask element. Consecutive elements get the weights 1 to 7 in turn (1 and 2 in 16-bit types)."""


def causal_attribute(node: NodeProto) -> str:
    return _CAUSAL_ATTRIBUTES.get(node.op_type, "")


def depends_on_row_number(node: NodeProto) -> bool:
    """Return True if an attention node has a causal mask or a window, which depend on the row of the query."""
    windows = (get_attribute(node, name, -1) for name in _WINDOW_ATTRIBUTES.get(node.op_type, ()))
    return bool(get_attribute(node, causal_attribute(node), 0)) or max(windows, default=-1) >= 0


def supports_masks(node: NodeProto, facts: GraphFacts) -> bool:
    """Return True if the integer function can replace an attention node with its masks.

    A padding vector of MultiHeadAttention must have one number for each sequence of the batch.
    """
    batch = facts.shape(node.input[0])
    padding = facts.shape(node.input[4]) if node.op_type == "MultiHeadAttention" and len(node.input) > 4 else None
    return not padding or len(padding) > 1 or (batch is not None and batch[:1] == padding)


def attention_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces an attention operator.

    Each row of the result is the row of the query, plus sums over all keys, values and mask elements.
    """
    is_flat = len(call.outputs[0][1] or (0, 0, 0)) == 3
    # `in_blocks` has the indices of the inputs in which heads are ranges of the last axis. Keys and values can have a
    # separate axis of heads although the query has none.
    in_blocks = [i for i in range(3) if is_flat and call.input_ranks[i : i + 1] != (4,)]
    heads_attribute = "kv_num_heads" if "kv_num_heads" in call.nonzero_attributes else "num_heads"
    nodes = [node for i in range(3) for node in centred_mod(call, f"X{i}", f"B{i}")]
    shapes = {"one": [1], "rows": [0, 0], "rest": [-1], "flat": [0, 0, -1], "upright": [0, 1, -1, 1]}
    nodes += [constant_node(name, np.array(value, np.int64)) for name, value in shapes.items()]
    if is_flat:
        nodes += [
            attribute_constant("count", "value_int", heads_attribute, AttributeProto.INT),
            helper.make_node("Reshape", ["count", "one"], ["heads"]),
            helper.make_node("Concat", ["rows", "heads", "rest"], ["split"], axis=0),
            *(helper.make_node("Reshape", [f"B{i}", "split"], [f"H{i}"]) for i in in_blocks),
            *(helper.make_node("Transpose", [f"H{i}"], [f"T{i}"], perm=[0, 2, 1, 3]) for i in in_blocks if i),
        ]
    keys, values = (f"T{i}" if i in in_blocks else f"B{i}" for i in (1, 2))
    nodes += [
        helper.make_node("Reshape", [keys, "flat"], ["F1"]),
        helper.make_node("Reshape", [values, "flat"], ["F2"]),
        helper.make_node("Concat", ["F1", "F2"], ["pairs"], axis=2),
        *reduce_sum(call, "pairs", 2, "sum"),
    ]
    if is_flat:
        nodes.append(helper.make_node("Reshape", ["sum", "upright"], ["share"]))
    else:  # Query heads with a common key head are adjacent, so a Reshape gives each key head its group of query heads.
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
    return [*nodes, *_add_mask_terms(call, is_flat), *_unread_outputs(call)]


def _unread_outputs(call: StandInCall) -> list[NodeProto]:
    return [helper.make_node("Identity", ["X0"], [f"Y{i}"]) for i in range(1, len(call.outputs))]


def _add_mask_terms(call: StandInCall, is_flat: bool) -> list[NodeProto]:
    """Return nodes that compute Y: the sum of the tensor `mixed`, a term for each mask, and row numbers if needed.

    `mixed` is the sum of the query, all keys and all values. If `is_flat`, heads are ranges of the last axis of Y.
    """
    inputs = MASK_INPUTS.get(call.op, ()) if call.opset >= 13 else ()
    masks = [i for i in inputs if i < len(call.input_types) and call.input_types[i] and call.input_ranks[i]]
    nodes = [node for i in masks for node in _mask_term(call, i)]
    terms = [f"mark{i}" for i in masks]
    row_attributes = {_CAUSAL_ATTRIBUTES.get(call.op, ""), *_WINDOW_ATTRIBUTES.get(call.op, ())}
    if call.opset >= 13 and call.nonzero_attributes & row_attributes:
        nodes += _row_numbers(call, is_flat)
        terms.append("numbers")
    previous = "mixed"
    if is_flat and terms:
        nodes.append(helper.make_node("Reshape", ["mixed", "split"], ["apart"]))
        previous = "apart"
    for term in terms:
        if is_flat:
            nodes.append(helper.make_node("Transpose", [term], [f"{term}_turned"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Add", [previous, f"{term}_turned" if is_flat else term], [f"with_{term}"]))
        previous = f"with_{term}"
    if is_flat and terms:
        nodes.append(helper.make_node("Reshape", [previous, "shape"], ["Y"]))
        return nodes
    return [*nodes, helper.make_node("Identity", [previous], ["Y"])]


def _mask_term(call: StandInCall, i: int) -> list[NodeProto]:
    """Return nodes that compute the tensor `mark{i}`: for each row of the query, a weighted sum of mask input i.

    The weight of an element depends on its position, so swapped elements change the sum. The result has the shape
    (batch, heads, rows, 1); axes that the mask lacks have length 1.
    """
    prefix, rank = f"mark{i}", call.input_ranks[i]
    nodes = [
        helper.make_node("Cast", [f"X{i}"], [f"{prefix}_x"], to=call.dtype),
        *centred_mod(call, f"{prefix}_x", f"{prefix}_b"),
    ]
    weighted = f"{prefix}_b"
    if rank > 1:
        nodes += [
            *_position_numbers(call, weighted, -1, prefix, [-1]),
            helper.make_node("Mul", [weighted, f"{prefix}_by"], [f"{prefix}_w"]),
        ]
        nodes += reduce_sum(call, f"{prefix}_w", rank - 1, f"{prefix}_s")
        weighted = f"{prefix}_s"
    # This mask marks the valid keys of each sequence. It has no axis of heads, so a Reshape inserts one:
    # - mask of shape (batch, rows, keys): the sums over keys get the shape (batch, 1, rows, 1).
    # - mask of shape (batch, keys): the sums over keys get the shape (batch, 1, 1, 1).
    # - number of valid keys of each sequence, shape (batch,): these numbers get the shape (batch, 1, 1, 1).
    if _SEQUENCE_MASK_INPUTS.get(call.op) == i:
        aligned = constant_node(f"{prefix}_to", np.array([0, 1, -1, 1] if rank == 3 else [-1, 1, 1, 1], np.int64))
        return [*nodes, aligned, helper.make_node("Reshape", [weighted, f"{prefix}_to"], [prefix])]
    if rank == 4:
        return [*nodes, helper.make_node("Identity", [weighted], [prefix])]
    axes = constant_node(f"{prefix}_axes", np.arange(4 - rank))
    return [*nodes, axes, helper.make_node("Unsqueeze", [weighted, f"{prefix}_axes"], [prefix])]


def _position_numbers(call: StandInCall, tensor: str, axis: int, target: str, shape: list[int]) -> list[NodeProto]:
    """Return nodes that compute the tensor `{target}_by`: 1, 2, …, 7, 1, 2, … along `axis` of `tensor`.

    The numbers distinguish positions, so that swapped elements change a sum. They repeat, so that sums stay small
    enough to be exact. In 16-bit types, they are 1, 2, 1, 2, ….

    Args:
        call: Description of the calling nodes.
        tensor: Name of the tensor, which determines how many numbers there are.
        axis: Index of the axis.
        target: Prefix of the names of all computed tensors.
        shape: Shape of `{target}_by`, in which it is multiplied by or added to another tensor: −1 on the axis of the
            numbers, otherwise 1.
    """
    period = _POSITION_PERIOD if SIGNIFICAND_BITS[call.dtype] >= 24 else 2
    numbers = {"zero": 0, "step": 1, "axis": axis, "most": period}
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


def _row_numbers(call: StandInCall, is_flat: bool) -> list[NodeProto]:
    """Return nodes that compute the tensor `numbers` of shape (1, 1, rows, 1): row numbers, or zeros if not causal."""
    return [
        *_position_numbers(call, "X0", 1 if is_flat else 2, "row", [1, 1, -1, 1]),
        attribute_constant("flag", "value_int", _CAUSAL_ATTRIBUTES[call.op], AttributeProto.INT),
        helper.make_node("Cast", ["flag"], ["causal"], to=call.dtype),
        helper.make_node("Mul", ["row_by", "causal"], ["numbers"]),
    ]
