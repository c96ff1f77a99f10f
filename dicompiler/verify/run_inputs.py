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
"""Number of consecutive frames with which a network with states is verified."""


def prepare_inputs(model: Model, inputs: Mapping[str, NDArray[Any]] | None = None, seed: int = 0) -> dict[str, Any]:
    """Return checked inputs for one frame, by input name.

    `inputs` are the user's inputs; if they are None, random inputs are drawn with `seed`. Random tokens, positions,
    classes and masks are within their valid ranges. A state (a tensor that one frame passes to the next) is zeros if
    the user omits it.

    Raises:
        DicompilerError: An input is missing, unknown or of another type or shape, or it contains an index beyond the
            end of the table that it indexes.
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
    """Return the inputs without states (tensors that a frame passes to the next), for all frames but the first."""
    states = dict(read_states(model.proto) or ())
    return {name: value for name, value in inputs.items() if name not in states}


def first_and_later_inputs(
    model: Model, inputs: Mapping[str, NDArray[Any]] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs of the first frame of a run, and those of all later frames.

    Both are equal unless the model has states (tensors that one frame passes to the next). The inputs of later frames
    then have no states. The inputs of the first frame have states only if the user gives `inputs`; otherwise, the run
    begins with states of zeros.
    """
    first = prepare_inputs(model, inputs)
    if not read_states(model.proto):
        return first, first
    later = remove_states(model, first)
    return (later if inputs is None else first), later


def verification_frames(model: Model, inputs: Mapping[str, NDArray[Any]] | None) -> list[dict[str, Any]]:
    """Return the inputs of the frames to verify: one frame, or STATEFUL_FRAMES frames if the model has states.

    Random inputs differ from frame to frame. States are tensors that one frame passes to the next, so only the first
    frame gets them as inputs.
    """
    if not read_states(model.proto):
        return [prepare_inputs(model, inputs)]
    frames = [prepare_inputs(model, inputs, 0 if inputs is not None else seed) for seed in range(STATEFUL_FRAMES)]
    return [frames[0], *(remove_states(model, frame) for frame in frames[1:])]


def reference_outputs(
    model: Model, frames: Sequence[Mapping[str, Any]], optimization: Optimization = "extended"
) -> list[dict[str, Any]]:
    """Return onnxruntime's outputs for consecutive frames.

    Each frame reads the states (tensors that one frame passes to the next) of the previous frame. If the model
    has no states, frames that are the same object as the first frame are not computed again.
    """
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
    """Add a hint to errors of the `with` block that random inputs may have caused: the user can give inputs.

    `inputs` are the user's inputs. If they are not None, no inputs are random, and errors are not changed.
    """
    try:
        yield
    except DicompilerError as error:
        if inputs is not None or _INPUT_ERROR not in str(error) or is_out_of_memory(error):
            raise
        names = ", ".join(value.name for value in graph_inputs(model))
        hint = f"; the inputs were random: give inputs that the network accepts (--inputs X.npz with {names})"
        raise type(error)(f"{error}{hint}") from error
