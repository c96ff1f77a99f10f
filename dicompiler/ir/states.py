"""States: pairs of graph input and graph output of which a device keeps its piece from frame to frame.

What is made as the output in a frame is read as the input in the next one. Which pairs there are is said in the model's
metadata; a placed model says there which pieces of them are where. Written and read here alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx

from dicompiler.ir.regions import Region, Shape, slices

STATES, PIECES = "dicompiler.states", "dicompiler.pieces"

Pairs = tuple[tuple[str, str], ...]
"""(graph input, graph output) of each state."""
Whole = tuple[str, int, Shape]
"""A graph input that is a state: its name, element type and shape."""


class Kept(NamedTuple):
    """A piece of a state on a device: what is read there as tensor `read` is what was made there as tensor `made` in
    the frame before. region: of the graph input `past`, and as well of the graph output `present`."""

    device: str
    past: str
    present: str
    region: Region
    read: str
    made: str


def states_of(model: onnx.ModelProto) -> Pairs | None:
    """The model's states; None where it says nothing of them."""
    text = _entry(model, STATES)
    return None if text is None else tuple((past, present) for past, present in json.loads(text))


def set_states(model: onnx.ModelProto, pairs: Sequence[tuple[str, str]]) -> None:
    """Says in the model's metadata which states it has, () for none."""
    _write(model, STATES, [list(pair) for pair in pairs])


def pieces_of(model: onnx.ModelProto) -> tuple[tuple[Kept, ...], tuple[Whole, ...]]:
    """The pieces of a placed model's states, and the states themselves."""
    pieces, states = json.loads(_entry(model, PIECES) or "[[], []]")
    return (
        tuple(
            Kept(device, past, present, tuple((a, b) for a, b in region), read, made)
            for device, past, present, region, read, made in pieces
        ),
        tuple((name, dtype, tuple(shape)) for name, dtype, shape in states),
    )


def set_pieces(model: onnx.ModelProto, pieces: Sequence[Kept], states: Sequence[Whole]) -> None:
    """Says in a placed model's metadata where the pieces of its states are."""
    _write(model, PIECES, [pieces, states])


def fed(pieces: Sequence[Kept], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a placed model: those of the network, and of each state its pieces (by `read`) in its place."""
    pasts = {piece.past for piece in pieces}
    own = {name: value for name, value in inputs.items() if name not in pasts}
    return own | {piece.read: inputs[piece.past][slices(piece.region)] for piece in pieces if piece.past in inputs}


def _entry(model: onnx.ModelProto, key: str) -> str | None:
    return next((entry.value for entry in model.metadata_props if entry.key == key), None)


def _write(model: onnx.ModelProto, key: str, value: Any) -> None:
    kept = [entry for entry in model.metadata_props if entry.key != key]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=key, value=json.dumps(value))
