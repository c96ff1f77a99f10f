"""The pass `keep-states`: declare states, which stay on the device that computes them.

A state is a graph output that becomes a graph input of the next frame, such as a key/value cache. The pass writes the
pairs of input and output to the model's metadata.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import onnx
from onnx import helper, numpy_helper

from dicompiler.plugin_api import DicompilerError, Model, Pass, PipelineState, UsageError
from dicompiler.plugin_api.onnx import TensorInfo, unique_name, write_states
from dicompiler.plugin_api.utilities import did_you_mean
from dicompiler_passes.node_rewrites import int64_array

log = logging.getLogger("dicompiler")

AUTO, NONE = "auto", "none"
USUAL_PATTERNS = (
    "past_key_values.*=present.*",
    "past_key_values.*=present_key_values.*",
    "past_*=present_*",
    "past.*=present.*",
    "cached_*=new_cached_*",
    "h=hn",
    "c=cn",
    "h0=hn",
    "c0=cn",
    "h_0=h_n",
    "c_0=c_n",
    "state=stateN",
)
"""Patterns for the usual names of states: input=output, with the same text for * on both sides.

Their sources, in this order: optimum and onnxruntime (key/value caches), icefall (speech), PyTorch (LSTM), Silero
(speech).
"""


@dataclass(frozen=True)
class KeepStates(Pass):
    """Declare pairs of graph input and graph output as states, which a device keeps from frame to frame.

    past.0 (1, 8, 64, 32), present.0 (1, 8, 64, 32)   ⇒  a state: past.0 of the next frame is present.0 of this frame
    present.0 = Concat(past.0, new) (1, 8, 65, 32)    ⇒  … → Slice → present.0/kept: the last 64 rows are the state

    The second form requires inputs for an attention mask and for positions: only a mask makes the model ignore rows
    that no frame has computed yet.
    """

    name: ClassVar[str] = "keep-states"
    # The pass removes the first rows of state outputs that are longer than their inputs.
    preserves_outputs: ClassVar[bool] = False

    state: tuple[str, ...] = field(
        default=(AUTO,),
        metadata={
            "help": "pairs input=output; past*=present* is for all pairs with the same text in place of *; auto: usual "
            "names of exporters; none: no states"
        },
    )

    def run(self, state: PipelineState) -> PipelineState:
        return replace(state, model=keep_states(state.model, self.state))


def keep_states(model: Model, texts: Sequence[str]) -> Model:
    """Return the model with the states (pairs of graph input and graph output) that `texts` select.

    Args:
        model: Model with static shapes.
        texts: Patterns such as `past*=present*`; `auto` selects usual names of exporters, `none` selects nothing.

    Returns:
        The model with the states in its metadata; outputs with additional rows are replaced by their last rows.

    Raises:
        UsageError: A pattern matches no input, or the model has no output for a matching input.
        DicompilerError: A pair cannot be a state, because types or shapes differ.
    """
    if NONE in texts and len(texts) > 1:
        raise UsageError("state: 'none' cannot be combined with patterns: omit one of them")
    patterns = [text for text in texts if text not in (AUTO, NONE)]
    graph, tensors = model.proto.graph, model.tensors()
    inputs = [value.name for value in graph.input if not tensors[value.name].is_constant]
    outputs = [value.name for value in graph.output]
    pairs = [pair for text in patterns for pair in _match_pattern(text, inputs, outputs)]
    _check_unique(pairs)
    row_counts = {pair: _extra_rows_or_reason(model, tensors, *pair) for pair in pairs}
    for reason in row_counts.values():
        if isinstance(reason, str):
            raise DicompilerError(f"state: {reason}")
    if AUTO in texts:
        row_counts |= _find_usual_pairs(model, tensors, inputs, outputs, {name for pair in pairs for name in pair})
    return _with_states(model, {pair: rows for pair, rows in row_counts.items() if not isinstance(rows, str)})


def _match_pattern(pattern: str, inputs: Sequence[str], outputs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs (input, output) that a pattern `past*=present*` selects.

    Raises:
        UsageError: The pattern is invalid or matches no input, or a matching input has no output.
    """
    past, equals, present = pattern.partition("=")
    if not (past and equals and present) or past.count("*") > 1 or past.count("*") != present.count("*"):
        raise UsageError(f"state {pattern!r} is not of the form past*=present*, with at most one * on each side")
    pairs = list(_candidate_pairs(pattern, inputs))
    if not pairs:
        raise UsageError(f"state {pattern!r}: the model has no input {past!r}{did_you_mean(past, inputs)}")
    for name, output in pairs:
        if output not in outputs:
            raise UsageError(
                f"state {pattern!r}: the model has no output {output!r} for input {name!r}"
                f"{did_you_mean(output, outputs)}"
            )
    yield from pairs


