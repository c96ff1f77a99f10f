"""Rules of fused attention operators and of rotary embeddings.

Batch and heads can be split. Rows of the query can be split unless the result of a row depends on its position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from dicompiler.ir.operator_rule import (
    ORT_DOMAIN,
    OpCost,
    Operation,
    OperatorRule,
    Piece,
    cost_only_rules,
    whole_tensor,
)
from dicompiler.ir.regions import Interval, Region, Shape, block_interval
from dicompiler.partition.operators.elementwise import broadcast_need


def attention(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split an Attention: each part reads its rows and heads of the query, and all keys and values of its heads.

    Query heads that share a key head stay together. Rows stay together if the mask is causal or the attention is
    limited to a window of keys. The node stays whole if it has past keys (a cache) or an input for the lengths of the
    keys.
    """
    if any(operation.has_input(index) for index in (4, 5, 6)):
        return whole_tensor(operation, region, reduce)
    names = ("q_num_heads", "kv_num_heads")
    counts = tuple([operation.attribute(name, operation.input_shape(i)[1]) for i, name in enumerate(names)])
    windows = [operation.attribute(f"{side}_window_size", -1) for side in ("left", "right")]
    can_split_rows = not operation.attribute("is_causal", 0) and max(windows) < 0
    out, needs, heads = _split_heads(operation, region, counts, can_split_rows)
    mask: list[Region | None] = [None for _ in operation.inputs[3:]]
    # The last axis of the mask has one element per key. It can be shorter than the number of keys, and is read whole.
    if operation.has_input(3):
        shape = operation.input_shape(3)
        rows = out[1] if len(out) == 3 else out[2]
        mask[0] = (*broadcast_need(shape, (out[0], heads[0], rows, (0, shape[-1])))[:-1], (0, shape[-1]))
    return Piece(out, (*needs, *mask), _changed_head_counts(names if len(out) == 3 else (), heads, counts))


