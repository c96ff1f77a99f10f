"""Narrowing of sent tensors: casts before and after each transfer.

box ⇒ Cast (float16, bfloat16) or QuantizeLinear (int8) ⇒ transfer ⇒ Cast or DequantizeLinear ⇒ box in its own type
"""

from __future__ import annotations

import numpy as np

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.routing import Box, Routing
from dicompiler.ir.tasks import TensorKey
from dicompiler.ir.wire_dtype import (
    WireFormat,
    effective_wire_dtypes,
    int8_scale_and_zero_point,
    range_name,
    sent_dtype,
)
from dicompiler.partition.placed_graph import NodePlacement, PlacedGraphBuilder, PlacedTensor

LAST_POSITION = 1 << 31
"""Position in layer order after all layers."""
MIN_OPSET_BY_DTYPE = {"float16": 6, "bfloat16": 13, "int8": 10}
"""First opset with a Cast or QuantizeLinear for each wire type."""
PLACEHOLDER_RANGE = (-1.0, 1.0)
"""Value range in programs that are only simulated, before samples have been run."""


class WireCasts:
    """Casts between the devices of a placed graph; none for tensors that are sent unchanged."""

    def __init__(self, builder: PlacedGraphBuilder, layers: LayerGraph, wire: WireFormat) -> None:
        self.builder, self.layers, self.wire = builder, layers, wire
        self.kinds = effective_wire_dtypes(layers)
        # By narrowed tensor, device and lane; shared by all readers.
        self.wide: dict[tuple[str, str, int], PlacedTensor] = {}

    def narrow(
        self, tensor: PlacedTensor, box: Box, slice_placement: NodePlacement, producer_placement: NodePlacement
    ) -> PlacedTensor:
        """Return the tensor that is sent for a box of `tensor`: sliced, then narrowed.

        The cast of a slice comes after all slices at `slice_placement`, so that their transfers still leave together.
        The cast of a whole tensor directly follows the node that computes it.

        Args:
            tensor: Tensor of which the box is a region.
            box: The box.
            slice_placement: Placement of the slice.
            producer_placement: Placement of the node that computes `tensor`.
        """
        assert box.region is not None
        piece, kind = self.builder.add_slice(tensor, box.region, slice_placement), self.kinds.get(box.key.tensor)
        if kind is None:
            return piece
        run, lane, position, phase = (producer_placement if piece is tensor else slice_placement).step_key
        placement = slice_placement._replace(step_key=(run, lane, LAST_POSITION if lane < 0 else position, phase))
        narrowed = PlacedTensor(
            self.builder.unique_tensor_name(f"{piece.name}~{kind}"),
            piece.region,
            sent_dtype(self.layers, box.key.tensor),
        )
        return self._convert(piece, narrowed, placement, box.key, "QuantizeLinear")

    def widen(self, sent: PlacedTensor, key: TensorKey, place: NodePlacement) -> PlacedTensor:
        """Return the received box in its own type, shared by all readers on this device and lane."""
        if key.tensor not in self.kinds:
            return sent
        cache_key = (sent.name, place.device, place.lane)
        if cache_key not in self.wide:
            widened = PlacedTensor(
                self.builder.unique_tensor_name(f"{sent.name}@{place.device}"),
                sent.region,
                self.layers.tensors[key.tensor].dtype,
            )
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
    """Raise DicompilerError if sent tensors cannot be narrowed.

    Value ranges can be missing, or the opset too old.

    Args:
        routing: The routing.
        wire: Its wire format.
        opset: Opset of the model's standard operators; 0: it uses none.
    """
    known = effective_wire_dtypes(routing.layers)
    keys = dict.fromkeys(box.key for role in routing.roles for box in role.received_boxes if box.key.tensor in known)
    for key in keys:
        kind, name = known[key.tensor], range_name(key)
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
    """Return the maximum number of narrowings on a path from a model input to an output."""
    layers = routing.layers
    dtypes = effective_wire_dtypes(layers)
    sent_keys = {box.key for role in routing.roles for box in role.received_boxes if box.key.tensor in dtypes}
    whole, partial = (
        {key.tensor for key in sent_keys if (key.reduce is None) == is_whole} for is_whole in (True, False)
    )
    depth = dict.fromkeys(layers.inputs, 0)
    for layer in layers.layers:
        deepest = max((depth.get(name, 0) + (name in whole) for name in layer.inputs), default=0)
        sums = any(name in partial for node in layer.nodes for name in node.outputs)
        depth |= dict.fromkeys(layer.outputs, deepest + sums)
    return max((depth.get(name, 0) + (name in whole) for name in layers.outputs), default=0)
