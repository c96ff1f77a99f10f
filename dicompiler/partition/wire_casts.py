"""Conversion of sent tensors to smaller wire types, and back, by nodes of a placed graph.

A sent tensor can be narrowed to a smaller wire type. It passes Cast (float16, bfloat16) or QuantizeLinear (int8), the
transfer, and Cast or DequantizeLinear. For `int8-block` (8-bit integers with a scale per block), several standard ONNX
nodes encode and decode the tensor:

    x (float) ⇒ values (int8), scale indices (int8) ⇒ values · table[index] (float)

- The values of a region, in row-major order, form blocks of BLOCK_SIZE values; the last block can be shorter.
- The values of a block are divided by its scale: the smallest entry of a table for which all quotients fit into 8 bits.
  The index of the entry is sent instead of the scale.
- A sent tensor has one axis, which contains the values of all blocks, then the indices.
- The table has four scales per factor of two, for blocks with largest magnitudes from 2^-40 to 2^23.9. A 16-bit scale
  instead of the 8-bit index would reduce the mean error by only a tenth.
- If a block contains NaN or infinity, the nodes that convert it look up an index that the table does not have. The run
  then ends with an error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.layers import LayerGraph, TensorKey
from dicompiler.ir.regions import Region, region_shape, volume
from dicompiler.ir.routing import Box, Routing
from dicompiler.ir.wire_dtype import (
    BLOCK_SIZE,
    INT8_BLOCK,
    UNCHANGED,
    WireFormat,
    block_count,
    effective_wire_dtypes,
    int8_scale_and_zero_point,
    range_name,
    sent_dtype,
    wire_name_by_tensor,
)
from dicompiler.partition.placed_graph import NodePlacement, PlacedGraphBuilder, PlacedTensor

MIN_OPSET = 13
"""First opset that can encode int8-block, because its QuantizeLinear can have a scale for each row of a matrix."""
SCALES_PER_OCTAVE = 4
"""Number of scales per factor of two in the scale table of the wire type int8-block."""
SCALE_MARGIN = 2.0**-10
"""Fraction by which the scales of int8-block are reduced, so that decoded values get the same scale when sent again.

