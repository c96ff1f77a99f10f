"""Rules of quantized operators: those of the float operators with other inputs.

Scales and zero points are one number, or one per index of an axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from dicompiler.base.memoize import memoized
from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece, PieceFunction, counted_rules, whole_tensor
from dicompiler.ir.regions import Interval, Region, full_region
from dicompiler.operators.conv_pool import conv, conv_cost, conv_reduction_length, window_read_share
from dicompiler.operators.elementwise import broadcast_need
from dicompiler.operators.matmul import contraction, contraction_length, matmul_cost


def _parameter_need(operation: Operation, index: int, tensor: Region, axis: int | None) -> Region | None:
    """Return the region needed of a scale or zero point.

    Args:
        operation: The quantized operator.
        index: Input with the scale or zero point.
        tensor: Region that is read of the tensor that it describes.
        axis: Axis of that tensor along which it can vary; None: it is read in full.
    """
    shape = operation.input_shape(index) if operation.has_input(index) else None
    if shape is None or shape in ((), (1,)) or axis is None:
        return None if shape is None else full_region(shape)
    return (tensor[axis],) if len(shape) == 1 else broadcast_need(shape, tensor)


def quantize_linear(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """QuantizeLinear, DequantizeLinear: y[region] ← x[region], scale and zero point[its indices].

    Blocked quantization stays whole.
    """
    if operation.attribute("block_size", 0):
        return whole_tensor(operation, region, reduce)
    named = operation.attribute("axis", 1)
    axis = named if -len(region) <= named < len(region) else None
    return Piece(
        region, (region, *(_parameter_need(operation, i, region, axis) for i in range(1, len(operation.inputs))))
    )


@memoized
def _float_operation(operation: Operation, operands: tuple[int, ...]) -> Operation:
    return replace(operation, inputs=tuple(operation.inputs[i] for i in operands if i < len(operation.inputs)))


def piece_of_float_operator(
    piece: PieceFunction,
    operands: tuple[int, ...],
    about: Mapping[int, tuple[int, int]],
    operation: Operation,
    region: Region,
    reduce: Interval | None,
) -> Piece:
    """Return the piece of a quantized operator by the rule of its float operator.

    Args:
        piece: Piece function of the float operator.
        operands: Inputs of the quantized operator that are the inputs of the float operator.
        about: For each scale or zero point, its operand and the operand's axis along which it can vary.
        operation: The quantized operator.
        region: Requested region.
        reduce: Range of the reduction axis.
    """
    found = piece(_float_operation(operation, operands), region, reduce)
    read = dict(zip(operands, found.needs, strict=False))
    for index, (operand, axis) in about.items():
        tensor = read[operand] or ()
        read[index] = _parameter_need(operation, index, tensor, axis if len(tensor) > 1 else None)
    return replace(found, needs=tuple(read.get(index, need) for index, need in enumerate(operation.full_needs())))


_CONV_INTEGER = partial(piece_of_float_operator, conv, (0, 1), {3: (1, 0)})
_QLINEAR_CONV = partial(piece_of_float_operator, conv, (0, 3, 8), {4: (3, 0), 5: (3, 0)})
_MATMUL_INTEGER = partial(piece_of_float_operator, contraction, (0, 1), {2: (0, -2), 3: (1, -1)})
_QLINEAR_MATMUL = partial(
    piece_of_float_operator, contraction, (0, 3), {1: (0, -2), 2: (0, -2), 4: (3, -1), 5: (3, -1)}
)
_QLINEAR_CONV_COST, _QLINEAR_CONV_READ_SHARE = partial(conv_cost, weight=3), partial(window_read_share, weight=3)
RULES = (
    OperatorRule(
        "QuantizeLinear", quantize_linear, is_elementwise=True, stand_in="bounded_input", constant_stand_ins="- factor"
    ),
    OperatorRule("DequantizeLinear", quantize_linear, is_elementwise=True, constant_stand_ins="shift step"),
    OperatorRule(
        "ConvInteger",
        _CONV_INTEGER,
        reduction_length=conv_reduction_length,
        cost=conv_cost,
        read_share=window_read_share,
    ),
    OperatorRule(
        "QLinearConv", _QLINEAR_CONV, cost=_QLINEAR_CONV_COST, read_share=_QLINEAR_CONV_READ_SHARE, rounds_sums=True
    ),
    *counted_rules(_QLINEAR_CONV_COST, "QLinearConv"),
    OperatorRule("MatMulInteger", _MATMUL_INTEGER, reduction_length=contraction_length, cost=matmul_cost),
    OperatorRule("QLinearMatMul", _QLINEAR_MATMUL, cost=matmul_cost, rounds_sums=True),
)
