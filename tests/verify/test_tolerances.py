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


@pytest.mark.parametrize("level", [0, 4])
def test_products_with_int8_activations_allow_a_share_of_the_range(level: int) -> None:
    node = onnx.helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=32, N=1, accuracy_level=level
    )
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, n)) for name, n in (("x", 32), ("y", 1))
    ]
    constants = [
        onnx.numpy_helper.from_array(np.zeros((1, 1, 16), np.uint8), "w"),
        onnx.numpy_helper.from_array(np.zeros((1, 1), np.float32), "s"),
    ]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], constants)
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    found = quantized_tolerances(Model.load(onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)))
    assert found == ({"y": Tolerance(MAX_QUANTIZATION_STEPS / 256)} if level else {})


def test_computed_scale_allows_share_of_range() -> None:
    text = "(float[1, 4] y) { s = ReduceMax <keepdims = 0> (x) y = DequantizeLinear (q, s) }"
    found = quantized_tolerances(Model.load(onnx.parser.parse_model(f"{HEAD} {text}")))
    assert found == {"y": Tolerance(np.float64(MAX_QUANTIZATION_STEPS) / 256)}


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        # Converters to float16 write such models if inputs and outputs must stay float32.
        (
            "{ a = Cast <to = 10> (x) b = Sigmoid (a) y = Cast <to = 1> (b) }",
            {"y": Tolerance(RELATIVE_TOLERANCES["float16"])},
        ),
        (
            "{ a = Cast <to = 16> (x) b = Cast <to = 1> (a) y = Exp (b) }",
            {"y": Tolerance(RELATIVE_TOLERANCES["bfloat16"])},
        ),
        # Weights in float16 were rounded before the computation, so the tolerance does not change.
        ("<float16[4] w = {1, 2, 3, 4}> { a = Cast <to = 1> (w) y = Add (x, a) }", {}),
        ("{ a = Cast <to = 11> (x) b = Exp (a) y = Cast <to = 1> (b) }", {}),
    ],
)
def test_tolerance_follows_from_coarsest_type(text: str, allowed: dict[str, Tolerance]) -> None:
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(f"{HEAD} (float[1, 4] y) {text}"))
    assert output_tolerances(Model.load(proto)) == allowed
