"""Operators on quantised tensors: their scales and zero points are one number, or one for each index of an axis."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dicompiler.ir.regions import Interval, Region, full
from dicompiler.ir.rule import Operation, OperatorRule, Piece, counted, whole
from dicompiler.operators.dense import matmul, matmul_reduction, product
from dicompiler.operators.elementwise import broadcast_need
from dicompiler.operators.windows import conv_core, convolved, strided, ungrouped


def _along(operation: Operation, index: int, interval: Interval) -> Region | None:
    """A scale or zero point: the interval of it where it has one for each index, all of it where it is one number."""
    if not operation.has(index):
        return None
    shape = operation.shape(index)
    return full(shape) if shape in ((), (1,)) else (interval,)


def quantize_linear(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """QuantizeLinear, DequantizeLinear: out region → the same region of x, and its indices along `axis` of scale and
    zero point. In blocks: whole."""
    if operation.attribute("block_size", 0):
        return whole(operation, region, reduce)
    axis = operation.attribute("axis", 1)
    interval = region[axis] if -len(region) <= axis < len(region) else (0, 1)
    return Piece(region, (region, *(_along(operation, i, interval) for i in range(1, len(operation.inputs)))))


def conv_integer(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """ConvInteger: as Conv, without bias; w's zero point may be one for each filter."""
    core = conv_core(operation, 1, region, reduce)
    zeros = (_along(operation, index, core.out[1]) for index in range(2, len(operation.inputs)))
    return Piece(core.out, (*core.needs, *zeros), core.attributes)


def qlinear_conv(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """QLinearConv(x, its scale and zero point, w, its two, y's two, bias): as Conv; what rounds cannot be summed."""
    core = conv_core(operation, 3, region, None)
    changed = dict(zip((0, 3), core.needs, strict=True))
    changed |= {index: _along(operation, index, core.out[1]) for index in (4, 5, 8)}
    return Piece(core.out, _with(operation, changed), core.attributes)


def _of_matrix(operation: Operation, index: int, matrix: Region, axis: int) -> Region | None:
    """What a matrix's scale or zero point gives to the region `matrix`: one number, a vector along the axis (-2: rows,
    -1: columns), or a tensor of the matrix's rank that broadcasts to it."""
    if not operation.has(index):
        return None
    shape = operation.shape(index)
    if len(shape) < 2:
        return _along(operation, index, matrix[axis]) if len(matrix) > 1 else full(shape)
    return broadcast_need(shape, matrix)


def matmul_integer(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """MatMulInteger: as MatMul; the zero points of the rows of a and of the columns of b."""
    return _matmul(operation, region, reduce, 1, {2: 0, 3: 1})


def qlinear_matmul(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """QLinearMatMul(a, its scale and zero point, b, its two, y's two): as MatMul; what rounds cannot be summed."""
    return _matmul(operation, region, None, 3, {1: 0, 2: 0, 4: 1, 5: 1})


def _matmul(operation: Operation, region: Region, reduce: Interval | None, right: int, about: dict[int, int]) -> Piece:
    """The matrices at inputs 0 and `right`; `about`: input index → the operand (0: a, 1: b) that it is about."""
    matrices = matmul(operation, region, reduce, right).needs
    changed = dict(zip((0, right), matrices, strict=True))
    changed |= {index: _of_matrix(operation, index, matrices[of] or (), of - 2) for index, of in about.items()}
    return Piece(region, _with(operation, changed))


def _with(operation: Operation, changed: Mapping[int, Region | None]) -> tuple[Region | None, ...]:
    """All of every input, but for what has `changed`."""
    return tuple(changed.get(index, need) for index, need in enumerate(operation.full_needs()))


RULES = (
    *(OperatorRule(op, quantize_linear, elementwise=True) for op in ("QuantizeLinear", "DequantizeLinear")),
    OperatorRule("ConvInteger", conv_integer, reduction=ungrouped, cost=convolved, reads=partial(strided, weight=1)),
    OperatorRule(
        "QLinearConv", qlinear_conv, cost=partial(convolved, weight=3), reads=partial(strided, weight=3), rounds=True
    ),
    *counted(partial(convolved, weight=3), "QLinearConv"),
    OperatorRule("MatMulInteger", matmul_integer, reduction=matmul_reduction, cost=product),
    OperatorRule("QLinearMatMul", qlinear_matmul, cost=product, rounds=True),
)
