"""Attention as one operator: batch and heads pass, and rows of the query where no row's place matters.

Written out as MatMul, Softmax and MatMul it needs no rule of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from dicompiler.ir.regions import Interval, Region, Shape, blocks_of, full
from dicompiler.ir.rule import Effort, Operation, OperatorRule, Piece, counted, whole
from dicompiler.operators.elementwise import broadcast_need


def attention(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Attention: y[batch, heads, rows, :] ← q[batch, heads, rows], k and v[batch, their heads], the mask's part.

    Heads of q that share one of k and v stay together. Rows pass unless a causal mask counts them. With heads inside
    the last axis (rank 3) the batch alone passes; with a past, or lengths of the keys: whole.
    """
    if any(operation.has(index) for index in (4, 5, 6)):
        return whole(operation, region, reduce)
    out, batch = full(operation.out_shape), region[0]
    if len(out) == 3:
        needs = [(batch, *full(operation.shape(index)[1:])) for index in range(3)]
        scores = full((operation.attribute("q_num_heads", 1), operation.shape(0)[1], operation.shape(1)[1]))
        return Piece((batch, *out[1:]), (*needs, *_mask(operation, (batch, *scores))))
    heads, shared = operation.shape(0)[1], operation.shape(0)[1] // operation.shape(1)[1]
    first, last = blocks_of(region[1], shared)
    keys = [(batch, (first, last), *full(operation.shape(index)[2:])) for index in (1, 2)]
    rows = region[2] if not operation.attribute("is_causal", 0) else out[2]
    queries = (batch, (first * shared, min(heads, last * shared)), rows)
    mask = _mask(operation, (*queries, (0, operation.shape(1)[2])))
    return Piece((*queries, out[3]), ((*queries, (0, operation.shape(0)[3])), *keys, *mask))


def _mask(operation: Operation, scores: Region) -> tuple[Region | None, ...]:
    """The mask's need, which broadcasts to the scores (batch, heads, rows of q, rows of k); its last axis can be
    shorter than the rows of k. Nothing where there is none."""
    absent = tuple(None for _ in operation.inputs[3:])
    if not operation.has(3):
        return absent
    shape = operation.shape(3)
    return ((*broadcast_need(shape, scores)[:-1], (0, shape[-1])), *absent[1:])


def _attended(
    operation: Operation, out: Shape, needs: Sequence[Shape], key: Shape, queries: int, past: int, projected: int = 0
) -> Effort:
    """Q Kᵀ and P V over the rows of k and v, beside the multiplications that make them; one FLOP for each score.

    key: (batch, rows, width), (batch, heads, rows, size), or packed: (batch, rows, …). queries: elements of q. past:
    the input whose rows, its last axis but one, come before those of k."""
    rows = (key[2] if len(key) == 4 else key[1]) + (needs[past][-2] if operation.has(past) else 0)
    heads = operation.attribute("num_heads") or operation.attribute("q_num_heads", 1)
    scores = math.prod(out[:-1]) * (heads if len(out) == 3 else 1) * rows
    return Effort(projected + rows * (queries + math.prod(out)), other=scores)


def attended(operation: Operation, out: Shape, needs: Sequence[Shape], past: int = 4) -> Effort:
    """Attention, MultiHeadAttention: k can be packed with v, or with it into q."""
    query, key = needs[0], needs[1] if operation.has(1) else needs[0]
    return _attended(operation, out, needs, key, math.prod(query) // (3 if len(query) == 5 else 1), past)


def projected(operation: Operation, out: Shape, needs: Sequence[Shape], past: int = 4) -> Effort:
    """onnxruntime's own Attention, which makes q, k, v of its input by a weight (features, their widths together)."""
    x, columns = needs[0], needs[1][-1]
    queries = math.prod(x[:-1]) * (operation.attribute("qkv_hidden_sizes") or [columns // 3])[0]
    return _attended(operation, out, needs, x, queries, past, math.prod(x) * columns)


def grouped(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """GroupQueryAttention: queries are as wide as what comes out. SparseAttention costs no more."""
    return _attended(operation, out, needs, needs[0], math.prod(out), 3)


RULES = (
    OperatorRule("Attention", attention, cost=attended),
    *counted(projected, "Attention"),
    *counted(partial(projected, past=8), "QAttention"),
    *counted(partial(attended, past=6), "MultiHeadAttention"),
    *counted(grouped, "GroupQueryAttention SparseAttention"),
)
