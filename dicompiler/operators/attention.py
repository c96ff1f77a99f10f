"""Rules of fused attention operators and of rotary embeddings.

Batch and heads can be split, and rows of the query if no row depends on its position. An attention that is written as
MatMul, Softmax and MatMul needs no rule of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from dicompiler.ir.operator_rule import ORT_DOMAIN, OpCost, Operation, OperatorRule, Piece, counted_rules, whole_tensor
from dicompiler.ir.regions import Interval, Region, Shape, block_interval
from dicompiler.operators.elementwise import broadcast_need


def attention(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Attention: y[batch, heads, rows] ← q[batch, heads, rows], k and v[batch, their heads], mask.

    Query heads that share a key head stay together. Rows can be split without causal mask and window. With a past, or
    with lengths of the keys, the node stays whole.
    """
    if any(operation.has_input(index) for index in (4, 5, 6)):
        return whole_tensor(operation, region, reduce)
    head_counts = (
        operation.attribute(name, operation.input_shape(i)[1]) for i, name in enumerate(("q_num_heads", "kv_num_heads"))
    )
    counts, windows = tuple(head_counts), [operation.attribute(f"{side}_window_size", -1) for side in ("left", "right")]
    passing = not operation.attribute("is_causal", 0) and max(windows) < 0
    out, needs, heads = _split_heads(operation, region, counts, passing)
    named = ("q_num_heads", "kv_num_heads") if len(out) == 3 else ()
    mask: list[Region | None] = [None for _ in operation.inputs[3:]]
    if operation.has_input(3):  # its last axis can be shorter than the rows of k
        shape = operation.input_shape(3)
        rows = out[1] if len(out) == 3 else out[2]
        mask[0] = (*broadcast_need(shape, (out[0], heads[0], rows, (0, shape[-1])))[:-1], (0, shape[-1]))
    return Piece(out, (*needs, *mask), _changed_head_counts(named, heads, counts))


