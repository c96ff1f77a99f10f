"""Estimate of the memory that TFLite-micro needs for consecutive layers, or for tiles of these layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dicompiler.plugin_api import LayerGraph, Region
from dicompiler.plugin_api.costs import count_task_macs, peak_nbytes, weight_regions
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler.plugin_api.regions import ShareTask, TaskNode, region_shape

ARENA_FIXED_BYTES, ARENA_OPERATOR_BYTES, ARENA_CHANNEL_BYTES = 1024, 350, 8
"""Bytes of an arena (TFLite-micro's working memory) in addition to its tensors, on a 64-bit host.

The numbers are per arena, per operator, and per output channel of a quantised convolution. They were fitted to 178
measured models; most arenas differ by less than 400 bytes from the fit.
"""
MODEL_OPERATOR_BYTES, MODEL_CHANNEL_BYTES = 600, 10
"""Bytes of a TFLite model file per operator, and per output channel of a quantised convolution."""


@dataclass(frozen=True)
class ArenaEstimate:
    """Estimated memory of one TFLite-micro model.

    Attributes:
        arena: Bytes of the arena (the model's working memory in RAM), with a safety margin.
        flash: Bytes of the model file.
        macs: Multiply-accumulate operations.
        incoming: Bytes of the inputs.
        outgoing: Bytes of the outputs.
    """

    arena: int
    flash: int
    macs: int
    incoming: int
    outgoing: int


def estimate_arena(layers: LayerGraph, tasks: Sequence[ShareTask], margin: float) -> ArenaEstimate:
    """Return the memory of one TFLite-micro model that computes the tasks (pieces of layers) in order.

    The arena (working memory) is made larger by the fraction `margin`.
    """
    first_time: dict[str, int] = {}
    sizes: dict[str, int] = {}
    last_time: dict[str, int] = {}
    spans: list[tuple[int, int, int]] = []
    channels = operators = 0
    constants: dict[tuple[str, Region], int] = {}
    # Times only order the events. Inputs of the model exist from time 0. Task k computes at time 2k + 2. If its input
    # needs padding, it is copied at time 2k + 1.
    for step, task in enumerate(tasks):
        time = 2 * step + 2
        elements = max((_padded_elements(layers, work) for work in task.nodes), default=0)
        padded_bytes = (
            elements * raw_nbytes(layers.tensors[next(iter(task.needs)).tensor].dtype, (1,)) if elements else 0
        )
        operators += 1 + (padded_bytes > 0)
        for i, (key, region) in enumerate(task.needs.items()):
            first_time.setdefault(key.tensor, 0)
            sizes[key.tensor] = max(sizes.get(key.tensor, 0), _nbytes(layers, key.tensor, region))
            last_time[key.tensor] = max(last_time.get(key.tensor, 0), time - 1 if padded_bytes and i == 0 else time)
        if padded_bytes:
            spans.append((time - 1, time, padded_bytes))
        for key, produced in task.outputs.items():
            first_time.setdefault(key.tensor, time)
            sizes[key.tensor] = _nbytes(layers, key.tensor, produced)
            last_time.setdefault(key.tensor, time)
        constants |= weight_regions(layers, task)
        channels += sum(_quantized_channels(layers, work) for work in task.nodes)
    inside = {key.tensor for task in tasks for key in task.outputs}
    out = [key.tensor for key in tasks[-1].outputs]
    last_time |= dict.fromkeys(out, 2 * len(tasks) + 2)
    peak_bytes = peak_nbytes([*spans, *((first_time[name], last_time[name], sizes[name]) for name in first_time)])
    arena = peak_bytes + ARENA_FIXED_BYTES + ARENA_OPERATOR_BYTES * operators + ARENA_CHANNEL_BYTES * channels
    return ArenaEstimate(
        int(arena * (1 + margin)),
        sum(constants.values()) + MODEL_OPERATOR_BYTES * operators + MODEL_CHANNEL_BYTES * channels,
        sum(count_task_macs(layers, task) for task in tasks),
        sum(size for name, size in sizes.items() if name not in inside),
        sum(sizes[name] for name in out),
    )


def _nbytes(layers: LayerGraph, tensor: str, region: Region | None) -> int:
    about = layers.tensors[tensor]
    shape = region_shape(region) if region is not None else about.shape
    return 0 if shape is None else raw_nbytes(about.dtype, shape)


def _quantized_channels(layers: LayerGraph, work: TaskNode) -> int:
    """Return the number of output channels if the node is a convolution with quantized weights, else 0."""
    if work.node.op != "Conv" or work.piece is None or layers.tensors[work.node.inputs[1]].is_constant:
        return 0
    return work.piece.out[1][1] - work.piece.out[1][0]


def _padded_elements(layers: LayerGraph, work: TaskNode) -> int:
    """Return the elements of a padded copy of a convolution's or pool's input.

    The result is 0 if TFLite's padding SAME or VALID suffices, because there is no copy then.
    """
    if work.node.op not in ("Conv", "MaxPool", "AveragePool") or work.piece is None or len(work.piece.out) != 4:
        return 0
    attributes: Mapping[str, object] = {**work.node.attributes, **work.piece.attributes}
    pads, strides, dilations = (
        list(attributes.get(key) or default)  # type: ignore[call-overload]  # lists of integers
        for key, default in (("pads", [0] * 4), ("strides", [1, 1]), ("dilations", [1, 1]))
    )
    kernel = attributes.get("kernel_shape")
    if kernel is None:
        kernel = (layers.tensors[work.node.inputs[1]].shape or ())[2:]
    input_region = work.piece.needs[0]
    assert input_region is not None
    shape_in, shape_out = region_shape(input_region), region_shape(work.piece.out)
    valid, same, padded_shape = True, True, list(shape_in)
    for i, extent in enumerate(kernel):  # type: ignore[arg-type, var-annotated]
        span = (extent - 1) * dilations[i] + 1
        total = (shape_out[2 + i] - 1) * strides[i] + span - shape_in[2 + i]
        begin, end = pads[i], max(total - pads[i], 0)
        valid = valid and begin == 0 and end == 0
        same = same and -(-shape_in[2 + i] // strides[i]) == shape_out[2 + i] and begin == max(total, 0) // 2
        padded_shape[2 + i] += begin + end
    return 0 if valid or same else math.prod(padded_shape)