It exceeds the rounding errors of the operator Log. Half a quantization step, 1/254 of the largest value, is far larger.
"""
ZERO_INDEX = 32
"""Index of the int8-block scale for blocks in which the largest magnitude is 1."""
MAX_INT8_BLOCK = float(2.0 ** ((127 - ZERO_INDEX + 0.5) / SCALES_PER_OCTAVE))
"""Largest magnitude that the wire type int8-block can represent. Larger finite values are clipped."""
MAX_ROUNDING_ERROR = 2.0 ** (1 / SCALES_PER_OCTAVE) / 254
"""Largest rounding error of a value sent as int8-block, as a share of the largest magnitude in its block."""
_LOG_STEP = np.float32(math.log(2) / SCALES_PER_OCTAVE)
_INVALID_INDEX = np.int32(256)
"""Index beyond the end of the table of int8-block scales, so that a Gather with it fails and ends the run."""


@functools.cache
def make_scale_table() -> NDArray[np.float32]:
    """Return the scales of the wire type int8-block, for the indices 0 to 127 and then -128 to -1.

    Index i is for blocks with a largest magnitude up to 2^((i - ZERO_INDEX + 0.5) / SCALES_PER_OCTAVE). The 0.5 is
    added because the sender rounds the logarithm of the largest magnitude to the nearest index.
    """
    indices = np.roll(np.arange(-128, 128), 128)  # ONNX counts negative indices from the end of a table.
    largest = 2.0 ** ((indices - ZERO_INDEX + 0.5) / SCALES_PER_OCTAVE)
    return (largest * (1 - SCALE_MARGIN) / 127).astype(np.float32)


class BlockQuantizer:
    """Builder of encoders and decoders of the wire type int8-block in a placed graph (nodes with devices).

    Outputs of an encoder's nodes are named SENT.SUFFIX, except the last one, which is the sent tensor SENT.
    """

    def __init__(self, builder: PlacedGraphBuilder) -> None:
        self.builder = builder

    def encode(
        self, tensor: PlacedTensor, name: str, place: NodePlacement, origin: str, wire_name: str
    ) -> PlacedTensor:
        """Add nodes that encode a tensor for the wire type int8-block; return the encoded tensor, called `name`.

        Args:
            tensor: Tensor with at least one value.
            name: Name of the encoded tensor.
            place: Device and position in time of the nodes.
            origin: Name of the model's tensor for which the nodes are added.
            wire_name: Layer or model input of which the tensor is an output, for error messages.
        """
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
        mean = steps.add("ReduceMean", inputs, (blocks,), matrix.dtype, keepdims=0, **axes)
        logarithm = steps.add("Log", [largest.name], (blocks,), matrix.dtype)
        step = self.builder.add_constant(np.array(_LOG_STEP), "int8-block~step")
        zero_index = self.builder.add_constant(np.array(ZERO_INDEX, np.int8), "int8-block~zero")
        index = steps.add("QuantizeLinear", [logarithm.name, step, zero_index], (blocks,), onnx.TensorProto.INT8)
        scale = self._add_checked_scales(steps, index, (largest, mean), wire_name)
        parameters = [scale.name, self._zeros(np.int8, blocks)]
        matrix = steps.add("QuantizeLinear", [matrix.name, *parameters], (blocks, rows), index.dtype, axis=0)
        flat = steps.cut(steps.reshape(matrix, (blocks * rows,)), 0, count)
        sent = PlacedTensor(name, ((0, count + blocks),), index.dtype)
        return self.builder.add_node("Concat", [flat.name, index.name], sent, place, origin, axis=0)

    def decode(
        self, sent: PlacedTensor, region: Region, dtype: int, name: str, place: NodePlacement, origin: str
    ) -> PlacedTensor:
        """Add nodes that decode the received tensor `sent` (int8-block); return the decoded tensor, called `name`.

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
        return self._add_lookup(steps, steps.cast(index, onnx.TensorProto.INT32), "gather")

    def _add_checked_scales(
        self, steps: _NodeChain, index: PlacedTensor, statistics: tuple[PlacedTensor, PlacedTensor], wire_name: str
    ) -> PlacedTensor:
        """Add nodes that look up the scale of each block, and that fail if a block contains NaN or infinity.

        Args:
            steps: Adds the nodes.
            index: Index of the scale of each block.
            statistics: Largest and mean magnitude of each block.
            wire_name: The layer or model input that the error proposes to send unchanged.
        """
        shape, wide = region_shape(index.region), steps.cast(index, onnx.TensorProto.INT32)
        # The largest magnitude can ignore NaN, and the mean of finite values can overflow. The smaller one of the two
        # is finite exactly if all values of the block are finite.
        magnitude = steps.add("Min", [tensor.name for tensor in statistics], shape, onnx.TensorProto.FLOAT)
        limit = self.builder.add_constant(np.array(np.finfo(np.float32).max), "int8-block~limit")
        is_finite = steps.add("LessOrEqual", [magnitude.name, limit], shape, onnx.TensorProto.BOOL)
        invalid = self.builder.add_constant(np.array(_INVALID_INDEX), "int8-block~invalid")
        checked = steps.add("Where", [is_finite.name, wide.name, invalid], shape, wide.dtype)
        # The name of the failing node is the error message, because onnxruntime's error contains only this name.
        error = (
            f"error: tensor {steps.origin} contains NaN or infinity, which {INT8_BLOCK} cannot represent: "
            f"add {wire_name}={UNCHANGED} to --wire-dtype"
        )
        return self._add_lookup(steps, checked, error)

    def _add_lookup(self, steps: _NodeChain, index: PlacedTensor, name: str) -> PlacedTensor:
        table = self.builder.add_constant(make_scale_table(), "int8-block~table")
        shape = region_shape(index.region)
        return steps.add("Gather", [table, index.name], shape, onnx.TensorProto.FLOAT, name)

    def _zeros(self, dtype: type[np.generic], count: int) -> str:
        return self.builder.add_constant(np.zeros(count, dtype), f"int8-block~{np.dtype(dtype)}zeros{count}")


