"""The memory layout of a device: the offsets of its tensors and of the arenas of its models in one memory.

An arena is the working memory of TFLite-micro for one model. Tensors are in memory until their last reader, and arenas
while their model runs. Tensors and arenas share bytes if their lifetimes do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dicompiler.plugin_api import DeviceProgram, Program, TensorSpec
from dicompiler_targets.artifact_files import HoistedSegment, find_device_inputs
from dicompiler_targets.tflm.graph import get_type_name
from dicompiler_targets.tflm.lowering import WireTensor, make_wire_copies, to_wire_shape

BUFFER_ALIGNMENT_BYTES = 16
"""Alignment of arenas, and of all tensors that are not a part of another tensor."""


@dataclass(frozen=True)
class PlacedTensorBuffer:
    """A tensor with its place in memory.

    Attributes:
        tensor: Name, type and shape of the tensor.
        first_step: First step of a frame (inference request) at which the tensor is in memory; 0 is the frame's start.
        last_step: Last step at which the tensor is in memory.
        offset: Offset in the device's memory, in bytes.
    """

    tensor: WireTensor
    first_step: int
    last_step: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.tensor.nbytes


def make_wire_tensor(value: TensorSpec) -> WireTensor:
    """Return a tensor of static shape in the form in which devices send it (channels last)."""
    assert value.shape is not None
    return WireTensor(value.name, get_type_name(value.dtype), to_wire_shape(value.shape))


def list_received(device: DeviceProgram) -> tuple[int, ...]:
    return tuple(step.index for step in device.steps if step.kind == "receive")


@dataclass(frozen=True)
class MemoryLayout:
    """The memory layout of a device: the offsets of tensors and arenas (working memory of models).

    Attributes:
        buffers: The tensors with their offsets, by name.
        arena_offsets: For each segment, the offset of its model's arena in bytes; None if the segment only copies data.
        frees_arena: For each segment, True if tensors or other arenas may use the arena's bytes after the model ran.
        size_bytes: Bytes of the whole memory.
        views: Names of tensors that are a part of another tensor, so that they need no copy.
    """

    buffers: Mapping[str, PlacedTensorBuffer]
    arena_offsets: tuple[int | None, ...]
    frees_arena: tuple[bool, ...]
    size_bytes: int
    views: frozenset[str]


def plan_memory(
    program: Program,
    device: DeviceProgram,
    hoisted_segments: Sequence[HoistedSegment],
    models: Sequence[int | None],
    arenas: Sequence[int],
) -> MemoryLayout:
    """Return the memory layout of a device.

    Args:
        program: Program of all devices.
        device: The device's part of the program.
        hoisted_segments: Segments (ONNX submodels) of the device, and the copies at their inputs and outputs.
        models: For each segment, the index of its model; None if the segment only copies data.
        arenas: For each model, the bytes of its arena (the working memory of TFLite-micro).
    """
    tensors = {name: make_wire_tensor(value) for hoisted in hoisted_segments for name, value in hoisted.values.items()}
    at_start = dict.fromkeys(value.name for value in find_device_inputs(program, device).values())
    at_start |= dict.fromkeys(program.transfers[i].value.name for i in list_received(device))
    known = (*program.inputs, *(transfer.value for transfer in program.transfers))
    tensors |= {value.name: make_wire_tensor(value) for value in known if value.name in at_start}
    first, last = dict.fromkeys(at_start, 0), dict.fromkeys(at_start, 0)
    steps = [step for step in device.steps if step.kind != "receive"]
    for time, step in enumerate(steps, 1):
        if step.kind == "run":
            segment = device.segments[step.index]
            first |= dict.fromkeys(segment.outputs, time)
            last |= dict.fromkeys((*segment.inputs, *segment.outputs), time)
        else:
            last[program.transfers[step.index].value.name] = time
    last |= dict.fromkeys(device.model_outputs, len(steps) + 1)
    views = _find_views(hoisted_segments)
    for name in reversed(views):  # A tensor that contains another one must exist as long as that one.
        last[views[name][0]] = max(last[views[name][0]], last[name])
    times = [time for time, step in enumerate(steps, 1) if step.kind == "run"]
    blocks = _find_arena_spans(models, times, len(steps) + 1)
    spans: dict[str | int, _Lifetime] = {
        name: _Lifetime(tensors[name].nbytes, first[name], last[name]) for name in first if name not in views
    }
    spans |= {i: _Lifetime(arenas[k], begin, end) for i, (k, begin, end) in enumerate(blocks)}
    places = min(
        (_place_spans(spans, order) for order in _PLACEMENT_ORDERS), key=lambda candidate: _get_end(spans, candidate)
    )
    size = _get_end(spans, places)
    for name, (source, start) in views.items():
        places[name] = places[source] + start
    placed_buffers = {name: PlacedTensorBuffer(tensors[name], first[name], last[name], places[name]) for name in first}
    arena_offsets = [
        next((places[i] for i, (k, begin, end) in enumerate(blocks) if k == model and begin <= time <= end), None)
        for model, time in zip(models, times, strict=True)
    ]
    ends = {(k, end) for k, _, end in blocks}
    frees = tuple((model, time) in ends for model, time in zip(models, times, strict=True))
    return MemoryLayout(placed_buffers, tuple(arena_offsets), frees, size, frozenset(views))


def _find_views(hoisted_segments: Sequence[HoistedSegment]) -> dict[str, tuple[str, int]]:
    """Return the outputs of segments that are a contiguous range of another tensor, such as rows of an image.

    The result has, by name and in the order of computation, the other tensor and the offset in it in bytes.
    """
    views: dict[str, tuple[str, int]] = {}
    for hoisted in hoisted_segments:
        for name, copied in hoisted.output_tensors.items():
            runs = make_wire_copies(name, copied, hoisted.values)
            source = runs[0].source
            held = (
                source in hoisted.values
                and source != name
                and (source in hoisted.output_tensors or source not in hoisted.outputs)
            )
            if len(runs) == 1 and not runs[0].loops and isinstance(source, str) and held:
                views[name] = source, runs[0].source_offset
    return views


def _find_arena_spans(models: Sequence[int | None], times: Sequence[int], end: int) -> list[tuple[int, int, int]]:
    """Return (model, first step, last step) for each period in which a model's arena must stay in memory.

    A model that runs several times, with no other model in between, keeps its arena.

    Args:
        models: For each segment, the index of its model; None if it has none.
        times: For each segment, its step.
        end: The last step of a frame.
    """
    blocks: list[tuple[int, int, int]] = []
    for model, time in zip(models, times, strict=True):
        if model is not None and blocks and blocks[-1][0] == model:
            blocks[-1] = (model, blocks[-1][1], time)
        elif model is not None:
            blocks.append((model, time, time))
    return [(blocks[0][0], 0, end)] if len(blocks) == 1 else blocks


@dataclass(frozen=True)
class _Lifetime:
    """The bytes of a tensor or an arena, and the first and the last step at which it is in memory."""

    size: int
    first: int
    last: int


_PLACEMENT_ORDERS: tuple[Callable[[_Lifetime], tuple[int, ...]], ...] = (
    lambda span: (-span.size, span.first),
    lambda span: (span.first - span.last, -span.size, span.first),
    lambda span: (span.first, -span.last, -span.size),
)
"""Orders in which tensors and arenas are placed: the largest first, the longest lifetime first, or in order of time.

All orders are tried, and the smallest layout is used.
"""


def _place_spans(
    spans: Mapping[str | int, _Lifetime], order: Callable[[_Lifetime], tuple[int, ...]]
) -> dict[str | int, int]:
    """Return the offset in memory of each tensor and arena, placed one after another in the given order.

    It is the lowest offset that is free during the lifetime.
    """
    placed: dict[str | int, int] = {}
    for name in sorted(spans, key=lambda n: (order(spans[n]), str(n))):
        span, offset = spans[name], 0
        others = [n for n in placed if spans[n].first <= span.last and span.first <= spans[n].last]
        for other in sorted(others, key=lambda n: placed[n]):
            if offset + span.size <= placed[other]:
                break
            offset = max(
                offset, -(-(placed[other] + spans[other].size) // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
            )
        placed[name] = offset
    return placed


def _get_end(spans: Mapping[str | int, _Lifetime], places: Mapping[str | int, int]) -> int:
    return max((places[name] + span.size for name, span in spans.items()), default=0)
