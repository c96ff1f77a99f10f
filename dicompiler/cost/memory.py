"""Memory of a program on each device: weights, live tensors and buffers.

A tensor is live from the moment it is computed or received to its last use. Memory that the target's runtime adds is
not computed here.
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
"""(first step, last step, bytes) of a tensor that is in memory during these steps of a program."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of memory that a program needs on one device.

    Attributes:
        weights: Bytes of the constants of all segments (ONNX submodels), each counted once.
        activations: Largest number of bytes of tensors that are needed at once, without the buffers.
        buffers: Bytes of graph inputs, of states (outputs that are inputs of the next frame) and of received tensors,
            for all frames in flight.
        added: Bytes that the target's runtime needs in addition to all of these.
    """

    weights: int
    activations: int
    buffers: int
    added: int = 0

    @property
    def total(self) -> int:
        """Bytes of weights, activations, buffers and the target's runtime together."""
        return self.weights + self.activations + self.buffers + self.added


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes of memory that a program needs on one device at each step of a frame.

    Step 2k + 1 is inside segment k (an ONNX submodel), and step 2k is between the segments k - 1 and k.

    Attributes:
        constants: Bytes of each constant by name. Constants are in memory at all steps, once for all frames.
        buffers: Bytes of buffers at each step.
        activations: Bytes of all other live tensors at each step.
    """

    constants: Mapping[str, int]
    buffers: tuple[int, ...]
    activations: tuple[int, ...]

    @property
    def weights(self) -> int:
        return sum(self.constants.values())

    @property
    def live_bytes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.buffers, self.activations, strict=True)))

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes at any step, for a single frame in flight and without the target's runtime."""
        return self.weights + max(self.live_bytes)


def program_memory(program: Program, frames: int = 1, added: Mapping[str, int] | None = None) -> dict[str, MemoryUse]:
    """Return the memory that a program needs on each device.

    A device runs one segment (an ONNX submodel) at a time, so only one frame in flight is inside a segment. Weights of
    all replicas and failure plans are counted. Tensors are those of the plan with which the frames need the most
    memory.

    Args:
        program: Program that the devices run.
        frames: Number of frames in flight, at least 1.
        added: Bytes that the target adds, by device.

    Returns:
        Memory by device name. Tensors without a static shape count as 0 bytes.
    """
    cases: dict[tuple[str, ...], list[dict[str, MemoryTimeline]]] = {}
    for role in program.roles:
        cases.setdefault(role.failed, []).append(memory_timeline(role))
    memory = {}
    for name in (device.device for device in program.devices):
        uses = [_concurrent_bytes([role[name] for role in roles], frames) for roles in cases.values()]
        buffers, activations = max(uses, key=sum)
        constants = {
            key: size for roles in cases.values() for role in roles for key, size in role[name].constants.items()
        }
        memory[name] = MemoryUse(sum(constants.values()), activations, buffers, 0 if added is None else added[name])
    return memory


def memory_timeline(program: Program) -> dict[str, MemoryTimeline]:
    """Return the memory of each device at each step of one frame, by device name.

    If the plan has replicas (copies on other devices), the frame uses the first one. Failure plans are ignored.
    """
    states = (state.value for device in program.devices for state in device.states)
    values: Sequence[TensorSpec] = (*program.inputs, *program.outputs, *(t.value for t in program.transfers), *states)
    sizes = {value.name: value.nbytes if value.is_fixed_size else 0 for value in values}
    return {device.device: _device_timeline(program, device, sizes) for device in program.devices}


def segment_value_sizes(segment: Segment) -> dict[str, int]:
    """Return the bytes of every tensor that a segment (ONNX submodel) reads or computes, without constants.

    Args:
        segment: Segment with its ONNX model.

    Returns:
        Bytes by tensor name; 0 if the shape is unknown.
    """
    inferred = onnx.shape_inference.infer_shapes(segment.model)
    graph = inferred.graph
    sizes = {value.name: value_nbytes(value) for value in (*graph.value_info, *graph.input, *graph.output)}
    names = [*segment.inputs, *(name for node in graph.node for name in node.output if name)]
    return {name: sizes.get(name, 0) for name in names}


def value_nbytes(value: onnx.ValueInfoProto) -> int:
    tensor_type = value.type.tensor_type
    if not tensor_type.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor_type.shape.dim):
        return 0
    return raw_nbytes(tensor_type.elem_type, tuple(dim.dim_value for dim in tensor_type.shape.dim))


