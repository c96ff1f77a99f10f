"""The figure `parts`: all segments of a plan, each alone on one core, beside the whole network, and what they lose."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime as ort

import dicompiler
from dicompiler import networks
from dicompiler.ir.onnx.weights import Weight, is_hollow
from dicompiler.ir.program import Program
from dicompiler.partition.annotations import annotation_of
from dicompiler.verify.comparison import random_inputs
from dicompiler.verify.executor import Executor, to_ort
from dicompiler_targets import seams
from dicompiler_targets.sockets.runtime.seams import Seam, copied
from overheads.measuring import Figure

IN_PARTS = ("resnet18", "resnet50", "mobilenet_v2")
PARTS = 1.10
"""All parts together, without the operations that the plan does more than once: at most so many times the whole."""
PLATFORM, STRATEGY = "rpi4x4", "auto"
LEVELS = {"all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL, "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED}
"""What is measured: only at the best level has the engine a layout of its own, into which each part brings its tensors
and out of it again, and fuses additions only of what is in it."""
SETTLED = 4
"""Runs before those that count: a segment's weights come from memory first, which is told apart."""


class Bound:
    """A model in onnxruntime at one of LEVELS, on one thread, with inputs and outputs bound once; inputs that nobody
    gives are zeros. seam: of a segment, whose copies are made beside, as the sockets runtime makes them."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        weights: Mapping[str, Weight],
        inputs: Mapping[str, Any],
        level: str,
        seam: seams.Seam | None = None,
    ) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = LEVELS[level]
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        names = [tensor.name for tensor in proto.graph.initializer if is_hollow(tensor)]
        self._kept = [to_ort(np.asarray(weights[name].array(), order="C")) for name in names]
        options.add_external_initializers(names, self._kept)
        self._session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._memory = {
            one.name: np.array(inputs[one.name], order="C") if one.name in inputs else np.zeros(one.shape, "float32")
            for one in (*self._session.get_inputs(), *self._session.get_outputs())
        }
        for one in self._session.get_inputs():
            self._binding.bind_ortvalue_input(one.name, to_ort(self._memory[one.name]))
        for one in self._session.get_outputs():
            self._binding.bind_ortvalue_output(one.name, to_ort(self._memory[one.name]))
        self._before, self._after = self._copies(seam, inputs) if seam is not None else ([], [])

    def _copies(self, seam: seams.Seam, inputs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        for name in (*seam.segment.inputs, *seam.segment.outputs):
            self._memory.setdefault(name, np.array(inputs[name], order="C"))
        ends = {"inputs": list(seam.segment.inputs), "outputs": list(seam.segment.outputs), **seam.document}
        return Seam(ends, self._session).bound(lambda name: self._memory[name].reshape(-1).view(np.uint8))

    def seconds(self) -> float:
        """Processor time of a run: what others do on the host meanwhile counts little."""
        start = time.thread_time()
        copied(self._before)
        self._session.run_with_iobinding(self._binding)
        copied(self._after)
        return time.thread_time() - start


def parts(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """The segments of all devices, summed, beside the whole: round by round, and the median of the rounds."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    figures = []
    for name in names or IN_PARTS:
        made = dicompiler.compile(networks.build(name), platform=PLATFORM, strategy=STRATEGY)
        program, model = made.program, made.reference
        assert program is not None and model is not None and made.metrics is not None and made.single is not None
        inputs = random_inputs(program.inputs)
        values = {k: v for held in Executor(program).run(inputs, True).values.values() for k, v in held.items()}
        devices = [[segment.model for segment in device.segments] for device in program.devices]
        again = sum(one.flops for one in made.metrics.devices) / sum(one.flops for one in made.single.devices)
        count = sum(map(len, devices))
        where = f"{name}, {STRATEGY} on {PLATFORM}, {count} segments, {again:.3f} times the operations"
        own = {node.name for node in model.proto.graph.node}
        for level in LEVELS:
            whole = Bound(model.proto, model.weights, inputs, level)
            sides = [
                [Bound(seam.segment.model, program.weights, values, level, seam) for seam in seams.seams(device)]
                for device in program.devices
            ]
            bare = [Bound(without_cuts(p, own), program.weights, values, level) for ps in devices for p in ps]
            all_sides = [whole, *(side for device in sides for side in device), *bare]
            turns = [measured(all_sides, frames) for _ in range(rounds)]
            ratios = sorted(summed(turn[1 : count + 1], statistics.median) / whole_s(turn) / again for turn in turns)
            found = [[one for turn in turns for one in turn[side]] for side in range(len(all_sides) + 1)]
            base, split, uncut = [*found[0], *found[-1]], found[1 : count + 1], found[count + 1 : -1]
            spread = f"rounds {ratios[0]:.3f} to {ratios[-1]:.3f}"
            shortest = summed(split, min) / min(base) / again
            figures.append(Figure(f"{where}, at {level}", statistics.median(ratios), shortest, PARTS, spread))
            click.echo(figures[-1])
            cuts = [(summed(split, of) - summed(uncut, of)) / of(base) for of in (statistics.median, min)]
            cold = sum(map(in_order, sides)) / in_order([whole]) / again
            click.echo(
                f"    slices and joins {cuts[0]:.1%} of the whole (of the shortest: {cuts[1]:.1%}); "
                f"each device's segments in the order of frames: {cold:.3f} times the whole, "
                f"with {nbytes(program) / sum(w.nbytes for w in model.weights.values()):.2f} times its weights to read"
            )
    return figures


def measured(sides: Sequence[Bound], frames: int) -> list[list[float]]:
    """Seconds of each side, measured one after another, and of the first once more at the end: a host that becomes
    faster or slower meanwhile is not taken for a difference between the sides."""
    found = []
    for side in (*sides, sides[0]):
        for _ in range(SETTLED):
            side.seconds()
        found.append([side.seconds() for _ in range(max(1, frames // 4))])
    return found


def whole_s(turn: Sequence[Sequence[float]]) -> float:
    """Seconds of the whole network, of what was measured before its parts and behind them."""
    return statistics.median([*turn[0], *turn[-1]])


def in_order(sides: Sequence[Bound], frames: int = 12) -> float:
    """Seconds of all sides, one after another as in a frame: what each reads of its weights comes from memory where the
    caches are too small for those of all. The median."""
    found = [sum(side.seconds() for side in sides) for _ in range(frames + SETTLED)]
    return statistics.median(found[SETTLED:])


def summed(sides: Iterable[Sequence[float]], of: Any) -> float:
    """What `of` makes of the seconds of each side, added up."""
    return float(sum(map(of, sides)))


def nbytes(program: Program) -> int:
    """Bytes of weights that all segments together read."""
    tensors = (t for device in program.devices for s in device.segments for t in s.model.graph.initializer)
    return sum(program.weights[t.name].nbytes for t in tensors if is_hollow(t))


def without_cuts(proto: onnx.ModelProto, own: Collection[str]) -> onnx.ModelProto:
    """The segment without what is cut out of its tensors and without what is joined: what is cut for other devices is
    not made, what is read cut or joined is given ready. own: the names of the network's nodes, which stay."""
    known = onnx.shape_inference.infer_shapes(proto).graph
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    graph = bare.graph
    made = {"Slice", "Concat"}
    cuts = {n.output[0] for n in graph.node if n.op_type in made and annotation_of(n).origin not in own}
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
