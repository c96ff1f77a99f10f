"""Reductions over axes (ReduceSum, ReduceMean, ArgMax …): those axes are read in full, the others pass.

Where parts of a reduced axis can be put together (sums, maxima, minima), the first reduced axis can be cut by LIP.
"""

from __future__ import annotations

from dicompiler.ir.regions import Interval, Region, with_interval
from dicompiler.ir.rule import Operation, OperatorRule, Piece, counted, taken, whole

MERGED = {"ReduceSum": "Add", "ReduceL1": "Add", "ReduceMax": "Max", "ReduceMin": "Min"}
"""How partial results become the result. A mean is none: its parts would count by their numbers of elements."""
OTHERS = "ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceProd ReduceSumSquare".split()


def reduced_axes(operation: Operation) -> tuple[int, ...] | None:
    """The axes that go: an attribute, or since opset 13 (ReduceSum) or 18 an input; None where they are not known."""
    rank = len(operation.shape(0))
    axes = operation.attribute("axes")
    if operation.has(1):
        if (value := operation.value(1)) is None:
            return None
        axes = value.tolist()
    if not axes:
        return () if operation.attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis % rank for axis in axes}))


def _need(operation: Operation, axes: tuple[int, ...], region: Region) -> Region:
    """The input region: `axes` in full, the others as in `region`, which may have lost those axes."""
    if operation.attribute("keepdims", 1):
        return tuple((0, extent) if axis in axes else region[axis] for axis, extent in enumerate(operation.shape(0)))
    rest = iter(region)
    return tuple((0, extent) if axis in axes else next(rest) for axis, extent in enumerate(operation.shape(0)))


def reduce_axes(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """ReduceSum and its kin: y[kept axes] ← x[kept axes, all of the reduced ones, or a range of the first of them]."""
    axes = reduced_axes(operation)
    if axes is None:
        return whole(operation, region, reduce)
    need = _need(operation, axes, region)
    if reduce is not None:
        need = with_interval(need, _cut_axis(operation, axes), reduce)
    return Piece(region, (need, *operation.full_needs()[1:]))


def _cut_axis(operation: Operation, axes: tuple[int, ...]) -> int:
    """The first reduced axis that is longer than one element; the first where there is none."""
    shape = operation.shape(0)
    return next((axis for axis in axes if shape[axis] > 1), axes[0])


def reduction(operation: Operation) -> int | None:
    """The extent of the axis that LIP cuts; None where nothing is reduced, or where onnxruntime cannot join parts of
    this type."""
    from onnx import TensorProto

    tensor, axes = operation.inputs[0], reduced_axes(operation)
    if not axes or tensor is None:
        return None
    floats = (TensorProto.FLOAT, TensorProto.DOUBLE)
    types = floats if operation.node.opset < 12 else (*floats, TensorProto.INT32, TensorProto.INT64)
    return operation.shape(0)[_cut_axis(operation, axes)] if tensor.dtype in types else None


def arg(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """ArgMax, ArgMin: the axis in full, the others pass."""
    axis = operation.attribute("axis", 0) % len(operation.shape(0))
    return Piece(region, (_need(operation, (axis,), region),))


RULES = (
    *(OperatorRule(op, reduce_axes, reduction=reduction, merge=merge, cost=taken) for op, merge in MERGED.items()),
    *(OperatorRule(op, reduce_axes, cost=taken, stand_in="reduce") for op in OTHERS),
    *(OperatorRule(op, arg, cost=taken) for op in ("ArgMax", "ArgMin")),
    *counted(taken, "QLinearReduceMean ReduceSumInteger"),
)