class _NodeChain:
    """Builder of nodes with the same device and position in time. Their outputs are named after the tensor `name`."""

    def __init__(self, builder: PlacedGraphBuilder, name: str, place: NodePlacement, origin: str) -> None:
        self.builder, self.name, self.place, self.origin = builder, name, place, origin

    def add(
        self, op: str, inputs: Sequence[str], shape: Sequence[int], dtype: int, suffix: str = "", **attributes: Any
    ) -> PlacedTensor:
        name = self.builder.unique_tensor_name(f"{self.name}.{suffix or op.lower()}")
        output = PlacedTensor(name, tuple((0, extent) for extent in shape), dtype)
        return self.builder.add_node(op, inputs, output, self.place, self.origin, **attributes)

    def cast(self, tensor: PlacedTensor, dtype: int) -> PlacedTensor:
        shape = region_shape(tensor.region)
        return tensor if tensor.dtype == dtype else self.add("Cast", [tensor.name], shape, dtype, to=dtype)

    def reshape(self, tensor: PlacedTensor, shape: tuple[int, ...]) -> PlacedTensor:
        return self.add("Reshape", [tensor.name, self.builder.add_constant(shape)], shape, tensor.dtype)

    def cut(self, tensor: PlacedTensor, start: int, stop: int) -> PlacedTensor:
        if tensor.region == ((start, stop),):
            return tensor
        bounds = [self.builder.add_constant((number,)) for number in (start, stop, 0)]
        return self.add("Slice", [tensor.name, *bounds], (stop - start,), tensor.dtype)


def is_encoder_tensor(output: str, sent: str) -> bool:
    """Return True if `output` is an intermediate tensor of the nodes that convert to the sent tensor `sent`."""
    return output.startswith(f"{sent}.")


LAST_POSITION = 1 << 31
"""Position in the order of execution after all layers, for casts of sent slices, so that they follow all slices."""
MIN_OPSET_BY_DTYPE = {"float16": 6, "bfloat16": 13, "int8": 10, INT8_BLOCK: MIN_OPSET}
"""First opset with the operators that convert a tensor to a wire type (a type in which it is sent), by wire type."""
PLACEHOLDER_RANGE = (-1.0, 1.0)
"""Value range of tensors sent as int8 in programs that are only simulated, for which no samples have been run."""


