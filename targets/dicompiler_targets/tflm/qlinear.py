"""Operators that onnxruntime's quantiser writes with their scales among the inputs, as what they mean in QDQ form.

A segment's model → the same with standard operators: QLinearConv(x, …, w, …, y's) ⇒ DequantizeLinear(x),
DequantizeLinear(w) → Conv → QuantizeLinear. Scales, zero points and weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Weight, is_hollow

RUNNING = ("DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat")
"""Operators of networks whose activations are quantised while they run."""


@dataclass
class _Rewriter:
    """A model while its nodes are rewritten."""

    model: onnx.ModelProto
    weights: Mapping[str, Weight]
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def value(self, name: str) -> NDArray[Any]:
        """A constant. KeyError where it is none."""
        tensor = {t.name: t for t in self.model.graph.initializer}[name]
        return self.weights[name].array() if is_hollow(tensor) else onnx.numpy_helper.to_array(tensor)

    def add(self, op: str, node: onnx.NodeProto, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """A node more, called after the one that it comes from; its output."""
        self.nodes.append(onnx.helper.make_node(op, inputs, [output], node.name, **attributes))
        return output

    def dequantised(self, node: onnx.NodeProto, index: int, axis: int | None = None) -> str:
        """The floats of the tensor at an input, whose scale and zero point are the next two; axis: of its scales."""
        inputs = [name for name in node.input[index : index + 3] if name]
        attributes = {} if axis is None or self.value(inputs[1]).size == 1 else {"axis": axis}
        return self.add("DequantizeLinear", node, inputs, f"{node.output[0]}/{index}", **attributes)

    def bias(self, node: onnx.NodeProto, index: int, scales: tuple[int, int]) -> str:
        """The floats of a bias in int32, which has the product of two scales."""
        name, scale = node.input[index], f"{node.output[0]}/bias scale"
        of_x, of_w = (self.value(node.input[i]).astype(np.float64) for i in scales)
        product = of_x.reshape(()) * of_w
        self.model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(product, np.float32), scale))
        attributes = {"axis": 0} if product.size > 1 else {}
        return self.add("DequantizeLinear", node, [name, scale], f"{node.output[0]}/{index}", **attributes)

    def quantised(self, node: onnx.NodeProto, op: str, inputs: Sequence[str], about: int, **attributes: Any) -> None:
        """The node itself on floats, and the QuantizeLinear whose scale and zero point are at input `about`."""
        floats = self.add(op, node, inputs, f"{node.output[0]}/float", **attributes)
        self.add("QuantizeLinear", node, [floats, *node.input[about : about + 2]], node.output[0])


def _attributes(node: onnx.NodeProto, *without: str) -> dict[str, Any]:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if attributes.get("channels_last", 0):
        raise _refusal(node, "its image lies channels last", "quantise without layout transformation")
    return {name: value for name, value in attributes.items() if name not in (*without, "channels_last")}


def _conv(rewriter: _Rewriter, node: onnx.NodeProto) -> None:
    inputs = [rewriter.dequantised(node, 0), rewriter.dequantised(node, 3, 0)]
    if len(node.input) > 8 and node.input[8]:
        inputs.append(rewriter.bias(node, 8, (1, 4)))
    rewriter.quantised(node, "Conv", inputs, 6, **_attributes(node))


def _gemm(rewriter: _Rewriter, node: onnx.NodeProto) -> None:
    attributes = _attributes(node)
    if len(node.input) < 9 or attributes.get("alpha", 1.0) != 1.0:
        raise _refusal(node, "its output is not quantised, or alpha is not 1", "quantise in QDQ form")
    inputs = [rewriter.dequantised(node, 0), rewriter.dequantised(node, 3, 1 - attributes.get("transB", 0))]
    if node.input[6]:
        inputs.append(rewriter.bias(node, 6, (1, 4)))
    rewriter.quantised(node, "Gemm", inputs, 7, **attributes)


def _of_two(op: str, rewriter: _Rewriter, node: onnx.NodeProto) -> None:
    """Operands and their scales, then the output's."""
    axis = 1 if op == "MatMul" else None
    inputs = [rewriter.dequantised(node, 0), rewriter.dequantised(node, 3, axis)]
    rewriter.quantised(node, op, inputs, 6, **_attributes(node))


def _of_one(op: str, rewriter: _Rewriter, node: onnx.NodeProto) -> None:
    rewriter.quantised(node, op, [rewriter.dequantised(node, 0)], 3, **_attributes(node, "opset"))


def _concat(rewriter: _Rewriter, node: onnx.NodeProto) -> None:
    inputs = [rewriter.dequantised(node, index) for index in range(2, len(node.input), 3)]
    rewriter.quantised(node, "Concat", inputs, 0, **_attributes(node))


REWRITES: Mapping[str, Callable[[_Rewriter, onnx.NodeProto], None]] = {
    "QLinearConv": _conv,
    "QLinearMatMul": partial(_of_two, "MatMul"),
    "QGemm": _gemm,
    "QLinearAdd": partial(_of_two, "Add"),
    "QLinearMul": partial(_of_two, "Mul"),
    "QLinearConcat": _concat,
    **{
        f"QLinear{op}": partial(_of_one, op)
        for op in ("GlobalAveragePool", "AveragePool", "Sigmoid", "LeakyRelu", "Softmax")
    },
}


def _refusal(node: onnx.NodeProto, cause: str, remedy: str) -> DicompilerError:
    return DicompilerError(f"target tflm: node {node.name!r} ({node.op_type}): {cause}: {remedy}")


def expanded(model: onnx.ModelProto, weights: Mapping[str, Weight]) -> onnx.ModelProto:
    """The model in QDQ form. DicompilerError naming the node where its scales are computed."""
    for node in model.graph.node:
        if node.op_type in RUNNING:
            raise _refusal(node, "activations are quantised while it runs", "quantise with samples (--calibrate)")
    if not any(node.op_type in REWRITES for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewriter = _Rewriter(copy, weights)
    for node in model.graph.node:
        try:
            REWRITES.get(node.op_type, _same)(rewriter, node)
        except KeyError:
            raise _refusal(node, "its scales are computed", "quantise with samples (--calibrate)") from None
    del copy.graph.node[:]
    copy.graph.node.extend(rewriter.nodes)
    return copy


def _same(rewriter: _Rewriter, node: onnx.NodeProto) -> None:
    rewriter.nodes.append(node)
