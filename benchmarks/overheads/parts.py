"""The figure `parts` of overhead.py: all segments of a plan, on one core, compared with the whole network."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime as ort
from support.cpp_copies import prepared

import dicompiler
from dicompiler import CompileResult, networks
from dicompiler.ir.onnx.weights import Weight, is_placeholder
from dicompiler.ir.program import Program, Segment
from dicompiler.partition.placed_model import read_annotation
from dicompiler.verify.comparison import random_inputs
from dicompiler.verify.executor import ProgramExecutor, to_ort
from dicompiler_targets import artifact_files
from dicompiler_targets.artifact_files import HoistedSegment
from dicompiler_targets.sockets.runtime.segments import SegmentIO, run_copies
from overheads.measuring import Figure

NETWORKS = ("resnet18", "resnet50", "mobilenet_v2")
MAX_PARTS_RATIO = 1.10
"""Limit of the time of all segments together, divided by the time of the whole network.

The ratio is first divided by the factor by which the plan has more operations than the network.
"""
PLATFORM, STRATEGY = "rpi4-gateway-x4", "auto"
LEVELS = {"all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL, "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED}
"""onnxruntime's optimization levels at which segments are compared with the network.

Only at the level "all", onnxruntime uses a tensor layout of its own. Each segment must convert its inputs to this
layout and its outputs back, and additions are fused only with operators of the same segment.
"""
TARGETS = ("sockets", "mpi")
"""Targets whose runtimes copy the inputs and outputs of segments; each of them is measured."""
WARM_UP_RUNS = 4
"""Number of runs of a segment before the measured ones.

