"""Exactness: every sum of a check model stays below the limit of its type, and the largest is named."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper
from support.exact_models import SMALL, from_text, network

from dicompiler.ir.onnx.model import Model
from dicompiler.verify.exact import check_model, measure_peak
from dicompiler.verify.exact.exactness_check import compute_all_tensors
from dicompiler.verify.exact.sparse_filters import WEIGHTED_OPS
from dicompiler.verify.executor import run_model


def halved(model: Model) -> Model:
    """Return the same network in float16."""
    proto = model.to_proto()
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return Model.load(proto)


@pytest.mark.parametrize("name", SMALL)
def test_sums_are_exact_and_weights_are_small_integers(name: str) -> None:
    checked, inputs = check_model(network(name), 1)
    assert measure_peak(checked, inputs).share < 1
    for node in checked.proto.graph.node:
        if node.op_type in WEIGHTED_OPS:
            assert {-1, 1} <= set(np.unique(checked.array(node.input[1]))) <= {-1, 0, 1}
    for array in (*compute_all_tensors(checked, inputs).values(), *inputs.values()):
        scaled = array * 64
        assert np.array_equal(scaled, np.rint(scaled))
        assert np.abs(array).max() < 2**24


@pytest.mark.parametrize("name", ["tiny", "quirks", "lenet"])
def test_float16_networks_stay_in_exact_range(name: str) -> None:
    checked, inputs = check_model(halved(network(name)), 0)
    assert all(array.dtype == np.float16 for array in inputs.values())
    assert all(np.abs(array).max() < 2**11 for array in compute_all_tensors(checked, inputs).values())
    output = run_model(checked, inputs)["output"]
    assert output.dtype == np.float16
    assert np.unique(output).size > 3


@pytest.mark.parametrize(("values", "share"), [([3.0, -4.0], 7 / 2**24), ([0.5, 0.25], 3 / 2**24), ([0.0, 0.0], 0.0)])
def test_peak_is_sum_of_absolute_values_in_last_places(values: list[float], share: float) -> None:
    model = from_text(
        '<ir_version: 8, opset_import: ["": 17]> g (float[1] a, float[1] b) => (float[1] y) { y = Add (a, b) }'
    )
    found = measure_peak(model, {name: np.float32([value]) for name, value in zip("ab", values, strict=True)})
    assert found.share == share
    assert found.tensor == ("y" if share else "")


def test_names_largest_tensor_and_rejects_rounding() -> None:
    model = from_text(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] z)
        { a = Add (x, x)  b = Mul (a, a)  z = Neg (a) }"""
    )
    found = measure_peak(model, {"x": np.float32([3, 1000])})
    assert (found.tensor, found.magnitude) == ("b", 4e6)
    rounds = from_text('<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Exp (x) }')
    assert measure_peak(rounds, {"x": np.float32([1, 2])}).magnitude == float("inf")
