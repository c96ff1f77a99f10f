"""The inputs of a verification run: those of the user, or random inputs that the network accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from dicompiler.base.errors import DicompilerError, is_out_of_memory
from dicompiler.base.ort_session import Optimization
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import is_fixed_size
from dicompiler.ir.recurrent_states import read_states
from dicompiler.verify import executor
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler.verify.executor import check_inputs, with_initial_states
from dicompiler.verify.index_inputs import find_value_limits, limit_values
from dicompiler.verify.lookup_tables import check_indices
from dicompiler.verify.non_tensor_inputs import random_non_tensor_inputs, to_ort_inputs

STATEFUL_FRAMES = 4
"""Number of consecutive frames with which a network with states (outputs that the next frame reads) is verified."""


def prepare_inputs(model: Model, inputs: Mapping[str, NDArray[Any]] | None = None, seed: int = 0) -> dict[str, Any]:
    """Return checked inputs for one frame, by input name.

    Args:
        model: The network.
        inputs: The user's inputs; missing states (tensors that one frame passes to the next) become zeros. If None,
            valid random inputs are drawn.
        seed: Seed of random inputs.

    Raises:
        DicompilerError: An input is missing, unknown or of another type or shape, or an index is beyond the end of its
            table.
    """
    values = graph_inputs(model)
    if inputs is not None:
        states = dict(read_states(model.proto) or ())
        inputs = to_ort_inputs(model, inputs)
        state_values = [value for value in values if value.name in states]
        checked = check_inputs(values, with_initial_states(state_values, inputs, is_first_frame=True))
        check_indices(model, checked)
        return checked
    tensors = random_inputs([value for value in values if is_fixed_size(value.dtype)], seed)
    tensors = limit_values(tensors, find_value_limits(model), seed)
    return check_inputs(values, tensors | random_non_tensor_inputs(model, seed))


def remove_states(model: Model, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of one frame without states (tensors that one frame passes to the next).

    Every frame except the first one gets the states of the previous frame instead.
    """
    states = dict(read_states(model.proto) or ())
    return {name: value for name, value in inputs.items() if name not in states}


def first_and_later_inputs(
    model: Model, inputs: Mapping[str, NDArray[Any]] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs of the first frame of a run, and those of all later frames.

    They are equal unless the model has states (tensors that one frame passes to the next). Only the first frame can
    then have states as inputs, namely those that the user gives.
    """
    first = prepare_inputs(model, inputs)
    if not read_states(model.proto):
        return first, first
    later = remove_states(model, first)
    return (later if inputs is None else first), later


def verification_frames(model: Model, inputs: Mapping[str, NDArray[Any]] | None) -> list[dict[str, Any]]:
    """Return the inputs of the frames to verify: STATEFUL_FRAMES frames if the model has states, otherwise one frame.

    A state is a tensor that one frame passes to the next, so only the first frame has states as inputs.
    """
    if not read_states(model.proto):
        return [prepare_inputs(model, inputs)]
    frames = [prepare_inputs(model, inputs, 0 if inputs is not None else seed) for seed in range(STATEFUL_FRAMES)]
    return [frames[0], *(remove_states(model, frame) for frame in frames[1:])]


def reference_outputs(
    model: Model, frames: Sequence[Mapping[str, Any]], optimization: Optimization = "extended"
) -> list[dict[str, Any]]:
    """Return onnxruntime's outputs for consecutive frames, each of which reads the states of the previous one."""
    pairs, state, results = read_states(model.proto) or (), dict[str, Any](), list[dict[str, Any]]()
    values = [value for value in graph_inputs(model) if value.name in dict(pairs)]
    for i, frame in enumerate(frames):
        if not pairs and i and frame is frames[0]:
            results.append(results[0])
            continue
        feed = with_initial_states(values, {**state, **frame}, is_first_frame=True)
        results.append(executor.run_model(model, feed, optimization=optimization))
        state = {past: results[-1].pop(present) for past, present in pairs}
    return results


_INPUT_ERROR = "onnxruntime cannot run it"
"""Phrase in all errors that say that onnxruntime failed to compute a frame, perhaps because of the frame's inputs."""


@contextmanager
def hint_on_input_error(model: Model, inputs: Mapping[str, NDArray[Any]] | None) -> Iterator[None]:
    """Add a hint to errors of onnxruntime in the `with` block if inputs were random: the user can give valid inputs.

    `inputs` are the user's inputs; None if they were random.
    """
    try:
        yield
    except DicompilerError as error:
        if inputs is not None or _INPUT_ERROR not in str(error) or is_out_of_memory(error):
            raise
        names = ", ".join(value.name for value in graph_inputs(model))
        hint = f"; the inputs were random: give inputs that the network accepts (--inputs X.npz with {names})"
        raise type(error)(f"{error}{hint}") from error