class WireCasts:
    """Builder of the casts of tensors that are sent in a smaller element type (wire type) than their own."""

    def __init__(self, builder: PlacedGraphBuilder, layers: LayerGraph, wire: WireFormat) -> None:
        self.builder, self.layers, self.wire = builder, layers, wire
        self.kinds = effective_wire_dtypes(layers)
        self.quantizer = BlockQuantizer(builder)
        # Received tensors after the cast to their original type, by the name of the received tensor, the device and the
        # lane (number of a group of the device's parts).
        self.wide: dict[tuple[str, str, int], PlacedTensor] = {}

    def narrow(
        self, piece: PlacedTensor, box: Box, slice_placement: NodePlacement, maker: NodePlacement
    ) -> PlacedTensor:
        """Return the tensor `piece` in the element type in which it is sent. A cast is added if it is needed.

        Args:
            piece: Tensor that contains `box`.
            box: Region of a tensor that is sent.
            slice_placement: Placement of the Slice that may cut the box.
            maker: Placement of the node that computes `piece`: this Slice, or a node of a layer.
        """
        kind = self.kinds.get(box.key.tensor)
        if kind is None or (kind == INT8_BLOCK and not volume(piece.region)):
            return piece
        # The cast of a slice follows all slices. Between two slices, it would end the segment (the submodel that a
        # device runs at once), and the tensors would not be sent together.
        period, lane, position, phase = maker.step_key
        placement = slice_placement._replace(step_key=(period, lane, LAST_POSITION if lane < 0 else position, phase))
        name = self.builder.unique_tensor_name(f"{piece.name}~{kind}")
        if kind == INT8_BLOCK:
            wire_name = wire_name_by_tensor(self.layers)[box.key.tensor]
            return self.quantizer.encode(piece, name, placement, range_name(box.key), wire_name)
        narrowed = PlacedTensor(name, piece.region, sent_dtype(self.layers, box.key.tensor))
        return self._convert(piece, narrowed, placement, box.key, "QuantizeLinear")

    def widen(self, sent: PlacedTensor, box: Box, place: NodePlacement) -> PlacedTensor:
        """Return a received box (region of a tensor), cast back from the wire type to its original type.

        All parts of a device with the same lane (number of a group of parts) share the cast.
        """
        assert box.region is not None
        key, kind = box.key, self.kinds.get(box.key.tensor)
        if kind is None or (kind == INT8_BLOCK and not volume(box.region)):
            return sent
        cache_key = (sent.name, place.device, place.lane)
        if cache_key not in self.wide:
            name = self.builder.unique_tensor_name(f"{sent.name}@{place.device}")
            widened = PlacedTensor(name, box.region, self.layers.tensors[key.tensor].dtype)
            if kind == INT8_BLOCK:
                origin = range_name(key)
                self.wide[cache_key] = self.quantizer.decode(sent, box.region, widened.dtype, name, place, origin)
            else:
                self.wide[cache_key] = self._convert(sent, widened, place, key, "DequantizeLinear")
        return self.wide[cache_key]

    def _convert(
        self, tensor: PlacedTensor, converted: PlacedTensor, placement: NodePlacement, key: TensorKey, quantize_op: str
    ) -> PlacedTensor:
        origin = range_name(key)
        if self.kinds[key.tensor] != "int8":
            return self.builder.add_node("Cast", [tensor.name], converted, placement, origin, to=converted.dtype)
        scale, zero = int8_scale_and_zero_point(self.wire.ranges.get(origin, PLACEHOLDER_RANGE))
        names = (
            self.builder.add_constant(np.array(scale, np.float32), f"{origin}~scale"),
            self.builder.add_constant(np.array(zero, np.int8), f"{origin}~zero"),
        )
        return self.builder.add_node(quantize_op, [tensor.name, *names], converted, placement, origin)


def check_wire_dtypes(routing: Routing, wire: WireFormat, opset: int) -> None:
    """Raise DicompilerError if the opset is too old for a wire type, or the value range of an int8 tensor is unknown.

    A wire type is the element type in which a tensor is sent. `opset` is the version of the model's standard operators;
    0: it uses none.
    """
    dtypes = effective_wire_dtypes(routing.layers)
    keys = dict.fromkeys(box.key for role in routing.roles for box in role.received_boxes if box.key.tensor in dtypes)
    for key in keys:
        kind, name = dtypes[key.tensor], range_name(key)
        if 0 < opset < MIN_OPSET_BY_DTYPE.get(kind, 0):
            raise DicompilerError(
                f"wire: {kind} needs opset {MIN_OPSET_BY_DTYPE[kind]}, but the model has {opset}: convert the model "
                "(onnx.version_converter), or use another type"
            )
        if kind == "int8" and name not in wire.ranges:
            raise DicompilerError(
                f"wire: the value range of {name!r}, which is sent as int8, is unknown: "
                "give sample inputs (--wire-samples)"
            )


def max_narrowings_on_path(routing: Routing) -> int:
    """Return how often a value is converted to a smaller wire type on a path from a model input to a model output.

    The result is the maximum over all paths.
    """
    layers = routing.layers
    dtypes = effective_wire_dtypes(layers)
    sent_keys = {box.key for role in routing.roles for box in role.received_boxes if box.key.tensor in dtypes}
    whole = {key.tensor for key in sent_keys if key.reduce is None}
    partial = {key.tensor for key in sent_keys if key.reduce is not None}
    count = dict.fromkeys(layers.inputs, 0)
    for layer in layers.layers:
        largest = max((count.get(name, 0) + (name in whole) for name in layer.inputs), default=0)
        has_sent_sums = any(name in partial for node in layer.nodes for name in node.outputs)
        count |= dict.fromkeys(layer.outputs, largest + has_sent_sums)
    return max((count.get(name, 0) + (name in whole) for name in layers.outputs), default=0)
