"""Operators fused by onnxruntime are divided into standard ones that compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from support.modern_net import MS, Net

from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.verify.comparison import compare_value
from dicompiler.verify.executor import run_model
from dicompiler.verify.run_inputs import prepare_inputs

SMALL = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "Conv Relu": {"activation": "Relu"},
    "Conv": {},
    "Conv LeakyRelu": {"activation": "LeakyRelu", "activation_params": [0.1]},
    "Conv Clip": {"activation": "Clip", "activation_params": [0.0, 0.5]},
    "Conv HardSigmoid": {"activation": "HardSigmoid", "activation_params": [0.3, 0.6]},
    "Conv Sigmoid": {"activation": "Sigmoid", "strides": [2, 2]},
}
PRODUCTS: dict[str, dict[str, Any]] = {
    "MatMul": {},
    "Transpose MatMul": {"transA": 1},
    "Transpose MatMul Mul": {"transB": 1, "alpha": 0.125},
    "Transpose Transpose MatMul Mul": {"transA": 1, "transB": 1, "alpha": 2.0},
}


def assert_same(net: Net, output: str, shape: tuple[int, ...], operators: str, **others: tuple[int, ...]) -> None:
    """Assert that the prepared model has these operators and computes the same (others: shapes of more outputs)."""
    shapes = {output: shape, **others}
    types = [helper.make_tensor_value_info(name, 1, of) for name, of in shapes.items()]
    model = Model.load(net.model(types=types, ir=10))
    ready = prepare(model, state=None).model
    assert [node.op_type for node in ready.proto.graph.node] == operators.split()
    feed = prepare_inputs(model)
    before, after = run_model(model, feed), run_model(ready, feed)
    for name in shapes:
        check = compare_value(name, before[name], after[name])
        assert check.passed, check.detail


@pytest.mark.parametrize(("operators", "attributes"), CONVOLUTIONS.items(), ids=CONVOLUTIONS)
def test_unfuses_convolution_and_activation(operators: str, attributes: dict[str, Any]) -> None:
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    y = net.op("FusedConv", x, net.weight(4, 3, 3, 3), net.weight(4), domain=MS, **SMALL, **attributes)
    assert_same(net, y, (1, 4, *[8 // attributes.get("strides", [1])[0]] * 2), operators)


def test_unfuses_convolution_sum_and_activation() -> None:
    net = Net()
    x = net.input("x", (1, 4, 8, 8))
    y = net.op("FusedConv", x, net.weight(4, 4, 3, 3), "", x, domain=MS, activation="Tanh", **SMALL)
    assert_same(net, y, (1, 4, 8, 8), "Conv Add Tanh")


def test_unfuses_gemm_and_activation() -> None:
    net = Net()
    numbers = {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.6, "transB": 1, "alpha": 0.5}
    y = net.op("FusedGemm", net.input("x", (5, 8)), net.weight(4, 8), net.weight(4), domain=MS, **numbers)
    assert_same(net, y, (5, 4), "Gemm HardSigmoid")


@pytest.mark.parametrize(("operators", "attributes"), PRODUCTS.items(), ids=PRODUCTS)
def test_unfuses_transposed_operands(operators: str, attributes: dict[str, Any]) -> None:
    net = Net()
    a, b = np.zeros((2, 3, 5)), np.zeros((2, 5, 4))
    shapes = [x.swapaxes(1, 2).shape if attributes.get(f"trans{n}") else x.shape for n, x in (("A", a), ("B", b))]
    inputs = [net.input(name, shape) for name, shape in zip("ab", shapes, strict=True)]
    assert_same(net, net.op("FusedMatMul", *inputs, domain=MS, **attributes), (2, 3, 4), operators)


@pytest.mark.parametrize("turned", [(), ("transA",), ("transB",), ("transA", "transB")])
@pytest.mark.parametrize("batched", [("transBatchA",), ("transBatchB",), ("transBatchA", "transBatchB")])
def test_unfuses_operands_with_inner_batch(batched: tuple[str, ...], turned: tuple[str, ...]) -> None:
    """Detection transformers have such operands: their first axis is that of the sequence."""
    net = Net()
    inputs = []
    for name, shape in (("A", [2, 3, 5, 4]), ("B", [2, 3, 4, 6])):
        own = [*shape[:-2], *shape[:-3:-1]] if f"trans{name}" in turned else shape
        own = [own[2], *own[:2], own[3]] if f"transBatch{name}" in batched else own
        inputs.append(net.input(name, own))
    output = net.op("FusedMatMul", *inputs, domain=MS, **dict.fromkeys((*batched, *turned), 1))
    expected = ["Transpose" for name in "AB" if {f"trans{name}", f"transBatch{name}"} & {*batched, *turned}]
    assert_same(net, output, (2, 3, 5, 6), " ".join([*expected, "MatMul"]))


def test_keeps_unknown_activation_fused() -> None:
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    y = net.op("FusedConv", x, net.weight(4, 3, 3, 3), domain=MS, activation="Nobody", **SMALL)
    model = Model.load(net.model(types=[helper.make_tensor_value_info(y, 1, (1, 4, 8, 8))]))
    assert [node.op_type for node in prepare(model).model.proto.graph.node] == ["FusedConv"]


CACHES = {"present_k": (1, 2, 9, 8), "present_v": (1, 2, 9, 8)}


def attended(net: Net, op: str, size: int, *masks: str, rank: int = 3, **attributes: int) -> str:
    """Return an attention of three rows behind a past of six, with 2 heads and caches that are read."""
    shapes = [(1, 3, count * 8) if rank == 3 else (1, count, 3, 8) for count in (size, 2, 2)]
    inputs = [net.input(name, shape) for name, shape in zip("qkv", shapes, strict=True)]
    pasts = [net.input(f"past_{name}", (1, 2, 6, 8)) for name in "kv"]
    y = net.op(op, *inputs, *masks, *pasts, outputs=3, **attributes, **({} if op == "Attention" else {"domain": MS}))
    net.nodes[-1].output[1:] = list(CACHES)
    return y


def test_caches_of_fused_attention_become_concats() -> None:
    net = Net()
    y = attended(net, "MultiHeadAttention", 2, "", "", net.input("bias", (1, 2, 3, 9)), num_heads=2)
    assert_same(net, y, (1, 3, 16), "Reshape Transpose Concat Reshape Transpose Concat MultiHeadAttention", **CACHES)


def test_caches_of_standard_attention_become_concats() -> None:
    """Cases include queries that share keys, and inputs that already have an axis of heads."""
    net = Net(23)
    y = attended(net, "Attention", 4, net.input("mask", (3, 9)), q_num_heads=4, kv_num_heads=2)
    turned = "Reshape Transpose Concat " * 2 + "Reshape Transpose Attention Transpose Reshape"
    assert_same(net, y, (1, 3, 32), turned, **CACHES)
    net = Net(23)
    assert_same(net, attended(net, "Attention", 4, "", rank=4), (1, 4, 3, 8), "Concat Concat Attention", **CACHES)


@pytest.mark.parametrize("read", [CACHES, {"present_k": CACHES["present_k"]}, {}], ids=len)
def test_attention_that_counts_rows_keeps_past(read: dict[str, tuple[int, ...]]) -> None:
    """The attention makes both caches, because onnxruntime requires both, even if nothing reads them."""
    net = Net(23)
    y = attended(net, "Attention", 2, "", q_num_heads=2, kv_num_heads=2, is_causal=1)
    assert_same(net, y, (1, 3, 16), "Attention", **read)


def test_attention_with_bias_keeps_past() -> None:
    net = Net()
    y = attended(net, "MultiHeadAttention", 2, net.input("bias", (48,)), "", "", num_heads=2)
    assert_same(net, y, (1, 3, 16), "MultiHeadAttention", **CACHES)


def test_attention_with_read_scores_keeps_past() -> None:
    net = Net()
    y = attended(net, "MultiHeadAttention", 2, "", "", "", num_heads=2)
    net.nodes[-1].output.append("scores")
    assert_same(net, y, (1, 3, 16), "MultiHeadAttention", **CACHES, scores=(1, 2, 3, 9))


def test_keeps_skip_normalization_with_read_mean() -> None:
    net = Net()
    x, other = net.input("x", (2, 8)), net.input("other", (2, 8))
    net.op("SkipSimplifiedLayerNormalization", x, other, net.weight(8), domain=MS, outputs=4)
    types = [helper.make_tensor_value_info(name, 1, None) for name in ("t0", "t0_2", "t0_3")]
    ready = prepare(Model.load(net.model(types=types)), state=None).model
    assert [node.op_type for node in ready.proto.graph.node] == ["SkipSimplifiedLayerNormalization"]


def test_nbits_scales_become_matrix() -> None:
    net = Net()
    x = net.input("x", (2, 64))
    values = net.random.integers(0, 256, (6, 4, 8)), net.random.integers(0, 256, 12)
    weight, points = (net.const(one, np.uint8) for one in values)
    attributes = {"K": 64, "N": 6, "bits": 4, "block_size": 16}
    y = net.op("MatMulNBits", x, weight, net.weight(24), points, domain=MS, **attributes)
    assert_same(net, y, (2, 6), "MatMulNBits")
    ready = prepare(Model.load(net.model(types=[helper.make_tensor_value_info(y, 1, (2, 6))], ir=10)), state=None).model
    (node,) = ready.proto.graph.node
    shapes = {one.name: list(one.dims) for one in ready.proto.graph.initializer}
    assert [shapes[name] for name in node.input[1:]] == [[6, 4, 8], [6, 4], [6, 2]]
