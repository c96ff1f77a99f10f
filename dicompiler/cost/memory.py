"""What a Program holds in memory on each device: weights, live tensors, and buffers of what it is given and sent.

Program + frames in flight → bytes by device. Exact for what the program says; what a target adds is `Target.memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from dicompiler.ir.onnx.structure import node_reads
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.program import DeviceProgram, Program, Segment, Value


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device.

    weights: the constants of its segments, each once. buffers: the graph inputs that it is given and the transfers that
    it receives, all of them there from the start of a frame, for every frame in flight. activations: the most that
    live tensors take beside the buffers.
    """

    weights: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.buffers


def program_memory(program: Program, frames: int = 1) -> dict[str, MemoryUse]:
    """Device → what it holds with `frames` frames in flight (at least 1).

    A buffer is held up to its last reader on the device, what a segment makes from its node to its last reader or send;
    what is delivered, to the end. One frame is inside a segment, the others are between two. Tensors without static
    shape count nothing. Views (Reshape, Identity) count as copies. With several roles, the weights of all of them are
    there, and the frames in flight are dealt out over the roles that take most.
    """
    roles = [(role, _border_sizes(role)) for role in program.roles]
    return {
        device.device: _together([_device(role, role.devices[i], sizes) for role, sizes in roles], frames)
        for i, device in enumerate(program.devices)
    }


