"""Encoder and decoder of the wire type `int8-block` (8-bit integers with a scale per block), as standard ONNX nodes.

The values of a region, in row-major order, form blocks of BLOCK_SIZE values; the last block can be shorter. Each block
has a scale, by which its values are divided. The scale is the smallest entry of a table for which all quotients fit
into 8 bits. Instead of the scale, its index in the table is sent, in 8 bits. A sent tensor has one axis, which contains
the values of all blocks, then the indices.

    x (float) ⇒ values (int8), scale indices (int8) ⇒ values · table[index] (float)

The table has four scales per factor of two, for blocks with largest magnitudes from 2^-40 to 2^23.9. A 16-bit scale
instead of the 8-bit index would need one more byte per block, and would reduce the mean error by a tenth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.ir.regions import Region, region_shape, volume
from dicompiler.ir.wire_dtype import BLOCK_SIZE, block_count
from dicompiler.partition.placed_graph import NodePlacement, PlacedGraphBuilder, PlacedTensor

MIN_OPSET = 13
"""First opset with a QuantizeLinear that has a scale for each row of a matrix."""
SCALES_PER_OCTAVE = 4
"""Number of scales per factor of two."""
SCALE_MARGIN = 2.0**-10
"""Fraction by which each scale is smaller than needed, so that values get the same scale if they are sent again.

