"""Measure what splitting costs in an engine: the figure `parts` of overhead.py with `--engine`.

The CPU time of all segments of a plan with height tiles is compared with that of the whole network in the fastest
engine. Everything runs in one thread on one core.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from peers.engines import run_in_mnn, run_in_ncnn, run_in_onnxruntime

import dicompiler
from dicompiler import CompileResult, networks
from dicompiler.ir.onnx.model import Model
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler.verify.executor import ProgramExecutor
from dicompiler_targets.sockets.runtime.segments import SegmentIO, make_sessions, make_value, run_segment
from overheads.measuring import Figure

NETWORKS = ("resnet18", "resnet50", "vgg16", "yolov8n")
PLATFORM, STRATEGY = "rpi4x4", "dp"
"""Four boards, and the strategy that splits a network into blocks of fused height tiles for them."""
MAX_PARTS_RATIO = 1.10
"""Largest allowed ratio of the time of all segments to the time of the whole network.

It is first divided by the ratio of the plan's operations to the network's operations.
"""
WHOLE_NETWORKS = {"onnxruntime": run_in_onnxruntime, "ncnn": run_in_ncnn, "mnn": run_in_mnn}
"""For each engine, the function that loads a whole network and returns a function for one frame."""
WARM_UP_RUNS = 3

ComputeFunction = Callable[[], object]
"""A function that computes a segment or a whole network once. The caller measures its time."""


@dataclass(frozen=True)
class DeviceSegment:
    """A segment of a device, as the runtime of target `sockets` computes it, and example values of its inputs.

    Attributes:
        session: The segment in its engine; None if it only copies.
        segment_io: The copies before and after it.
        values: The inputs, by name.
    """

    session: Any
    segment_io: SegmentIO
    values: Mapping[str, Any]

    def run(self) -> None:
        values, computed = self.segment_io.join_inputs(self.values), dict[str, Any]()
        if self.session is not None:
            computed = run_segment(self.session, self.segment_io.session_entry, values)
        self.segment_io.cut_outputs(computed, self.values)

    def without_copies(self) -> ComputeFunction:
        """Return a function that runs the segment without the copies before and after it."""
        if self.session is None:
            return lambda: None
        return partial(
            run_segment, self.session, self.segment_io.session_entry, self.segment_io.join_inputs(self.values)
        )


@dataclass(frozen=True)
class Case:
    """A network whose plan one engine computes.

    Attributes:
        name: Text that describes the case, for the output.
        operation_ratio: Number of operations of the plan, divided by that of the network.
        devices: The segments of each device.
    """

    name: str
    operation_ratio: float
    devices: Sequence[Sequence[DeviceSegment]]

    @property
    def segments(self) -> list[DeviceSegment]:
        return [segment for device in self.devices for segment in device]


def engine_parts(engines: Sequence[str], names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """Compare the CPU time of all segments in each engine with that of the whole network in the fastest engine."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    figures = []
    for name in names or NETWORKS:
        with tempfile.TemporaryDirectory() as scratch:
            proto = networks.build(name)
            wholes = load_whole_networks(proto, Path(scratch))
            cases = [compile_case(name, proto, engine, Path(scratch)) for engine in engines]
            figures += measure_cases(cases, wholes, frames, rounds)
    return figures


def load_whole_networks(proto: onnx.ModelProto, scratch: Path) -> dict[str, ComputeFunction]:
    """Return a function that computes a frame of the whole network, for each engine that can compute it."""
    model, calls = scratch / "model.onnx", dict[str, ComputeFunction]()
    onnx.save(proto, model)
    inputs = random_inputs(graph_inputs(Model.load(proto)))
    for engine, load in WHOLE_NETWORKS.items():
        try:
            calls[engine] = load(model, inputs, 1)
        except Exception as error:
            click.echo(f"{engine} cannot compute the whole network: {str(error).splitlines()[0]}", err=True)
    return calls


def compile_case(name: str, proto: onnx.ModelProto, engine: str, scratch: Path) -> Case:
    artifact = scratch / f"artifact-{engine}"
    made = dicompiler.compile(proto, PLATFORM, STRATEGY, target="sockets", engine=engine, output=artifact)
    assert made.metrics is not None and made.single_device_metrics is not None
    flops, network_flops = (sum(d.flops for d in m.devices) for m in (made.metrics, made.single_device_metrics))
    devices = load_segments(made, artifact)
    count, ratio = sum(map(len, devices)), flops / network_flops
    return Case(
        f"{name}, {engine}, {STRATEGY} on {PLATFORM}, {count} segments, {ratio:.3f} times the operations",
        ratio,
        devices,
    )


def load_segments(made: CompileResult, artifact: Path) -> list[list[DeviceSegment]]:
    """Return the segments of each device of an artifact, with values of their inputs from an example frame."""
    program = made.program
    assert program is not None
    tensors = ProgramExecutor(program).run(random_inputs(program.inputs), True).values
    devices = []
    for device in program.devices:
        directory = artifact / device.device
        manifest = json.loads((directory / "manifest.json").read_text())
        pairs = zip(make_sessions(directory, manifest, 1), manifest["segments"], strict=True)
        values = tensors[device.device]
        devices.append([DeviceSegment(s, SegmentIO(entry, s), bind_inputs(entry, values)) for s, entry in pairs])
    return devices


def bind_inputs(segment: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a segment, which are float32, as onnxruntime values."""
    arrays = {name: np.array(tensors[name], order="C") for name in segment["inputs"]}
    return {name: make_value(array.reshape(-1).view(np.uint8), "FLOAT", array.shape) for name, array in arrays.items()}


def measure_cases(
    cases: Sequence[Case], wholes: Mapping[str, ComputeFunction], frames: int, rounds: int
) -> list[Figure]:
    """Measure the whole network in each engine and the segments of each case in turn; return a figure for each case."""
    parts: list[list[float]] = [[] for _ in cases]
    bare: list[list[float]] = [[] for _ in cases]
    whole: dict[str, list[float]] = {engine: [] for engine in wholes}
    for _ in range(rounds):
        for i, case in enumerate(cases):
            for engine, call in wholes.items():
                whole[engine].append(median_s(call, frames))
            parts[i].append(sum(median_s(segment.run, frames) for segment in case.segments))
            bare[i].append(sum(median_s(segment.without_copies(), frames) for segment in case.segments))
    medians = {engine: statistics.median(seconds) for engine, seconds in whole.items()}
    click.echo("whole network, ms: " + ", ".join(f"{engine} {1000 * s:.1f}" for engine, s in medians.items()))
    fastest_s, least_s = min(medians.values()), min(map(min, whole.values()))
    figures = []
    for i, case in enumerate(cases):
        ratio = statistics.median(parts[i]) / fastest_s / case.operation_ratio
        figures.append(Figure(case.name, ratio, min(parts[i]) / least_s / case.operation_ratio, MAX_PARTS_RATIO))
        click.echo(figures[-1])
        copies = 1 - statistics.median(bare[i]) / statistics.median(parts[i])
        click.echo(f"    {1000 * statistics.median(parts[i]):.1f} ms, of which copies {copies:.1%}")
    return figures


def median_s(call: ComputeFunction, frames: int) -> float:
    """Return the median CPU time of a call, in seconds. Other processes on the host hardly affect it."""
    seconds = []
    for i in range(WARM_UP_RUNS + frames):
        start = time.thread_time()
        call()
        seconds += [time.thread_time() - start] * (i >= WARM_UP_RUNS)
    return statistics.median(seconds)
