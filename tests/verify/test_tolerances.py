"""Tolerances: steps of the scale for quantized outputs, else by the coarsest type on the path."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from dicompiler.ir.onnx.model import Model
from dicompiler.verify.tolerances import (
    MAX_QUANTIZATION_STEPS,
    RELATIVE_TOLERANCES,
    Tolerance,
    output_tolerances,
    quantized_tolerances,
)

HEAD = '<ir_version: 8, opset_import: ["": 17]> g (int8[1, 4] q, float[1, 4] x) =>'
SCALES = "<float s = {0.5}, int8 z = {0}>"


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("(float[1, 4] y) {S} { y = DequantizeLinear (q, s, z) }", {"y": Tolerance(MAX_QUANTIZATION_STEPS, 0.5)}),
        (
            "(float[1, 4] y) {S} { d = DequantizeLinear (q, s, z) y = Flatten (d) }",
            {"y": Tolerance(MAX_QUANTIZATION_STEPS, 0.5)},
        ),
        (
            "(float[1, 4] y) {S} { d = DequantizeLinear (q, s, z) y = Softmax (d) }",
            {"y": Tolerance(MAX_QUANTIZATION_STEPS / 256)},
        ),
        ("(int8[1, 4] y) {S} { y = QuantizeLinear (x, s, z) }", {"y": Tolerance(MAX_QUANTIZATION_STEPS, 1.0)}),
        ("(int64[1, 1] y) {S} { d = DequantizeLinear (q, s, z) y = ArgMax <axis = 1> (d) }", {}),
        ("(float[1, 4] y) { y = Relu (x) }", {}),
    ],
)
def test_only_outputs_of_quantized_networks_have_steps(text: str, allowed: dict[str, Tolerance]) -> None:
    model = Model.load(onnx.parser.parse_model(f"{HEAD} {text.replace('{S}', SCALES)}"))
    found = quantized_tolerances(model)
    assert found.keys() == allowed.keys()
    for name, one in allowed.items():
        assert found[name] == one


def test_computed_scale_allows_share_of_range() -> None:
    text = "(float[1, 4] y) { s = ReduceMax <keepdims = 0> (x) y = DequantizeLinear (q, s) }"
    found = quantized_tolerances(Model.load(onnx.parser.parse_model(f"{HEAD} {text}")))
    assert found == {"y": Tolerance(np.float64(MAX_QUANTIZATION_STEPS) / 256)}


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        # Converters to float16 that keep the types of inputs and outputs write such models.
        (
            "{ a = Cast <to = 10> (x) b = Sigmoid (a) y = Cast <to = 1> (b) }",
            {"y": Tolerance(RELATIVE_TOLERANCES["float16"])},
        ),
        (
            "{ a = Cast <to = 16> (x) b = Cast <to = 1> (a) y = Exp (b) }",
            {"y": Tolerance(RELATIVE_TOLERANCES["bfloat16"])},
        ),
        # Weights in float16 were rounded before the computation.
        ("<float16[4] w = {1, 2, 3, 4}> { a = Cast <to = 1> (w) y = Add (x, a) }", {}),
        ("{ a = Cast <to = 11> (x) b = Exp (a) y = Cast <to = 1> (b) }", {}),
    ],
)
def test_tolerance_follows_from_coarsest_type(text: str, allowed: dict[str, Tolerance]) -> None:
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(f"{HEAD} (float[1, 4] y) {text}"))
    assert output_tolerances(Model.load(proto)) == allowed