It exceeds the rounding errors of the operator Log, and is far below half a quantization step (1/254).
"""
ZERO_INDEX = 32
"""Index of the scale that is used for a block if the largest magnitude of its values is 1."""
MAX_INT8_BLOCK = float(2.0 ** ((127 - ZERO_INDEX + 0.5) / SCALES_PER_OCTAVE))
"""Largest magnitude that the wire type can represent. Larger values are clipped."""
MAX_ROUNDING_ERROR = 2.0 ** (1 / SCALES_PER_OCTAVE) / 254
"""Largest difference between a value and its received value, as a share of the largest magnitude in its block."""
_LOG_STEP = np.float32(math.log(2) / SCALES_PER_OCTAVE)


@functools.cache
def make_scale_table() -> NDArray[np.float32]:
    """Return the scales by index. The indices -128 to -1 are at the end, as ONNX counts negative indices.

    Index i is for blocks with a largest magnitude up to 2^((i - ZERO_INDEX + 0.5) / SCALES_PER_OCTAVE). The 0.5 is
    there because the sender rounds the logarithm of the largest magnitude to the nearest index. All scales are smaller
    than needed by the fraction SCALE_MARGIN, so that a block that a receiver has decoded gets the same index if it is
    sent again.
    """
    indices = np.roll(np.arange(-128, 128), 128)
    largest = 2.0 ** ((indices - ZERO_INDEX + 0.5) / SCALES_PER_OCTAVE)
    return (largest * (1 - SCALE_MARGIN) / 127).astype(np.float32)


class BlockQuantizer:
    """Adds encoders and decoders of the wire type int8-block to a placed graph (nodes with devices).

    The outputs of all nodes of an encoder have the name of the sent tensor, with a dot and a suffix.
    """

    def __init__(self, builder: PlacedGraphBuilder) -> None:
        self.builder = builder

    def encode(self, tensor: PlacedTensor, name: str, place: NodePlacement, origin: str) -> PlacedTensor:
        """Add nodes that encode a tensor with at least one value; return the encoded tensor, which is called `name`."""
        count = volume(tensor.region)
        blocks, rows = block_count(count), min(BLOCK_SIZE, count)
        steps = _NodeChain(self.builder, name, place, origin)
        values = steps.cast(tensor, onnx.TensorProto.FLOAT)
        if blocks * rows != count:
            flat = steps.reshape(values, (count,))
            zeros = self._zeros(np.float32, blocks * rows - count)
            values = steps.add("Concat", [flat.name, zeros], (blocks * rows,), flat.dtype, axis=0)
        matrix = steps.reshape(values, (blocks, rows))
        magnitudes = steps.add("Abs", [matrix.name], (blocks, rows), matrix.dtype)
        opset = self.builder.facts.opset
        axes: dict[str, Any] = {"axes": (1,)} if opset < 18 else {}
        inputs = [magnitudes.name] if axes else [magnitudes.name, self.builder.add_constant((1,))]
        largest = steps.add("ReduceMax", inputs, (blocks,), matrix.dtype, keepdims=0, **axes)
        logarithm = steps.add("Log", [largest.name], (blocks,), matrix.dtype)
        step = self.builder.add_constant(np.array(_LOG_STEP), "int8-block~step")
        zero_index = self.builder.add_constant(np.array(ZERO_INDEX, np.int8), "int8-block~zero")
        index = steps.add("QuantizeLinear", [logarithm.name, step, zero_index], (blocks,), onnx.TensorProto.INT8)
        scale = self._add_scales(steps, index)
        parameters = [scale.name, self._zeros(np.int8, blocks)]
        matrix = steps.add("QuantizeLinear", [matrix.name, *parameters], (blocks, rows), index.dtype, axis=0)
        flat = steps.cut(steps.reshape(matrix, (blocks * rows,)), 0, count)
        sent = PlacedTensor(name, ((0, count + blocks),), index.dtype)
        return self.builder.add_node("Concat", [flat.name, index.name], sent, place, origin, axis=0)

    def decode(
        self, sent: PlacedTensor, region: Region, dtype: int, name: str, place: NodePlacement, origin: str
    ) -> PlacedTensor:
        """Add nodes that decode the received tensor `sent`; return the decoded tensor, which is called `name`.

        The decoded tensor contains `region` of the model's tensor, and has the element type `dtype`.
        """
        count = volume(region)
        blocks, rows = block_count(count), min(BLOCK_SIZE, count)
        steps = _NodeChain(self.builder, name, place, origin)
        values, index = steps.cut(sent, 0, count), steps.cut(sent, count, count + blocks)
        if blocks * rows != count:
            inputs = [values.name, self._zeros(np.int8, blocks * rows - count)]
            values = steps.add("Concat", inputs, (blocks * rows,), values.dtype, axis=0)
        matrix = steps.reshape(values, (blocks, rows))
        scale = self._add_scales(steps, index)
        inputs = [matrix.name, scale.name]
        matrix = steps.add("DequantizeLinear", inputs, (blocks, rows), scale.dtype, axis=0)
        if blocks * rows != count:
            matrix = steps.cut(steps.reshape(matrix, (blocks * rows,)), 0, count)
        matrix = steps.cast(matrix, dtype)
        shape = self.builder.add_constant(region_shape(region))
        return self.builder.add_node("Reshape", [matrix.name, shape], PlacedTensor(name, region, dtype), place, origin)

    def _add_scales(self, steps: _NodeChain, index: PlacedTensor) -> PlacedTensor:
        shape = region_shape(index.region)
        wide = steps.add("Cast", [index.name], shape, onnx.TensorProto.INT32, to=onnx.TensorProto.INT32)
        table = self.builder.add_constant(make_scale_table(), "int8-block~table")
        return steps.add("Gather", [table, wide.name], shape, onnx.TensorProto.FLOAT)

    def _zeros(self, dtype: type[np.generic], count: int) -> str:
        return self.builder.add_constant(np.zeros(count, dtype), f"int8-block~{np.dtype(dtype)}zeros{count}")


class _NodeChain:
    """Adds nodes with the same device and position in time, and with outputs named after the tensor `name`."""

    def __init__(self, builder: PlacedGraphBuilder, name: str, place: NodePlacement, origin: str) -> None:
        self.builder, self.name, self.place, self.origin = builder, name, place, origin

    def add(self, op: str, inputs: Sequence[str], shape: Sequence[int], dtype: int, **attributes: Any) -> PlacedTensor:
        name = self.builder.unique_tensor_name(f"{self.name}.{op.lower()}")
        output = PlacedTensor(name, tuple((0, extent) for extent in shape), dtype)
        return self.builder.add_node(op, inputs, output, self.place, self.origin, **attributes)

    def cast(self, tensor: PlacedTensor, dtype: int) -> PlacedTensor:
        shape = region_shape(tensor.region)
        return tensor if tensor.dtype == dtype else self.add("Cast", [tensor.name], shape, dtype, to=dtype)

    def reshape(self, tensor: PlacedTensor, shape: tuple[int, ...]) -> PlacedTensor:
        return self.add("Reshape", [tensor.name, self.builder.add_constant(shape)], shape, tensor.dtype)

    def cut(self, tensor: PlacedTensor, start: int, stop: int) -> PlacedTensor:
        """Return the values from `start` to `stop` of a tensor with one axis."""
        if tensor.region == ((start, stop),):
            return tensor
        bounds = [self.builder.add_constant((number,)) for number in (start, stop, 0)]
        return self.add("Slice", [tensor.name, *bounds], (stop - start,), tensor.dtype)


def is_part_of(output: str, sent: str) -> bool:
    """Return True if a node with this output belongs to the nodes that encode the sent tensor `sent`."""
    return output.startswith(f"{sent}.")
