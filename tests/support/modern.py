"""Networks of the kinds that people deploy now, tiny and with seeded weights, node by node as exporters write them.

MODERN: name → a function that makes the network. Each is small enough to be compiled and verified in a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MS = "com.microsoft"
ML = "ai.onnx.ml"
LOWEST = float(np.finfo(np.float32).min)
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


class Net:
    """A graph that grows: each call of `op` adds a node and gives the name of its first output."""

    def __init__(self, opset: int = 17, dtype: Any = np.float32) -> None:
        self.opset, self.dtype, self.random = opset, dtype, np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.weights: list[onnx.TensorProto] = []

    def input(self, name: str, shape: Sequence[int], dtype: int | None = None) -> str:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)) if dtype is None else dtype
        self.inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def const(self, value: Any, dtype: Any = None) -> str:
        array = np.asarray(value, self.dtype if dtype is None else dtype)
        self.weights.append(numpy_helper.from_array(array, f"c{len(self.weights)}"))
        return self.weights[-1].name

    def ints(self, *values: int) -> str:
        return self.const(values, np.int64)

    def weight(self, *shape: int) -> str:
        return self.const(self.random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1))

    def op(self, op: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any) -> str:
        names = [f"t{len(self.nodes)}" + (f"_{i}" if i else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, f"n{len(self.nodes)}", domain=domain, **attributes))
        return names[0]

    def model(self, *outputs: str, types: Sequence[onnx.ValueInfoProto] = (), ir: int = 8) -> onnx.ModelProto:
        values = list(types) or [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", self.inputs, values, self.weights)
        domains = {"": self.opset, **dict.fromkeys(sorted({n.domain for n in self.nodes if n.domain}), 1)}
        if ML in domains:
            domains[ML] = 3
        imports = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=ir)
        return proto if types else onnx.shape_inference.infer_shapes(proto, data_prop=True)

    # --- blocks -----------------------------------------------------------------------------------------------------

    def linear(self, x: str, features: int, out: int, bias: bool = True) -> str:
        y = self.op("MatMul", x, self.weight(features, out))
        return self.op("Add", y, self.weight(out)) if bias else y

    def conv(self, x: str, channels: int, out: int, kernel: Sequence[int], **attributes: Any) -> str:
        groups = attributes.get("group", 1)
        weight = self.weight(out, channels // groups, *kernel)
        return self.op("Conv", x, weight, self.weight(out), kernel_shape=list(kernel), **attributes)

    def silu(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x))

    def gelu(self, x: str, form: str = "erf") -> str:
        if form == "op":
            return self.op("Gelu", x)
        if form == "erf":  # as torch.onnx writes it
            inner = self.op("Erf", self.op("Div", x, self.const(np.sqrt(2))))
            return self.op("Mul", self.op("Mul", x, self.op("Add", inner, self.const(1.0))), self.const(0.5))
        cube = self.op("Mul", self.const(0.044715), self.op("Pow", x, self.const(3.0)))
        inner = self.op("Tanh", self.op("Mul", self.const(0.797885), self.op("Add", x, cube)))
        return self.op("Mul", self.op("Mul", self.const(0.5), x), self.op("Add", self.const(1.0), inner))

    def layer_norm(self, x: str, width: int, form: str = "primitive") -> str:
        if form == "op":
            return self.op("LayerNormalization", x, self.weight(width), self.weight(width), axis=-1, epsilon=1e-5)
        centred = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        variance = self.op("ReduceMean", self.op("Pow", centred, self.const(2.0)), axes=[-1])
        scaled = self.op("Div", centred, self.op("Sqrt", self.op("Add", variance, self.const(1e-5))))
        return self.op("Add", self.op("Mul", scaled, self.weight(width)), self.weight(width))

    def rms_norm(self, x: str, width: int) -> str:
        mean = self.op("ReduceMean", self.op("Pow", x, self.const(2.0)), axes=[-1])
        scale = self.op("Reciprocal", self.op("Sqrt", self.op("Add", mean, self.const(1e-6))))
        return self.op("Mul", self.weight(width), self.op("Mul", x, scale))

    def heads(self, x: str, rows: int, heads: int, size: int) -> str:
        return self.op("Transpose", self.op("Reshape", x, self.ints(1, rows, heads, size)), perm=[0, 2, 1, 3])

    def attend(self, q: str, k: str, v: str, size: int, mask: Callable[[str], str] | None = None) -> str:
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Div", scores, self.const(np.sqrt(size)))
        return self.op("MatMul", self.op("Softmax", mask(scores) if mask else scores, axis=-1), v)

    def attention(
        self, x: str, rows: int, width: int, heads: int, mask: Callable[[str], str] | None = None, of: str = ""
    ) -> str:
        size = width // heads
        q, k, v = (self.heads(self.linear(y, width, width), rows, heads, size) for y in (x, of or x, of or x))
        return self.joined(self.attend(q, k, v, size, mask), rows, width)

    def joined(self, y: str, rows: int, width: int) -> str:
        y = self.op("Reshape", self.op("Transpose", y, perm=[0, 2, 1, 3]), self.ints(1, rows, width))
        return self.linear(y, width, width)

    def block(self, x: str, rows: int, width: int, form: str = "erf", norm: str = "primitive") -> str:
        """A transformer's block that normalises first."""
        x = self.op("Add", x, self.attention(self.layer_norm(x, width, norm), rows, width, 4))
        inner = self.gelu(self.linear(self.layer_norm(x, width, norm), width, 2 * width), form)
        return self.op("Add", x, self.linear(inner, 2 * width, width))


