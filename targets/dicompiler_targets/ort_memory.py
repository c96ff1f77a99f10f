"""Prediction of the memory that a process with onnxruntime needs in addition to weights, activations and buffers.

A process has one onnxruntime session for each segment (ONNX submodel of a device). The constants of this module were
measured with benchmarks/memory.py on x86-64 Linux with glibc and onnxruntime 1.31.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import onnx

from dicompiler.plugin_api import DeviceProgram, Program, Segment
from dicompiler.plugin_api.costs import constant_sizes, peak_nbytes, program_memory, segment_value_sizes
from dicompiler.plugin_api.onnx import Optimization
from dicompiler_targets.artifact_files import serialize_model

MIB_BYTES = 1 << 20
SESSION_BYTES, NODE_BYTES = 96 << 10, 12 << 10
"""Bytes of an onnxruntime session without nodes, and bytes of each of its nodes."""
ARENA_WASTE_SHARE = 0.1
"""Unused bytes between tensors in onnxruntime's memory arena, divided by the bytes of activations and buffers."""
MIN_WORKSPACE_BYTES, FLOAT_BYTES = MIB_BYTES, 4
"""Minimum bytes of the scratch memory of convolutions, and bytes of one of its elements."""
TEMPORARY_WEIGHT_COPIES = 3
"""Number of temporary copies of the largest convolution weight while a session is created.

onnxruntime multiplies the weights by those of a following BatchNormalization. At optimization level "all", it also
reorders them in blocks of channels.
"""
FOLDED_OPERATORS = ("BatchNormalization", "Mul")
"""Operators that onnxruntime multiplies into the weights of a preceding convolution."""
PACKED_OPERATORS = ("Gemm", "MatMul")
"""Operators whose constant operand is copied into a packed layout when the session is created."""
FUSED_ACTIVATIONS = ("Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "Elu", "Softplus")
"""Activations that onnxruntime fuses with a preceding Gemm.

onnxruntime packs the weights of fused nodes after all other weights, which changes the peak of memory.
"""


@dataclass(frozen=True)
class WeightLoading:
    """The weights of a segment that onnxruntime transforms while it creates the session.

    Folded weights are convolution weights that are multiplied by the constants of following nodes.

    Attributes:
        packed: Bytes of each weight that is copied into a packed layout, in the order of packing.
        folded: Bytes of all weights that are folded at least once.
        refolded: Bytes of all weights that are folded more than once.
        convolution: Bytes of the weights of all convolutions.
        largest: Bytes of the largest weight of a convolution.
    """

    packed: tuple[int, ...]
    folded: int
    refolded: int
    convolution: int
    largest: int

    def kept_bytes(self, is_blocked: bool) -> int:
        """Return the bytes of transformed convolution weights, which stay in memory next to the mapped weights file.

        `is_blocked` is True if onnxruntime reorders weights in blocks of channels (level "all").
        """
        return self.convolution if is_blocked else self.folded

    def peak_bytes(self, is_blocked: bool) -> int:
        """Return the peak bytes of convolution weights while the session is created.

        `is_blocked` is True if onnxruntime reorders weights in blocks of channels (level "all").
        """
        second_copy = self.convolution if is_blocked else self.refolded
        return self.folded + second_copy + TEMPORARY_WEIGHT_COPIES * self.largest * bool(second_copy or self.folded)


def predict_memory_overhead(program: Program, process_bytes: int, optimization: Optimization) -> dict[str, int]:
    """Predict the memory of each device's process in addition to weights, activations and buffers.

    Args:
        program: The program of all devices.
        process_bytes: Bytes of a process without onnxruntime sessions.
        optimization: The optimization level of onnxruntime.

    Returns:
        Bytes by device name.
    """
    is_blocked = optimization == "all"
    counted = program_memory(program)
    overhead = {}
    for index, first_role in enumerate(program.devices):
        name = first_role.device
        device, copied = _merge_roles(program, index, is_blocked)
        running = _running_bytes(device, counted[name].activations + counted[name].buffers) + copied
        overhead[name] = process_bytes + max(running, _loading_peak_bytes(device, is_blocked) - counted[name].total)
    return overhead


def count_retained_bytes(program: Program, device: DeviceProgram) -> int:
    """Return the additional bytes of a runtime that keeps sent and output tensors until their frame ends.

    They are additional to those of a runtime that frees each tensor after its last use. States (tensors that the device
    keeps for the next frame) are included.
    """
    end = len(device.segments)
    sizes = {name: size for segment in device.segments for name, size in segment_value_sizes(segment).items()}
    first = {name: index for index, segment in enumerate(device.segments) for name in segment.outputs}
    last = {name: index for index, segment in enumerate(device.segments) for name in segment.inputs}
    sent = {program.transfers[step.index].value.name for step in device.steps if step.kind == "send"}
    retained = sent | set(device.model_outputs)
    lifetimes = {name: (first[name], max(first[name], last.get(name, 0)), sizes.get(name, 0)) for name in first}
    longer = [(begin, end if name in retained else stop, size) for name, (begin, stop, size) in lifetimes.items()]
    states = sum(state.value.nbytes for state in device.states)
    return peak_nbytes(longer) - peak_nbytes(lifetimes.values()) + states


def _merge_roles(program: Program, index: int, is_blocked: bool) -> tuple[DeviceProgram, int]:
    """Return device number `index` with the segments of all its roles, and the bytes of repeated weights.

    A role is the normal plan, a replica or a failure plan. Weights are repeated if several segments use the same
    weight, because the session of each segment makes its own transformed copy.

    Args:
        program: The program of all devices.
        index: Index of the device.
        is_blocked: True if onnxruntime reorders weights in blocks of channels (level "all").
    """
    segments: dict[bytes, Segment] = {}
    seen: dict[str, int] = {}
    copied = 0
    for role in program.roles:
        known = set(segments)
        segments |= {serialize_model(s): s for s in role.devices[index].segments}
        new = [segment for key, segment in segments.items() if key not in known]
        for segment in new:
            repeated = sum(size for name, size in constant_sizes(segment).items() if name in seen)
            loading = analyze_weight_loading(segment) if repeated else WeightLoading((), 0, 0, 0, 0)
            copied += min(repeated, sum(loading.packed) + loading.kept_bytes(is_blocked))
        for segment in new:
            seen |= constant_sizes(segment)
    return replace(program.devices[index], segments=tuple(segments.values())), copied


def _session_bytes(device: DeviceProgram) -> int:
    nodes = sum(len(segment.model.graph.node) for segment in device.segments)
    return SESSION_BYTES * len(device.segments) + NODE_BYTES * nodes


def _running_bytes(device: DeviceProgram, tensor_bytes: int) -> int:
    """Return the bytes that a device needs in addition to weights and tensors while it computes a frame.

    `tensor_bytes` are the bytes of activations and communication buffers.
    """
    workspace = max((workspace_bytes(segment) for segment in device.segments), default=0)
    return _session_bytes(device) + int(ARENA_WASTE_SHARE * tensor_bytes) + workspace


def _loading_peak_bytes(device: DeviceProgram, is_blocked: bool) -> int:
    """Return the peak bytes while the sessions of a device are created one after another.

    Weights that onnxruntime does not transform are not counted, because they are only mapped. `is_blocked` is True if
    onnxruntime reorders weights in blocks of channels (level "all").
    """
    kept = peak = 0
    for segment in device.segments:
        loading = analyze_weight_loading(segment)
        peak = max(peak, kept + loading.peak_bytes(is_blocked))
        kept += loading.kept_bytes(is_blocked)
        for size in loading.packed:
            peak = max(peak, kept + 2 * size)
            kept += size
    return _session_bytes(device) + max(peak, kept)


def workspace_bytes(segment: Segment) -> int:
    """Return the largest number of bytes of scratch memory that a node of the segment needs."""
    sizes = segment_value_sizes(segment)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in segment.model.graph.initializer}
    largest = 0
    for node in segment.model.graph.node:
        output = sizes.get(node.output[0], 0)
        if node.op_type == "LRN":
            largest = max(largest, 2 * output)
        elif node.op_type == "Conv":
            largest = max(largest, MIN_WORKSPACE_BYTES, _unfolded_bytes(shapes.get(node.input[1], ()), output))
    return largest


