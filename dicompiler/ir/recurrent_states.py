"""States: pairs of graph input and graph output of which a device keeps its piece from frame to frame.

What is made as the output in a frame is read as the input in the next one. Which pairs there are is said in the model's
metadata; a placed model says there which pieces of them are where. Written and read here alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx

from dicompiler.ir.regions import Region, Shape, to_slices

STATES_KEY, STATE_PIECES_KEY = "dicompiler.states", "dicompiler.pieces"

StatePairs = tuple[tuple[str, str], ...]
"""(graph input, graph output) of each state."""
StateInput = tuple[str, int, Shape]
"""A graph input that is a state: its name, element type and shape."""


class StatePiece(NamedTuple):
    """A piece of a state on a device: what is read there as tensor `read` is what was made there as tensor `made` in
    the frame before. region: of the graph input `past`, and as well of the graph output `present`."""

    device: str
    past: str
    present: str
    region: Region
    read_name: str
    written_name: str


def read_states(model: onnx.ModelProto) -> StatePairs | None:
    """The model's states; None where it says nothing of them."""
    text = _metadata_value(model, STATES_KEY)
    return None if text is None else tuple((past, present) for past, present in json.loads(text))


def write_states(model: onnx.ModelProto, pairs: Sequence[tuple[str, str]]) -> None:
    """Says in the model's metadata which states it has, () for none."""
    _set_metadata(model, STATES_KEY, [list(pair) for pair in pairs])


def read_state_pieces(model: onnx.ModelProto) -> tuple[tuple[StatePiece, ...], tuple[StateInput, ...]]:
    """The pieces of a placed model's states, and the states themselves."""
    pieces, states = json.loads(_metadata_value(model, STATE_PIECES_KEY) or "[[], []]")
    return (
        tuple(
            StatePiece(device, past, present, tuple((a, b) for a, b in region), read, made)
            for device, past, present, region, read, made in pieces
        ),
        tuple((name, dtype, tuple(shape)) for name, dtype, shape in states),
    )


def write_state_pieces(model: onnx.ModelProto, pieces: Sequence[StatePiece], states: Sequence[StateInput]) -> None:
    """Says in a placed model's metadata where the pieces of its states are."""
    _set_metadata(model, STATE_PIECES_KEY, [pieces, states])


def inputs_with_states(pieces: Sequence[StatePiece], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a placed model: those of the network, and of each state its pieces (by `read`) in its place."""
    pasts = {piece.past for piece in pieces}
    own = {name: value for name, value in inputs.items() if name not in pasts}
    return own | {
        piece.read_name: inputs[piece.past][to_slices(piece.region)] for piece in pieces if piece.past in inputs
    }


def _metadata_value(model: onnx.ModelProto, key: str) -> str | None:
    return next((entry.value for entry in model.metadata_props if entry.key == key), None)


def _set_metadata(model: onnx.ModelProto, key: str, value: Any) -> None:
    kept = [entry for entry in model.metadata_props if entry.key != key]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=key, value=json.dumps(value))
