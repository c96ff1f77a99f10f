"""States: pairs of a model input and a model output that a device keeps from frame to frame.

The output of a frame is the input of the next frame. The model's metadata lists the pairs, and the metadata of a placed
model lists the piece of each state on each device. Only this module reads and writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx

from dicompiler.ir.regions import Region, Shape, to_slices

STATES_KEY, STATE_PIECES_KEY = "dicompiler.states", "dicompiler.pieces"

StatePairs = tuple[tuple[str, str], ...]
"""(model input, model output) of each state."""
StateInput = tuple[str, int, Shape]
"""Name, element type and shape of the model input of a state."""


class StatePiece(NamedTuple):
    """Piece of a state on a device.

    The device reads as `read_name` the value that it wrote as `written_name` in the previous frame.

    Attributes:
        device: Name of the device.
        past: Model input of the state.
        present: Model output of the state.
        region: Region of both that the piece contains.
        read_name: Tensor that is read on this device.
        written_name: Tensor that is computed on this device.
    """

    device: str
    past: str
    present: str
    region: Region
    read_name: str
    written_name: str


def read_states(model: onnx.ModelProto) -> StatePairs | None:
    """Return the model's states.

    Args:
        model: The model.

    Returns:
        (model input, model output) of each state; None if the model's metadata do not mention states.
    """
    text = _metadata_value(model, STATES_KEY)
    return None if text is None else tuple((past, present) for past, present in json.loads(text))


def write_states(model: onnx.ModelProto, pairs: Sequence[tuple[str, str]]) -> None:
    """Store the model's states in its metadata.

    Args:
        model: The model, which is changed.
        pairs: (model input, model output) of each state.
    """
    _set_metadata(model, STATES_KEY, [list(pair) for pair in pairs])


def read_state_pieces(model: onnx.ModelProto) -> tuple[tuple[StatePiece, ...], tuple[StateInput, ...]]:
    """Return the pieces of a placed model's states, and the inputs of the states.

    Args:
        model: A placed model.

    Returns:
        The pieces, and the model inputs that are states.
    """
    pieces, states = json.loads(_metadata_value(model, STATE_PIECES_KEY) or "[[], []]")
    return (
        tuple(
            StatePiece(device, past, present, tuple((a, b) for a, b in region), read, written)
            for device, past, present, region, read, written in pieces
        ),
        tuple((name, dtype, tuple(shape)) for name, dtype, shape in states),
    )


def write_state_pieces(model: onnx.ModelProto, pieces: Sequence[StatePiece], states: Sequence[StateInput]) -> None:
    """Store the pieces of states in the metadata of a placed model."""
    _set_metadata(model, STATE_PIECES_KEY, [pieces, states])


def inputs_with_states(pieces: Sequence[StatePiece], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a placed model, with the pieces of each state in place of the state.

    Args:
        pieces: Pieces of the states.
        inputs: Values by name of the model's input.

    Returns:
        Values by name of the placed model's input.
    """
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
