"""Operations give rules shapes and small constants; whole operators need everything."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from dicompiler.ir.operator_rule import Node, Operation, TensorInfo, whole_tensor

X = TensorInfo("x", TensorProto.FLOAT, (2, 3))
OPEN = TensorInfo("n", TensorProto.FLOAT, None)
AXES = TensorInfo("axes", TensorProto.INT64, (1,), is_constant=True, value=np.int64([1]))
NODE = Node("node", "Thing", "", 17, {"mode": "sum"}, ("x", "", "n", "axes"), ("y",))
OPERATION = Operation(NODE, (X, None, OPEN, AXES), (TensorInfo("y", TensorProto.FLOAT, (2, 5)),))


def test_only_small_constants_have_a_value() -> None:
    values = [OPERATION.constant_value(index) for index in range(5)]
    assert [value is None for value in values] == [True, True, True, False, True]
    assert values[3] is AXES.value


def test_missing_attributes_have_the_default() -> None:
    assert OPERATION.attribute("mode", "mean") == "sum"
    assert OPERATION.attribute("axis", -1) == -1


def test_whole_tensor_computes_everything_for_any_region() -> None:
    for region in (((0, 1), (0, 1)), ((0, 2), (0, 5))):
        piece = whole_tensor(OPERATION, region, None)
        assert piece.out == ((0, 2), (0, 5))
        assert piece.needs == OPERATION.full_needs() == (((0, 2), (0, 3)), None, None, ((0, 1),))