def _candidate_pairs(pattern: str, inputs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (input, output name) for each input that matches a pattern `past*=present*`.

    The model need not have an output with this name.
    """
    past, _, present = pattern.partition("=")
    regex = re.escape(past).replace(r"\*", "(.*)")
    for name in inputs:
        if match := re.fullmatch(regex, name):
            yield name, present.replace("*", match[1] if match.groups() else "")


def _check_unique(pairs: Sequence[tuple[str, str]]) -> None:
    for side, noun in ((0, "input"), (1, "output")):
        names = [pair[side] for pair in pairs]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"state: {noun} {name!r} is in two pairs: use it in one")


def _find_usual_pairs(
    model: Model, tensors: Mapping[str, TensorInfo], inputs: Sequence[str], outputs: Sequence[str], taken: set[str]
) -> dict[tuple[str, str], int]:
    """Return the pairs (input, output) with usual names that can be states, with their additional output rows.

    Pairs with a name in `taken` are skipped. The names of the others are added to `taken`. The function logs the found
    pairs, and warns about a pair that cannot be a state.
    """
    row_counts: dict[tuple[str, str], int] = {}
    refused: list[str] = []
    for pattern in USUAL_PATTERNS:
        for pair in _candidate_pairs(pattern, inputs):
            if pair[1] not in outputs or not taken.isdisjoint(pair):
                continue
            taken.update(pair)
            rows = _extra_rows_or_reason(model, tensors, *pair)
            if isinstance(rows, str):
                refused.append(rows)
            else:
                row_counts[pair] = rows
    if row_counts:
        (past, present), *_ = row_counts
        log.info(
            "%d states stay on their devices, such as %s → %s (--state none: no states)", len(row_counts), present, past
        )
    if refused:
        log.warning(
            "state: %d pairs with usual names are not states: %s (--state none: no states)", len(refused), refused[0]
        )
    return row_counts


def _extra_rows_or_reason(model: Model, tensors: Mapping[str, TensorInfo], past: str, present: str) -> int | str:
    """Return the number of rows of the output `present` that the input `past` does not have.

    If the pair cannot be a state (kept by a device from frame to frame), return the reason as a text.
    """
    old, new = tensors[past], tensors[present]
    pair = f"input {past!r} {_describe_tensor(old)} and output {present!r} {_describe_tensor(new)}"
    if old.dtype != new.dtype:
        return f"{pair} have different types: export them with the same type"
    if old.shape is None or new.shape is None:
        return f"{pair} must have static shapes: fix them (--shape {past}=…)"
    if old.shape == new.shape:
        return 0
    if len(old.shape) == len(new.shape):
        axes = [axis for axis, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b]
        extra = new.shape[axes[0]] - old.shape[axes[0]]
        if len(axes) == 1 and extra > 0 and old.shape[axes[0]] > 0 and _appends_rows(model, past, present, axes[0]):
            total = new.shape[axes[0]]
            if _has_mask_and_positions(model, tensors, total):
                return extra
            return (
                f"{pair}: the output is longer by {extra}, and keeping its last {total - extra} rows needs inputs for "
                f"a mask over all {total} rows and for positions: export the model with attention_mask and "
                "position_ids, or with a cache of fixed size"
            )
    return f"{pair} differ in shape: a state keeps its shape, or grows by a Concat of its old value and new rows"


def _describe_tensor(tensor: TensorInfo) -> str:
    return f"{onnx.TensorProto.DataType.Name(tensor.dtype).lower()} {tensor.shape or '(open)'}"


def _appends_rows(model: Model, past: str, present: str, axis: int) -> bool:
    # The output must be a Concat of the input and new rows.
    maker = next((node for node in model.proto.graph.node if present in node.output), None)
    if maker is None or maker.op_type != "Concat" or maker.input[0] != past:
        return False
    along = next(attribute.i for attribute in maker.attribute if attribute.name == "axis")
    return bool(along % len(model.tensors()[past].shape or ()) == axis)


def _has_mask_and_positions(model: Model, tensors: Mapping[str, TensorInfo], rows: int) -> bool:
    inputs = [tensors[value.name] for value in model.proto.graph.input]
    has_mask = any("mask" in tensor.name.lower() and rows in (tensor.shape or ()) for tensor in inputs)
    return has_mask and any("position" in tensor.name.lower() for tensor in inputs)


def _with_states(model: Model, row_counts: Mapping[tuple[str, str], int]) -> Model:
    """Return the model with pairs (input, output) as states, which devices keep from frame to frame.

    Args:
        model: The model.
        row_counts: For each pair, the number of rows that the output has in addition to those of the input.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph, tensors, pairs = proto.graph, model.tensors(), list[tuple[str, str]]()
    taken = dict.fromkeys((*tensors, *(name for node in graph.node for name in (node.name, *node.output))), 0)
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    for (past, present), extra in row_counts.items():
        pairs.append((past, _slice_last_rows(graph, tensors[past], present, extra, opset, taken) if extra else present))
    write_states(proto, pairs)
    return replace(model, proto=proto)


def _slice_last_rows(
    graph: onnx.GraphProto, past: TensorInfo, present: str, extra: int, opset: int, taken: dict[str, int]
) -> str:
    """Replace the graph output `present` by a Slice of its last rows. Return the name of the new output.

    Args:
        graph: The graph, changed in place.
        past: The state's input.
        present: The state's output.
        extra: Number of rows to remove.
        opset: Opset of the model.
        taken: Names in use.
    """
    assert past.shape is not None
    output = next(value for value in graph.output if value.name == present)
    sizes = [dim.dim_value for dim in output.type.tensor_type.shape.dim]
    axis = next(axis for axis, (a, b) in enumerate(zip(past.shape, sizes, strict=True)) if a != b)
    name = unique_name(f"{present}/kept", taken)
    bounds: dict[str, Any] = {"starts": [extra], "ends": [sizes[axis]], "axes": [axis]}
    inputs: list[str] = []
    for key, values in bounds.items() if opset >= 10 else ():
        inputs.append(unique_name(f"{name}/{key}", taken))
        graph.initializer.append(numpy_helper.from_array(int64_array(*values), inputs[-1]))
    maker = next(i for i, node in enumerate(graph.node) if present in node.output)
    attributes = {} if inputs else bounds
    # Insert the Slice directly after `maker`: the state is then complete early, and the next frame can start.
    graph.node.insert(maker + 1, helper.make_node("Slice", [present, *inputs], [name], name, **attributes))
    graph.value_info.append(output)
    output.CopyFrom(helper.make_tensor_value_info(name, past.dtype, past.shape))
    return name
