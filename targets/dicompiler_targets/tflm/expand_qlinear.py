"""Expansion of onnxruntime's QLinear operators, which have scales as inputs, to standard operators in QDQ form.

In QDQ form, float operators are between DequantizeLinear and QuantizeLinear nodes:

    QLinearConv(x, w, scales and zero points of x, w and y) → y
        ⇒ DequantizeLinear(x), DequantizeLinear(w) → Conv → QuantizeLinear → y

Scales, zero points and weights are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError
from dicompiler.plugin_api.onnx import Weight, is_placeholder

DYNAMIC_OPERATORS = (
    "DynamicQuantizeLinear",
    "ConvInteger",
    "MatMulInteger",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
)
"""Operators that quantize activations at run time, which TFLite-micro does not support."""


@dataclass
class _QLinearRewriter:
    """A model whose QLinear operators are being replaced by QDQ form; `nodes` are the new nodes."""

    model: onnx.ModelProto
    weights: Mapping[str, Weight]
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def get_constant(self, name: str) -> NDArray[Any]:
        """Return the values of a constant; raise KeyError if the tensor is not constant."""
        tensor = {t.name: t for t in self.model.graph.initializer}[name]
        return self.weights[name].array() if is_placeholder(tensor) else onnx.numpy_helper.to_array(tensor)

    def add_node(self, op: str, node: onnx.NodeProto, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(onnx.helper.make_node(op, inputs, [output], node.name, **attributes))
        return output

    def add_dequantized(self, node: onnx.NodeProto, index: int, axis: int | None = None) -> str:
        """Add a DequantizeLinear of input `index` of a node; return the name of its output.

        The scale and the zero point are the next two inputs of the node. A scale with several values is for the indices
        along `axis`.
        """
        inputs = [name for name in node.input[index : index + 3] if name]
        attributes = {} if axis is None or self.get_constant(inputs[1]).size == 1 else {"axis": axis}
        return self.add_node("DequantizeLinear", node, inputs, f"{node.output[0]}/{index}", **attributes)

    def add_dequantized_bias(self, node: onnx.NodeProto, index: int, scales: tuple[int, int]) -> str:
        """Add a DequantizeLinear of an int32 bias (input `index` of a node); return the name of its output.

        `scales` has the indices of two inputs of the node. The scale of the bias is the product of their scales.
        """
        name, scale = node.input[index], f"{node.output[0]}/bias scale"
        of_x, of_w = (self.get_constant(node.input[i]).astype(np.float64) for i in scales)
        product = of_x.reshape(()) * of_w
        self.model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(product, np.float32), scale))
        attributes = {"axis": 0} if product.size > 1 else {}
        return self.add_node("DequantizeLinear", node, [name, scale], f"{node.output[0]}/{index}", **attributes)

    def add_quantized(
        self, node: onnx.NodeProto, op: str, inputs: Sequence[str], scale_index: int, **attributes: Any
    ) -> None:
        """Add a float32 node and a QuantizeLinear of its output.

        The scale of the output is input `scale_index` of the original node; the zero point is the next input.
        """
        floats = self.add_node(op, node, inputs, f"{node.output[0]}/float", **attributes)
        self.add_node("QuantizeLinear", node, [floats, *node.input[scale_index : scale_index + 2]], node.output[0])


def _get_attributes(node: onnx.NodeProto, *without: str) -> dict[str, Any]:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if attributes.get("channels_last", 0):
        raise _make_refusal(node, "its image has channels last", "quantise without layout transformation")
    return {name: value for name, value in attributes.items() if name not in (*without, "channels_last")}


def _rewrite_conv(rewriter: _QLinearRewriter, node: onnx.NodeProto) -> None:
    inputs = [rewriter.add_dequantized(node, 0), rewriter.add_dequantized(node, 3, 0)]
    if len(node.input) > 8 and node.input[8]:
        inputs.append(rewriter.add_dequantized_bias(node, 8, (1, 4)))
    rewriter.add_quantized(node, "Conv", inputs, 6, **_get_attributes(node))


def _rewrite_gemm(rewriter: _QLinearRewriter, node: onnx.NodeProto) -> None:
    attributes = _get_attributes(node)
    if len(node.input) < 9 or attributes.get("alpha", 1.0) != 1.0:
        raise _make_refusal(node, "its output is not quantised, or alpha is not 1", "quantise in QDQ form")
    inputs = [rewriter.add_dequantized(node, 0), rewriter.add_dequantized(node, 3, 1 - attributes.get("transB", 0))]
    if node.input[6]:
        inputs.append(rewriter.add_dequantized_bias(node, 6, (1, 4)))
    rewriter.add_quantized(node, "Gemm", inputs, 7, **attributes)


def _rewrite_binary(op: str, rewriter: _QLinearRewriter, node: onnx.NodeProto) -> None:
    """Rewrite a node with two operands to the float32 operator `op`.

    The node's inputs are, in this order: the first operand, its scale and zero point; the same for the second operand;
    the scale and zero point of the output.
    """
    axis = 1 if op == "MatMul" else None
    inputs = [rewriter.add_dequantized(node, 0), rewriter.add_dequantized(node, 3, axis)]
    rewriter.add_quantized(node, op, inputs, 6, **_get_attributes(node))


def _rewrite_unary(op: str, rewriter: _QLinearRewriter, node: onnx.NodeProto) -> None:
    rewriter.add_quantized(node, op, [rewriter.add_dequantized(node, 0)], 3, **_get_attributes(node, "opset"))


def _rewrite_concat(rewriter: _QLinearRewriter, node: onnx.NodeProto) -> None:
    inputs = [rewriter.add_dequantized(node, index) for index in range(2, len(node.input), 3)]
    rewriter.add_quantized(node, "Concat", inputs, 0, **_get_attributes(node))


REWRITES: Mapping[str, Callable[[_QLinearRewriter, onnx.NodeProto], None]] = {
    "QLinearConv": _rewrite_conv,
    "QLinearMatMul": partial(_rewrite_binary, "MatMul"),
    "QGemm": _rewrite_gemm,
    "QLinearAdd": partial(_rewrite_binary, "Add"),
    "QLinearMul": partial(_rewrite_binary, "Mul"),
    "QLinearConcat": _rewrite_concat,
    **{
        f"QLinear{op}": partial(_rewrite_unary, op)
        for op in ("GlobalAveragePool", "AveragePool", "Sigmoid", "LeakyRelu", "Softmax")
    },
}


def _make_refusal(node: onnx.NodeProto, cause: str, remedy: str) -> DicompilerError:
    return DicompilerError(f"target tflm: node {node.name!r} ({node.op_type}): {cause}: {remedy}")


def expand_qlinear(model: onnx.ModelProto, weights: Mapping[str, Weight]) -> onnx.ModelProto:
    """Return the model with operators in QDQ form (float, between DequantizeLinear and QuantizeLinear).

    Raises:
        DicompilerError: A scale is not constant, or activations are quantized at run time. The error names the node.
    """
    for node in model.graph.node:
        if node.op_type in DYNAMIC_OPERATORS:
            raise _make_refusal(
                node, "its activations are quantised at run time", "quantise with samples (--quantize-samples)"
            )
    if not any(node.op_type in REWRITES for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewriter = _QLinearRewriter(copy, weights)
    for node in model.graph.node:
        try:
            REWRITES.get(node.op_type, _copy_node)(rewriter, node)
        except KeyError:
            remedy = "quantise with samples (--quantize-samples)"
            raise _make_refusal(node, "its scales are computed during the run", remedy) from None
    del copy.graph.node[:]
    copy.graph.node.extend(rewriter.nodes)
    return copy


def _copy_node(rewriter: _QLinearRewriter, node: onnx.NodeProto) -> None:
    rewriter.nodes.append(node)
