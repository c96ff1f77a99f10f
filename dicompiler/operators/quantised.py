"""Operators on quantised tensors: each is the one on floats with other inputs. Their scales and zero points are one
number, or one for each index of an axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from dicompiler.base.remembering import remembered
from dicompiler.ir.regions import Interval, Region, full
from dicompiler.ir.rule import Operation, OperatorRule, Piece, PieceFunction, counted, whole
from dicompiler.operators.dense import contraction, product, summed_extent
from dicompiler.operators.elementwise import broadcast_need
from dicompiler.operators.windows import conv, convolved, strided, ungrouped


def _about(operation: Operation, index: int, tensor: Region, axis: int | None) -> Region | None:
    """What a scale or zero point gives to a region of the tensor that it is about: one number, one for each index of
    that axis, or numbers that broadcast to it."""
    shape = operation.shape(index) if operation.has(index) else None
    if shape is None or shape in ((), (1,)) or axis is None:
        return None if shape is None else full(shape)
    return (tensor[axis],) if len(shape) == 1 else broadcast_need(shape, tensor)


def quantize_linear(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """QuantizeLinear, DequantizeLinear: out region → the same region of x, and its indices along `axis` of scale and
    zero point. In blocks: whole."""
    if operation.attribute("block_size", 0):
        return whole(operation, region, reduce)
    named = operation.attribute("axis", 1)
    axis = named if -len(region) <= named < len(region) else None
    return Piece(region, (region, *(_about(operation, i, region, axis) for i in range(1, len(operation.inputs)))))


@remembered
def _of_floats(operation: Operation, operands: tuple[int, ...]) -> Operation:
    return replace(operation, inputs=tuple(operation.inputs[i] for i in operands if i < len(operation.inputs)))


def on_floats(
    piece: PieceFunction,
    operands: tuple[int, ...],
    about: Mapping[int, tuple[int, int]],
    operation: Operation,
    region: Region,
    reduce: Interval | None,
) -> Piece:
    """The `piece` of the operator on floats, whose inputs are `operands` of this one's. about: scale or zero point →
    (the operand that it is about, the axis of that along which there may be many); a vector has no axis."""
    found = piece(_of_floats(operation, operands), region, reduce)
    read = dict(zip(operands, found.needs, strict=False))
    for index, (operand, axis) in about.items():
        tensor = read[operand] or ()
        read[index] = _about(operation, index, tensor, axis if len(tensor) > 1 else None)
    return replace(found, needs=tuple(read.get(index, need) for index, need in enumerate(operation.full_needs())))


_CONV_INTEGER = partial(on_floats, conv, (0, 1), {3: (1, 0)})
_QLINEAR_CONV = partial(on_floats, conv, (0, 3, 8), {4: (3, 0), 5: (3, 0)})
_MATMUL_INTEGER = partial(on_floats, contraction, (0, 1), {2: (0, -2), 3: (1, -1)})
_QLINEAR_MATMUL = partial(on_floats, contraction, (0, 3), {1: (0, -2), 2: (0, -2), 4: (3, -1), 5: (3, -1)})
_CONVOLVED, _STRIDED = partial(convolved, weight=3), partial(strided, weight=3)
RULES = (
    OperatorRule("QuantizeLinear", quantize_linear, elementwise=True, stand_in="bounded", constants="- factor"),
    OperatorRule("DequantizeLinear", quantize_linear, elementwise=True, constants="shift step"),
    OperatorRule("ConvInteger", _CONV_INTEGER, reduction=ungrouped, cost=convolved, reads=strided),
    OperatorRule("QLinearConv", _QLINEAR_CONV, cost=_CONVOLVED, reads=_STRIDED, rounds=True),
    *counted(_CONVOLVED, "QLinearConv"),
    OperatorRule("MatMulInteger", _MATMUL_INTEGER, reduction=summed_extent, cost=product),
    OperatorRule("QLinearMatMul", _QLINEAR_MATMUL, cost=product, rounds=True),
)
