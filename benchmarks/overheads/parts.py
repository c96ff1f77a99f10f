"""The figure `parts`: all segments of a plan, each alone on one core, beside the whole network."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime as ort

import dicompiler
from dicompiler import networks
from dicompiler.ir.onnx.weights import Weight, is_hollow
from dicompiler.verify.comparison import random_inputs
from dicompiler.verify.executor import Executor, to_ort
from overheads.measuring import Figure

IN_PARTS = ("resnet18", "resnet50", "mobilenet_v2")
PARTS = 1.10
"""All parts together, without the operations that the plan does more than once: at most so many times the whole."""
PLATFORM, STRATEGY = "rpi4x4", "auto"
LEVELS = {"all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL, "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED}
"""What is measured: only at the best level has the engine a layout of its own, into which each part brings its tensors
and out of it again, and fuses additions only of what is in it."""


class Bound:
    """A model in onnxruntime at one of LEVELS, on one thread, with inputs and outputs bound once."""

    def __init__(
        self, proto: onnx.ModelProto, weights: Mapping[str, Weight], inputs: Mapping[str, Any], level: str
    ) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = LEVELS[level]
        options.intra_op_num_threads = 1
        names = [tensor.name for tensor in proto.graph.initializer if is_hollow(tensor)]
        self._kept = [to_ort(np.asarray(weights[name].array(), order="C")) for name in names]
        options.add_external_initializers(names, self._kept)
        self._session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        given = {one.name: to_ort(np.asarray(inputs[one.name], order="C")) for one in self._session.get_inputs()}
        outputs = [one.name for one in self._session.get_outputs()]
        for name, value in given.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in zip(outputs, self._session.run_with_ort_values(outputs, given), strict=True):
            self._binding.bind_ortvalue_output(name, value)

    def seconds(self) -> float:
        """Processor time of a run: what others do on the host meanwhile counts little."""
        start = time.thread_time()
        self._session.run_with_iobinding(self._binding)
        return time.thread_time() - start


def parts(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """The segments of all devices, summed, beside the whole, by the shortest times of each."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    figures = []
    for name in names or IN_PARTS:
        made = dicompiler.compile(networks.build(name), platform=PLATFORM, strategy=STRATEGY)
        program, model = made.program, made.reference
        assert program is not None and model is not None and made.metrics is not None and made.single is not None
        inputs = random_inputs(program.inputs)
        values = {k: v for held in Executor(program).run(inputs, True).values.values() for k, v in held.items()}
        segments = [segment for device in program.devices for segment in device.segments]
        again = sum(one.flops for one in made.metrics.devices) / sum(one.flops for one in made.single.devices)
        for level in LEVELS:
            sides = [Bound(model.proto, model.weights, inputs, level)]
            sides += [Bound(segment.model, program.weights, values, level) for segment in segments]
            found = measured(sides, frames, rounds)
            medians, shortest = (sum(map(of, found[1:])) / of(found[0]) / again for of in (statistics.median, min))
            where = f"{name}, {STRATEGY} on {PLATFORM}, {len(segments)} segments, {again:.3f} times the operations"
            figures.append(Figure(f"{where}, at {level}", medians, shortest, PARTS))
            click.echo(figures[-1])
    return figures


def measured(sides: Sequence[Bound], frames: int, rounds: int) -> list[list[float]]:
    """Seconds of each side, measured in turn."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, seconds in zip(sides, found, strict=True):
            side.seconds()
            seconds += [side.seconds() for _ in range(max(1, frames // 4))]
    return found