def _unfolded_bytes(weight_shape: tuple[int, ...], output_bytes: int) -> int:
    """Return the bytes of the unfolded input (im2col) of a convolution.

    onnxruntime unfolds it only if the convolution has more filters than output positions. `weight_shape` is (filters,
    channels, kernel height, kernel width). The output is in float32.
    """
    if not weight_shape or weight_shape[0] == 0 or math.prod(weight_shape[2:]) == 1:
        return 0
    positions = output_bytes // FLOAT_BYTES // weight_shape[0]
    return FLOAT_BYTES * positions * math.prod(weight_shape[1:]) if weight_shape[0] > positions else 0


def analyze_weight_loading(segment: Segment) -> WeightLoading:
    """Find the weights of a segment that onnxruntime transforms while it creates the session."""
    sizes = constant_sizes(segment)
    nodes = segment.model.graph.node
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    packed_first: list[int] = []
    packed_last: list[int] = []
    folded = refolded = 0
    convolution = [0]
    for node in nodes:
        weight = sizes.get(node.input[1], 0) if len(node.input) > 1 else 0
        successors = (successor.op_type for successor in _iterate_successors(node, readers))
        if node.op_type == "Conv" and weight:
            folds = _count_folds(successors)
            convolution.append(weight)
            folded += weight * (folds > 0)
            refolded += weight * (folds > 1)
        elif node.op_type in PACKED_OPERATORS and weight:
            is_fused = node.op_type == "Gemm" and next(successors, "") in FUSED_ACTIVATIONS
            (packed_last if is_fused else packed_first).append(weight)
    return WeightLoading((*packed_first, *packed_last), folded, refolded, sum(convolution), max(convolution))


def _iterate_successors(node: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]]) -> Iterator[onnx.NodeProto]:
    """Yield the chain of nodes after `node` in which each node is the only reader of the previous node's output."""
    while len(node.output) > 0 and len(successors := readers.get(node.output[0], [])) == 1:
        node = successors[0]
        yield node


def _count_folds(successors: Iterable[str]) -> int:
    """Return how many of the following operators onnxruntime multiplies into a convolution's weights.

    `successors` are operator types. An Add is skipped, because it changes only the bias.
    """
    count = 0
    for op in successors:
        if op in FOLDED_OPERATORS:
            count += 1
        elif op != "Add":
            break
    return count