def _split_heads(
    operation: Operation, region: Region, counts: tuple[int, ...], passing: bool
) -> tuple[Region, list[Region], tuple[Interval, Interval]]:
    """Return the aligned output region, the needs of q, k and v, and the ranges of their heads.

    Heads are an axis (rank 4) or blocks of the last axis (rank 3).

    Args:
        operation: The attention.
        region: Requested region of the output.
        counts: Number of query heads, and of key and value heads.
        passing: True if rows of the query can be split.
    """
    shape, (heads, shared) = operation.out_shape, (counts[0], counts[0] // counts[1])
    flat = len(shape) == 3
    rows = region[1 if flat else 2] if passing else (0, shape[1 if flat else 2])
    first, last = block_interval(region[2 if flat else 1], shared * (shape[2] // heads if flat else 1))
    own = ((first * shared, last * shared), (first, last))

    def need(index: int, some: Interval, count: int, length: Interval | None) -> Region:
        of = operation.input_shape(index)
        if len(of) == 4:
            return (region[0], some, length or (0, of[2]), (0, of[3]))
        size = of[2] // count
        return (region[0], length or (0, of[1]), (some[0] * size, some[1] * size))

    needs = [need(0, own[0], heads, rows), *(need(index, own[1], counts[1], None) for index in (1, 2))]
    if flat:
        size = shape[2] // heads
        return (region[0], rows, (own[0][0] * size, own[0][1] * size)), needs, own
    return (region[0], own[0], rows, (0, shape[3])), needs, own


def _changed_head_counts(names: Sequence[str], heads: Sequence[Interval], counts: Sequence[int]) -> dict[str, int]:
    own = (stop - start for start, stop in heads)
    return {name: n for name, n, before in zip(names, own, counts, strict=False) if n != before}


def multi_head(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """MultiHeadAttention: heads are blocks of the last axis. Packed inputs, a bias or a past: stays whole."""
    several = (
        operation.has_input(1) and operation.has_input(2) and all(len(operation.input_shape(i)) < 5 for i in (0, 1, 2))
    )
    if not several or any(operation.has_input(index) for index in (3, *range(6, len(operation.inputs)))):
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
    """GroupQueryAttention: query heads that share keys stay together. Packed inputs: stays whole."""
    if not (operation.has_input(1) and operation.has_input(2)) or any(
        operation.has_input(i) for i in range(11, len(operation.inputs))
    ):
        return whole_tensor(operation, region, reduce)
    counts = operation.attribute("num_heads"), operation.attribute("kv_num_heads")
    out, needs, heads = _split_heads(operation, region, counts, passing=False)
    others: list[Region | None] = list(operation.full_needs()[3:])
    for index, other in enumerate(others, 3):
        if other is not None and index in (3, 4):
            others[index - 3] = (out[0], heads[1], *other[2:])
        elif other is not None and index in (5, 9):
            others[index - 3] = (out[0], *other[1:])
        elif other is not None and index == 10:
            others[index - 3] = broadcast_need(operation.input_shape(10), (out[0], heads[0], *other[2:]))
    return Piece(out, (*needs, *others), _changed_head_counts(("num_heads", "kv_num_heads"), heads, counts))


def rotary_embedding(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """RotaryEmbedding: y[batch, rows, heads] ← x[batch, rows, heads], positions, caches.

    Rows can be split if each has its own position.
    """
    place = 1 if operation.node.domain else 3  # of the positions
    caches = [index for index in (1, 2, 3) if index != place]
    shape, count = operation.out_shape, operation.attribute("num_heads", 0)
    positions = operation.input_shape(place) if operation.has_input(place) else None
    row = len(shape) - 2 if len(shape) == 4 else 1
    out = list(region)
    if positions is not None and len(positions) == 1:  # the first one's
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
        needs[place] = (out[0], out[row])
    return Piece(tuple(out), tuple(needs), attributes)


def _attention_cost(
    operation: Operation, out: Shape, needs: Sequence[Shape], key: Shape, queries: int, past: int, projected: int = 0
) -> OpCost:
    """Return the cost of Q Kᵀ and P V, of given projections, and of one FLOP per score.

    Args:
        operation: The attention.
        out: Shape of the output region.
        needs: Shapes of the input regions.
        key: Shape of the keys: (batch, rows, width), (batch, heads, rows, size), or packed (batch, rows, …).
        queries: Number of elements of q.
        past: Index of the input with rows (second last axis) that precede those of the keys.
        projected: Multiply-adds of the projections.
    """
    rows = (key[2] if len(key) == 4 else key[1]) + (needs[past][-2] if operation.has_input(past) else 0)
    heads = operation.attribute("num_heads") or operation.attribute("q_num_heads", 1)
    own = heads * out[2] // operation.out_shape[2] if len(out) == 3 else 1
    scores = math.prod(out[:-1]) * own * rows
    return OpCost(projected + rows * (queries + math.prod(out)), other_flops=scores)


def attention_cost(operation: Operation, out: Shape, needs: Sequence[Shape], past: int = 4) -> OpCost:
    """Return the cost of Attention or MultiHeadAttention; k can be packed with v, or with q and v."""
    query, key = needs[0], needs[1] if operation.has_input(1) else needs[0]
    return _attention_cost(operation, out, needs, key, math.prod(query) // (3 if len(query) == 5 else 1), past)


def projected_attention_cost(operation: Operation, out: Shape, needs: Sequence[Shape], past: int = 4) -> OpCost:
    """Return the cost of onnxruntime's own Attention, including the projections to q, k and v."""
    x, columns = needs[0], needs[1][-1]
    queries = math.prod(x[:-1]) * (operation.attribute("qkv_hidden_sizes") or [columns // 3])[0]
    return _attention_cost(operation, out, needs, x, queries, past, math.prod(x) * columns)


def grouped_query_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:
    """Return the cost of GroupQueryAttention, an upper bound for SparseAttention."""
    return _attention_cost(operation, out, needs, needs[0], math.prod(out), 3)


RULES = (
    OperatorRule("Attention", attention, cost=attention_cost, stand_in="attention", constant_stand_ins="shift"),
    OperatorRule(
        "MultiHeadAttention",
        multi_head,
        ORT_DOMAIN,
        cost=partial(attention_cost, past=6),
        stand_in="attention",
        constant_stand_ins="shift",
    ),
    OperatorRule(
        "GroupQueryAttention",
        grouped_query,
        ORT_DOMAIN,
        cost=grouped_query_cost,
        stand_in="attention",
        constant_stand_ins="shift",
    ),
    *(OperatorRule("RotaryEmbedding", rotary_embedding, domain, stand_in="remainder") for domain in ("", ORT_DOMAIN)),
    *counted_rules(projected_attention_cost, "Attention"),
    *counted_rules(partial(projected_attention_cost, past=8), "QAttention"),
    *counted_rules(grouped_query_cost, "SparseAttention"),
)
