"""What a Program holds in memory on each device: weights, live tensors, and buffers of what it is given and sent.

Program + frames in flight → bytes by device. Exact for what the program says; what a target adds is `Target.memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import onnx

from dicompiler.ir.onnx.graph_structure import tensors_read
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.program import DeviceProgram, Program, Segment, TensorSpec

LiveRange = tuple[int, int, int]
"""(First step, last step, bytes) of what is held."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device.

    weights: the constants of its segments, each once. buffers: the graph inputs that it is given, states that it keeps
    and the transfers that it receives, all there from the start of a frame, for every frame in flight. activations: the
    most that live tensors take beside the buffers. added: what the target that runs it adds.
    """

    weights: int
    activations: int
    buffers: int
    added: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.buffers + self.added


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes of one device over a frame. constants: by name, there all the time and for all frames. buffers,
    activations: by step, where step 2k + 1 is inside segment k, and step 2k between the segments k - 1 and k."""

    constants: Mapping[str, int]
    buffers: tuple[int, ...]
    activations: tuple[int, ...]

    @property
    def weights(self) -> int:
        """The constants together."""
        return sum(self.constants.values())

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Buffers and activations by step."""
        return tuple(map(sum, zip(self.buffers, self.activations, strict=True)))

    @property
    def peak_bytes(self) -> int:
        """The most at once: MemoryUse.total of a single frame."""
        return self.weights + max(self.live_bytes)


def program_memory(program: Program, frames: int = 1, added: Mapping[str, int] | None = None) -> dict[str, MemoryUse]:
    """Device → what it holds with `frames` frames in flight (at least 1), and what a target adds: `added`, by device.

    A buffer is held up to its last reader on the device, what a segment makes from its node to its last reader or send;
    what is delivered, to the end. One frame is inside a segment, the others are between two. Tensors without static
    shape count nothing. Views (Reshape, Identity) count as copies. With several roles, the weights of all of them are
    there, and the frames in flight are dealt out over the roles that take most: over those without a loss, or over
    those of one loss, if that is more.
    """
    cases: dict[tuple[str, ...], list[dict[str, MemoryTimeline]]] = {}
    for role in program.roles:
        cases.setdefault(role.failed, []).append(memory_timeline(role))
    return {
        device.device: _largest_use(
            [_concurrent_bytes([role[device.device] for role in roles], frames) for roles in cases.values()],
            [role[device.device].constants for roles in cases.values() for role in roles],
            0 if added is None else added[device.device],
        )
        for device in program.devices
    }


def memory_timeline(program: Program) -> dict[str, MemoryTimeline]:
    """Device → what it holds step by step for one frame, of the first role where there are several."""
    kept = (state.value for device in program.devices for state in device.states)
    values: Sequence[TensorSpec] = (*program.inputs, *program.outputs, *(t.value for t in program.transfers), *kept)
    border = {value.name: value.nbytes if value.is_fixed_size else 0 for value in values}
    return {device.device: _device_timeline(program, device, border) for device in program.devices}


def segment_value_sizes(segment: Segment) -> dict[str, int]:
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
    sizes = {tensor.name: raw_nbytes(tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
    for sparse in graph.sparse_initializer:
        sizes[sparse.values.name] = raw_nbytes(sparse.values.data_type, tuple(sparse.dims))
    return sizes


def peak_nbytes(spans: Iterable[LiveRange]) -> int:
    """The most that is held at once."""
    changes = _nbytes_deltas(spans)
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


def _nbytes_deltas(spans: Iterable[LiveRange]) -> Counter[int]:
    """Step → by how many bytes more are held than at the step before."""
    changes = Counter[int]()
    for first, last, size in spans:
        changes[first] += size
        changes[last + 1] -= size
    return changes


def segment_peak_nbytes(segment: Segment, sizes: Mapping[str, int]) -> int:
    """The most bytes that the tensors made inside the segment take at once; its outputs are held to its end.

    sizes: what `segment_values` gives. A node's inputs and outputs are held at the same time.
    """
    nodes = segment.model.graph.node
    last = {name: i for i, node in enumerate(nodes) for name in tensors_read(node)}
    last |= dict.fromkeys(segment.outputs, len(nodes))
    return peak_nbytes(
        (i, max(i, last.get(name, i)), sizes.get(name, 0)) for i, node in enumerate(nodes) for name in node.output
    )


def _largest_use(cases: Iterable[tuple[int, int]], constants: Iterable[Mapping[str, int]], added: int) -> MemoryUse:
    """cases: buffers and activations in each; the constants are there in all of them."""
    buffers, activations = max(cases, key=sum)
    every = {name: size for held in constants for name, size in held.items()}
    return MemoryUse(sum(every.values()), activations, buffers, added)


def _concurrent_bytes(roles: Sequence[MemoryTimeline], frames: int) -> tuple[int, int]:
    """(Buffers, activations.) Frames follow each other through the roles: of n roles each has frames / n at once, some
    one more. One frame is inside a segment, the others rest between two."""
    largest = sorted(roles, key=lambda role: -max(role.live_bytes))
    counts = [(frames + len(roles) - 1 - i) // len(roles) for i in range(len(roles))]
    flying = [(role, count) for role, count in zip(largest, counts, strict=True) if count]
    buffers = sum(count * role.buffers[0] for role, count in flying)
    resting = sum(count * max(role.live_bytes[::2]) for role, count in flying)
    inside = max(max(role.live_bytes) - max(role.live_bytes[::2]) for role, _ in flying)
    return buffers, resting + inside - buffers


def _device_timeline(program: Program, device: DeviceProgram, border: Mapping[str, int]) -> MemoryTimeline:
    """border: bytes of the graph's inputs and outputs and of what travels."""
    constants: dict[str, int] = {}
    sizes = dict(border)
    last = _last_use_steps(program, device)
    live: list[LiveRange] = []
    for k, segment in enumerate(device.segments):
        constants |= constant_sizes(segment)
        values = segment_value_sizes(segment)
        sizes |= {name: size for name, size in values.items() if size}
        live.append((2 * k + 1, 2 * k + 1, segment_peak_nbytes(segment, values)))
    for k, segment in enumerate(device.segments):
        kept = [name for name in segment.outputs if last.get(name, -1) >= 2 * k + 2]
        live += ((2 * k + 2, last[name], sizes.get(name, 0)) for name in kept)
    given = [(0, last.get(name, 0), sizes[name]) for name in _initial_tensors(program, device)]
    steps = range(2 * len(device.segments) + 1)
    buffers, activations = (
        tuple(accumulate(changes[step] for step in steps)) for changes in (_nbytes_deltas(given), _nbytes_deltas(live))
    )
    return MemoryTimeline(constants, buffers, activations)


