"""The inputs that a network is run with: those that were given, else seeded random ones that it can take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import is_fixed_size
from dicompiler.ir.recurrent_states import read_states
from dicompiler.verify import executor
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler.verify.executor import check_inputs, with_initial_states
from dicompiler.verify.index_inputs import find_value_limits, limit_values
from dicompiler.verify.levels import Optimization
from dicompiler.verify.lookup_tables import check_indices
from dicompiler.verify.non_tensor_inputs import random_non_tensor_inputs, to_ort_inputs

STATEFUL_FRAMES = 4
"""Frames in a row with which a network with states is verified."""


def prepare_inputs(model: Model, inputs: Mapping[str, NDArray[Any]] | None = None, seed: int = 0) -> dict[str, Any]:
    """`inputs`, checked; None: seeded random ones, in range where an input is a number of a token, a position, a class
    or a mask. States that are not given begin as zeros. DicompilerError for a missing, unknown or unfitting one,
    and for a number outside the table that it is looked up in."""
    values = graph_inputs(model)
    if inputs is not None:
        pasts = dict(read_states(model.proto) or ())
        inputs = to_ort_inputs(model, inputs)
        given = check_inputs(
            values, with_initial_states([value for value in values if value.name in pasts], inputs, is_first_frame=True)
        )
        check_indices(model, given)
        return given
    numbers = random_inputs([value for value in values if is_fixed_size(value.dtype)], seed)
    return check_inputs(
        values, limit_values(numbers, find_value_limits(model), seed) | random_non_tensor_inputs(model, seed)
    )


def remove_states(model: Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a frame in which states are what the frame before made."""
    pasts = dict(read_states(model.proto) or ())
    return {name: value for name, value in given.items() if name not in pasts}


def first_and_later_inputs(
    model: Model, inputs: Mapping[str, NDArray[Any]] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run is given in its first frame and in all others: the same, but states, if given, in the first alone."""
    given = prepare_inputs(model, inputs)
    if not read_states(model.proto):
        return given, given
    later = remove_states(model, given)
    return (later if inputs is None else given), later


def verification_frames(model: Model, inputs: Mapping[str, NDArray[Any]] | None) -> list[dict[str, Any]]:
    """`given_inputs` of a frame; of a model with states of STEPS in a row, states in the first, and otherwise other
    numbers in each where they are random."""
    if not read_states(model.proto):
        return [prepare_inputs(model, inputs)]
    frames = [prepare_inputs(model, inputs, 0 if inputs is not None else seed) for seed in range(STATEFUL_FRAMES)]
    return [frames[0], *(remove_states(model, frame) for frame in frames[1:])]


def reference_outputs(
    model: Model, frames: Sequence[Mapping[str, Any]], optimization: Optimization = "extended"
) -> list[dict[str, Any]]:
    """What onnxruntime makes of frames in a row, with states fed back. One frame without states is computed once."""
    pairs, state, made = read_states(model.proto) or (), dict[str, Any](), list[dict[str, Any]]()
    values = [value for value in graph_inputs(model) if value.name in dict(pairs)]
    for i, frame in enumerate(frames):
        if not pairs and i and frame is frames[0]:
            made.append(made[0])
            continue
        feed = with_initial_states(values, {**state, **frame}, is_first_frame=True)
        made.append(executor.run_model(model, feed, optimization=optimization))
        state = {past: made[-1].pop(present) for past, present in pairs}
    return made


_LOAD_ERRORS = ("cannot be loaded", "onnxruntime cannot load it")
"""What an error says of a model that no inputs make right."""


@contextmanager
def hint_on_input_error(model: Model, inputs: Mapping[str, NDArray[Any]] | None) -> Iterator[None]:
    """Says, where the network cannot be computed with random inputs, that one can give better ones, and which."""
    try:
        yield
    except DicompilerError as error:
        of_inputs = "onnxruntime" in str(error).lower() and not any(words in str(error) for words in _LOAD_ERRORS)
        if inputs is not None or not of_inputs:
            raise
        names = ", ".join(value.name for value in graph_inputs(model))
        more = f"; its inputs were random numbers: give arrays that it takes (--inputs X.npz with {names})"
        raise type(error)(f"{error}{more}") from error
