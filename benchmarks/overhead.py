"""What the runtimes cost beside the engine and the wire: each figure a ratio of two sides that are measured in turn.

In: which figure, which networks, how often. Out: a line for each on stdout; the exit code is 1 where a goal was missed.
Run it as README.md says, on a host that does nothing else.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime as ort

import dicompiler
from dicompiler import networks
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight, is_hollow
from dicompiler.target.records import RunOptions
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler.verify.executor import Executor, to_ort
from dicompiler_targets.mpi import MpiTarget, tools

THREADS = 2
APART_S = 0.05
"""Between two sides that are measured: threads of the one must have stopped to spin before the other begins."""
ONE = 1.03
"""One device beside onnxruntime at its defaults: at most so many times its time."""


@dataclass(frozen=True)
class Figure:
    """What was measured: times of one side by the other's, of medians and of the shortest of all rounds."""

    name: str
    median: float
    shortest: float
    goal: float

    def __str__(self) -> str:
        return f"{self.name}: {self.median:.3f} (of the shortest: {self.shortest:.3f}; at most {self.goal})"


Side = Callable[[], Sequence[float]]
"""Runs frames; the seconds of each."""


def alternately(name: str, base: Side, other: Side, rounds: int, goal: float) -> Figure:
    """The times of `other` by those of `base`, measured in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            time.sleep(APART_S)
            seconds[side].extend((base, other)[side]())
    medians, shortest = [statistics.median(one) for one in seconds], [min(one) for one in seconds]
    click.echo(f"{name}: {1000 * medians[0]:.2f} and {1000 * medians[1]:.2f} ms a frame", err=True)
    return Figure(name, medians[1] / medians[0], shortest[1] / shortest[0], goal)


# -- one: one device beside onnxruntime at its defaults

NETWORKS = ("resnet50", "mobilenet_v2", "vgg16", "densenet121", "mobilenet_v2 int8")
FIRST = 3
"""Frames that do not count."""


def build(name: str, place: Path) -> tuple[onnx.ModelProto, Path | None]:
    """A network, and samples of its inputs where it is to be quantised (at 160 × 160)."""
    if not name.endswith(" int8"):
        return networks.build(name), None
    proto = networks.build(name.removesuffix(" int8"), size=160)
    values = graph_inputs(Model.load(proto))
    drawn = [random_inputs(values, seed) for seed in range(4)]
    np.savez(place / "samples.npz", **{value.name: np.stack([one[value.name] for one in drawn]) for value in values})  # type: ignore[arg-type]
    return proto, place / "samples.npz"


def in_python(model: Path, frames: int) -> Side:
    """`InferenceSession(path).run` as users call it, with THREADS."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    inputs = {one.name: np.full(one.shape, 0.5, "float32") for one in session.get_inputs()}

    def run() -> Sequence[float]:
        seconds = []
        for _ in range(frames + FIRST):
            start = time.perf_counter()
            session.run(None, inputs)
            seconds.append(time.perf_counter() - start)
        return seconds[FIRST:]

    return run


