"""Narrowing: what travels in a narrower type is made so where it is sent, and wide again where it is read.

piece → Cast (float16, bfloat16) or QuantizeLinear (int8) ─ transfer → Cast or DequantizeLinear → piece of its own type
"""

from __future__ import annotations

import numpy as np

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.routing import Box, Routing
from dicompiler.ir.tasks import Key
from dicompiler.ir.wire import Wire, kinds, range_name, sent_dtype, steps
from dicompiler.partition.placed_graph import Held, Place, PlacedGraphBuilder

LAST = 1 << 31
"""A place in layer order behind all others."""
NEEDS = {"float16": 6, "bfloat16": 13, "int8": 10}
"""Type on the wire → the first opset whose Cast, or QuantizeLinear, makes it."""
UNMEASURED = (-1.0, 1.0)
"""The range in a program that is only evaluated, before samples were run."""


class Border:
    """What stands between the pieces of two devices. Of a tensor that travels as it is: nothing."""

    def __init__(self, builder: PlacedGraphBuilder, layers: LayerGraph, wire: Wire) -> None:
        self.builder, self.layers, self.wire = builder, layers, wire
        self.kinds = kinds(layers)
        self.wide: dict[tuple[str, str, int], Held] = {}  # narrow tensor, device, lane → what its readers there share

    def narrowed(self, held: Held, box: Box, early: Place, behind: Place) -> Held:
        """What is sent of `held`, whose maker is at `behind`: the box cut out of it at `early`, and narrowed then, all
        slices there before that, so that they still leave together; what is all of it directly behind its maker."""
        assert box.region is not None
        piece, kind = self.builder.slice(held, box.region, early), self.kinds.get(box.key.tensor)
        if kind is None:
            return piece
        run, lane, position, phase = (behind if piece is held else early).turn
        place = early._replace(turn=(run, lane, LAST if lane < 0 else position, phase))
        made = Held(self.builder.name(f"{piece.name}~{kind}"), piece.region, sent_dtype(self.layers, box.key.tensor))
        return self._convert(piece, made, place, box.key, "QuantizeLinear")

    def widened(self, sent: Held, key: Key, place: Place) -> Held:
        """The received piece in its own type, for the reader at `place` and all others there."""
        if key.tensor not in self.kinds:
            return sent
        at = (sent.name, place.device, place.lane)
        if at not in self.wide:
            held = Held(
                self.builder.name(f"{sent.name}@{place.device}"), sent.region, self.layers.tensors[key.tensor].dtype
            )
            self.wide[at] = self._convert(sent, held, place, key, "DequantizeLinear")
        return self.wide[at]

    def _convert(self, held: Held, made: Held, place: Place, key: Key, quantised: str) -> Held:
        origin = range_name(key)
        if self.kinds[key.tensor] != "int8":
            return self.builder.add("Cast", [held.name], made, place, origin, to=made.dtype)
        scale, zero = steps(self.wire.ranges.get(origin, UNMEASURED))
        names = (
            self.builder.constant(np.array(scale, np.float32), f"{origin}~scale"),
            self.builder.constant(np.array(zero, np.int8), f"{origin}~zero"),
        )
        return self.builder.add(quantised, [held.name, *names], made, place, origin)


def check_wire(routing: Routing, wire: Wire, opset: int) -> None:
    """DicompilerError where what travels by `routing` cannot be narrowed so: for want of ranges, or of an operator in
    the model's opset (0: it uses none)."""
    known = kinds(routing.layers)
    keys = dict.fromkeys(box.key for role in routing.roles for box in role.received if box.key.tensor in known)
    for key in keys:
        kind, name = known[key.tensor], range_name(key)
        if 0 < opset < NEEDS.get(kind, 0):
            raise DicompilerError(
                f"wire: {kind} needs opset {NEEDS[kind]}, and the model has {opset}: convert it "
                "(onnx.version_converter), or take another type"
            )
        if kind == "int8" and name not in wire.ranges:
            raise DicompilerError(
                f"wire: no range is known of {name!r}, which travels as int8: give samples of the inputs (--samples)"
            )


def narrowings(routing: Routing) -> int:
    """How many times in a row, at most, what leads from an input to an output is narrowed."""
    layers = routing.layers
    known = kinds(layers)
    travels = {box.key for role in routing.roles for box in role.received if box.key.tensor in known}
    whole, partial = ({key.tensor for key in travels if (key.reduce is None) == kept} for kept in (True, False))
    depth = dict.fromkeys(layers.inputs, 0)
    for layer in layers.layers:
        deepest = max((depth.get(name, 0) + (name in whole) for name in layer.inputs), default=0)
        sums = any(name in partial for node in layer.nodes for name in node.outputs)
        depth |= dict.fromkeys(layer.outputs, deepest + sums)
    return max((depth.get(name, 0) + (name in whole) for name in layers.outputs), default=0)
