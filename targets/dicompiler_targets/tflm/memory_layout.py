"""A device's memory: the tensors at the borders of its segments and the arenas of its models, all in one piece.

DeviceProgram + shapes + arenas → places. A tensor holds its place from when it is made, or from the start of the frame
where it is given or received, to its last reader; an arena, while its model runs. What is not there at the same time
shares a place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dicompiler.plugin_api import DeviceProgram, Program, TensorSpec
from dicompiler_targets.artifact_files import find_device_inputs
from dicompiler_targets.copy_hoisting import HoistedSegment
from dicompiler_targets.tflm.graph import get_type_name
from dicompiler_targets.tflm.lowering import WireTensor, make_wire_copies, to_wire_shape

BUFFER_ALIGNMENT_BYTES = 16
"""Bytes; each tensor that is no view of another starts at a multiple of it, and each arena."""


@dataclass(frozen=True)
class PlacedTensorBuffer:
    """A tensor with its place: `offset` in bytes; there from step `first` to step `last`."""

    tensor: WireTensor
    first_step: int
    last_step: int
    offset: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.tensor.nbytes


def make_wire_tensor(value: TensorSpec) -> WireTensor:
    """A tensor of the program as it lies on the wire; its shape is static."""
    assert value.shape is not None
    return WireTensor(value.name, get_type_name(value.dtype), to_wire_shape(value.shape))


def list_received(device: DeviceProgram) -> tuple[int, ...]:
    """The transfers that the device receives, by index."""
    return tuple(step.index for step in device.steps if step.kind == "receive")


@dataclass(frozen=True)
class MemoryLayout:
    """held: the tensors by name. arenas: of each segment the place of its model's arena (None: it computes nothing).
    frees: whether its arena is free for others behind it. size: bytes of the whole memory. views: of the tensors those
    that lie in another one, so that nothing is copied for them."""

    buffers: Mapping[str, PlacedTensorBuffer]
    arena_offsets: tuple[int | None, ...]
    frees_arena: tuple[bool, ...]
    size_bytes: int
    views: frozenset[str]


def plan_memory(
    program: Program,
    device: DeviceProgram,
    peeled: Sequence[HoistedSegment],
    models: Sequence[int | None],
    arenas: Sequence[int],
) -> MemoryLayout:
    """The places of everything. peeled, models: of the device's segments in order; arenas: bytes for each model."""
    borders = {name: make_wire_tensor(value) for one in peeled for name, value in one.values.items()}
    at_start = dict.fromkeys(value.name for value in find_device_inputs(program, device).values())
    at_start |= dict.fromkeys(program.transfers[i].value.name for i in list_received(device))
    known = (*program.inputs, *(transfer.value for transfer in program.transfers))
    borders |= {value.name: make_wire_tensor(value) for value in known if value.name in at_start}
    first, last = dict.fromkeys(at_start, 0), dict.fromkeys(at_start, 0)
    steps = [step for step in device.steps if step.kind != "receive"]
    for time, step in enumerate(steps, 1):
        if step.kind == "run":
            segment = device.segments[step.index]
            first |= dict.fromkeys(segment.outputs, time)
            last |= dict.fromkeys((*segment.inputs, *segment.outputs), time)
        else:
            last[program.transfers[step.index].value.name] = time
    last |= dict.fromkeys(device.sinks, len(steps) + 1)
    views = _find_views(peeled)
    for name in reversed(views):  # what a view lies in is there as long as the view
        last[views[name][0]] = max(last[views[name][0]], last[name])
    times = [time for time, step in enumerate(steps, 1) if step.kind == "run"]
    blocks = _find_arena_spans(models, times, len(steps) + 1)
    spans: dict[str | int, _Lifetime] = {
        name: _Lifetime(borders[name].nbytes, first[name], last[name]) for name in first if name not in views
    }
    spans |= {i: _Lifetime(arenas[k], begin, end) for i, (k, begin, end) in enumerate(blocks)}
    places = min(
        (_place_spans(spans, order) for order in _PLACEMENT_ORDERS), key=lambda candidate: _get_end(spans, candidate)
    )
    size = _get_end(spans, places)
    for name, (source, start) in views.items():
        places[name] = places[source] + start
    held = {name: PlacedTensorBuffer(borders[name], first[name], last[name], places[name]) for name in first}
    arena_offsets = [
        next((places[i] for i, (k, begin, end) in enumerate(blocks) if k == model and begin <= time <= end), None)
        for model, time in zip(models, times, strict=True)
    ]
    ends = {(k, end) for k, _, end in blocks}
    frees = tuple((model, time) in ends for model, time in zip(models, times, strict=True))
    return MemoryLayout(held, tuple(arena_offsets), frees, size, frozenset(views))


def _find_views(peeled: Sequence[HoistedSegment]) -> dict[str, tuple[str, int]]:
    """Outputs of segments that are one run of bytes of another tensor that the device holds: → (that tensor, the first
    byte), such as rows of an image. In the order in which they are made."""
    views: dict[str, tuple[str, int]] = {}
    for one in peeled:
        for name, assembly in one.output_assemblies.items():
            runs = make_wire_copies(name, assembly, one.values)
            source = runs[0].source
            held = (
                source in one.values
                and source != name
                and (source in one.output_assemblies or source not in one.outputs)
            )
            if len(runs) == 1 and not runs[0].loops and isinstance(source, str) and held:
                views[name] = source, runs[0].source_offset
    return views


def _find_arena_spans(models: Sequence[int | None], times: Sequence[int], end: int) -> list[tuple[int, int, int]]:
    """(model, first step, last step): a model that runs several times with no other in between stays where it is; the
    only one, from frame to frame."""
    blocks: list[tuple[int, int, int]] = []
    for model, time in zip(models, times, strict=True):
        if model is not None and blocks and blocks[-1][0] == model:
            blocks[-1] = (model, blocks[-1][1], time)
        elif model is not None:
            blocks.append((model, time, time))
    return [(blocks[0][0], 0, end)] if len(blocks) == 1 else blocks


@dataclass(frozen=True)
class _Lifetime:
    """Bytes that are there from a step to a step."""

    size: int
    first: int
    last: int


_PLACEMENT_ORDERS: tuple[Callable[[_Lifetime], tuple[int, ...]], ...] = (
    lambda span: (-span.size, span.first),
    lambda span: (span.first - span.last, -span.size, span.first),
    lambda span: (span.first, -span.last, -span.size),
)
"""In which places are given: the largest first, those that stay longest, in order of time. The best one is taken."""


def _place_spans(
    spans: Mapping[str | int, _Lifetime], order: Callable[[_Lifetime], tuple[int, ...]]
) -> dict[str | int, int]:
    """Each at the lowest place that is free as long as it is there."""
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
    """Bytes up to the end of what lies last."""
    return max((places[name] + span.size for name, span in spans.items()), default=0)
