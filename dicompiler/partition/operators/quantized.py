"""Rules of quantized operators, which are split like the corresponding float operators.

Their scales and zero points are additional inputs. Each is one number, or has one number per index of an axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from dicompiler.base.memoize import memoized
from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece, PieceFunction, cost_only_rules, whole_tensor
from dicompiler.ir.regions import Interval, Region, full_region
from dicompiler.partition.operators.conv_pool import conv, conv_cost, conv_reduction_length, window_read_share
from dicompiler.partition.operators.elementwise import broadcast_need
from dicompiler.partition.operators.matmul import contraction, contraction_length, matmul_cost


def _parameter_need(operation: Operation, index: int, tensor_region: Region, axis: int | None) -> Region | None:
    """Return the region of a scale or zero point that a piece reads; None if the node has no input `index`.

    Args:
        operation: The quantized operator.
        index: Index of the scale or zero point among the inputs.
        tensor_region: Region of the quantized tensor that the piece reads.
        axis: Axis of the quantized tensor along which the scale or zero point can vary. None: the piece reads all
            numbers.
    """
    shape = operation.input_shape(index) if operation.has_input(index) else None
    if shape is None or shape in ((), (1,)) or axis is None:
        return None if shape is None else full_region(shape)
    return (tensor_region[axis],) if len(shape) == 1 else broadcast_need(shape, tensor_region)


def quantize_linear(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a QuantizeLinear or DequantizeLinear: each part reads its output region of the input.

    It also reads the scales and zero points of this region. With blocked quantization the node stays whole.
    """
    if operation.attribute("block_size", 0):
        return whole_tensor(operation, region, reduce)
    axis = operation.attribute("axis", 1)
    axis = axis if -len(region) <= axis < len(region) else None
    parameters = [_parameter_need(operation, i, region, axis) for i in range(1, len(operation.inputs))]
    return Piece(region, (region, *parameters))


@memoized
def _float_operation(operation: Operation, operands: tuple[int, ...]) -> Operation:
    return replace(operation, inputs=tuple(operation.inputs[i] for i in operands if i < len(operation.inputs)))


def piece_of_float_operator(
    float_piece: PieceFunction,
    operands: tuple[int, ...],
    parameters: Mapping[int, tuple[int, int]],
    operation: Operation,
    region: Region,
    reduce: Interval | None,
) -> Piece:
    """Split a quantized operator: like its float operator; each part also reads its scales and zero points.

    Args:
        float_piece: Piece function of the float operator.
        operands: Indices of the inputs that the float operator has too.
        parameters: For each scale and zero point, by input index: the index of its operand, and the axis of this
            operand along which the scale or zero point can vary.
        operation: The quantized operator.
        region: Requested region of the output.
        reduce: Range of the reduction axis; None for the full sum.
    """
    piece = float_piece(_float_operation(operation, operands), region, reduce)
    needs = dict(zip(operands, piece.needs, strict=False))
    for index, (operand, axis) in parameters.items():
        tensor_region = needs[operand] or ()
        needs[index] = _parameter_need(operation, index, tensor_region, axis if len(tensor_region) > 1 else None)
    return replace(piece, needs=tuple(needs.get(index, need) for index, need in enumerate(operation.full_needs())))


_CONV_INTEGER = partial(piece_of_float_operator, conv, (0, 1), {3: (1, 0)})
_QLINEAR_CONV = partial(piece_of_float_operator, conv, (0, 3, 8), {4: (3, 0), 5: (3, 0)})
_MATMUL_INTEGER = partial(piece_of_float_operator, contraction, (0, 1), {2: (0, -2), 3: (1, -1)})
_QLINEAR_MATMUL = partial(
    piece_of_float_operator, contraction, (0, 3), {1: (0, -2), 2: (0, -2), 4: (3, -1), 5: (3, -1)}
)
_QLINEAR_CONV_COST = partial(conv_cost, weight_index=3)
_QLINEAR_CONV_READ_SHARE = partial(window_read_share, weight_index=3)
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
    *cost_only_rules(_QLINEAR_CONV_COST, "QLinearConv"),
    OperatorRule("MatMulInteger", _MATMUL_INTEGER, reduction_length=contraction_length, cost=matmul_cost),
    OperatorRule("QLinearMatMul", _QLINEAR_MATMUL, cost=matmul_cost, rounds_sums=True),
)
