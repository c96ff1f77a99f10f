"""Building blocks of stand-ins: bounded values, sums in each opset, and attributes of the call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from dicompiler.ir.onnx.model import Model
from dicompiler.verify.exact.function_builder import MODULUS, StandInCall, nonnegative_mod, reduce_sum
from dicompiler.verify.executor import run_model

X = np.array([[-40, -16, -1, 0], [1, 15, 16, 100]], np.float32)


def ran(nodes: Sequence[onnx.NodeProto], opset: int, output: str, shape: Sequence[int]) -> np.ndarray:
    """Return the result of the nodes for X0 = X."""
    values = [helper.make_tensor_value_info(name, 1, own) for name, own in (("X0", X.shape), (output, shape))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    result: np.ndarray = run_model(Model.load(model), {"X0": X})[output]
    return result


@pytest.mark.parametrize("opset", [9, 13, 17])
def test_nonnegative_mod_returns_remainders(opset: int) -> None:
    call = StandInCall("Softmax", opset, 1, TensorProto.FLOAT, frozenset())
    assert np.array_equal(ran(nonnegative_mod(call), opset, "bounded", X.shape), np.mod(X, MODULUS))


@pytest.mark.parametrize("opset", [9, 11, 13, 17])
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_sum_keeps_axis(opset: int, axis: int) -> None:
    call = StandInCall("Softmax", opset, 1, TensorProto.FLOAT, frozenset())
    expected = X.sum(axis, keepdims=True)
    assert np.array_equal(ran(reduce_sum(call, "X0", axis, "sum"), opset, "sum", expected.shape), expected)


def test_node_refers_to_shared_attributes_of_call() -> None:
    call = StandInCall("AveragePool", 17, 1, TensorProto.FLOAT, frozenset())
    node = call.node("MaxPool", ["X0"], ["Y"], strides=[1, 1])
    referred = {entry.name for entry in node.attribute if entry.ref_attr_name}
    assert {"kernel_shape", "pads", "auto_pad", "ceil_mode"} <= referred
    assert "strides" not in referred
    assert "dilations" not in referred  # Before opset 19, AveragePool has no attribute dilations.
    assert call.input_names == ["X0"]


def test_typed_constant_has_type_of_first_input() -> None:
    made = StandInCall("Softmax", 17, 1, TensorProto.FLOAT16, frozenset()).typed_constant("two", 2)
    array = onnx.numpy_helper.to_array(made.attribute[0].t)
    assert (array.dtype, float(array)) == (np.float16, 2.0)
