"""Rules of element-wise operators with broadcasting, and of BatchNormalization."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dicompiler.ir.operator_rule import (
    ORT_DOMAIN,
    Operation,
    OperatorRule,
    Piece,
    cost_per_output,
    whole_tensor,
    zero_cost,
)
from dicompiler.ir.regions import Interval, Region

UNARY_OPERATORS = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu "
    "HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid "
    "Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu"
).split()
BROADCASTING_OPERATORS = (
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or PRelu Pow Sub Sum Where Xor"
).split()


def broadcast_need(shape: Sequence[int], region: Region) -> Region:
    """Return the region of a broadcast input of shape `shape` that a region of the output reads.

    For example, the output region ((0, 2), (2, 4), (0, 5)) reads the region ((2, 4), (0, 1)) of an input of shape (8,
    1).
    """
    axes = zip(shape, region[len(region) - len(shape) :], strict=True)
    return tuple((0, 1) if extent == 1 else interval for extent, interval in axes)


def elementwise(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split an element-wise operator: each part reads its output region of each input, with broadcasting."""
    shapes = (None if tensor is None else tensor.shape for tensor in operation.inputs)
    return Piece(region, tuple(None if shape is None else broadcast_need(shape, region) for shape in shapes))


def batch_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a BatchNormalization: each part reads its output region of the input, and the parameters of its channels.

    The parameters are scale, shift, mean and variance. In training mode the node stays whole.
    """
    if operation.attribute("training_mode", 0):
        return whole_tensor(operation, region, reduce)
    # Before opset 9, the parameters can have the shape of the input without its first axis.
    channels = region[1:] if len(operation.input_shape(1)) > 1 else region[1:2] or ((0, 1),)
    return Piece(region, (region, *(channels for _ in operation.inputs[1:])))


def cast_like(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Split a CastLike: each part is a Cast to the output's type, which does not read the second input."""
    output = operation.outputs[0]
    assert output is not None
    return Piece(region, (region, None), {"to": output.dtype}, op="Cast")


def dropout(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Split a Dropout, which copies its input. In training mode it draws random numbers, so it stays whole."""
    mode = operation.constant_value(2)
    if operation.has_input(2) and (mode is None or mode.any()):
        return whole_tensor(operation, region, reduce)
    return elementwise(operation, region, reduce)


ORT_OPERATORS = ("BiasGelu", "FastGelu", "Gelu")
"""Element-wise operators of onnxruntime's own domain."""

STAND_INS = {
    "Relu": "Celu Elu Gelu HardSwish Mish Selu Softplus Swish",
    "Neg": "Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Exp Log Reciprocal Sin Sinh Softsign Sqrt Tan Tanh",
    "remainder": "HardSigmoid Sigmoid",
    "Sub": "Div Pow",
    "same_operator": "Add Mul",
    "weighted_sum": "Shrink",
    "Max": "Mean",
}
"""Operators by their stand-in: the operator or integer function that replaces them in the exact check of `verify`.

The check computes with small integers. Elu, for example, would round its results, and is replaced by the similar Relu.
"""
CONSTANT_STAND_INS = {
    "shift": "Add Div Max Mean Min Pow Sub Sum Where",
    "factor": "Mul",
    "- slope": "PRelu",
    "- min max": "Clip",
}
"""Operators by the kinds of integers that replace their constant inputs in the exact check of `verify`.

A key has one kind for each input, and the last kind is for all further inputs. An input with `-` keeps its values.
"""


_rule = partial(OperatorRule, is_elementwise=True)


def _standard_rule(op: str) -> OperatorRule:
    tables = (STAND_INS, CONSTANT_STAND_INS)
    stand_in, constants = (next((key for key, ops in table.items() if op in ops.split()), "") for table in tables)
    cost = zero_cost if op in ("BitCast", "Cast", "Identity") else cost_per_output
    return _rule(op, elementwise, cost=cost, stand_in=stand_in, constant_stand_ins=constants)


RULES = (
    *(_standard_rule(op) for op in (*UNARY_OPERATORS, *BROADCASTING_OPERATORS, "BitCast")),
    *(
        _rule(op, elementwise, ORT_DOMAIN, stand_in="weighted_sum", constant_stand_ins="- shift")
        for op in ORT_OPERATORS
    ),
    _rule("BatchNormalization", batch_normalization, constant_stand_ins="- scale shift shift variance"),
    _rule("CastLike", cast_like, cost=zero_cost),
    _rule("Dropout", dropout, cost=zero_cost),
)
