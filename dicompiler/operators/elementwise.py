"""Rules of element-wise operators with broadcasting, and of BatchNormalization.

Inputs are read in the region of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return the region that `region` of the output needs of a broadcast input.

    Axes are aligned at the right, and an axis of extent 1 is read whole: shape (8, 1), region of a (2, 8, 5) output ⇒
    ((c0, c1), (0, 1)).
    """
    axes = zip(shape, region[len(region) - len(shape) :], strict=True)
    return tuple((0, 1) if extent == 1 else interval for extent, interval in axes)


def elementwise(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """Element-wise operators: y[region] ← the same region of each input, with broadcasting."""
    shapes = (None if tensor is None else tensor.shape for tensor in operation.inputs)
    return Piece(region, tuple(None if shape is None else broadcast_need(shape, region) for shape in shapes))


def batch_normalization(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """BatchNormalization: y[n, c, …] ← x[n, c, …], and c of scale, shift, mean and variance.

    Training: stays whole.

    Before opset 9, the latter can have the shape of x without its first axis.
    """
    if operation.attribute("training_mode", 0):
        return whole_tensor(operation, region, reduce)
    channels = region[1:] if len(operation.input_shape(1)) > 1 else region[1:2] or ((0, 1),)
    return Piece(region, (region, *(channels for _ in operation.inputs[1:])))


def cast_like(operation: Operation, region: Region, reduce: Interval | None) -> Piece:  # noqa: ARG001
    """CastLike: a piece is a Cast to the output's type."""
    output = operation.outputs[0]
    assert output is not None
    return Piece(region, (region, None), {"to": output.dtype}, op="Cast")


def dropout(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Dropout: the identity in inference.

    In training mode, it draws random numbers for the whole tensor and stays whole.
    """
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
"""Operators by stand-in in the exact check. Rectifiers are replaced by Relu, and bounded functions stay bounded."""
CONSTANT_STAND_INS = {
    "shift": "Add Div Max Mean Min Pow Sub Sum Where",
    "factor": "Mul",
    "- slope": "PRelu",
    "- min max": "Clip",
}
"""Operators by the stand-ins of their constants in the exact check."""


def _standard_rule(op: str) -> OperatorRule:
    """Return the rule of an element-wise operator of the standard domain."""
    stand_in, constants = (
        next((word for word, ops in table.items() if op in ops.split()), "")
        for table in (STAND_INS, CONSTANT_STAND_INS)
    )
    cost = zero_cost if op in ("BitCast", "Cast", "Identity") else cost_per_output
    return OperatorRule(
        op, elementwise, is_elementwise=True, cost=cost, stand_in=stand_in, constant_stand_ins=constants
    )


RULES = (
    *(_standard_rule(op) for op in (*UNARY_OPERATORS, *BROADCASTING_OPERATORS, "BitCast")),
    *(
        OperatorRule(
            op, elementwise, ORT_DOMAIN, is_elementwise=True, stand_in="weighted_sum", constant_stand_ins="- shift"
        )
        for op in ORT_OPERATORS
    ),
    OperatorRule(
        "BatchNormalization",
        batch_normalization,
        is_elementwise=True,
        constant_stand_ins="- scale shift shift variance",
    ),
    OperatorRule("CastLike", cast_like, is_elementwise=True, cost=zero_cost),
    OperatorRule("Dropout", dropout, is_elementwise=True, cost=zero_cost),
)