def in_cpp(model: Path, frames: int, place: Path) -> Side:
    """bare.cc, built with the headers and the library of the MPI target."""
    found, program = tools.find(), place / "bare"
    library = place / "libonnxruntime.so.1"  # the wheel's file does not bear the name by which programs load it
    library.symlink_to(found.library)
    source = Path(__file__).with_name("bare.cc")
    line = [
        found.compiler,
        "-O2",
        "-std=c++17",
        f"-I{found.include}",
        source,
        "-o",
        program,
        library,
        f"-Wl,-rpath,{place}",
    ]
    subprocess.run(line, check=True)

    def run() -> Sequence[float]:
        words = [program, model, str(THREADS), str(frames + FIRST)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return [float(line) for line in done.stdout.split()][FIRST:]

    return run


def in_session(artifact: Path, frames: int, stack: ExitStack) -> Side:
    """Frames given one after another to a session that stays open, as a user's program does."""
    inputs = _inputs(artifact)
    session = stack.enter_context(dicompiler.connect(artifact, RunOptions(in_flight=1)))

    def run() -> Sequence[float]:
        seconds = []
        for _ in range(frames + FIRST):
            start = time.perf_counter()
            session.infer(inputs)
            seconds.append(time.perf_counter() - start)
        return seconds[FIRST:]

    return run


def in_runs(artifact: Path, frames: int, _stack: ExitStack) -> Side:
    """The frames of an MPI program, one after another."""
    inputs = _inputs(artifact)

    def run() -> Sequence[float]:
        result = MpiTarget().run(artifact, [inputs] * (frames + FIRST), RunOptions(in_flight=1, keep=1))
        return result.frames_s[FIRST:]

    return run


def _inputs(artifact: Path) -> dict[str, Any]:
    values = graph_inputs(Model.load(artifact / "reference" / "model.onnx"))
    return {value.name: np.full(value.shape or (), 0.5, "float32") for value in values}


def one(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """One device of sockets and of mpi beside onnxruntime at its defaults, in Python and in C++."""
    figures = []
    for name in names or NETWORKS:
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
            place = Path(scratch)
            proto, samples = build(name, place)
            model = place / "model.onnx"
            prepare(Model.load(proto), calibrate=samples).model.save(model) if samples else onnx.save(proto, model)
            python, cpp = in_python(model, frames), in_cpp(model, frames, place)
            for target, base, start in (("sockets", python, in_session), ("mpi", cpp, in_runs)):
                dicompiler.compile(
                    proto,
                    platform="rpi4x1",
                    strategy="single",
                    target=f"{target}{{threads={THREADS}}}",
                    calibrate=samples,
                    output=place / target,
                )
                other = start(place / target, frames, stack)
                figures.append(alternately(f"{name}, {target}", base, other, rounds, ONE))
                click.echo(figures[-1])
    return figures


# -- parts: all segments of a plan, each alone on one core, beside the whole network

IN_PARTS = ("resnet18", "resnet50", "mobilenet_v2")
PARTS = 1.10
"""All parts together, without the operations that the plan does more than once: at most so many times the whole."""
PLATFORM, STRATEGY = "rpi4x4", "auto"


class Bound:
    """A model in onnxruntime at its best level, on one thread, with inputs and outputs bound once."""

    def __init__(self, proto: onnx.ModelProto, weights: Mapping[str, Weight], inputs: Mapping[str, Any]) -> None:
        options = ort.SessionOptions()
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
        sides = [Bound(model.proto, model.weights, inputs)]
        sides += [Bound(segment.model, program.weights, values) for segment in segments]
        found: list[list[float]] = [[] for _ in sides]
        for _ in range(rounds):
            for side, seconds in zip(sides, found, strict=True):
                side.seconds()
                seconds += [side.seconds() for _ in range(max(1, frames // 4))]
        again = sum(one.flops for one in made.metrics.devices) / sum(one.flops for one in made.single.devices)
        medians, shortest = (sum(map(of, found[1:])) / of(found[0]) / again for of in (statistics.median, min))
        where = f"{name}, {STRATEGY} on {PLATFORM}, {len(segments)} segments, {again:.3f} times the operations"
        figures.append(Figure(where, medians, shortest, PARTS))
        click.echo(figures[-1])
    return figures


FIGURES = {"one": one, "parts": parts}


@click.command(context_settings={"show_default": True})
@click.option("--figure", type=click.Choice(sorted(FIGURES)), required=True, help="What is measured.")
@click.option("--network", "names", multiple=True, help="Networks; default: the figure's own.")
@click.option("--frames", default=20, help="Frames of each round.")
@click.option("--rounds", default=6, help="How often each side is measured.")
def main(figure: str, names: Sequence[str], frames: int, rounds: int) -> None:
    """Measure what the runtimes cost."""
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    found = FIGURES[figure](names, frames, rounds)
    sys.exit(0 if all(min(one.median, one.shortest) <= one.goal for one in found) else 1)


if __name__ == "__main__":
    main()
