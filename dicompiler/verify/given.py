"""The inputs that a network is run with: those that were given, else seeded random ones that it can take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import sized
from dicompiler.ir.states import states_of
from dicompiler.verify import executor
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler.verify.executor import begun, check_inputs
from dicompiler.verify.levels import Optimization
from dicompiler.verify.ranges import limits, ranged
from dicompiler.verify.tables import check_range
from dicompiler.verify.unsized import seeded, understood

STEPS = 4
"""Frames in a row with which a network with states is verified."""


def given_inputs(model: Model, inputs: Mapping[str, NDArray[Any]] | None = None, seed: int = 0) -> dict[str, Any]:
    """`inputs`, checked; None: seeded random ones, in range where an input is a number of a token, a position, a class
    or a mask. States that are not given begin as zeros. DicompilerError for a missing, unknown or unfitting one,
    and for a number outside the table that it is looked up in."""
    values = graph_inputs(model)
    if inputs is not None:
        pasts = dict(states_of(model.proto) or ())
        inputs = understood(model, inputs)
        given = check_inputs(values, begun([value for value in values if value.name in pasts], inputs, first=True))
        check_range(model, given)
        return given
    numbers = random_inputs([value for value in values if sized(value.dtype)], seed)
    return check_inputs(values, ranged(numbers, limits(model), seed) | seeded(model, seed))


def without_states(model: Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a frame in which states are what the frame before made."""
    pasts = dict(states_of(model.proto) or ())
    return {name: value for name, value in given.items() if name not in pasts}


def run_frames(model: Model, inputs: Mapping[str, NDArray[Any]] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run is given in its first frame and in all others: the same, but states, if given, in the first alone."""
    given = given_inputs(model, inputs)
    if not states_of(model.proto):
        return given, given
    later = without_states(model, given)
    return (later if inputs is None else given), later


def given_frames(model: Model, inputs: Mapping[str, NDArray[Any]] | None) -> list[dict[str, Any]]:
    """`given_inputs` of a frame; of a model with states of STEPS in a row, states in the first, and otherwise other
    numbers in each where they are random."""
    if not states_of(model.proto):
        return [given_inputs(model, inputs)]
    frames = [given_inputs(model, inputs, 0 if inputs is not None else seed) for seed in range(STEPS)]
    return [frames[0], *(without_states(model, frame) for frame in frames[1:])]


def references(
    model: Model, frames: Sequence[Mapping[str, Any]], optimization: Optimization = "extended"
) -> list[dict[str, Any]]:
    """What onnxruntime makes of frames in a row, with states fed back. One frame without states is computed once."""
    pairs, state, made = states_of(model.proto) or (), dict[str, Any](), list[dict[str, Any]]()
    values = [value for value in graph_inputs(model) if value.name in dict(pairs)]
    for i, frame in enumerate(frames):
        if not pairs and i and frame is frames[0]:
            made.append(made[0])
            continue
        feed = begun(values, {**state, **frame}, first=True)
        made.append(executor.run_model(model, feed, optimization=optimization))
        state = {past: made[-1].pop(present) for past, present in pairs}
    return made


_LOADING = ("cannot be loaded", "onnxruntime cannot load it")
"""What an error says of a model that no inputs make right."""


@contextmanager
def advising(model: Model, inputs: Mapping[str, NDArray[Any]] | None) -> Iterator[None]:
    """Says, where the network cannot be computed with random inputs, that one can give better ones, and which."""
    try:
        yield
    except DicompilerError as error:
        of_inputs = "onnxruntime" in str(error).lower() and not any(words in str(error) for words in _LOADING)
        if inputs is not None or not of_inputs:
            raise
        names = ", ".join(value.name for value in graph_inputs(model))
        more = f"; its inputs were random numbers: give arrays that it takes (--inputs X.npz with {names})"
        raise type(error)(f"{error}{more}") from error
