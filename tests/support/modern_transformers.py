"""Transformers for texts, sounds and images, tiny and with seeded weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from support.modern_net import FLOAT, INT, LOWEST, MS, Net


def bert(dtype: Any = np.float32) -> onnx.ModelProto:
    """Return BERT with inputs for token numbers, a mask and segments; it normalises after each sublayer."""
    net, rows, width = Net(dtype=dtype), 8, 32
    ids, mask, segments = (net.input(n, (1, rows), INT) for n in ("input_ids", "attention_mask", "token_type_ids"))
    x = net.op("Add", net.op("Gather", net.weight(50, width), ids), net.op("Gather", net.weight(2, width), segments))
    x = net.op("Add", x, net.op("Gather", net.weight(16, width), net.const([range(rows)], np.int64)))
    x = net.layer_norm(x, width)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    wide = net.op("Cast", net.op("Unsqueeze", mask, net.ints(1, 2)), to=kind)
    lowest = float(np.finfo(dtype).min)
    beside = net.op("Mul", net.op("Sub", net.const(1.0), wide), net.const(lowest))
    for _ in range(3):
        y = net.attention(x, rows, width, 4, lambda scores: net.op("Add", scores, beside))
        x = net.layer_norm(net.op("Add", y, x), width)
        y = net.linear(net.gelu(net.linear(x, width, 64)), 64, width)
        x = net.layer_norm(net.op("Add", y, x), width)
    first = net.op("Gather", x, net.const(0, np.int64), axis=1)
    return net.model(x, net.op("Tanh", net.op("Gemm", first, net.weight(width, width), net.weight(width), transB=1)))


def bert_fused() -> onnx.ModelProto:
    """Return BERT with the fused operators into which onnxruntime's optimiser rewrites it."""
    net, rows, width = Net(), 8, 32
    ids, segments, mask = (net.input(n, (1, rows), TensorProto.INT32) for n in ("input_ids", "token_type_ids", "mask"))
    tables = [net.weight(50, width), net.weight(16, width), net.weight(2, width), net.weight(width), net.weight(width)]
    x = net.op("EmbedLayerNormalization", ids, segments, *tables, mask, domain=MS, outputs=2)
    for _ in range(2):
        qkv = [net.weight(width, 3 * width), net.weight(3 * width)]
        y = net.op("Attention", x, *qkv, x.replace("t0", "t0_1") if x == "t0" else "", domain=MS, num_heads=4)
        y = net.op("MatMul", y, net.weight(width, width))
        norm = [net.weight(width), net.weight(width), net.weight(width)]
        x = net.op("SkipLayerNormalization", y, x, *norm, domain=MS)
        y = net.op("BiasGelu", net.op("MatMul", x, net.weight(width, 64)), net.weight(64), domain=MS)
        y = net.op("FastGelu", net.linear(y, 64, width), domain=MS)
        x = net.op("SkipLayerNormalization", y, x, *norm, domain=MS)
    return net.model(x, types=[helper.make_tensor_value_info(x, FLOAT, (1, rows, width))])


def gpt2(cache: int = 0) -> onnx.ModelProto:
    """A decoder with a causal mask by Where, GELU by tanh; with a cache of keys and values for one step."""
    net, width, heads = Net(), 32, 4
    rows = 1 if cache else 8
    ids = net.input("input_ids", (1, rows), INT)
    places = net.input("position_ids", (1, rows), INT)
    x = net.op("Add", net.op("Gather", net.weight(50, width), ids), net.op("Gather", net.weight(16, width), places))
    causal = net.const(np.tril(np.ones((1, 1, cache + rows, cache + rows), bool))[:, :, -rows:], bool)
    present = []
    for layer in range(2):
        y = net.layer_norm(x, width)
        qkv = net.op("Gemm", net.op("Reshape", y, net.ints(rows, width)), net.weight(width, 96), net.weight(96))
        net.op("Split", net.op("Reshape", qkv, net.ints(1, rows, 96)), net.ints(32, 32, 32), outputs=3, axis=2)
        parts = [net.heads(name, rows, heads, 8) for name in net.nodes[-1].output]
        for i, what in enumerate(("key", "value") if cache else (), 1):
            past = net.input(f"past.{layer}.{what}", (1, heads, cache, 8))
            parts[i] = net.op("Concat", past, parts[i], axis=2)
            present.append(parts[i])
        y = net.attend(*parts, 8, lambda s: net.op("Where", causal, s, net.const(LOWEST)))  # type: ignore[misc]
        x = net.op("Add", net.joined(y, rows, width), x)
        y = net.linear(net.gelu(net.linear(net.layer_norm(x, width), width, 64), "tanh"), 64, width)
        x = net.op("Add", x, y)
    return net.model(net.linear(net.layer_norm(x, width), width, 50, False), *present)