def _split_heads(
    operation: Operation, region: Region, counts: tuple[int, ...], can_split_rows: bool
) -> tuple[Region, list[Region], tuple[Interval, Interval]]:
    """Return the computed output region, the regions of query, key and value, and the ranges of query and key heads.

    Heads are an axis (rank 4) or blocks of the last axis (rank 3).

    Args:
        operation: The attention operator.
        region: Requested output region. It is extended to all query heads that share a key head.
        counts: Numbers of query heads and of key heads.
        can_split_rows: False: the region is extended to all rows.
    """
    shape, shared = operation.out_shape, counts[0] // counts[1]
    row_axis, head_axis, head_size = (1, 2, shape[2] // counts[0]) if len(shape) == 3 else (2, 1, 1)
    query_rows = region[row_axis] if can_split_rows else (0, shape[row_axis])
    first, last = block_interval(region[head_axis], shared * head_size)
    heads = ((first * shared, last * shared), (first, last))

    def read(tensor_shape: Shape, interval: Interval, count: int, rows: Interval | None = None) -> Region:
        if len(tensor_shape) == 4:
            return (region[0], interval, rows or (0, tensor_shape[2]), (0, tensor_shape[3]))
        size = tensor_shape[2] // count
        return (region[0], rows or (0, tensor_shape[1]), (interval[0] * size, interval[1] * size))

    query = read(operation.input_shape(0), heads[0], counts[0], query_rows)
    keys_and_values = [read(operation.input_shape(index), heads[1], counts[1]) for index in (1, 2)]
    return read(shape, heads[0], counts[0], query_rows), [query, *keys_and_values], heads


def _changed_head_counts(names: Sequence[str], heads: Sequence[Interval], counts: Sequence[int]) -> dict[str, int]:
    """Return those numbers of heads that differ between a part of an attention and the whole node, by attribute.

    Args:
        names: Attributes with the numbers of heads.
        heads: Ranges of heads that the part computes, one per attribute.
        counts: Values of the attributes in the whole node.
    """
    new = (stop - start for start, stop in heads)
    return {name: n for name, n, before in zip(names, new, counts, strict=False) if n != before}


def multi_head(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a MultiHeadAttention: by batch, heads and rows of the query; each part reads all keys of its heads.

    The node stays whole if it has a bias or past keys, or if one tensor contains several of query, key and value.
    """
    has_all = operation.has_input(1) and operation.has_input(2)
    is_packed = not has_all or any(len(operation.input_shape(i)) == 5 for i in (0, 1, 2))
    if is_packed or any(operation.has_input(index) for index in (3, *range(6, len(operation.inputs)))):
        return whole_tensor(operation, region, reduce)
    count = operation.attribute("num_heads")
    out, needs, heads = _split_heads(operation, region, (count, count), not operation.attribute("unidirectional", 0))
    masks: list[Region | None] = [None for _ in operation.inputs[3:]]
    if operation.has_input(4):
        shape = operation.input_shape(4)
        if len(shape) == 1 and shape[0] != operation.out_shape[0]:
            return whole_tensor(operation, region, reduce)
        masks[1] = (out[0], *((out[1],) if len(shape) == 3 else ()), *((0, n) for n in shape[-1:] if len(shape) > 1))
    if operation.has_input(5):
        shape = operation.input_shape(5)
        masks[2] = broadcast_need(shape, (out[0], heads[0], out[1], (0, shape[-1])))
    return Piece(out, (*needs, *masks), _changed_head_counts(("num_heads",), heads, (count,)))


def grouped_query(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a GroupQueryAttention: by batch, and by groups of query heads that share a key head.

    The node stays whole if one tensor contains query, key and value, or if it has inputs after the attention bias
    (input 10), which this rule does not know.
    """
    is_packed = not (operation.has_input(1) and operation.has_input(2))
    if is_packed or any(operation.has_input(i) for i in range(11, len(operation.inputs))):
        return whole_tensor(operation, region, reduce)
    counts = operation.attribute("num_heads"), operation.attribute("kv_num_heads")
    out, own_needs, heads = _split_heads(operation, region, counts, can_split_rows=False)
    needs: list[Region | None] = [*own_needs]
    for index, need in enumerate(operation.full_needs()[3:], 3):
        if need is not None and index in (3, 4):
            need = (out[0], heads[1], *need[2:])
        elif need is not None and index in (5, 9):
            need = (out[0], *need[1:])
        elif need is not None and index == 10:
            need = broadcast_need(operation.input_shape(10), (out[0], heads[0], *need[2:]))
        needs.append(need)
    return Piece(out, tuple(needs), _changed_head_counts(("num_heads", "kv_num_heads"), heads, counts))


def rotary_embedding(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a RotaryEmbedding: by batch and heads, and by rows unless only the position of the first row is given."""
    positions_index = 1 if operation.node.domain else 3
    caches = [index for index in (1, 2, 3) if index != positions_index]
    shape, count = operation.out_shape, operation.attribute("num_heads", 0)
    positions = operation.input_shape(positions_index) if operation.has_input(positions_index) else None
    row = len(shape) - 2 if len(shape) == 4 else 1
    out = list(region)
    # A vector of positions has only the position of the first row. Rows are then not split, because a part that starts
    # at another row would need another position.
    if positions is not None and len(positions) == 1:
        out[row] = (0, shape[row])
    attributes = {}
    if len(shape) == 4:
        out[3] = (0, shape[3])
    else:
        size = shape[2] // count if count else 2 * operation.input_shape(caches[0])[-1]
        first, last = block_interval(region[2], size)
        out[2] = (first * size, last * size)
        attributes = {"num_heads": last - first} if count and last - first != count else {}
    needs: list[Region | None] = [tuple(out), *operation.full_needs()[1:]]
    if positions is None:
        for index in caches:
            needs[index] = (out[0], out[row], (0, operation.input_shape(index)[-1]))
    elif len(positions) == 2:
        needs[positions_index] = (out[0], out[row])
    return Piece(tuple(out), tuple(needs), attributes)


def _attention_cost(
    operation: Operation,
    out: Shape,
    needs: Sequence[Shape],
    key: Shape,
    query_size: int,
    past: int,
    projections: int = 0,
) -> OpCost:
    """Return the cost of the products Q Kᵀ (the scores) and P V (P is their softmax), and of one FLOP per score.

    Args:
        operation: The attention operator.
        out: Shape of the computed output region.
        needs: Shapes of the regions that are read of the inputs.
        key: Shape of the keys: (batch, rows, features), (batch, heads, rows, features of a head), or (batch, rows, …)
            if several tensors are packed into one.
        query_size: Number of elements of the query.
        past: Index of the optional input with the keys of earlier frames.
        projections: Multiply-adds of the projections to queries, keys and values, which are added to the cost.
    """
    rows = (key[2] if len(key) == 4 else key[1]) + (needs[past][-2] if operation.has_input(past) else 0)
    heads = operation.attribute("num_heads") or operation.attribute("q_num_heads", 1)
    piece_heads = heads * out[2] // operation.out_shape[2] if len(out) == 3 else 1
    scores = math.prod(out[:-1]) * piece_heads * rows
    return OpCost(projections + rows * (query_size + math.prod(out)), other_flops=scores)


def attention_cost(operation: Operation, out: Shape, needs: Sequence[Shape], past: int = 4) -> OpCost:
    """Return the cost of attention: the products Q Kᵀ and P V, and one FLOP per score.

    `past` is the index of the optional input with past keys.
    """
    # Keys and values can be packed into the query's tensor.
    query, key = needs[0], needs[1] if operation.has_input(1) else needs[0]
    return _attention_cost(operation, out, needs, key, math.prod(query) // (3 if len(query) == 5 else 1), past)


def projected_attention_cost(operation: Operation, out: Shape, needs: Sequence[Shape], past: int = 4) -> OpCost:
    """Return the cost of onnxruntime's own Attention: attention, and the projections to queries, keys and values.

    `past` is the index of the optional input with past keys.
    """
    x, columns = needs[0], needs[1][-1]
    queries = math.prod(x[:-1]) * (operation.attribute("qkv_hidden_sizes") or [columns // 3])[0]
    return _attention_cost(operation, out, needs, x, queries, past, math.prod(x) * columns)


def grouped_query_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of attention with grouped queries. For SparseAttention, it is an upper bound."""
    return _attention_cost(operation, out, needs, needs[0], math.prod(out), 3)


_attention = partial(OperatorRule, stand_in="attention", constant_stand_ins="shift")
RULES = (
    _attention("Attention", attention, cost=attention_cost),
    _attention("MultiHeadAttention", multi_head, ORT_DOMAIN, cost=partial(attention_cost, past=6)),
    _attention("GroupQueryAttention", grouped_query, ORT_DOMAIN, cost=grouped_query_cost),
    *(OperatorRule("RotaryEmbedding", rotary_embedding, domain, stand_in="remainder") for domain in ("", ORT_DOMAIN)),
    *cost_only_rules(projected_attention_cost, "Attention"),
    *cost_only_rules(partial(projected_attention_cost, past=8), "QAttention"),
    *cost_only_rules(grouped_query_cost, "SparseAttention"),
)
