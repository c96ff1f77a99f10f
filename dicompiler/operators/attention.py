"""Attention as one operator: batch and heads pass, and rows of the query where no row's place matters.

Written out as MatMul, Softmax and MatMul it needs no rule of its own.
"""

from __future__ import annotations

from dicompiler.ir.regions import Interval, Region, full
from dicompiler.ir.rule import Operation, OperatorRule, Piece
from dicompiler.operators.elementwise import broadcast_need


def attention(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Attention: y[batch, heads, rows, :] ← q[batch, heads, rows], k and v[batch, their heads], the mask's part.

    Heads of q that share one of k and v stay together. Rows pass unless a causal mask counts them. With heads inside
    the last axis (rank 3) the batch alone passes; with a past, or lengths of the keys: whole.
    """
    out = full(operation.out_shape)
    if any(operation.has(index) for index in (4, 5, 6)):
        return Piece(out, operation.full_needs())
    batch = region[0]
    if len(out) == 3:
        needs = [(batch, *full(operation.shape(index)[1:])) for index in range(3)]
        return Piece((batch, *out[1:]), (*needs, *_mask(operation, (batch, *_scores(operation)[1:]))))
    heads, shared = operation.shape(0)[1], operation.shape(0)[1] // operation.shape(1)[1]
    own = (region[1][0] // shared, -(-region[1][1] // shared))
    query = (own[0] * shared, min(heads, own[1] * shared))
    rows = region[2] if not operation.attribute("is_causal", 0) else out[2]
    keys = [(batch, own, *full(operation.shape(index)[2:])) for index in (1, 2)]
    scores = (batch, query, rows, (0, operation.shape(1)[2]))
    q = (batch, query, rows, (0, operation.shape(0)[3]))
    return Piece((batch, query, rows, out[3]), (q, *keys, *_mask(operation, scores)))


def _scores(operation: Operation) -> Region:
    """All scores (batch, heads, rows of q, rows of k) of an operator whose heads are inside the last axis."""
    heads = operation.attribute("q_num_heads", 1)
    return full((operation.shape(0)[0], heads, operation.shape(0)[1], operation.shape(1)[1]))


def _mask(operation: Operation, scores: Region) -> tuple[Region | None, ...]:
    """The mask's need, which broadcasts to the scores; its last axis can be shorter than the rows of k. Nothing where
    there is none."""
    if not operation.has(3):
        return tuple(None for _ in operation.inputs[3:])
    shape = operation.shape(3)
    need = broadcast_need(shape, scores)
    return ((*need[:-1], (0, shape[-1])), *(None for _ in operation.inputs[4:]))


RULES = (OperatorRule("Attention", attention),)