def llama(cache: int = 0) -> onnx.ModelProto:
    """RMS normalisation and rotary positions in primitive operators, SiLU, grouped queries, a cache."""
    net, width, heads = Net(), 32, 4
    rows = 1 if cache else 8
    x = net.op("Gather", net.weight(50, width), net.input("input_ids", (1, rows), INT))
    places = net.op("Cast", net.op("Unsqueeze", net.input("position_ids", (1, rows), INT), net.ints(2)), to=FLOAT)
    angles = net.op("Mul", places, net.const(0.5 ** np.arange(4)))
    angles = net.op("Unsqueeze", net.op("Concat", angles, angles, axis=-1), net.ints(1))
    cos, sin = net.op("Cos", angles), net.op("Sin", angles)

    def turned(y: str) -> str:
        low = net.op("Slice", y, net.ints(0), net.ints(4), net.ints(3))
        high = net.op("Neg", net.op("Slice", y, net.ints(4), net.ints(1 << 62), net.ints(3)))
        return net.op("Add", net.op("Mul", y, cos), net.op("Mul", net.op("Concat", high, low, axis=-1), sin))

    total, present = cache + rows, []
    causal = net.const(np.triu(np.full((1, 1, total, total), LOWEST), 1)[:, :, -rows:])
    for layer in range(2):
        y = net.rms_norm(x, width)
        q = turned(net.heads(net.linear(y, width, 32, False), rows, heads, 8))
        shared = [turned(net.heads(net.linear(y, width, 16, False), rows, 2, 8))]
        shared.append(net.heads(net.linear(y, width, 16, False), rows, 2, 8))
        for i, what in enumerate(("key", "value") if cache else ()):
            past = net.input(f"past_key_values.{layer}.{what}", (1, 2, cache, 8))
            shared[i] = net.op("Concat", past, shared[i], axis=2)
            present.append(shared[i])
        wide = []
        for one in shared:  # Each key-value head serves two query heads, so it is repeated.
            one = net.op("Unsqueeze", one, net.ints(2))
            one = net.op("Expand", one, net.ints(1, 2, 2, total, 8))
            wide.append(net.op("Reshape", one, net.ints(1, heads, total, 8)))
        y = net.attend(q, *wide, 8, lambda s: net.op("Add", s, causal))  # type: ignore[misc]
        x = net.op("Add", x, net.joined(y, rows, width))
        y = net.rms_norm(x, width)
        gate = net.op("Mul", net.silu(net.linear(y, width, 48, False)), net.linear(y, width, 48, False))
        x = net.op("Add", x, net.linear(gate, 48, width, False))
    return net.model(net.linear(net.rms_norm(x, width), width, 50, False), *present)


def llama_fused() -> onnx.ModelProto:
    """Return a Llama decoder with onnxruntime's fused operators."""
    net, rows, width = Net(), 8, 32
    x = net.op("Gather", net.weight(50, width), net.input("input_ids", (1, rows), INT))
    places = net.input("position_ids", (1, rows), INT)
    tables = net.const(np.cos(np.arange(64).reshape(16, 4))), net.const(np.sin(np.arange(64).reshape(16, 4)))
    for _ in range(2):
        y = net.op("SimplifiedLayerNormalization", x, net.weight(width), axis=-1, epsilon=1e-5, stash_type=1)
        q, k, v = (net.linear(y, width, width, False) for _ in range(3))
        q, k = (net.op("RotaryEmbedding", one, places, *tables, domain=MS, num_heads=4) for one in (q, k))
        y = net.linear(net.op("MultiHeadAttention", q, k, v, domain=MS, num_heads=4), width, width, False)
        y = net.op("SkipSimplifiedLayerNormalization", y, x, net.weight(width), domain=MS, outputs=1)
        x = net.op("Add", x, net.linear(net.op("QuickGelu", net.linear(y, width, 64), domain=MS), 64, width))
    logits = net.op("MatMul", x, net.weight(width, 50))
    return net.model(logits, types=[helper.make_tensor_value_info(logits, FLOAT, (1, rows, 50))])