def _initial_tensors(program: Program, device: DeviceProgram) -> tuple[str, ...]:
    """The tensors that are there from the start: what it receives, the inputs that it reads or sends on, states."""
    received = [program.transfers[step.index].value.name for step in device.steps if step.kind == "receive"]
    wanted = {name for segment in device.segments for name in segment.inputs} | set(device.sinks)
    wanted |= {program.transfers[step.index].value.name for step in device.steps if step.kind == "send"}
    kept = [state.value.name for state in device.states]
    return tuple(dict.fromkeys([*(name for name in device.sources if name in wanted), *kept, *received]))


def _last_use_steps(program: Program, device: DeviceProgram) -> dict[str, int]:
    """Tensor → the last step at which it is held: inside its last reader, inside the segment after the one behind which
    it is sent (sending goes on while that runs), or the end where it is delivered, or kept."""
    last: dict[str, int] = {}
    latest = 0
    for step in device.steps:
        if step.kind == "run":
            latest = 2 * step.index + 3
            last |= dict.fromkeys(device.segments[step.index].inputs, 2 * step.index + 1)
        elif step.kind == "send":
            name = program.transfers[step.index].value.name
            last[name] = max(last.get(name, 0), latest)
    return last | dict.fromkeys(
        (*device.sinks, *(state.written_name for state in device.states)), 2 * len(device.segments)
    )
