"""Values of check models: channels vary and stay alive, and inputs are small numbers of their type."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from support.exact_models import SMALL, from_text, network

from dicompiler.verify.exact import check_model, measure_coverage, seeds_needed
from dicompiler.verify.exact.exactness_check import compute_all_tensors
from dicompiler.verify.executor import run_model


@pytest.mark.parametrize("name", SMALL)
def test_most_channels_vary_over_image(name: str) -> None:
    checked, inputs = check_model(network(name), 0)
    tensors = compute_all_tensors(checked, inputs)
    for node in checked.proto.graph.node:
        array = tensors[node.output[0]]
        if node.op_type == "Conv" and array.shape[2] * array.shape[3] > 1:
            assert (array.max((2, 3)) != array.min((2, 3))).mean() > 0.5


LIMITS = {"low": -1.0, "high": 1.0}


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("y = ConvTranspose <strides = [2, 2]> (x, w, b)", {"w": (4, 3, 3, 3), "b": (3,)}),
        ("f = Flatten (x) y = Gemm <alpha = 0.3, beta = 0.7> (f, w, b)", {"w": (144, 5), "b": (5,)}),
        ("f = Flatten (x) y = Gemm <transA = 1, transB = 1> (w, f)", {"w": (144, 5)}),
        ("y = MatMul (x, w)", {"w": (6, 3)}),
        ("y = MatMul (w, x)", {"w": (1, 4, 5, 6)}),
        ("m = MatMul (x, w) y = Add (m, b)", {"w": (4, 6, 3), "b": (3,)}),
        ("y = PRelu (x, w)", {"w": (4, 1, 1)}),
        ("y = LeakyRelu <alpha = 0.1> (x)", {}),
        ("m = Mul (x, w) y = Add (m, b)", {"w": (4, 1, 1), "b": (4, 1, 1)}),
        ("y = Concat <axis = 1> (x, w)", {"w": (1, 2, 6, 6)}),
        ("y = Clip (x, low, high)", {"low": (), "high": ()}),
        ("s = Sigmoid (x) y = Mul (x, s)", {}),
        ("y = Div (x, w)", {"w": ()}),
        ("c = Cast <to = 7> (x) z = Sub (c, c) g = Gather <axis = 0> (w, z) y = Mul (g, x)", {"w": (9,)}),
    ],
)
def test_other_operators_become_exact(body: str, constants: dict[str, tuple[int, ...]]) -> None:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in constants.items()}
    arrays |= {name: np.array(limit, np.float32) for name, limit in LIMITS.items() if name in arrays}
    model = from_text(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 6, 6] x) => (float y) {{ {body} }}', arrays
    )
    model.proto.graph.output[0].type.tensor_type.ClearField("shape")
    for seed in (0, 1):
        checked, inputs = check_model(model, seed)
        output = run_model(checked, inputs)["y"]
        assert np.array_equal(output, np.rint(output))
        assert np.unique(output).size > 2
        (other,) = ReferenceEvaluator(checked.to_proto()).run(None, inputs)
        assert np.array_equal(output, other)
    read = measure_coverage(check_model(model, seed)[0] for seed in range(seeds_needed(model)))
    assert (read.taps_read, read.channels_read) == (read.taps, read.channels)


def test_batch_normalization_before_relu_keeps_channels_alive() -> None:
    checked, _ = check_model(network("tiny"), 0)
    nodes = {node.name: node for node in checked.proto.graph.node}
    weight, scale, variance = (
        checked.array(nodes[name].input[index]) for name, index in (("stem", 1), ("stem.bn", 1), ("stem.bn", 4))
    )
    assert set(scale / np.sqrt(variance)) == {-1, 1}
    # The variances differ, so a rule that uses the variance of another channel gives another result.
    assert set(variance) == {1, 4, 16}
    assert all((scale[channel] * weight[channel] > 0).any() for channel in range(scale.size))


def test_inputs_of_other_types_are_small() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (int64[5] i, bool[5] b, double[5] d) => (int64[5] y, bool[5] c, double[5] e) {
          y = Identity (i)
          c = Not (b)
          e = Neg (d) }""")
    _, inputs = check_model(model, 0)
    assert {name: array.dtype.name for name, array in inputs.items()} == {"i": "int64", "b": "bool", "d": "float64"}
    assert inputs["i"].min() >= 0