def bert(dtype: Any = np.float32) -> onnx.ModelProto:
    """Token numbers, a mask and segments; normalised afterwards."""
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
    """What onnxruntime's own optimiser makes of BERT."""
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
    proto = net.model(x, types=[helper.make_tensor_value_info(x, FLOAT, (1, rows, width))])
    return proto


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
        for one in shared:  # each head of keys and values serves two of queries
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
    """The same with onnxruntime's fused operators."""
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
    y = net.conv(x, width, width, (4,), pads=[2, 2], group=4)  # positions
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


def yolo(nms: bool = True) -> onnx.ModelProto:
    """C2f blocks, SPPF, a neck, heads with distributions of distances (DFL), non-maximum suppression."""
    net = Net()

    def cbs(x: str, channels: int, out: int, size: int = 1, stride: int = 1) -> str:
        return net.silu(net.conv(x, channels, out, (size, size), strides=[stride] * 2, pads=[size // 2] * 4))

    def c2f(x: str, channels: int, out: int) -> str:
        net.op("Split", cbs(x, channels, out), net.ints(out // 2, out // 2), axis=1, outputs=2)
        left, right = net.nodes[-1].output
        y = net.op("Add", right, cbs(cbs(right, out // 2, out // 2, 3), out // 2, out // 2, 3))
        return cbs(net.op("Concat", left, right, y, axis=1), 3 * out // 2, out)

    x = c2f(cbs(net.input("images", (1, 3, 32, 32)), 3, 8, 3, 2), 8, 8)
    small = c2f(cbs(x, 8, 16, 3, 2), 16, 16)
    pools = [cbs(cbs(small, 16, 16, 3, 2), 16, 8)]
    for _ in range(3):
        pools.append(net.op("MaxPool", pools[-1], kernel_shape=[5, 5], pads=[2] * 4))
    deep = cbs(net.op("Concat", *pools, axis=1), 32, 16)
    up = net.op("Resize", deep, "", net.const([1, 1, 2, 2]), mode="nearest", nearest_mode="floor")
    up = c2f(net.op("Concat", up, small, axis=1), 32, 16)
    rows = []
    for head, side in ((up, 8), (deep, 4)):
        boxes = net.conv(cbs(head, 16, 16, 3), 16, 16, (1, 1))
        classes = net.conv(cbs(head, 16, 16, 3), 16, 3, (1, 1))
        both = net.op("Concat", boxes, classes, axis=1)
        rows.append(net.op("Reshape", both, net.ints(1, 19, side * side)))
    net.op("Split", net.op("Concat", *rows, axis=2), net.ints(16, 3), axis=1, outputs=2)
    boxes, scores = net.nodes[-1].output
    spread = net.op("Transpose", net.op("Reshape", boxes, net.ints(1, 4, 4, 80)), perm=[0, 2, 1, 3])
    spread = net.op("Softmax", spread, axis=1)
    far = net.op("Conv", spread, net.const(np.arange(4).reshape(1, 4, 1, 1)))
    far = net.op("Reshape", far, net.ints(1, 4, 80))
    low, high = (net.op("Slice", far, net.ints(a), net.ints(a + 2), net.ints(1)) for a in (0, 2))
    anchors = net.const(net.random.random((1, 2, 80)))
    low, high = net.op("Sub", anchors, low), net.op("Add", anchors, high)
    centre = net.op("Div", net.op("Add", low, high), net.const(2.0))
    found = net.op("Concat", centre, net.op("Sub", high, low), axis=1)
    found, scores = net.op("Mul", found, net.const(np.full((1, 80), 8.0))), net.op("Sigmoid", scores)
    if not nms:
        return net.model(net.op("Concat", found, scores, axis=1))
    found = net.op("Transpose", found, perm=[0, 2, 1])
    limits = net.ints(20), net.const([0.5], np.float32), net.const([0.25], np.float32)
    chosen = net.op("NonMaxSuppression", found, scores, *limits, center_point_box=1)
    places = net.op("Gather", chosen, net.const(2, np.int64), axis=1)
    return net.model(net.op("Gather", found, places, axis=1), chosen)


def speech(kind: str = "LSTM") -> onnx.ModelProto:
    """Convolutions that stride over frequencies alone, then steps of a recurrent layer in both directions."""
    net = Net()
    x = net.input("features", (1, 1, 32, 24))
    x = net.op("Relu", net.conv(x, 1, 8, (3, 3), strides=[2, 1], pads=[1] * 4))
    x = net.op("Relu", net.conv(x, 8, 8, (3, 3), strides=[2, 1], pads=[1] * 4))
    x = net.op("Reshape", net.op("Transpose", x, perm=[3, 0, 1, 2]), net.ints(24, 1, 64))
    gates, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 12
    weights = [net.weight(2, gates * hidden, n) for n in (64, hidden)] + [net.weight(2, 2 * gates * hidden)]
    y = net.op(kind, x, *weights, direction="bidirectional", hidden_size=hidden, outputs=2)
    y = net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1, 3]), net.ints(24, 1, 24))
    return net.model(net.op("LogSoftmax", net.linear(y, 24, 11), axis=-1))


def faster_rcnn() -> onnx.ModelProto:
    """Reshape by a shape that is an input, regions of interest, suppression, a head on each region."""
    net = Net()
    x = net.op("Relu", net.conv(net.input("image", (1, 3, 32, 32)), 3, 8, (3, 3), strides=[4, 4], pads=[1] * 4))
    boxes = net.conv(x, 8, 4, (1, 1))
    shape = net.input("shape", (3,), INT)
    boxes = net.op("Reshape", boxes, shape)
    scores = net.op("Reshape", net.op("Sigmoid", net.conv(x, 8, 1, (1, 1))), net.ints(1, 1, 64))
    limits = net.ints(8), net.const([0.7], np.float32), net.const([0.0], np.float32)
    boxes = net.op("Reshape", boxes, net.ints(1, 64, 4))
    chosen = net.op("NonMaxSuppression", boxes, scores, *limits)
    places = net.op("Gather", chosen, net.const(2, np.int64), axis=1)
    rois = net.op("Gather", net.op("Reshape", boxes, net.ints(64, 4)), places, axis=0)
    first = net.op("Mul", places, net.const(0, np.int64))
    crops = net.op("RoiAlign", x, rois, first, output_height=3, output_width=3, sampling_ratio=2)
    return net.model(net.linear(net.op("Flatten", crops), 72, 5), net.op("Exp", net.conv(x, 8, 4, (3, 3))))


def quantised() -> onnx.ModelProto:
    """In QDQ form: weights are integers that are dequantised, one scale for each filter."""
    net = Net()

    def qdq(x: str, scale: float) -> str:
        about = net.const(scale), net.const(128, np.uint8)
        return net.op("DequantizeLinear", net.op("QuantizeLinear", x, *about), *about)

    def weight(*shape: int) -> str:
        values = net.const(net.random.integers(-127, 128, shape), np.int8)
        about = net.const(net.random.random(shape[0]) / 200 + 1e-4), net.const(np.zeros(shape[0]), np.int8)
        return net.op("DequantizeLinear", values, *about, axis=0)

    x, channels = qdq(net.input("image", (1, 3, 16, 16)), 0.02), 3
    for out, stride in ((16, 2), (16, 1), (32, 2)):
        bias = net.op("DequantizeLinear", net.const(net.random.integers(-99, 99, out), np.int32), net.const(1e-3))
        y = net.op("Conv", x, weight(out, channels, 3, 3), bias, strides=[stride] * 2, pads=[1] * 4)
        y = qdq(net.op("Relu", y), 0.05)
        x = qdq(net.op("Add", x, y), 0.07) if out == channels else y
        channels = out
    x = qdq(net.op("Flatten", net.op("GlobalAveragePool", x)), 0.03)
    return net.model(net.op("Gemm", x, weight(10, 32), net.weight(10), transB=1))


def dynamically_quantised() -> onnx.ModelProto:
    net = Net()
    x = net.input("x", (6, 32))
    for _ in range(2):
        net.op("DynamicQuantizeLinear", x, outputs=3)
        q, scale, zero = net.nodes[-1].output
        w = net.const(net.random.integers(-127, 128, (32, 32)), np.int8)
        y = net.op("Cast", net.op("MatMulInteger", q, w, zero), to=FLOAT)
        x = net.op("Add", net.op("Mul", y, net.op("Mul", scale, net.const(0.01))), net.weight(32))
        x = net.op("Relu", x)
    return net.model(x)


def video() -> onnx.ModelProto:
    """Convolutions and pools over time, rows and columns."""
    net = Net()
    x = net.op("Relu", net.conv(net.input("clip", (1, 3, 8, 16, 16)), 3, 8, (3, 3, 3), pads=[1] * 6))
    x = net.op("MaxPool", x, kernel_shape=[2, 2, 2], strides=[2, 2, 2])
    x = net.op("Relu", net.conv(x, 8, 16, (3, 1, 1), pads=[1, 0, 0, 1, 0, 0], strides=[2, 1, 1]))
    x = net.op("AveragePool", x, kernel_shape=[1, 3, 3], pads=[0, 1, 1, 0, 1, 1])
    x = net.op("ConvTranspose", x, net.weight(16, 8, 1, 2, 2), strides=[1, 2, 2])
    return net.model(net.op("Gemm", net.op("Flatten", net.op("GlobalAveragePool", x)), net.weight(8, 5), net.weight(5)))


def durations() -> onnx.ModelProto:
    """1-D convolutions with dilation, cumulative sums, of which both directions are used."""
    net = Net()
    x = net.input("phones", (1, 16, 20))
    for dilation in (1, 2, 4):
        y = net.conv(x, 16, 16, (3,), pads=[dilation] * 2, dilations=[dilation])
        x = net.op("Add", x, net.op("Mul", net.op("Tanh", y), net.op("Sigmoid", y)))
    y = net.op("Softplus", net.conv(x, 16, 1, (1,)))
    ends = net.op("CumSum", y, net.const(2, np.int64))
    back = net.op("CumSum", net.op("Exp", y), net.const(-1, np.int64), exclusive=1, reverse=1)
    return net.model(net.op("Mul", x, net.op("Sub", ends, back)))


def resizing() -> onnx.ModelProto:
    net = Net()
    x = net.conv(net.input("image", (1, 3, 12, 12)), 3, 8, (3, 3), pads=[1] * 4)
    for mode, factor in (("linear", 2), ("cubic", 2), ("linear", 3)):
        y = net.op("Resize", x, "", net.const([1, 1, factor, factor]), mode=mode)
        x = net.op("Relu", net.conv(y, 8, 8, (3, 3), pads=[1] * 4, strides=[factor] * 2))
    y = net.op("Resize", x, "", "", net.ints(1, 8, 30, 30), mode="linear", coordinate_transformation_mode="align_corners")
    return net.model(net.conv(y, 8, 2, (1, 1)))


def gelus() -> onnx.ModelProto:
    net = Net(20)
    x = net.input("x", (1, 6, 32))
    for form in ("erf", "tanh", "op"):
        x = net.op("Add", x, net.gelu(net.linear(net.layer_norm(x, 32, "op"), 32, 32), form))
    for op in ("Mish", "HardSwish", "Elu", "Selu", "Softsign"):
        x = net.op(op, net.linear(x, 32, 32))
    return net.model(x)


def control() -> onnx.ModelProto:
    """A branch and a loop between convolutions."""
    net = Net()
    x = net.conv(net.input("x", (1, 4, 8, 8)), 4, 4, (3, 3), pads=[1] * 4)
    branch = [
        helper.make_graph([helper.make_node(op, [x], [f"{op}_out"])], op, [], [helper.make_tensor_value_info(f"{op}_out", FLOAT, (1, 4, 8, 8))])
        for op in ("Sigmoid", "Exp")
    ]
    big = net.op("Greater", net.op("ReduceMax", x, keepdims=0), net.const(0.5))
    x = net.op("Add", net.op("If", big, then_branch=branch[0], else_branch=branch[1]), x)
    return net.model(net.conv(x, 4, 4, (3, 3), pads=[1] * 4))


# --- scikit-learn ---------------------------------------------------------------------------------------------------


def _trees(count: int, classes: int, classifier: bool) -> dict[str, Any]:
    """`count` trees of three inner nodes and four leaves."""
    random, kind = np.random.default_rng(1), "class" if classifier else "target"
    modes = ["BRANCH_LEQ"] * 3 + ["LEAF"] * 4
    leaves = [(tree, leaf, c) for tree in range(count) for leaf in range(3, 7) for c in range(classes)]
    return {
        "nodes_treeids": [tree for tree in range(count) for _ in range(7)],
        "nodes_nodeids": list(range(7)) * count,
        "nodes_featureids": [int(i) for i in random.integers(0, 6, 7 * count)],
        "nodes_modes": modes * count,
        "nodes_values": [float(v) for v in random.standard_normal(7 * count)],
        "nodes_truenodeids": [1, 3, 5, 0, 0, 0, 0] * count,
        "nodes_falsenodeids": [2, 4, 6, 0, 0, 0, 0] * count,
        f"{kind}_treeids": [tree for tree, _, _ in leaves],
        f"{kind}_nodeids": [leaf for _, leaf, _ in leaves],
        f"{kind}_ids": [c for _, _, c in leaves],
        f"{kind}_weights": [float(v) for v in random.random(len(leaves)) / count],
    }


def forest(rows: int = 8) -> onnx.ModelProto:
    """A scaler, a forest that tells classes apart, probabilities as a sequence of maps."""
    net = Net()
    x = net.input("x", (rows, 6))
    x = net.op("Scaler", x, domain=ML, offset=[0.1] * 6, scale=[1.7] * 6)
    trees = {**_trees(5, 3, True), "post_transform": "NONE", "classlabels_int64s": [0, 1, 2]}
    label = net.op("TreeEnsembleClassifier", x, domain=ML, outputs=2, **trees)
    maps = net.op("ZipMap", f"{label}_1", domain=ML, classlabels_int64s=[0, 1, 2])
    scores = helper.make_map_type_proto(INT, helper.make_tensor_type_proto(FLOAT, []))
    types = [helper.make_tensor_value_info(label, INT, (rows,))]
    types.append(helper.make_value_info(maps, helper.make_sequence_type_proto(scores)))
    return net.model(types=types)


def regression(rows: int = 8) -> onnx.ModelProto:
    """A scaler, a normaliser, and the sum of a forest and a line."""
    net = Net()
    x = net.op("Scaler", net.input("x", (rows, 6)), domain=ML, offset=[0.1] * 6, scale=[1.7] * 6)
    trees = net.op("TreeEnsembleRegressor", x, domain=ML, n_targets=2, **_trees(5, 2, False))
    unit = net.op("Normalizer", x, domain=ML, norm="L2")
    weights = {"coefficients": [0.3 * i for i in range(12)], "intercepts": [0.5, -0.25], "targets": 2}
    line = net.op("LinearRegressor", unit, domain=ML, **weights)
    y = net.op("Add", trees, line)
    return net.model(types=[helper.make_tensor_value_info(y, FLOAT, (rows, 2))])


def classification(rows: int = 8) -> onnx.ModelProto:
    """Missing values filled in, a linear classifier with words for labels."""
    net = Net()
    x = net.input("x", (rows, 4))
    x = net.op("Imputer", x, domain=ML, imputed_value_floats=[0.5] * 4, replaced_value_float=float("nan"))
    weights = {"coefficients": [0.3 * i - 1 for i in range(12)], "intercepts": [0.5, -0.25, 0.1]}
    labels = {"classlabels_strings": ["a", "b", "c"], "post_transform": "SOFTMAX", "multi_class": 1}
    label = net.op("LinearClassifier", x, domain=ML, outputs=2, **weights, **labels)
    types = [helper.make_tensor_value_info(label, TensorProto.STRING, (rows,))]
    return net.model(types=[*types, helper.make_tensor_value_info(f"{label}_1", FLOAT, (rows, 3))])


def unsorted() -> onnx.ModelProto:
    """A network whose file has its last nodes first, as some converters to float16 leave it."""
    proto = yolo(False)
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


MODERN: dict[str, Callable[[], onnx.ModelProto]] = {
    "bert": bert,
    "bert-float16": lambda: bert(np.float16),
    "bert-fused": bert_fused,
    "classification": classification,
    "control": control,
    "durations": durations,
    "dynamically-quantised": dynamically_quantised,
    "faster-rcnn": faster_rcnn,
    "forest": forest,
    "gelus": gelus,
    "gpt2": gpt2,
    "gpt2-cache": lambda: gpt2(7),
    "llama": llama,
    "llama-cache": lambda: llama(7),
    "llama-fused": llama_fused,
    "quantised": quantised,
    "regression": regression,
    "resizing": resizing,
    "segformer": segformer,
    "speech-gru": lambda: speech("GRU"),
    "speech-lstm": speech,
    "speech-rnn": lambda: speech("RNN"),
    "t5": t5,
    "unsorted": unsorted,
    "video": video,
    "vit": vit,
    "wav2vec2": wav2vec2,
    "whisper": whisper,
    "yolo": lambda: yolo(False),
    "yolo-nms": yolo,
}
