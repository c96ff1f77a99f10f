"""Operators on quantised tensors: their scales and zero points are one number, or one for each index of an axis."""

from __future__ import annotations

from dicompiler.ir.regions import Interval, Region, full
from dicompiler.ir.rule import Operation, OperatorRule, Piece
from dicompiler.operators.dense import matmul, matmul_reduction
from dicompiler.operators.elementwise import broadcast_need
from dicompiler.operators.windows import conv_core, ungrouped


def _along(operation: Operation, index: int, interval: Interval) -> Region | None:
    """A scale or zero point: the interval of it where it has one for each index, all of it where it is one number."""
    if not operation.has(index):
        return None
    shape = operation.shape(index)
    return full(shape) if shape in ((), (1,)) else (interval,)


def quantize_linear(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """QuantizeLinear, DequantizeLinear: out region → the same region of x, and its indices along `axis` of scale and
    zero point. In blocks: whole."""
    if operation.attribute("block_size", 0):
        return Piece(full(operation.out_shape), operation.full_needs())
    axis = operation.attribute("axis", 1)
    interval = region[axis] if -len(region) <= axis < len(region) else (0, 1)
    return Piece(region, (region, *(_along(operation, i, interval) for i in range(1, len(operation.inputs)))))


def conv_integer(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """ConvInteger: as Conv, without bias; w's zero point may be one for each filter."""
    core = conv_core(operation, 1, region, reduce)
    zeros = [_along(operation, index, core.filters) for index in range(2, len(operation.inputs))]
    return Piece(core.out, (core.x, core.weight, *zeros), core.attributes)


def qlinear_conv(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """QLinearConv(x, its scale and zero point, w, its two, y's two, bias): as Conv; what rounds cannot be summed."""
    core = conv_core(operation, 3, region, None)
    needs = list(operation.full_needs())
    needs[0], needs[3] = core.x, core.weight
    for index in (4, 5, 8):
        if index < len(needs):
            needs[index] = _along(operation, index, core.filters)
    return Piece(core.out, tuple(needs), core.attributes)


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
    needs = list(operation.full_needs())
    matrices = matmul(operation, region, reduce, right).needs
    needs[0], needs[right] = matrices
    for index, operand in about.items():
        if index < len(needs):
            needs[index] = _of_matrix(operation, index, matrices[operand] or (), operand - 2)
    return Piece(region, tuple(needs))


RULES = (
    *(OperatorRule(op, quantize_linear, elementwise=True) for op in ("QuantizeLinear", "DequantizeLinear")),
    OperatorRule("ConvInteger", conv_integer, reduction=ungrouped),
    OperatorRule("QLinearConv", qlinear_conv),
    OperatorRule("MatMulInteger", matmul_integer, reduction=matmul_reduction),
    OperatorRule("QLinearMatMul", qlinear_matmul),
)
