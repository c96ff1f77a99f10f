"""Blocks of modern networks that consist of operators with rules can be split without a rule of their own."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np
import onnx
import pytest
from support.generators import random_plan
from support.layer_graphs import rules

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.partition.bounds_inference import cuttable_axes
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.comparison import compare_value
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass

HEADER = '<ir_version: 8, opset_import: ["": {opset}]> '
BLOCKS: Mapping[str, tuple[int, str]] = {
    "SiLU": (
        17,
        "(float[1,4,6,6] x, float[4,4,3,3] w) => (y) {c = Conv<pads=[1,1,1,1]>(x, w) s = Sigmoid(c) y = Mul(c, s)}",
    ),
    "hard-swish": (
        17,
        "(float[1,4,6,6] x, float[4,4,1,1] w) => (y) <float three = {3.0}, float zero = {0.0}, float six = {6.0}>"
        " {c = Conv(x, w) a = Add(c, three) b = Clip(a, zero, six) m = Mul(c, b) y = Div(m, six)}",
    ),
    "squeeze and excite": (
        17,
        "(float[1,4,6,6] x, float[2,4,1,1] w, float[4,2,1,1] v) => (y)"
        " {p = ReduceMean<axes=[2,3]>(x) a = Conv(p, w) b = Relu(a) d = Conv(b, v) e = Sigmoid(d) y = Mul(x, e)}",
    ),
    "channel shuffle": (
        13,
        "(float[1,6,4,4] x) => (y) <int64[5] a = {1,2,3,4,4}, int64[4] b = {1,6,4,4}>"
        " {r = Reshape(x, a) t = Transpose<perm=[0,2,1,3,4]>(r) y = Reshape(t, b)}",
    ),
    "attention": (
        17,
        "(float[2,5,6] x, float[6,18] w) => (y) <int64[3] sizes = {6, 6, 6}, int64[4] heads = {2, 5, 2, 3},"
        " int64[3] flat = {2, 5, 6}, float scale = {0.5}>"
        " {p = MatMul(x, w) q, k, v = Split<axis=2>(p, sizes) a = Reshape(q, heads) b = Reshape(k, heads)"
        " c = Reshape(v, heads) d = Transpose<perm=[0,2,1,3]>(a) e = Transpose<perm=[0,2,3,1]>(b)"
        " f = Transpose<perm=[0,2,1,3]>(c) s = MatMul(d, e) t = Mul(s, scale) u = Softmax(t) o = MatMul(u, f)"
        " r = Transpose<perm=[0,2,1,3]>(o) y = Reshape(r, flat)}",
    ),
    "a normalised layer": (
        17,
        "(float[2,5,6] x, float[6] g, float[6] h, float[6,8] w) => (y)"
        " {n = LayerNormalization<axis=-1>(x, g, h) m = MatMul(n, w) e = Erf(m) y = Mul(m, e)}",
    ),
    "an upsampling path": (
        13,
        "(float[1,4,4,4] x, float[1,2,8,8] z, float[4,2,2,2] w, float[2,4,3,3] u) => (y)"
        " {t = ConvTranspose<strides=[2,2]>(x, w) c = Concat<axis=1>(t, z) y = Conv<pads=[1,1,1,1]>(c, u)}",
    ),
}


def model_of(name: str) -> Model:
    """Return the block with normalized Splits and inferred shapes."""
    from dicompiler.driver.prepare import prepare

    opset, text = BLOCKS[name]
    proto = onnx.parser.parse_model(HEADER.format(opset=opset) + "g " + text)
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return prepare(Model.load(proto)).model


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_can_be_split_and_compute_the_same(name: str) -> None:
    model = model_of(name)
    layers = form_layers(model, rules())
    assert all(cuttable_axes(layers, layer) for layer in layers.layers)
    values = np.random.default_rng(0)
    feed = {
        v.name: values.standard_normal(model.tensors()[v.name].shape).astype(np.float32)
        for v in model.proto.graph.input
    }
    reference = run_model(model, feed)["y"]
    for seed in range(12):
        plan = random_plan(Random(seed), layers)
        placed = PartitionPass().run(PipelineState(model=model, layers=layers, plan=plan))
        for outputs in ProgramExecutor(build_program(placed.model, plan.devices)).run(feed).delivered.values():
            check = compare_value("y", reference, outputs["y"])
            assert check.passed, (seed, check.detail)


@pytest.mark.parametrize(("name", "count"), [("SiLU", 1), ("hard-swish", 1)])
def test_decomposed_activations_are_absorbed(name: str, count: int) -> None:
    assert len(form_layers(model_of(name), rules()).layers) == count
