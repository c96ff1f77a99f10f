"""Matrix products: FULLY_CONNECTED (of 8-bit numbers CONV_2D) where the right one is constant, else BATCH_MATMUL."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler_targets.tflm.flatbuffer import Quantisation
from dicompiler_targets.tflm.graph import Node, refusal
from dicompiler_targets.tflm.windows import ACTIVATIONS, VALID, no_bias
from dicompiler_targets.tflm.writer import IMAGE, Writer


def gemm(writer: Writer, node: Node) -> None:
    """Gemm → FULLY_CONNECTED, and an ADD where C is computed or a whole matrix."""
    weight = writer.graph.constants.get(node.inputs[1])
    if weight is None or node.attribute("transA", 0):
        raise refusal(node, "its second matrix is computed, or its first one transposed", "use target sockets")
    rows = weight if node.attribute("transB", 0) else weight.T
    if rows.dtype == np.float32:
        rows = rows * np.float32(node.attribute("alpha", 1.0))
    about = writer.graph.quantisations.get(node.inputs[1])
    beta = node.attribute("beta", 1.0)
    count = rows.shape[0]
    given = writer.graph.constants.get(node.inputs[2]) if node.has(2) else None
    if not node.has(2) or (given is not None and given.size in (1, count)):
        bias = -1
        if given is not None:
            whole = np.broadcast_to(given.reshape(-1), (count,))
            scaled = whole if whole.dtype != np.float32 else whole * np.float32(beta)
            bias = writer.constant(scaled, node.inputs[2], writer.graph.quantisations.get(node.inputs[2]))
        _connected(writer, node, rows, about, bias, writer.make(node.output, "plain"), node.activation)
        return
    if beta != 1.0:
        raise refusal(node, "beta is not 1 for a C that is no vector", "multiply C before it")
    product = writer.tensor(f"{node.output}/product", "float32", writer.graph.shapes[node.output])
    _connected(writer, node, rows, about, -1, product, "NONE")
    output, activation = writer.make(node.output, "plain"), ACTIVATIONS[node.activation]
    writer.add("ADD", [product, writer.read(node.inputs[2])], [output], "Add", FusedActivationFunction=activation)


def _connected(
    writer: Writer,
    node: Node,
    rows: NDArray[Any],
    about: Quantisation | None,
    bias: int,
    output: int,
    activation: str,
) -> None:
    """The product with the transpose of a matrix (N, K). The K columns of `rows` are put in the order of a flattened
    image where x is one, which then needs no transpose."""
    name = node.inputs[0]
    image = writer.flat.get(name)
    if image is not None and writer.form(image) == "image":
        shape = writer.graph.shapes[image]
        rows = rows.reshape(-1, *shape[1:]).transpose(IMAGE).reshape(rows.shape)
        x = writer.reshape(writer.read(image, "image"), (shape[0], math.prod(shape[1:])))
    else:
        x = writer.read(name)
    _product(writer, x, (node.inputs[1], rows, about), bias, output, activation)


def _product(
    writer: Writer,
    x: int,
    weight: tuple[str, NDArray[Any], Quantisation | None],
    bias: int,
    output: int,
    activation: str,
) -> None:
    """x (M, K) and the weight (its name, its rows (N, K), its numbers) → output (M, N), by FULLY_CONNECTED.

    Of 8-bit numbers by CONV_2D, on M images of one pixel: TFLite-micro and LiteRT round its results alike, and those of
    FULLY_CONNECTED not.
    """
    name, rows, about = weight
    values: dict[str, Any] = {"FusedActivationFunction": ACTIVATIONS[activation]}
    if about is None:
        inputs = [x, writer.constant(rows, name), bias]
        writer.add("FULLY_CONNECTED", inputs, [output], "FullyConnected", KeepNumDims=False, **values)
        return
    (height, _), (count, depth) = writer.shape(x), rows.shape
    about = Quantisation(about.scale, about.zero, 0)
    image = writer.reshape(x, (height, 1, 1, depth))
    pixels = writer.like(output, (height, 1, 1, count))
    inputs = [image, writer.constant(rows.reshape(count, 1, 1, depth), name, about)]
    inputs.append(bias if bias >= 0 else no_bias(writer, count, image, about))
    values |= {"Padding": VALID, "StrideW": 1, "StrideH": 1, "DilationHFactor": 1, "DilationWFactor": 1}
    writer.add("CONV_2D", inputs, [pixels], "Conv2D", **values)
    writer.reshape(pixels, (height, count), output)


def matmul(writer: Writer, node: Node) -> None:
    """MatMul → FULLY_CONNECTED over the rows of all matrices, or BATCH_MATMUL."""
    weight = writer.graph.constants.get(node.inputs[1])
    shape, out = writer.graph.shape(node.inputs[0]), writer.graph.shapes[node.output]
    if weight is not None and weight.ndim == 2 and len(shape) >= 2:
        x = writer.reshape(writer.read(node.inputs[0]), (math.prod(shape[:-1]), shape[-1]))
        about = writer.graph.quantisations.get(node.inputs[1])
        bias = writer.read(node.inputs[2]) if node.has(2) else -1
        output = writer.make(node.output, "plain")
        product = output if len(out) == 2 else writer.like(output, (math.prod(out[:-1]), out[-1]))
        _product(writer, x, (node.inputs[1], weight.T, about), bias, product, node.activation)
        if product != output:
            writer.reshape(product, out, output)
        return
    if len(shape) < 2 or len(writer.graph.shape(node.inputs[1])) < 2:
        raise refusal(node, "an operand is a vector", "reshape it to a matrix")
    inputs = [writer.read(name) for name in node.inputs]
    output = writer.make(node.output, "plain")
    if node.activation != "NONE":
        plain = writer.like(output, writer.shape(output))
        writer.add("BATCH_MATMUL", inputs, [plain], "BatchMatMul", AdjX=False, AdjY=False)
        writer.add(node.activation, [plain], [output])
    else:
        writer.add("BATCH_MATMUL", inputs, [output], "BatchMatMul", AdjX=False, AdjY=False)
