"""Weights of products in blocks: the integers, the results of onnxruntime, and invalid options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.driver.artifact import verify
from dicompiler.driver.compiler import compile
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.plugin.pass_manager import make_pipeline
from dicompiler.verify.executor import run_model
from dicompiler_passes.quantise import Quantise, quantize_matrix

DECODER = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocabulary": 50, "size": 1, "past": 8}
TEXT = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 3, 80] x) => (float[1, 3, 80] y)
{ a = MatMul (x, w)  b = Relu (a)  y = MatMul (b, w) }"""


def product(weight: NDArray[Any], text: str = TEXT) -> Model:
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return Model.load(proto)


def quantized(model: Model, **options: Any) -> Model:
    return Quantise(**options).run(PipelineState(model=model)).model


def dequantize(blocks: NDArray[np.uint8], scales: NDArray[Any], bits: int, features: int) -> NDArray[Any]:
    if bits == 4:
        blocks = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:2], -1)
    values = (blocks.astype(np.float32) - (1 << (bits - 1))) * scales[:, :, None]
    matrix: NDArray[Any] = values.reshape(len(values), -1)[:, :features].T
    return matrix


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("shape", [(32, 3), (80, 5), (7, 4), (256, 1)])
def test_rounds_to_steps_of_the_largest_magnitude(bits: int, block_size: int, shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    # Zeros must be quantised correctly, so every second element of the last column is 0.
    weight[:, -1] *= np.arange(shape[0]) % 2
    blocks, scales = quantize_matrix(weight, bits, block_size)
    block_count = -(-shape[0] // block_size)
    assert blocks.shape == (shape[1], block_count, block_size * bits // 8) and scales.shape == blocks.shape[:2]
    error = np.abs(dequantize(blocks, scales, bits, shape[0]) - weight)
    steps = np.repeat(np.abs(scales).T, block_size, axis=0)[: shape[0]]
    assert (error <= steps * 1.0001).all() and np.mean(error <= steps * 0.5001) > 0.9


def test_blocks_of_zeros_stay_zero() -> None:
    blocks, scales = quantize_matrix(np.zeros((64, 2), np.float32), 4, 32)
    assert not dequantize(blocks, scales, 4, 64).any()


@pytest.mark.parametrize(("weights", "bits"), [("int4", 4), ("int8", 8)])
@pytest.mark.parametrize(("activations", "close"), [("float32", 1e-5), ("int8", 0.03)])
def test_onnxruntime_multiplies_by_the_quantized_weights(
    weights: str, bits: int, activations: str, close: float
) -> None:
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((80, 80)).astype(np.float32)
    model = quantized(product(weight), weights=weights, activations=activations, block_size=16)
    nodes = [node for node in model.proto.graph.node if node.op_type == "MatMulNBits"]
    assert [node.op_type for node in model.proto.graph.node] == ["MatMulNBits", "Relu", "MatMulNBits"]
    assert nodes[0].input[1:] == nodes[1].input[1:] and len(model.proto.graph.initializer) == 2
    levels = [attribute.i for node in nodes for attribute in node.attribute if attribute.name == "accuracy_level"]
    assert levels == ([4, 4] if activations == "int8" else [])
    x = rng.standard_normal((1, 3, 80)).astype(np.float32)
    rounded = dequantize(*quantize_matrix(weight, bits, 16), bits, 80)
    expected = np.maximum(x @ rounded, 0) @ rounded
    assert np.abs(run_model(model, {"x": x})["y"] - expected).max() <= close * np.abs(expected).max()


def test_pipeline_text_selects_int8_activations() -> None:
    model = product(np.eye(80, dtype=np.float32))
    (step,) = make_pipeline("quantise{weights=int4 activations=int8 block_size=32}")
    state = step.run(PipelineState(model=model))
    attributes = {attribute.name: attribute.i for attribute in state.model.proto.graph.node[0].attribute}
    assert attributes == {"K": 80, "N": 80, "bits": 4, "block_size": 32, "accuracy_level": 4}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"weights": "int4", "samples": "x.npz"}, "quantise: weights=int4 needs no samples and keeps the inputs"),
        ({"weights": "int8", "inputs": "int8"}, "quantise: weights=int8 needs no samples and keeps the inputs"),
        ({"weights": "int4", "block_size": 24}, "quantise: invalid block_size 24: use one of 16, 32, 64, 128, 256"),
        ({"samples": "x.npz", "activations": "int8"}, "quantise: activations=int8 needs block-quantised weights"),
    ],
)
def test_rejects_options_of_the_other_kind(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        quantized(product(np.eye(80, dtype=np.float32)), **options)
    assert str(caught.value).startswith(expected)


def test_rejects_networks_without_products() -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Relu (x) }'
    with pytest.raises(DicompilerError, match="quantise: the network has no product with a constant matrix"):
        quantized(Model.load(onnx.parser.parse_model(text)), weights="int4")


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_split_decoder_agrees_with_the_quantized_network(activations: str, tmp_path: Path) -> None:
    model = quantized(Model.load(networks.build("llama_small", 1, **DECODER)), weights="int4", activations=activations)
    result = compile(model, "rpi4x2", "heads", objective="memory", output=tmp_path / "out")
    assert result.routing is not None and result.routing.received_boxes
    verification = verify(tmp_path / "out")
    assert verification.passed, verification
    exact = next(check for check in verification.checks if check.name == "exact")
    assert exact.applies
