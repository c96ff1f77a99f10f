"""Operators that look along an axis, or over all of some axes: those are read in full, the others pass."""

from __future__ import annotations

from dicompiler.ir.regions import Interval, Region, full, replace
from dicompiler.ir.rule import Operation, OperatorRule, Piece
from dicompiler.operators.elementwise import broadcast_need


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


def lp_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """LpNormalization: the axis in full."""
    axis = operation.attribute("axis", -1) % len(region)
    out = replace(region, axis, (0, operation.out_shape[axis]))
    return Piece(out, (out,))


def mean_variance(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """MeanVarianceNormalization: its axes in full."""
    axes = {axis % len(region) for axis in operation.attribute("axes") or (0, 2, 3)}
    out = tuple((0, operation.out_shape[i]) if i in axes else interval for i, interval in enumerate(region))
    return Piece(out, (out,))


def instance_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """InstanceNormalization: batch and channels pass, with their scale and shift; a channel's map in full."""
    out = (*region[:2], *full(operation.out_shape[2:]))
    return Piece(out, (out, *((region[1],) for _ in operation.inputs[1:])))


def group_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """GroupNormalization: whole groups of channels, with all of their maps; scale and shift are per group before opset
    21, per channel since."""
    count, channels = operation.attribute("num_groups"), operation.out_shape[1]
    per_group = channels // count
    groups = (region[1][0] // per_group, -(-region[1][1] // per_group))
    own = (groups[0] * per_group, groups[1] * per_group)
    out = (region[0], own, *full(operation.out_shape[2:]))
    vector = (groups,) if operation.node.opset < 21 else (own,)
    attributes = {} if groups == (0, count) else {"num_groups": groups[1] - groups[0]}
    return Piece(out, (out, *(vector for _ in operation.inputs[1:])), attributes)


def layer_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """LayerNormalization, RMSNormalization: every axis from `axis` on in full; scale and shift broadcast."""
    axis = operation.attribute("axis", -1) % len(region)
    out = (*region[:axis], *full(operation.out_shape[axis:]))
    rest = (broadcast_need(t.shape, out) if t and t.shape is not None else None for t in operation.inputs[1:])
    return Piece(out, (out, *rest))


def cumulative(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """CumSum, CumProd: the axis in full, which an input names."""
    value = operation.value(1)
    if value is None:
        return Piece(full(operation.out_shape), operation.full_needs())
    axis = int(value.reshape(-1)[0]) % len(region)
    out = replace(region, axis, (0, operation.out_shape[axis]))
    return Piece(out, (out, operation.full_needs()[1]))


def top_k(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """TopK: the axis in full, in input and output; its values alone, or else whole."""
    axis = operation.attribute("axis", -1) % len(region)
    out = replace(region, axis, (0, operation.out_shape[axis]))
    need = replace(region, axis, (0, operation.shape(0)[axis]))
    return Piece(out, (need, *operation.full_needs()[1:]))


RULES = (
    OperatorRule("LRN", lrn),
    *(OperatorRule(op, softmax) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    OperatorRule("LpNormalization", lp_normalization),
    OperatorRule("MeanVarianceNormalization", mean_variance),
    OperatorRule("InstanceNormalization", instance_normalization),
    OperatorRule("GroupNormalization", group_normalization),
    *(OperatorRule(op, layer_normalization) for op in ("LayerNormalization", "RMSNormalization")),
    *(OperatorRule(op, cumulative) for op in ("CumSum", "CumProd")),
    OperatorRule("TopK", top_k),
)
