"""Operators that look along an axis, or over all of some axes: those are read in full, the others pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial

from dicompiler.ir.regions import Interval, Region, Shape, blocks_of, full, with_interval
from dicompiler.ir.rule import Effort, Operation, OperatorRule, Piece, counted, taken
from dicompiler.operators.elementwise import elementwise

SCALED = "- gain shift"
"""What becomes of a scale and a shift in the exact check."""


def lrn(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """LRN: y[n, c, tile] ← x[n, c with a halo of channels, tile]; the halo's own results are sliced away."""
    size, channels = operation.attribute("size"), operation.shape(0)[1]
    start, stop = region[1]
    halo = (max(0, start - (size - 1) // 2), min(channels, stop + size // 2))
    need = with_interval(region, 1, halo)
    return Piece(region, (need,), raw=None if need == region else need)


def _in_full(operation: Operation, region: Region, axes: Collection[int]) -> Region:
    """The region with all of these axes."""
    return tuple((0, operation.out_shape[axis]) if axis in axes else cut for axis, cut in enumerate(region))


def softmax(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Softmax and its kin: the axis in full; before opset 13 every axis from `axis` on."""
    rank, modern = len(region), operation.node.opset >= 13
    axis = operation.attribute("axis", -1 if modern else 1) % rank
    return elementwise(operation, _in_full(operation, region, range(axis, axis + 1 if modern else rank)), reduce)


def mean_variance(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """MeanVarianceNormalization: its axes in full."""
    axes = {axis % len(region) for axis in operation.attribute("axes") or (0, 2, 3)}
    return elementwise(operation, _in_full(operation, region, axes), reduce)


def instance_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """InstanceNormalization: batch and channels pass, with their scale and shift; a channel's map in full."""
    out = (*region[:2], *full(operation.out_shape[2:]))
    return Piece(out, (out, *((region[1],) for _ in operation.inputs[1:])))


def group_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """GroupNormalization: whole groups of channels, with all of their maps; scale and shift are per group before opset
    21, per channel since."""
    count, channels = operation.attribute("num_groups"), operation.out_shape[1]
    size = channels // count
    first, last = blocks_of(region[1], size)
    out = (region[0], (first * size, last * size), *full(operation.out_shape[2:]))
    vector = ((first, last),) if operation.node.opset < 21 else (out[1],)
    attributes = {} if last - first == count else {"num_groups": last - first}
    return Piece(out, (out, *(vector for _ in operation.inputs[1:])), attributes)


def from_axis(operation: Operation, region: Region, reduce: Interval | None, count: int | None = None) -> Piece:
    """LayerNormalization, RMSNormalization: every axis from `axis` on in full; scale and shift broadcast.
    LpNormalization: that axis alone, `count` of them."""
    return elementwise(operation, _in_full(operation, region, range(len(region))[_axis(operation) :][:count]), reduce)


def _axis(operation: Operation) -> int:
    """The attribute `axis`, the last one if it is left out."""
    return int(operation.attribute("axis", -1)) % len(operation.out_shape)


def cumulative(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """CumSum, CumProd: the axis in full, which an input names."""
    value = operation.value(1)
    axes = range(len(region)) if value is None else (int(value.reshape(-1)[0]) % len(region),)
    out = _in_full(operation, region, axes)
    return Piece(out, (out, operation.full_needs()[1]))


def top_k(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """TopK: the axis in full, in input and output; its values alone, or else whole."""
    axis = _axis(operation)
    need = with_interval(region, axis, (0, operation.shape(0)[axis]))
    return Piece(_in_full(operation, region, (axis,)), (need, *operation.full_needs()[1:]))


def across(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:  # noqa: ARG001
    """LRN: one FLOP for each channel of each element's window."""
    return Effort(other=math.prod(out) * int(operation.attribute("size", 1)))


def skipped(operation: Operation, out: Shape, needs: Sequence[Shape], last: int) -> Effort:  # noqa: ARG001
    """A normalisation of the sum of two tensors, or of three where input `last` is there."""
    return Effort(other=(2 + operation.has(last)) * math.prod(out))


RULES = (
    OperatorRule("LRN", lrn, cost=across, stand_in="lrn"),
    *(OperatorRule(op, softmax, stand_in="softmax") for op in ("Softmax", "LogSoftmax")),
    OperatorRule("Hardmax", softmax),
    OperatorRule("LpNormalization", partial(from_axis, count=1), stand_in="lp"),
    OperatorRule("MeanVarianceNormalization", mean_variance, stand_in="mean variance"),
    OperatorRule("InstanceNormalization", instance_normalization, stand_in="instance", constants=SCALED),
    OperatorRule("GroupNormalization", group_normalization, stand_in="group", constants=SCALED),
    OperatorRule("LayerNormalization", from_axis, stand_in="layer", constants=SCALED),
    OperatorRule("RMSNormalization", from_axis, stand_in="layer", constants=SCALED),
    *counted(partial(skipped, last=4), "SkipLayerNormalization EmbedLayerNormalization"),
    *counted(partial(skipped, last=3), "SkipSimplifiedLayerNormalization"),
    *(OperatorRule(op, cumulative) for op in ("CumSum", "CumProd")),
    OperatorRule("TopK", top_k, cost=taken),
)