def genai(packed: bool = False) -> onnx.ModelProto:
    """A step of a decoder as onnxruntime-genai has it: caches are inputs and outputs of GroupQueryAttention.

    packed: queries, keys and values of one product, weights of four bits."""
    net, width, heads, shared, size, rows = Net(21), 32, 4, 2, 16, 8
    x = net.op("Gather", net.weight(50, width), net.input("input_ids", (1, 1), INT))
    counted = net.op("ReduceSum", net.input("attention_mask", (1, rows), INT), net.ints(1), keepdims=0)
    last = net.op("Cast", net.op("Sub", counted, net.const(1, np.int64)), to=TensorProto.INT32)
    angles, types = np.arange(rows * size // 2).reshape(rows, -1) / 7, list[onnx.ValueInfoProto]()
    tables = net.const(rows, np.int32), net.const(np.cos(angles)), net.const(np.sin(angles))

    def product(x: str, features: int, out: int) -> str:
        if not packed:
            return net.linear(x, features, out, False)
        weight = net.const(net.random.integers(0, 256, (out, features // 16, 8)), np.uint8)
        scales = net.const(net.random.random(out * features // 16) / 20)
        return net.op("MatMulNBits", x, weight, scales, domain=MS, K=features, N=out, bits=4, block_size=16)

    def kept(name: str) -> str:
        types.append(
            helper.make_tensor_value_info(name.replace("past_key_values", "present"), FLOAT, (1, 2, rows, size))
        )
        return net.input(name, (1, shared, rows, size))

    for layer in range(2):
        y = net.op("SimplifiedLayerNormalization", x, net.weight(width), axis=-1, epsilon=1e-5, stash_type=1)
        widths = [heads * size, shared * size, shared * size]
        qkv = [product(y, width, sum(widths)), "", ""] if packed else [product(y, width, one) for one in widths]
        pasts = [kept(f"past_key_values.{layer}.{what}") for what in ("key", "value")]
        counts = {"num_heads": heads, "kv_num_heads": shared, "do_rotary": 1}
        y = net.op("GroupQueryAttention", *qkv, *pasts, last, *tables, domain=MS, outputs=3, **counts)
        net.nodes[-1].output[1:] = [value.name for value in types[-2:]]
        y = product(y, heads * size, width)
        y = net.op("SkipSimplifiedLayerNormalization", x, y, net.weight(width), domain=MS, outputs=4)
        x = net.nodes[-1].output[3]
        x = net.op("Add", x, product(net.op("Mul", net.silu(product(y, width, 48)), product(y, width, 48)), 48, width))
    logits = net.linear(x, width, 50, False)
    return net.model(types=[helper.make_tensor_value_info(logits, FLOAT, (1, 1, 50)), *types])


def vit() -> onnx.ModelProto:
    net, width = Net(), 32
    x = net.conv(net.input("pixels", (1, 3, 32, 32)), 3, width, (8, 8), strides=[8, 8])
    x = net.op("Transpose", net.op("Reshape", x, net.ints(1, width, 16)), perm=[0, 2, 1])
    x = net.op("Add", net.op("Concat", net.weight(1, 1, width), x, axis=1), net.weight(1, 17, width))
    for _ in range(4):
        x = net.block(x, 17, width, norm="op")
    first = net.op("Gather", net.layer_norm(x, width, "op"), net.const(0, np.int64), axis=1)
    return net.model(net.op("Gemm", first, net.weight(10, width), net.weight(10), transB=1))


def whisper() -> onnx.ModelProto:
    net, width = Net(20), 32
    x = net.gelu(net.conv(net.input("mel", (1, 8, 24)), 8, width, (3,), pads=[1, 1]), "op")
    x = net.gelu(net.conv(x, width, width, (3,), pads=[1, 1], strides=[2]), "op")
    x = net.op("Add", net.op("Transpose", x, perm=[0, 2, 1]), net.weight(12, width))
    for _ in range(2):
        x = net.block(x, 12, width, "op", "op")
    return net.model(net.layer_norm(x, width, "op"))


def t5() -> onnx.ModelProto:
    """Relative positions: buckets by integers and logarithms, a table of biases for each head."""
    net, rows, width = Net(), 8, 32
    ids = net.input("input_ids", (1, rows), INT)
    x = net.op("Gather", net.weight(50, width), ids)
    length = net.op("Gather", net.op("Shape", ids), net.const(1, np.int64))
    steps = net.op("Range", net.const(0, np.int64), length, net.const(1, np.int64))
    far = net.op("Sub", net.op("Unsqueeze", steps, net.ints(0)), net.op("Unsqueeze", steps, net.ints(1)))
    ahead = net.op("Mul", net.op("Cast", net.op("Greater", far, net.ints(0)), to=INT), net.ints(8))
    near = net.op("Abs", far)
    log = net.op("Log", net.op("Div", net.op("Cast", near, to=FLOAT), net.const(4.0)))
    scaled = net.op("Cast", net.op("Mul", log, net.const(1.5)), to=INT)
    large = net.op("Min", net.op("Add", scaled, net.ints(4)), net.ints(7))
    bucket = net.op("Add", ahead, net.op("Where", net.op("Less", near, net.ints(4)), near, large))
    bias = net.op("Gather", net.weight(16, 4), bucket)
    bias = net.op("Unsqueeze", net.op("Transpose", bias, perm=[2, 0, 1]), net.ints(0))
    for _ in range(2):
        y = net.attention(net.rms_norm(x, width), rows, width, 4, lambda s: net.op("Add", s, bias))
        x = net.op("Add", x, y)
        y = net.op("Relu", net.linear(net.rms_norm(x, width), width, 64, False))
        x = net.op("Add", x, net.linear(y, 64, width, False))
    return net.model(net.rms_norm(x, width))


def wav2vec2() -> onnx.ModelProto:
    net, width = Net(), 16
    x = net.op("Unsqueeze", net.input("audio", (1, 400)), net.ints(1))
    channels = 1
    for kernel, stride in ((10, 5), (3, 2), (2, 2)):
        x = net.conv(x, channels, width, (kernel,), strides=[stride])
        if channels == 1:
            rows = net.op("Reshape", x, net.ints(0, width, -1))
            ones = net.const(np.ones(width)), net.const(np.zeros(width))
            x = net.op("Reshape", net.op("InstanceNormalization", rows, *ones), net.op("Shape", x))
        x, channels = net.gelu(x), width
    y = net.conv(x, width, width, (4,), pads=[2, 2], group=4)  # This convolution computes the positional embedding.
    y = net.gelu(net.op("Slice", y, net.ints(0), net.ints(-1), net.ints(2)))
    x = net.op("Transpose", net.op("Add", x, y), perm=[0, 2, 1])
    x = net.block(net.layer_norm(x, width, "op"), 19, width)
    return net.model(net.linear(x, width, 12))


def segformer() -> onnx.ModelProto:
    """Attention over fewer keys, depthwise convolutions between, a head that resizes."""
    net, width = Net(), 16
    x = net.conv(net.input("pixels", (1, 3, 32, 32)), 3, width, (7, 7), strides=[4, 4], pads=[3, 3, 3, 3])
    maps = []
    for side in (8, 4):
        rows = side * side
        flat = net.op("Transpose", net.op("Reshape", x, net.ints(1, width, rows)), perm=[0, 2, 1])
        y = net.layer_norm(flat, width)
        less = net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1]), net.ints(1, width, side, side))
        less = net.conv(less, width, width, (2, 2), strides=[2, 2])
        fewer = net.op("Transpose", net.op("Reshape", less, net.ints(1, width, rows // 4)), perm=[0, 2, 1])
        q = net.heads(net.linear(y, width, width), rows, 2, 8)
        k, v = (net.heads(net.linear(net.layer_norm(fewer, width), width, width), rows // 4, 2, 8) for _ in range(2))
        flat = net.op("Add", flat, net.joined(net.attend(q, k, v, 8), rows, width))
        y = net.linear(net.layer_norm(flat, width), width, 32)
        y = net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1]), net.ints(1, 32, side, side))
        y = net.conv(y, 32, 32, (3, 3), pads=[1] * 4, group=32)
        y = net.op("Transpose", net.op("Reshape", y, net.ints(1, 32, rows)), perm=[0, 2, 1])
        flat = net.op("Add", flat, net.linear(net.gelu(y), 32, width))
        x = net.op("Reshape", net.op("Transpose", flat, perm=[0, 2, 1]), net.ints(1, width, side, side))
        maps.append(x)
        x = net.conv(x, width, width, (3, 3), strides=[2, 2], pads=[1] * 4)
    up = net.op("Resize", maps[1], "", net.const([1, 1, 2, 2]), mode="linear")
    y = net.op("Relu", net.conv(net.op("Concat", up, maps[0], axis=1), 32, 16, (1, 1)))
    return net.model(net.conv(y, 16, 5, (1, 1)))
