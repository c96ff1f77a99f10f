"""A model of the memory that a process with onnxruntime sessions takes beyond weights, activations and buffers.

Program → bytes by device. The constants were measured with benchmarks/memory.py on x86-64 Linux with glibc and
onnxruntime 1.31.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import onnx

from dicompiler.plugin_api import DeviceProgram, Program, Segment
from dicompiler.plugin_api.costs import constant_sizes, peak_nbytes, program_memory, segment_value_sizes
from dicompiler.plugin_api.onnx import Optimization

MIB_BYTES = 1 << 20
SESSION_BYTES, NODE_BYTES = 96 << 10, 12 << 10
"""Bytes of each session, and of each node in it."""
ARENA_WASTE_SHARE = 0.1
"""Unused bytes between tensors in onnxruntime's arena, as a share of activations and buffers."""
MIN_WORKSPACE_BYTES, FLOAT_BYTES = MIB_BYTES, 4
"""Minimum workspace of convolutions at run time; bytes of one element of it."""
TEMPORARY_WEIGHT_COPIES = 3
"""Number of temporary copies of weights while a session is created, each at most as large as the largest weight.

A session multiplies the weights of a convolution by those of BatchNormalization, and at level "all" also reorders them
in blocks of channels. The copies exist in addition to all results. Below "all", weights that are multiplied twice are
copied once more."""
FOLDED_OPERATORS = ("BatchNormalization", "Mul")
PACKED_OPERATORS = ("Gemm", "MatMul")
"""Operators whose constant operand is packed when the session is created. Until then it exists twice."""
FUSED_ACTIVATIONS = ("Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "Elu", "Softplus")
"""Activations that are fused with a preceding Gemm. Such nodes are packed after all others."""


@dataclass(frozen=True)
class WeightLoading:
    """The bytes of a segment's weights that onnxruntime transforms when it creates the session.

    Attributes:
        packed: Bytes of each packed weight, in the order of packing.
        folded: Bytes of weights that are multiplied at least once.
        refolded: Bytes of weights that are multiplied more than once.
        convolution: Bytes of the weights of all convolutions.
        largest: Bytes of the largest of them.
    """

    packed: tuple[int, ...]
    folded: int
    refolded: int
    convolution: int
    largest: int

    def kept_bytes(self, blocked: bool) -> int:
        """Return the bytes of convolution weights that stay in memory in addition to the mapped file.

        Args:
            blocked: Whether weights are reordered in blocks (level "all").
        """
        return self.convolution if blocked else self.folded

    def peak_bytes(self, blocked: bool) -> int:
        """Return the peak bytes of convolution weights; `blocked` as in `kept_bytes`."""
        second_copy = self.convolution if blocked else self.refolded
        return self.folded + second_copy + TEMPORARY_WEIGHT_COPIES * self.largest * bool(second_copy or self.folded)


def predict_memory_overhead(program: Program, base: int, optimization: Optimization) -> dict[str, int]:
    """Predict the memory beyond that of `program_memory`, at the worst moment of creating sessions or of a frame.

    Args:
        program: The program.
        base: Bytes of the process without sessions.
        optimization: onnxruntime's optimization level.

    Returns:
        Bytes by device.
    """
    blocked = optimization == "all"
    counted = program_memory(program)
    overhead = {}
    for index, first_role in enumerate(program.devices):
        name = first_role.device
        device, copied = _merge_roles(program, index, blocked)
        running = _running_bytes(device, counted[name].activations + counted[name].buffers) + copied
        overhead[name] = base + max(running, _loading_peak_bytes(device, blocked) - counted[name].total)
    return overhead


def count_retained_bytes(program: Program, device: DeviceProgram) -> int:
    """Return the additional bytes of a runtime that keeps sent and delivered tensors to the end of a frame.

    The states that it keeps for the next frame are included.
    """
    end = len(device.segments)
    sizes = {name: size for segment in device.segments for name, size in segment_value_sizes(segment).items()}
    first = {name: index for index, segment in enumerate(device.segments) for name in segment.outputs}
    last = {name: index for index, segment in enumerate(device.segments) for name in segment.inputs}
    sent = {program.transfers[step.index].value.name for step in device.steps if step.kind == "send"}
    retained = sent | set(device.sinks)
    spans = {name: (first[name], max(first[name], last.get(name, 0)), sizes.get(name, 0)) for name in first}
    longer = [(begin, end if name in retained else stop, size) for name, (begin, stop, size) in spans.items()]
    states = sum(state.value.nbytes for state in device.states)
    return peak_nbytes(longer) - peak_nbytes(spans.values()) + states


def _merge_roles(program: Program, index: int, blocked: bool) -> tuple[DeviceProgram, int]:
    """Return a device with the distinct segments of all its roles, and the bytes of duplicated weights.

    If the segments of several roles use the same weight, each session packs or folds it for itself.
    """
    segments: dict[bytes, Segment] = {}
    seen: dict[str, int] = {}
    copied = 0
    for role in program.roles:
        known = set(segments)
        segments |= {s.model.SerializeToString(deterministic=True): s for s in role.devices[index].segments}
        new = [segment for key, segment in segments.items() if key not in known]
        for segment in new:
            repeated = sum(size for name, size in constant_sizes(segment).items() if name in seen)
            loading = analyze_weight_loading(segment) if repeated else WeightLoading((), 0, 0, 0, 0)
            copied += min(repeated, sum(loading.packed) + loading.kept_bytes(blocked))
        for segment in new:
            seen |= constant_sizes(segment)
    return replace(program.devices[index], segments=tuple(segments.values())), copied


def _session_bytes(device: DeviceProgram) -> int:
    """Return the bytes of the sessions without weights."""
    nodes = sum(len(segment.model.graph.node) for segment in device.segments)
    return SESSION_BYTES * len(device.segments) + NODE_BYTES * nodes


def _running_bytes(device: DeviceProgram, tensor_bytes: int) -> int:
    """Return the bytes in addition to weights and tensors while frames run."""
    workspace = max((workspace_bytes(segment) for segment in device.segments), default=0)
    return _session_bytes(device) + int(ARENA_WASTE_SHARE * tensor_bytes) + workspace


def _loading_peak_bytes(device: DeviceProgram, blocked: bool) -> int:
    """Return the peak bytes while sessions are created one after another.

    Weights that are not transformed do not count: they are pages of the mapped file that have not been read yet.
    """
    kept = peak = 0
    for segment in device.segments:
        loading = analyze_weight_loading(segment)
        peak = max(peak, kept + loading.peak_bytes(blocked))
        kept += loading.kept_bytes(blocked)
        for size in loading.packed:
            peak = max(peak, kept + 2 * size)
            kept += size
    return _session_bytes(device) + max(peak, kept)


def workspace_bytes(segment: Segment) -> int:
    """Return the largest workspace of a node at run time. LRN needs two copies of its tensor."""
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


def _unfolded_bytes(weight: tuple[int, ...], output: int) -> int:
    """Return the bytes of the unfolded input (im2col) of a convolution with more filters than output positions.

    Args:
        weight: Shape of the weight (filters, channels, kernel …).
        output: Bytes of the output.
    """
    if not weight or math.prod(weight[2:]) == 1:
        return 0
    positions = output // FLOAT_BYTES // weight[0]
    return FLOAT_BYTES * positions * math.prod(weight[1:]) if weight[0] > positions else 0


def analyze_weight_loading(segment: Segment) -> WeightLoading:
    """Return how onnxruntime transforms the segment's weights when it creates the session."""
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
    """Yield the nodes that follow one another, as long as each one is the only reader of the previous output."""
    while len(node.output) > 0 and len(successors := readers.get(node.output[0], [])) == 1:
        node = successors[0]
        yield node


def _count_folds(successors: Iterable[str]) -> int:
    """Return how many operators after a convolution multiply its weights. An Add in between changes only its bias."""
    count = 0
    for op in successors:
        if op in FOLDED_OPERATORS:
            count += 1
        elif op != "Add":
            break
    return count