def constant_sizes(segment: Segment) -> dict[str, int]:
    """Return the bytes of each constant of a segment (ONNX submodel). Sparse constants are measured as if dense.

    Args:
        segment: Segment with its ONNX model.

    Returns:
        Bytes by constant name.
    """
    graph = segment.model.graph
    sizes = {tensor.name: raw_nbytes(tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
    for sparse in graph.sparse_initializer:
        sizes[sparse.values.name] = raw_nbytes(sparse.values.data_type, tuple(sparse.dims))
    return sizes


def peak_nbytes(spans: Iterable[LiveRange]) -> int:
    """Return the largest number of bytes of tensors that are in memory at the same step of a program.

    Args:
        spans: (first step, last step, bytes) of each tensor.

    Returns:
        Number of bytes.
    """
    changes = _nbytes_deltas(spans)
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


def _nbytes_deltas(spans: Iterable[LiveRange]) -> Counter[int]:
    changes = Counter[int]()
    for first, last, size in spans:
        changes[first] += size
        changes[last + 1] -= size
    return changes


def segment_peak_nbytes(segment: Segment, sizes: Mapping[str, int]) -> int:
    """Return the largest number of bytes that tensors computed inside a segment (ONNX submodel) need at once.

    `sizes` has the bytes of each tensor by name.
    """
    nodes = segment.model.graph.node
    last = {name: i for i, node in enumerate(nodes) for name in tensors_read(node)}
    last |= dict.fromkeys(segment.outputs, len(nodes))
    tensors = [(i, name) for i, node in enumerate(nodes) for name in node.output]
    return peak_nbytes((i, max(i, last.get(name, i)), sizes.get(name, 0)) for i, name in tensors)


def _concurrent_bytes(roles: Sequence[MemoryTimeline], frames: int) -> tuple[int, int]:
    """Return (bytes of buffers, bytes of activations) of a device if `frames` frames are in flight.

    `roles` has the memory of each replica (copy of a plan on other devices), over which the frames are spread evenly.
    Only one frame at a time is inside a segment (an ONNX submodel).
    """
    largest = sorted(roles, key=lambda role: -max(role.live_bytes))
    counts = [(frames + len(roles) - 1 - i) // len(roles) for i in range(len(roles))]
    in_flight = [(role, count) for role, count in zip(largest, counts, strict=True) if count]
    buffers = sum(count * role.buffers[0] for role, count in in_flight)
    between_segments = sum(count * max(role.live_bytes[::2]) for role, count in in_flight)
    inside_segment = max(max(role.live_bytes) - max(role.live_bytes[::2]) for role, _ in in_flight)
    return buffers, between_segments + inside_segment - buffers


def _device_timeline(program: Program, device: DeviceProgram, interface_sizes: Mapping[str, int]) -> MemoryTimeline:
    """Return the memory of a device at each step.

    `interface_sizes` has the bytes of graph inputs and outputs, states and transferred tensors by name.
    """
    constants: dict[str, int] = {}
    sizes = dict(interface_sizes)
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
    initial = [(0, last.get(name, 0), sizes[name]) for name in _initial_tensors(program, device)]
    buffer_changes, changes = _nbytes_deltas(initial), _nbytes_deltas(live)
    steps = range(2 * len(device.segments) + 1)
    buffers = tuple(accumulate(buffer_changes[step] for step in steps))
    return MemoryTimeline(constants, buffers, tuple(accumulate(changes[step] for step in steps)))


def _initial_tensors(program: Program, device: DeviceProgram) -> tuple[str, ...]:
    """Return the names of the tensors that are in a device's memory from the start of a frame.

    They are received tensors, graph inputs that the device uses, and states (outputs of the previous frame).
    """
    received = [program.transfers[step.index].value.name for step in device.steps if step.kind == "receive"]
    used = {name for segment in device.segments for name in segment.inputs} | set(device.model_outputs)
    used |= {program.transfers[step.index].value.name for step in device.steps if step.kind == "send"}
    states = [state.value.name for state in device.states]
    return tuple(dict.fromkeys([*(name for name in device.model_inputs if name in used), *states, *received]))


def _last_use_steps(program: Program, device: DeviceProgram) -> dict[str, int]:
    """Return the last step at which each tensor is live, by tensor name.

    Sending continues in the background, so a sent tensor is assumed to be live until the next segment has run.
    """
    last: dict[str, int] = {}
    latest = 0
    for step in device.steps:
        if step.kind == "run":
            latest = 2 * step.index + 3
            last |= dict.fromkeys(device.segments[step.index].inputs, 2 * step.index + 1)
        elif step.kind == "send":
            name = program.transfers[step.index].value.name
            last[name] = max(last.get(name, 0), latest)
    kept = (*device.model_outputs, *(state.written_name for state in device.states))
    return last | dict.fromkeys(kept, 2 * len(device.segments))
