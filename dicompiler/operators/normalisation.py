"""Operators that look along an axis: LRN over a window of channels, Softmax over all of its axis."""

from __future__ import annotations

from dicompiler.operators.rule import Operation, OperatorRule, Piece
from dicompiler.regions import Interval, Region, full, replace


def lrn(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """LRN: y[n, c, tile] ← x[n, c with a halo of channels, tile]; the halo's own results are sliced away."""
    size, channels = operation.attribute("size"), operation.shape(0)[1]
    start, stop = region[1]
    halo = (max(0, start - (size - 1) // 2), min(channels, stop + size // 2))
    need = replace(region, 1, halo)
    return Piece(region, (need,), raw=None if need == region else need)


def softmax(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Softmax and its kin: the axis in full; before opset 13 every axis from `axis` on."""
    shape, modern = operation.out_shape, operation.node.opset >= 13
    axis = operation.attribute("axis", -1 if modern else 1) % len(shape)
    whole = (axis,) if modern else range(axis, len(shape))
    out = tuple(full(shape)[i] if i in whole else interval for i, interval in enumerate(region))
    return Piece(out, (out,))


RULES = (
    OperatorRule("LRN", lrn),
    *(OperatorRule(op, softmax) for op in ("Softmax", "LogSoftmax", "Hardmax")),
)
