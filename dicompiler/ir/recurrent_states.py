"""States: pairs of a model input and a model output that a device keeps from frame to frame.

The output of a frame is the input of the next frame. The model's metadata lists the pairs. After the pass `partition`,
it also lists the piece of each state on each device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx

from dicompiler.ir.regions import Region, Shape, to_slices

STATES_KEY, STATE_PIECES_KEY = "dicompiler.states", "dicompiler.pieces"

StatePairs = tuple[tuple[str, str], ...]
"""Names of the model input and the model output of each state (an output that is the input of the next frame)."""
StateInput = tuple[str, int, Shape]
"""Name, element type and shape of a model input that is a state (an output of the previous frame)."""


class StatePiece(NamedTuple):
    """Piece of a state (an output that is an input of the next frame) that one device keeps from frame to frame.

    In each frame, the tensor `read_name` has the value of the tensor `written_name` in the previous frame.

    Attributes:
        device: Name of the device.
        past: Name of the model input of the state.
        present: Name of the model output of the state.
        region: Region of `past` and `present` that the piece contains.
        read_name: Name of the tensor that the device reads in the partitioned model.
        written_name: Name of the tensor that the device computes in the partitioned model.
    """

    device: str
    past: str
    present: str
    region: Region
    read_name: str
    written_name: str


def read_states(model: onnx.ModelProto) -> StatePairs | None:
    """Return the model's states (outputs that are inputs of the next frame), as its metadata lists them.

    Args:
        model: Model that may have states in its metadata.

    Returns:
        Pairs of the names of the model input and the model output; None if the metadata does not mention states.
    """
    text = _metadata_value(model, STATES_KEY)
    return None if text is None else tuple((past, present) for past, present in json.loads(text))


def write_states(model: onnx.ModelProto, pairs: Sequence[tuple[str, str]]) -> None:
    """Store the model's states (outputs that are inputs of the next frame) in its metadata.

    Args:
        model: The model, which is changed.
        pairs: Names of the model input and the model output of each state.
    """
    _set_metadata(model, STATES_KEY, [list(pair) for pair in pairs])


def read_state_pieces(model: onnx.ModelProto) -> tuple[tuple[StatePiece, ...], tuple[StateInput, ...]]:
    """Return the pieces of states that devices keep, and the model inputs that are states, from a partitioned model.

    A state is an output that is an input of the next frame.
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
    _set_metadata(model, STATE_PIECES_KEY, [pieces, states])


def inputs_with_states(pieces: Sequence[StatePiece], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a partitioned model, in which each device's piece of a state replaces the whole state.

    A state is an input that is an output of the previous frame. `inputs` has the values of the original model's inputs,
    by name.
    """
    pasts = {piece.past for piece in pieces}
    present = [piece for piece in pieces if piece.past in inputs]
    return {name: value for name, value in inputs.items() if name not in pasts} | {
        piece.read_name: inputs[piece.past][to_slices(piece.region)] for piece in present
    }


def _metadata_value(model: onnx.ModelProto, key: str) -> str | None:
    return next((entry.value for entry in model.metadata_props if entry.key == key), None)


def _set_metadata(model: onnx.ModelProto, key: str, value: Any) -> None:
    kept = [entry for entry in model.metadata_props if entry.key != key]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=key, value=json.dumps(value))