In its first run, a segment reads its weights from memory instead of caches. `measure_in_order` measures this
separately.
"""

SegmentPair = tuple[Segment, HoistedSegment]
"""A segment, and the same segment without the data movement that the runtime does instead."""
Side = Callable[[], float]


def nothing() -> None:
    """Do nothing. This function replaces the copies of a model that has none."""


class Bound:
    """A model in onnxruntime at one of LEVELS, on one thread, with inputs and outputs bound once.

    Inputs without a value are zeros.

    Attributes:
        sides: Functions that run the model once and return its processor seconds. A segment has one function for each
            target, because the target's runtime copies its inputs and outputs. Any other model has one function, with
            the key "".
    """

    def __init__(
        self,
        proto: onnx.ModelProto | None,
        weights: Mapping[str, Weight],
        inputs: Mapping[str, Any],
        level: str,
        pair: SegmentPair | None = None,
    ) -> None:
        self._memory: dict[str, Any] = {}
        self._session, self._run = None, nothing
        if proto is not None:
            self._bind(proto, weights, inputs, level)
        self.sides: dict[str, Side] = {"": partial(self._seconds, nothing, nothing)}
        if pair is not None:
            self._memory |= {n: np.array(inputs[n], order="C") for n in pair[1].values if n not in self._memory}
            self.sides = {"sockets": self._in_numpy(pair), "mpi": self._in_cpp(pair)}

    def _bind(
        self, proto: onnx.ModelProto, weights: Mapping[str, Weight], inputs: Mapping[str, Any], level: str
    ) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = LEVELS[level]
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        names = [tensor.name for tensor in proto.graph.initializer if is_placeholder(tensor)]
        self._kept = [to_ort(np.asarray(weights[name].array(), order="C")) for name in names]
        options.add_external_initializers(names, self._kept)
        self._session = session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
        binding = session.io_binding()
        self._memory = {
            one.name: np.array(inputs[one.name], order="C") if one.name in inputs else np.zeros(one.shape, "float32")
            for one in (*session.get_inputs(), *session.get_outputs())
        }
        for one in session.get_inputs():
            binding.bind_ortvalue_input(one.name, to_ort(self._memory[one.name]))
        for one in session.get_outputs():
            binding.bind_ortvalue_output(one.name, to_ort(self._memory[one.name]))
        self._run = partial(session.run_with_iobinding, binding)

    def _in_numpy(self, pair: SegmentPair) -> Side:
        segment, hoisted = pair
        ends = {
            "inputs": list(segment.inputs),
            "outputs": list(segment.outputs),
            **artifact_files.describe_copies(hoisted),
        }
        copies = SegmentIO(ends, self._session).bind_copies(lambda name: self._memory[name].reshape(-1).view(np.uint8))
        return partial(self._seconds, *(partial(run_copies, own) for own in copies))

    def _in_cpp(self, pair: SegmentPair) -> Side:
        _, hoisted = pair
        copies = (
            [copy for name, one in own.items() for copy in artifact_files.make_copies(name, one, hoisted.values)]
            for own in (hoisted.copied_inputs, hoisted.copied_outputs)
        )
        return partial(self._seconds, *(prepared(own, self._memory) if own else nothing for own in copies))

    def _seconds(self, before: Callable[[], object], after: Callable[[], object]) -> float:
        """Return the processor time of a run, which other processes on the host hardly affect."""
        start = time.thread_time()
        before()
        self._run()
        after()
        return time.thread_time() - start


@dataclass(frozen=True)
class Case:
    """A network and the program of its plan.

    Attributes:
        where: Text that describes the case, for the output.
        made: The compiled network.
        program: The program.
        inputs: Inputs of the network, by name.
        values: Inputs and outputs of every segment, by name.
        operation_ratio: Number of operations of the program, divided by that of the network.
    """

    where: str
    made: CompileResult
    program: Program
    inputs: Mapping[str, Any]
    values: Mapping[str, Any]
    operation_ratio: float

    @classmethod
    def of(cls, name: str) -> Case:
        made = dicompiler.compile(networks.build(name), platform=PLATFORM, strategy=STRATEGY)
        program = made.program
        assert program is not None and made.metrics is not None and made.single_device_metrics is not None
        inputs = random_inputs(program.inputs)
        values = {k: v for held in ProgramExecutor(program).run(inputs, True).values.values() for k, v in held.items()}
        operation_ratio = sum(one.flops for one in made.metrics.devices) / sum(
            one.flops for one in made.single_device_metrics.devices
        )
        count = sum(len(device.segments) for device in program.devices)
        where = f"{name}, {STRATEGY} on {PLATFORM}, {count} segments, {operation_ratio:.3f} times the operations"
        return cls(where, made, program, inputs, values, operation_ratio)

    def sides(self, level: str) -> tuple[Side, list[list[dict[str, Side]]], list[Side]]:
        """Return functions that each run a model once and return its processor seconds, at one optimization level.

        The first one runs the whole network. The second value has, for each device and each of its segments, a function
        by target. The third value has a function for each segment without copies at its inputs and outputs.
        """
        model, program = self.made.reference, self.program
        assert model is not None
        own = {node.name for node in model.proto.graph.node}
        whole = Bound(model.proto, model.weights, self.inputs, level).sides[""]
        split = [
            [
                self._segment_sides(pair, level)
                for pair in zip(device.segments, artifact_files.hoist_device_copies(device), strict=True)
            ]
            for device in program.devices
        ]
        models = [without_cuts(segment.model, own) for device in program.devices for segment in device.segments]
        return whole, split, [Bound(one, program.weights, self.values, level).sides[""] for one in models]

    def _segment_sides(self, pair: SegmentPair, level: str) -> dict[str, Side]:
        computing = pair[1].segment
        model = None if computing is None else computing.model
        return Bound(model, self.program.weights, self.values, level, pair).sides

    def weight_read_ratio(self) -> float:
        """Return the bytes of weights that all segments read, divided by those of the network."""
        assert self.made.reference is not None
        return nbytes(self.program) / sum(weight.nbytes for weight in self.made.reference.weights.values())


def parts(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """Compare the time of all segments, with the copies that each target's runtime makes, with that of the network."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    figures = []
    for name in names or NETWORKS:
        case = Case.of(name)
        for level in LEVELS:
            figures += measure_level(case, level, frames, rounds)
    return figures


