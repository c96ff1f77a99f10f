"""What a process with onnxruntime's sessions holds beyond weights, activations and buffers: a model with constants that
were measured.

Program → bytes by device. The constants come from benchmarks/memory.py, on x86-64 Linux with glibc and onnxruntime
1.31.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import onnx

from dicompiler.plugin_api import DeviceProgram, Program, Segment
from dicompiler.plugin_api.costs import constant_sizes, program_memory, segment_value_sizes
from dicompiler.plugin_api.onnx import Optimization

MIB_BYTES = 1 << 20
SESSION_BYTES, NODE_BYTES = 96 << 10, 12 << 10
"""Of each session, and of each of its nodes."""
ARENA_WASTE_SHARE = 0.1
"""What onnxruntime's arena leaves unused between tensors, as a share of activations and buffers."""
MIN_WORKSPACE_BYTES, FLOAT_BYTES = MIB_BYTES, 4
"""The least that convolutions lay out anew while they run; bytes of one number of it."""
TEMPORARY_WEIGHT_COPIES = 3
"""A convolution's weights are multiplied when the session is made (BatchNormalization), and at level "all" laid out in
blocks of channels. Copies of so many of them, at most as large as the largest, are there beside all results; below
"all" once more all that are multiplied twice."""
FOLDED_OPERATORS = ("BatchNormalization", "Mul")
PACKED_OPERATORS = ("Gemm", "MatMul")
"""Their constant operand is packed when the session is made: it is there twice until it is packed."""
FUSED_ACTIVATIONS = ("Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "Elu", "Softplus")
"""A Gemm before one of them becomes one node with it, and such nodes are packed after all others."""


@dataclass(frozen=True)
class WeightLoading:
    """What making a session of a segment does with its weights, in bytes: packed, in the order of packing; folded once
    at least, and more than once; those of all convolutions, and the largest of them."""

    packed: tuple[int, ...]
    folded: int
    refolded: int
    convolution: int
    largest: int

    def kept_bytes(self, blocked: bool) -> int:
        """What of convolutions is there twice, or no pages of a file, from then on. blocked: at level "all"."""
        return self.convolution if blocked else self.folded

    def peak_bytes(self, blocked: bool) -> int:
        """What convolutions take at the worst moment."""
        more = self.convolution if blocked else self.refolded
        return self.folded + more + TEMPORARY_WEIGHT_COPIES * self.largest * bool(more or self.folded)


def predict_memory_overhead(program: Program, base: int, optimization: Optimization) -> dict[str, int]:
    """Device → bytes beyond what `program_memory` counts: at the worst moment of making the sessions or of a frame.
    base: of the process without sessions."""
    blocked = optimization == "all"
    held = program_memory(program)
    return {
        name: base
        + max(
            _running_bytes(device, held[name].activations + held[name].buffers) + copied,
            _loading_peak_bytes(device, blocked) - held[name].total,
        )
        for name, (device, copied) in (
            (d.device, _merge_roles(program, i, blocked)) for i, d in enumerate(program.devices)
        )
    }


def _merge_roles(program: Program, index: int, blocked: bool) -> tuple[DeviceProgram, int]:
    """The device with the segments of all roles, equal ones once; and the bytes of weights that several roles' sessions
    pack or fold, each for itself, beyond the first."""
    segments: dict[bytes, Segment] = {}
    seen: dict[str, int] = {}
    copied = 0
    for role in program.roles:
        known = set(segments)
        segments |= {s.model.SerializeToString(deterministic=True): s for s in role.devices[index].segments}
        new = [segment for key, segment in segments.items() if key not in known]
        for segment in new:
            again = sum(size for name, size in constant_sizes(segment).items() if name in seen)
            load = analyze_weight_loading(segment) if again else WeightLoading((), 0, 0, 0, 0)
            copied += min(again, sum(load.packed) + load.kept_bytes(blocked))
        for segment in new:
            seen |= constant_sizes(segment)
    return replace(program.devices[index], segments=tuple(segments.values())), copied


def _session_bytes(device: DeviceProgram) -> int:
    """The sessions, without weights."""
    nodes = sum(len(segment.model.graph.node) for segment in device.segments)
    return SESSION_BYTES * len(device.segments) + NODE_BYTES * nodes


def _running_bytes(device: DeviceProgram, tensors: int) -> int:
    """While frames run, beside weights and tensors."""
    scratch = max((workspace_bytes(segment) for segment in device.segments), default=0)
    return _session_bytes(device) + int(ARENA_WASTE_SHARE * tensors) + scratch


def _loading_peak_bytes(device: DeviceProgram, blocked: bool) -> int:
    """The most while sessions are made, one after another; weights that are neither packed, folded nor laid out anew
    are pages of the mapped file that nobody has read yet."""
    kept = most = 0
    for segment in device.segments:
        load = analyze_weight_loading(segment)
        most = max(most, kept + load.peak_bytes(blocked))
        kept += load.kept_bytes(blocked)
        for size in load.packed:
            most = max(most, kept + 2 * size)
            kept += size
    return _session_bytes(device) + max(most, kept)


def workspace_bytes(segment: Segment) -> int:
    """The most that one node of the segment takes for itself while it runs: LRN two copies of its tensor."""
    sizes = segment_value_sizes(segment)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in segment.model.graph.initializer}
    most = 0
    for node in segment.model.graph.node:
        output = sizes.get(node.output[0], 0)
        if node.op_type == "LRN":
            most = max(most, 2 * output)
        elif node.op_type == "Conv":
            most = max(most, MIN_WORKSPACE_BYTES, _unfolded_bytes(shapes.get(node.input[1], ()), output))
    return most


def _unfolded_bytes(weight: tuple[int, ...], output: int) -> int:
    """Bytes of the patches that a convolution copies side by side, all of them where it has more filters than places.

    weight: its shape (filters, channels, kernel …); output: bytes of what it computes.
    """
    if not weight or math.prod(weight[2:]) == 1:
        return 0
    places = output // FLOAT_BYTES // weight[0]
    return FLOAT_BYTES * places * math.prod(weight[1:]) if weight[0] > places else 0


def analyze_weight_loading(segment: Segment) -> WeightLoading:
    """What onnxruntime does with the segment's weights."""
    sizes = constant_sizes(segment)
    nodes = segment.model.graph.node
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    early: list[int] = []
    late: list[int] = []
    once = twice = 0
    convolved = [0]
    for node in nodes:
        weight = sizes.get(node.input[1], 0) if len(node.input) > 1 else 0
        following = (after.op_type for after in _iterate_successors(node, readers))  # no longer than it must be
        if node.op_type == "Conv" and weight:
            folds = _count_folds(following)
            convolved.append(weight)
            once += weight * (folds > 0)
            twice += weight * (folds > 1)
        elif node.op_type in PACKED_OPERATORS and weight:
            fused = node.op_type == "Gemm" and next(following, "") in FUSED_ACTIVATIONS
            (late if fused else early).append(weight)
    return WeightLoading((*early, *late), once, twice, sum(convolved), max(convolved))


def _iterate_successors(node: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]]) -> Iterator[onnx.NodeProto]:
    """The nodes that follow one after another, as long as each is the only reader of the one before."""
    while len(node.output) > 0 and len(after := readers.get(node.output[0], [])) == 1:
        node = after[0]
        yield node


def _count_folds(following: Iterable[str]) -> int:
    """How many of the nodes behind a convolution multiply its weights; an Add in between changes only its bias."""
    count = 0
    for op in following:
        if op in FOLDED_OPERATORS:
            count += 1
        elif op != "Add":
            break
    return count