@dataclass(frozen=True)
class MemoryCourse:
    """Bytes of one device over a frame. weights: those of all its frames, there all the time. buffers, activations: by
    step, where step 2k + 1 is inside segment k, and step 2k between the segments k - 1 and k."""

    weights: int
    buffers: tuple[int, ...]
    activations: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most at once: MemoryUse.total of a single frame."""
        return self.weights + max(map(sum, zip(self.buffers, self.activations, strict=True)))


def memory_course(program: Program) -> dict[str, MemoryCourse]:
    """Device → what it holds step by step for one frame, of the first role where there are several."""
    border = _border_sizes(program)
    found = {}
    for device in program.devices:
        spans = _spans(program, device, border)
        steps = range(2 * len(device.segments) + 1)
        live = [*spans.between, *spans.inside]
        found[device.device] = MemoryCourse(
            sum(spans.weights.values()),
            tuple(_held(spans.given, step) for step in steps),
            tuple(_held(live, step) for step in steps),
        )
    return found


def segment_values(segment: Segment) -> dict[str, int]:
    """Bytes of every tensor that the segment reads or makes (no constants), by name; 0 where its shape is not known."""
    inferred = onnx.shape_inference.infer_shapes(segment.model)
    graph = inferred.graph
    known = {value.name: value_nbytes(value) for value in (*graph.value_info, *graph.input, *graph.output)}
    names = [*segment.inputs, *(name for node in graph.node for name in node.output if name)]
    return {name: known.get(name, 0) for name in names}


def value_nbytes(value: onnx.ValueInfoProto) -> int:
    """Bytes of a tensor by its value info; 0 where its shape is not static or it is no tensor."""
    kind = value.type.tensor_type
    if not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return 0
    return raw_nbytes(kind.elem_type, tuple(dim.dim_value for dim in kind.shape.dim))


def constant_sizes(segment: Segment) -> dict[str, int]:
    """Bytes of the segment's constants by name, sparse ones as dense."""
    graph = segment.model.graph
    found = {tensor.name: raw_nbytes(tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
    for sparse in graph.sparse_initializer:
        found[sparse.values.name] = raw_nbytes(sparse.values.data_type, tuple(sparse.dims))
    return found


def peak(spans: Iterable[tuple[int, int, int]]) -> int:
    """The most that is held at once. `spans`: (first step, last step, bytes)."""
    changes: list[tuple[int, int]] = []
    for start, stop, size in spans:
        changes += ((start, size), (stop + 1, -size))
    held = most = 0
    for _, change in sorted(changes):  # at one step what ends goes before what begins
        held += change
        most = max(most, held)
    return most


def segment_peak(segment: Segment, sizes: Mapping[str, int]) -> int:
    """The most bytes that the tensors made inside the segment take at once; its outputs are held to its end.

    sizes: what `segment_values` gives. A node's inputs and outputs are held at the same time.
    """
    nodes = segment.model.graph.node
    last = {name: i for i, node in enumerate(nodes) for name in node_reads(node)}
    last |= dict.fromkeys(segment.outputs, len(nodes))
    return peak(
        (i, max(i, last.get(name, i)), sizes.get(name, 0)) for i, node in enumerate(nodes) for name in node.output
    )


def _border_sizes(program: Program) -> dict[str, int]:
    """Bytes of the graph's inputs and outputs and of what travels."""
    values: Sequence[Value] = (*program.inputs, *program.outputs, *(t.value for t in program.transfers))
    return {value.name: 0 if value.shape is None else value.nbytes for value in values}


@dataclass(frozen=True)
class _Role:
    """What a device holds for one frame of a role: weights by name, buffers, and what is held beside those at most
    (busy) and between two segments at most (resting)."""

    weights: Mapping[str, int]
    buffers: int
    busy: int
    resting: int


def _together(roles: Sequence[_Role], frames: int) -> MemoryUse:
    """Frames follow each other through the roles: of n roles each has frames / n at once, some one more. One frame is
    inside a segment, the others rest."""
    weights: dict[str, int] = {}
    for role in roles:
        weights |= role.weights
    largest = sorted(roles, key=lambda role: -role.buffers - role.busy)
    counts = [(frames + len(roles) - 1 - i) // len(roles) for i in range(len(roles))]
    there = [(role, count) for role, count in zip(largest, counts, strict=True) if count]
    busy = max(role.busy - role.resting for role, _ in there)
    resting = sum(count * role.resting for role, count in there)
    return MemoryUse(sum(weights.values()), busy + resting, sum(count * role.buffers for role, count in there))


@dataclass(frozen=True)
class _Spans:
    """What a device holds for a frame, as (first step, last step, bytes): what it is `given` (buffers), what it keeps
    `between` segments, what it holds `inside` them. weights: bytes by name."""

    weights: Mapping[str, int]
    given: Sequence[tuple[int, int, int]]
    between: Sequence[tuple[int, int, int]]
    inside: Sequence[tuple[int, int, int]]


def _spans(program: Program, device: DeviceProgram, border: Mapping[str, int]) -> _Spans:
    """Time is counted in steps: step 2k + 1 is inside segment k, step 2k between the segments k - 1 and k."""
    weights: dict[str, int] = {}
    sizes = dict(border)
    inside: list[int] = []
    for segment in device.segments:
        weights |= constant_sizes(segment)
        values = segment_values(segment)
        sizes |= {name: size for name, size in values.items() if size}
        inside.append(segment_peak(segment, values))
    last = _last_steps(program, device)
    spans = tuple((0, last.get(name, 0), sizes[name]) for name in _given(program, device))
    between = tuple(
        (2 * k + 2, last[name], sizes.get(name, 0))
        for k, segment in enumerate(device.segments)
        for name in segment.outputs
        if last.get(name, -1) >= 2 * k + 2
    )
    return _Spans(weights, spans, between, tuple((2 * k + 1, 2 * k + 1, size) for k, size in enumerate(inside)))


def _device(program: Program, device: DeviceProgram, border: Mapping[str, int]) -> _Role:
    found, end = _spans(program, device, border), 2 * len(device.segments)
    buffers = sum(size for _, _, size in found.given)
    busy = peak([*found.given, *found.between, *found.inside])
    resting = max((_held(found.given, step) + _held(found.between, step) for step in range(0, end + 1, 2)), default=0)
    return _Role(found.weights, buffers, max(0, busy - buffers), max(0, resting - buffers))


def _held(spans: Iterable[tuple[int, int, int]], step: int) -> int:
    return sum(size for start, stop, size in spans if start <= step <= stop)


def _given(program: Program, device: DeviceProgram) -> tuple[str, ...]:
    """The tensors that are there from the start: what it receives, and the inputs that it reads or sends on."""
    received = [program.transfers[step.index].value.name for step in device.steps if step.kind == "receive"]
    used = {name for segment in device.segments for name in segment.inputs} | set(device.sinks)
    used |= {program.transfers[step.index].value.name for step in device.steps if step.kind == "send"}
    return tuple(dict.fromkeys([*(name for name in device.sources if name in used), *received]))


def _last_steps(program: Program, device: DeviceProgram) -> dict[str, int]:
    """Tensor → the last step at which it is held: inside its last reader, inside the segment after the one behind which
    it is sent (sending goes on while that runs), or the end where it is delivered."""
    last: dict[str, int] = {}
    latest = 0
    for step in device.steps:
        if step.kind == "run":
            latest = 2 * step.index + 3
            last |= dict.fromkeys(device.segments[step.index].inputs, 2 * step.index + 1)
        elif step.kind == "send":
            name = program.transfers[step.index].value.name
            last[name] = max(last.get(name, 0), latest)
    return last | dict.fromkeys(device.sinks, 2 * len(device.segments))
