"""Narrowing of sent tensors: casts to a smaller wire type before each transfer, and casts back after it.

A tensor passes Cast (float16, bfloat16) or QuantizeLinear (int8), the transfer, and Cast or DequantizeLinear. For
int8-block, `block_quantization` adds several nodes before and after the transfer.
"""

from __future__ import annotations

import numpy as np

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.regions import volume
from dicompiler.ir.routing import Box, Routing
from dicompiler.ir.tasks import TensorKey
from dicompiler.ir.wire_dtype import (
    INT8_BLOCK,
    WireFormat,
    effective_wire_dtypes,
    int8_scale_and_zero_point,
    range_name,
    sent_dtype,
)
from dicompiler.partition.block_quantization import MIN_OPSET, BlockQuantizer
from dicompiler.partition.placed_graph import NodePlacement, PlacedGraphBuilder, PlacedTensor

LAST_POSITION = 1 << 31
"""Position in layer order that comes after all layers, for the casts of slices."""
MIN_OPSET_BY_DTYPE = {"float16": 6, "bfloat16": 13, "int8": 10, INT8_BLOCK: MIN_OPSET}
"""First opset with the operators that convert to each wire type."""
PLACEHOLDER_RANGE = (-1.0, 1.0)
"""Value range that is used in programs that are only simulated, because no samples have been run for them."""


class WireCasts:
    """Adds casts between devices, for tensors that are sent in a smaller element type (wire type) than their own."""

    def __init__(self, builder: PlacedGraphBuilder, layers: LayerGraph, wire: WireFormat) -> None:
        self.builder, self.layers, self.wire = builder, layers, wire
        self.kinds = effective_wire_dtypes(layers)
        self.quantizer = BlockQuantizer(builder)
        # Tensors that were cast back, by the name of the received tensor, the device and the lane. A device computes
        # its parts in groups, one group after another; the lane is the number of a group.
        self.wide: dict[tuple[str, str, int], PlacedTensor] = {}

    def narrow(
        self, tensor: PlacedTensor, box: Box, slice_placement: NodePlacement, producer_placement: NodePlacement
    ) -> PlacedTensor:
        """Return the tensor that is sent for a box (a region) of `tensor`, in the element type in which it is sent.

        A Slice and a cast are added if they are needed. If the box is the whole tensor, its cast directly follows the
        node that computes the tensor, at `producer_placement`. Otherwise, its cast follows all slices at
        `slice_placement`. A slice between two casts would end the segment after the first cast, and the tensors would
        not be sent together.
        """
        assert box.region is not None
        piece, kind = self.builder.add_slice(tensor, box.region, slice_placement), self.kinds.get(box.key.tensor)
        if kind is None or (kind == INT8_BLOCK and not volume(piece.region)):
            return piece
        period, lane, position, phase = (producer_placement if piece is tensor else slice_placement).step_key
        placement = slice_placement._replace(step_key=(period, lane, LAST_POSITION if lane < 0 else position, phase))
        name = self.builder.unique_tensor_name(f"{piece.name}~{kind}")
        if kind == INT8_BLOCK:
            return self.quantizer.encode(piece, name, placement, range_name(box.key))
        narrowed = PlacedTensor(name, piece.region, sent_dtype(self.layers, box.key.tensor))
        return self._convert(piece, narrowed, placement, box.key, "QuantizeLinear")

    def widen(self, sent: PlacedTensor, box: Box, place: NodePlacement) -> PlacedTensor:
        """Return a received box (region of a tensor), cast back from the wire type to its original type.

        All parts of a device with the same lane number share the cast. A device computes one lane after another.
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

    A wire type is the element type in which a tensor is sent. `opset` is the version of the model's standard operators,
    or 0 if the model does not use standard operators.
    """
    dtypes = effective_wire_dtypes(routing.layers)
    keys = dict.fromkeys(box.key for role in routing.roles for box in role.received_boxes if box.key.tensor in dtypes)
    for key in keys:
        kind, name = dtypes[key.tensor], range_name(key)
        if 0 < opset < MIN_OPSET_BY_DTYPE.get(kind, 0):
            raise DicompilerError(
                f"wire: {kind} needs opset {MIN_OPSET_BY_DTYPE[kind]}, but the model has {opset}: convert it "
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
