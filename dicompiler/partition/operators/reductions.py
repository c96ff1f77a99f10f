"""Rules of operators along axes: reductions, softmax, normalizations, LRN, TopK.

These operators read some axes completely, and all other axes can be split. For sums, maxima and minima, the first
reduced axis can be split too: each part then has a partial result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial

from onnx import TensorProto

from dicompiler.ir.operator_rule import (
    ORT_DOMAIN,
    OpCost,
    Operation,
    OperatorRule,
    Piece,
    cost_only_rules,
    cost_per_input,
    whole_tensor,
)
from dicompiler.ir.regions import Interval, Region, Shape, block_interval, full_region, with_interval
from dicompiler.partition.operators.elementwise import elementwise

MERGE_OPERATORS = {"ReduceSum": "Add", "ReduceL1": "Add", "ReduceMax": "Max", "ReduceMin": "Min"}
"""Operator that combines the partial results of a reduction, by reduction operator.

ReduceMean has none, because means over ranges of different lengths would need different weights.
"""
UNMERGEABLE_REDUCTIONS = "ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceProd ReduceSumSquare".split()


def lrn(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split an LRN: each part also reads the channels next to its output channels (a halo).

    The node of a part also writes the halo, so the region `out` of the part is sliced from the node's output.
    """
    size, channels = operation.attribute("size"), operation.input_shape(0)[1]
    start, stop = region[1]
    halo = (max(0, start - (size - 1) // 2), min(channels, stop + size // 2))
    need = with_interval(region, 1, halo)
    return Piece(region, (need,), written_region=None if need == region else need)


def _with_full_axes(operation: Operation, region: Region, axes: Collection[int]) -> Region:
    return tuple((0, operation.out_shape[axis]) if axis in axes else cut for axis, cut in enumerate(region))


def softmax(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Softmax, LogSoftmax or Hardmax: the axis `axis` stays whole; before opset 13, also all axes after it."""
    count, default = (1, -1) if operation.node.opset >= 13 else (None, 1)
    return normalization_from_axis(operation, region, reduce, count, default)


def mean_variance(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a MeanVarianceNormalization: the axes over which it normalizes stay whole."""
    axes = {axis % len(region) for axis in operation.attribute("axes") or (0, 2, 3)}
    return elementwise(operation, _with_full_axes(operation, region, axes), reduce)


def instance_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split an InstanceNormalization: height and width stay whole; each part reads scale and shift of its channels."""
    out = (*region[:2], *full_region(operation.out_shape[2:]))
    return Piece(out, (out, *((region[1],) for _ in operation.inputs[1:])))


def group_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a GroupNormalization: channels are extended to whole groups, and height and width stay whole."""
    count, channels = operation.attribute("num_groups"), operation.out_shape[1]
    size = channels // count
    first, last = block_interval(region[1], size)
    out = (region[0], (first * size, last * size), *full_region(operation.out_shape[2:]))
    # Scale and shift have one element per group before opset 21, and one per channel since then.
    vector = ((first, last),) if operation.node.opset < 21 else (out[1],)
    attributes = {} if last - first == count else {"num_groups": last - first}
    return Piece(out, (out, *(vector for _ in operation.inputs[1:])), attributes)


def normalization_from_axis(
    operation: Operation, region: Region, reduce: Interval | None, axis_count: int | None = None, default_axis: int = -1
) -> Piece:
    """Split a LayerNormalization or a similar operator: the axes over which it normalizes stay whole.

    Args:
        operation: The operator. Its attribute `axis` is the first of these axes.
        region: Requested region of the output.
        reduce: Range of the reduction axis, which is ignored.
        axis_count: Number of these axes; None: all axes from the first one on.
        default_axis: First of these axes if the node omits the attribute.
    """
    axes = range(len(region))[operation.attribute("axis", default_axis) % len(region) :]
    return elementwise(operation, _with_full_axes(operation, region, axes[:axis_count]), reduce)


def cumulative(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a CumSum or CumProd: the axis along which it accumulates stays whole."""
    value = operation.constant_value(1)
    axes = range(len(region)) if value is None else (int(value.reshape(-1)[0]) % len(region),)
    out = _with_full_axes(operation, region, axes)
    return Piece(out, (out, operation.full_needs()[1]))


def top_k(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a TopK: the axis in the attribute `axis` stays whole. If a node reads the indices, all axes stay whole."""
    axis = operation.attribute("axis", -1) % len(region)
    need = with_interval(region, axis, (0, operation.input_shape(0)[axis]))
    return Piece(_with_full_axes(operation, region, (axis,)), (need, *operation.full_needs()[1:]))


def lrn_cost(operation: Operation, out: Shape, needs: Sequence[Shape]) -> OpCost:  # noqa: ARG001
    """Return the cost of LRN: one FLOP per output element and channel of its window (attribute `size`)."""
    return OpCost(other_flops=math.prod(out) * int(operation.attribute("size", 1)))


def skip_normalization_cost(operation: Operation, out: Shape, needs: Sequence[Shape], bias: int) -> OpCost:  # noqa: ARG001
    """Return the cost of an addition and a normalization: two FLOP per output element, or three with a bias.

    The optional bias is the input with index `bias`.
    """
    return OpCost(other_flops=(2 + operation.has_input(bias)) * math.prod(out))


def reduced_axes(operation: Operation) -> tuple[int, ...] | None:
    """Return the axes that a reduction reduces; None if they are an input that is not constant."""
    rank = len(operation.input_shape(0))
    axes = [operation.attribute("axis", 0)] if operation.node.op.startswith("Arg") else operation.attribute("axes")
    if operation.has_input(1):
        if (value := operation.constant_value(1)) is None:
            return None
        axes = value.tolist()
    if not axes:
        return () if operation.attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis % rank for axis in axes}))


def reduction_piece(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a reduction: each part reads all elements along the reduced axes.

    For a partial result, only the range `reduce` of the first reduced axis with more than one element is read.
    """
    axes = reduced_axes(operation)
    if axes is None:
        return whole_tensor(operation, region, reduce)
    # Without keepdims, the output has no reduced axes. With it, their intervals (0, 1) of the output are skipped.
    kept = operation.attribute("keepdims", 1)
    rest = iter([interval for axis, interval in enumerate(region) if not kept or axis not in axes])
    need = tuple((0, extent) if axis in axes else next(rest) for axis, extent in enumerate(operation.input_shape(0)))
    if reduce is not None:
        need = with_interval(need, _reducible_axis(operation, axes), reduce)
    return Piece(region, (need, *operation.full_needs()[1:]))


def _reducible_axis(operation: Operation, axes: tuple[int, ...]) -> int:
    """Return the first reduced axis with more than one element, or the first reduced axis if all have one element."""
    shape = operation.input_shape(0)
    return next((axis for axis in axes if shape[axis] > 1), axes[0])


def reduction_length(operation: Operation) -> int | None:
    """Return the length of the reduced axis that can be divided, so that each part has a partial result.

    It is None if nothing is reduced, or if onnxruntime cannot combine partial results of this element type.
    """
    tensor, axes = operation.inputs[0], reduced_axes(operation)
    if not axes or tensor is None:
        return None
    floats = (TensorProto.FLOAT, TensorProto.DOUBLE)
    types = floats if operation.node.opset < 12 else (*floats, TensorProto.INT32, TensorProto.INT64)
    return operation.input_shape(0)[_reducible_axis(operation, axes)] if tensor.dtype in types else None


RMS_NORMALIZATIONS = ("RMSNormalization", "SimplifiedLayerNormalization")
"""Operator types of the root-mean-square normalization in ONNX, and in onnxruntime."""
_normalization = partial(OperatorRule, constant_stand_ins="- gain shift")
_layer_normalization = partial(_normalization, piece=normalization_from_axis, stand_in="layer_normalization")
_skip_normalization = partial(OperatorRule, piece=normalization_from_axis, stand_in="skip_normalization")
_reduction = partial(OperatorRule, piece=reduction_piece, cost=cost_per_input)
RULES = (
    OperatorRule("LRN", lrn, cost=lrn_cost, stand_in="lrn"),
    *(OperatorRule(op, softmax, stand_in="softmax") for op in ("Softmax", "LogSoftmax")),
    OperatorRule("Hardmax", softmax),
    OperatorRule("LpNormalization", partial(normalization_from_axis, axis_count=1), stand_in="lp_normalization"),
    OperatorRule("MeanVarianceNormalization", mean_variance, stand_in="mean_variance_normalization"),
    _normalization("InstanceNormalization", instance_normalization, stand_in="instance_normalization"),
    _normalization("GroupNormalization", group_normalization, stand_in="group_normalization"),
    *map(_layer_normalization, ("LayerNormalization", *RMS_NORMALIZATIONS)),
    *cost_only_rules(partial(skip_normalization_cost, bias=4), "EmbedLayerNormalization"),
    *(
        _skip_normalization(op, domain=ORT_DOMAIN, cost=partial(skip_normalization_cost, bias=index))
        for op, index in (("SkipLayerNormalization", 4), ("SkipSimplifiedLayerNormalization", 3))
    ),
    *(OperatorRule(op, cumulative, stand_in="running_sum") for op in ("CumSum", "CumProd")),
    OperatorRule("TopK", top_k, cost=cost_per_input),
    *(
        _reduction(
            op,
            reduction_length=reduction_length,
            merge_operator=merge,
            stand_in="same_operator" if merge == "Add" else "",
        )
        for op, merge in MERGE_OPERATORS.items()
    ),
    *(_reduction(op, stand_in="reduction") for op in UNMERGEABLE_REDUCTIONS),
    *map(_reduction, ("ArgMax", "ArgMin")),
    *cost_only_rules(cost_per_input, "QLinearReduceMean ReduceSumInteger"),
)
