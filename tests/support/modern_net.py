"""A builder of graphs node by node, as exporters write them, with seeded weights and blocks of common networks."""

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
    """A growing graph: each call of `op` adds a node and returns the name of its first output."""

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

    # --- blocks of several nodes ------------------------------------------------------------------------------------

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
        if form == "erf":  # torch.onnx writes this form.
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
        """Append a transformer block that normalises before attention and before its two linear layers."""
        x = self.op("Add", x, self.attention(self.layer_norm(x, width, norm), rows, width, 4))
        inner = self.gelu(self.linear(self.layer_norm(x, width, norm), width, 2 * width), form)
        return self.op("Add", x, self.linear(inner, 2 * width, width))
