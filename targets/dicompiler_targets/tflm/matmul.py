"""Lowering of matrix products (Gemm and MatMul).

A product with a constant right matrix becomes FULLY_CONNECTED (in int8 CONV_2D), any other product BATCH_MATMUL.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler_targets.tflm.conv_pool import ACTIVATION_CODES, VALID_PADDING, make_zero_bias
from dicompiler_targets.tflm.flatbuffer import QuantizationParams
from dicompiler_targets.tflm.graph import SegmentNode, make_refusal
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC, TfliteWriter


def lower_gemm(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower Gemm to FULLY_CONNECTED. An ADD follows if C is not constant or is a whole matrix."""
    weight = writer.graph.constants.get(node.inputs[1])
    if weight is None or node.get_attribute("transA", 0):
        raise make_refusal(
            node, "its second matrix is not constant, or its first matrix is transposed", "use target sockets"
        )
    rows = weight if node.get_attribute("transB", 0) else weight.T
    if rows.dtype == np.float32:
        rows = rows * np.float32(node.get_attribute("alpha", 1.0))
    quantization = writer.graph.quantizations.get(node.inputs[1])
    beta = node.get_attribute("beta", 1.0)
    count = rows.shape[0]
    bias_array = writer.graph.constants.get(node.inputs[2]) if node.has_input(2) else None
    if not node.has_input(2) or (bias_array is not None and bias_array.size in (1, count)):
        bias = -1
        if bias_array is not None:
            full_bias = np.broadcast_to(bias_array.reshape(-1), (count,))
            scaled = full_bias if full_bias.dtype != np.float32 else full_bias * np.float32(beta)
            bias = writer.add_constant(scaled, node.inputs[2], writer.graph.quantizations.get(node.inputs[2]))
        _add_fully_connected(
            writer, node, rows, quantization, bias, writer.add_output(node.output, "plain"), node.activation
        )
        return
    if beta != 1.0:
        raise make_refusal(node, "beta is not 1, and C is not a vector", "multiply C before the Gemm")
    product = writer.add_tensor(f"{node.output}/product", "float32", writer.graph.shapes[node.output])
    _add_fully_connected(writer, node, rows, quantization, -1, product, "NONE")
    output, activation = writer.add_output(node.output, "plain"), ACTIVATION_CODES[node.activation]
    writer.add_operation(
        "ADD", [product, writer.require_tensor(node.inputs[2])], [output], "Add", FusedActivationFunction=activation
    )


def _add_fully_connected(
    writer: TfliteWriter,
    node: SegmentNode,
    rows: NDArray[Any],
    quantization: QuantizationParams | None,
    bias: int,
    output: int,
    activation: str,
) -> None:
    """Add the product of the node's input with the transpose of `rows`, a matrix of shape (N, K).

    If the input is a flattened image, the columns of `rows` are reordered instead of transposing the image.
    """
    name = node.inputs[0]
    image = writer.flattened_images.get(name)
    if image is not None and writer.get_form(image) == "image":
        shape = writer.graph.shapes[image]
        rows = rows.reshape(-1, *shape[1:]).transpose(NCHW_TO_NHWC).reshape(rows.shape)
        x = writer.add_reshape(writer.require_tensor(image, "image"), (shape[0], math.prod(shape[1:])))
    else:
        x = writer.require_tensor(name)
    _add_product(writer, x, (node.inputs[1], rows, quantization), bias, output, activation)


def _add_product(
    writer: TfliteWriter,
    x: int,
    weight: tuple[str, NDArray[Any], QuantizationParams | None],
    bias: int,
    output: int,
    activation: str,
) -> None:
    """Add the product of a matrix of shape (M, K) and a constant weight, with a result of shape (M, N).

    In int8, it is a CONV_2D on M images of one pixel, because TFLite-micro and LiteRT round FULLY_CONNECTED
    differently.

    Args:
        writer: Writer of the TFLite graph.
        x: Tensor index of the left operand.
        weight: Name, rows (shape (N, K)) and quantization of the weight.
        bias: Tensor index of the bias; -1 for none.
        output: Tensor index of the result.
        activation: TFLite's activation.
    """
    name, rows, quantization = weight
    values: dict[str, Any] = {"FusedActivationFunction": ACTIVATION_CODES[activation]}
    if quantization is None:
        inputs = [x, writer.add_constant(rows, name), bias]
        writer.add_operation("FULLY_CONNECTED", inputs, [output], "FullyConnected", KeepNumDims=False, **values)
        return
    (height, _), (count, depth) = writer.get_shape(x), rows.shape
    quantization = QuantizationParams(quantization.scale, quantization.zero_point, 0)
    image = writer.add_reshape(x, (height, 1, 1, depth))
    pixels = writer.add_like(output, (height, 1, 1, count))
    inputs = [image, writer.add_constant(rows.reshape(count, 1, 1, depth), name, quantization)]
    inputs.append(bias if bias >= 0 else make_zero_bias(writer, count, image, quantization))
    values |= {"Padding": VALID_PADDING, "StrideW": 1, "StrideH": 1, "DilationHFactor": 1, "DilationWFactor": 1}
    writer.add_operation("CONV_2D", inputs, [pixels], "Conv2D", **values)
    writer.add_reshape(pixels, (height, count), output)


def lower_matmul(writer: TfliteWriter, node: SegmentNode) -> None:
    """Lower MatMul with a constant weight to FULLY_CONNECTED (in int8 CONV_2D), any other MatMul to BATCH_MATMUL.

    With a constant weight, all left matrices are combined into one.
    """
    weight = writer.graph.constants.get(node.inputs[1])
    shape, out = writer.graph.get_shape(node.inputs[0]), writer.graph.shapes[node.output]
    if weight is not None and weight.ndim == 2 and len(shape) >= 2:
        x = writer.add_reshape(writer.require_tensor(node.inputs[0]), (math.prod(shape[:-1]), shape[-1]))
        quantization = writer.graph.quantizations.get(node.inputs[1])
        bias = writer.require_tensor(node.inputs[2]) if node.has_input(2) else -1
        output = writer.add_output(node.output, "plain")
        product = output if len(out) == 2 else writer.add_like(output, (math.prod(out[:-1]), out[-1]))
        _add_product(writer, x, (node.inputs[1], weight.T, quantization), bias, product, node.activation)
        if product != output:
            writer.add_reshape(product, out, output)
        return
    if len(shape) < 2 or len(writer.graph.get_shape(node.inputs[1])) < 2:
        raise make_refusal(node, "an operand is a vector", "reshape it to a matrix")
    inputs = [writer.require_tensor(name) for name in node.inputs]
    output = writer.add_output(node.output, "plain")
    if node.activation != "NONE":
        plain = writer.add_like(output, writer.get_shape(output))
        writer.add_operation("BATCH_MATMUL", inputs, [plain], "BatchMatMul", AdjX=False, AdjY=False)
        writer.add_operation(node.activation, [plain], [output])
    else:
        writer.add_operation("BATCH_MATMUL", inputs, [output], "BatchMatMul", AdjX=False, AdjY=False)