def measure_level(case: Case, level: str, frames: int, rounds: int) -> list[Figure]:
    """Measure the segments and the network at one optimization level of onnxruntime.

    Return a figure for each target: the time of all segments divided by that of the network.
    """
    whole, split, bare = case.sides(level)
    by_target = [[side[target] for device in split for side in device] for target in TARGETS]
    sides = [whole, *bare, *(side for own in by_target for side in own)]
    turns = [measure_sides(sides, frames) for _ in range(rounds)]
    found = [[one for turn in turns for one in turn[side]] for side in range(len(sides) + 1)]
    base, uncut, first, figures = [*found[0], *found[-1]], found[1 : 1 + len(bare)], 1 + len(bare), []
    for target, own in zip(TARGETS, by_target, strict=True):
        place = slice(first, first := first + len(own))
        ratios = sorted(
            sum_times(turn[place], statistics.median) / whole_s(turn) / case.operation_ratio for turn in turns
        )
        spread = f"rounds {ratios[0]:.3f} to {ratios[-1]:.3f}"
        shortest = sum_times(found[place], min) / min(base) / case.operation_ratio
        title = f"{case.where}, at {level}, {target}"
        figures.append(Figure(title, statistics.median(ratios), shortest, MAX_PARTS_RATIO, spread))
        click.echo(figures[-1])
        cuts = [(sum_times(found[place], of) - sum_times(uncut, of)) / of(base) for of in (statistics.median, min)]
        cold = (
            sum(measure_in_order([side[target] for side in device]) for device in split)
            / measure_in_order([whole])
            / case.operation_ratio
        )
        click.echo(
            f"    slices and joins {cuts[0]:.1%} of the whole (of the shortest: {cuts[1]:.1%}); "
            f"each device's segments in the order of frames: {cold:.3f} times the whole, "
            f"with {case.weight_read_ratio():.2f} times its weights to read"
        )
    return figures


def measure_sides(sides: Sequence[Side], frames: int) -> list[list[float]]:
    """Return the seconds of each side (a model that is run), and of the first side once more at the end.

    The first side is the whole network. It is measured before and after its segments, so that a change of the host's
    speed is not mistaken for a difference between network and segments.
    """
    found = []
    for side in (*sides, sides[0]):
        for _ in range(WARM_UP_RUNS):
            side()
        found.append([side() for _ in range(max(1, frames // 4))])
    return found


def whole_s(turn: Sequence[Sequence[float]]) -> float:
    """Return the median seconds of the whole network, which was measured before and after its segments."""
    return statistics.median([*turn[0], *turn[-1]])


def measure_in_order(sides: Sequence[Side], frames: int = 12) -> float:
    """Return the median seconds of all sides (models) one after another, as in a frame.

    Each model then reads its weights from memory if the caches are too small for the weights of all models.
    """
    found = [sum(side() for side in sides) for _ in range(frames + WARM_UP_RUNS)]
    return statistics.median(found[WARM_UP_RUNS:])


def sum_times(sides: Iterable[Sequence[float]], of: Any) -> float:
    """Return the sum of the median or least seconds of all sides (models); `of` is the median or the minimum."""
    return float(sum(map(of, sides)))


def nbytes(program: Program) -> int:
    """Return the bytes of weights that all segments of a program read together."""
    tensors = (t for device in program.devices for s in device.segments for t in s.model.graph.initializer)
    return sum(program.weights[t.name].nbytes for t in tensors if is_placeholder(t))


def without_cuts(proto: onnx.ModelProto, own: Collection[str]) -> onnx.ModelProto:
    """Return a segment's model without the Slices and Concats that splitting the network has added.

    Outputs that such a node cuts are omitted. Inputs that such a node computes become inputs of the model. `own` are
    the names of the network's own nodes, which stay.
    """
    known = onnx.shape_inference.infer_shapes(proto).graph
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    graph = bare.graph
    made = {"Slice", "Concat"}
    cuts = {n.output[0] for n in graph.node if n.op_type in made and read_annotation(n).origin not in own}
    outputs = [value for value in graph.output if value.name not in cuts]
    if not outputs:
        return proto
    nodes = [node for node in graph.node if node.output[0] not in cuts]
    read = {name for node in nodes for name in node.input}
    inputs = [value for value in graph.input if value.name in read]
    inputs += [value for value in (*known.value_info, *known.output) if value.name in read & cuts]
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    for field, values in ((graph.node, nodes), (graph.input, inputs), (graph.output, outputs)):
        del field[:]
        field.extend(values)
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return bare
