"""Quantization of constant matrices in blocks, for products that onnxruntime computes with few bits.

MatMul(x, w)  ⇒  MatMulNBits(x, w in blocks of 4 or 8 bits, scales)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Model
from dicompiler_passes.unfuse_attention import ORT_DOMAIN

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Block sizes that onnxruntime's MatMulNBits supports."""
INT8_ACTIVATIONS = 4
"""Value of MatMulNBits' attribute `accuracy_level` with which activations are quantized to 8 bits."""


def quantize_products(model: Model, bits: int, block_size: int, has_int8_activations: bool) -> Model:
    """Return the network with the constant matrices of its products quantized.

    Args:
        model: A normalised network.
        bits: Bits of a weight: 4 or 8.
        block_size: Number of weights of a column that share a scale.
        has_int8_activations: True if the products are to quantize their activations to 8 bits.

    Returns:
        The network.

    Raises:
        DicompilerError: The network has no product with a constant matrix of float32.
    """
    graph = model.graph()
    packed: dict[str, tuple[gs.Constant, gs.Constant]] = {}
    level = {"accuracy_level": INT8_ACTIVATIONS} if has_int8_activations else {}
    count = 0
    for node in graph.nodes:
        if node.op != "MatMul" or node.domain not in (None, "", "ai.onnx") or not graph.is_constant(node.inputs[1]):
            continue
        weight = node.inputs[1]
        if len(weight.shape) != 2 or weight.dtype != np.float32 or 0 in weight.shape:
            continue
        if weight.name not in packed:
            blocks, scales = quantize_matrix(weight.values, bits, block_size)
            packed[weight.name] = (
                graph.add_initializer(graph.unused_tensor_name(f"{weight.name}_blocks"), blocks),
                graph.add_initializer(graph.unused_tensor_name(f"{weight.name}_scales"), scales),
            )
        features, columns = weight.shape
        node.op, node.domain = "MatMulNBits", ORT_DOMAIN
        node.attrs = {"K": features, "N": columns, "bits": bits, "block_size": block_size, **level}
        node.inputs = [node.inputs[0], *packed[weight.name]]
        count += 1
    if not count:
        raise DicompilerError("quantise: the network has no product with a constant matrix in float32: omit this pass")
    return model.with_graph(graph)


def quantize_matrix(weight: NDArray[Any], bits: int, block_size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return a matrix of shape (features, columns) as blocks and scales, in the form that MatMulNBits reads.

    A block has `block_size` consecutive features of a column; zeros are appended to the last block. In each block, the
    value with the largest magnitude becomes the lowest integer. This integer has the largest magnitude too, such as -8
    of -8 … 7.

    Returns:
        Blocks of shape (columns, blocks per column, bytes of a block), and scales of shape (columns, blocks per
        column).
    """
    features, columns = weight.shape
    block_count, middle = -(-features // block_size), 1 << (bits - 1)
    padded = np.zeros((columns, block_count * block_size), np.float32)
    padded[:, :features] = weight.T
    blocks = padded.reshape(columns, block_count, block_size)
    peaks = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
    scales = (peaks / -middle).astype(np.float32)
    steps = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0)
    values = np.clip(np.rint(steps) + middle, 0, 2 * middle - 1).astype(np.uint8)
    if bits == 4:
        values = values[:, :, ::2] | (values[:, :, 1::2] << 4)
    return values, scales[:, :, 0]
