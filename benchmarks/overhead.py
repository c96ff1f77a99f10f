"""What the runtimes cost beside the engine and the wire: each figure a ratio of two sides that are measured in turn.

In: which figure, which networks, how often. Out: a line for each on stdout; the exit code is 1 where a goal was missed.
Run it as README.md says, on a host that does nothing else.
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import onnx
import onnxruntime as ort

import dicompiler
from dicompiler import networks
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.plugin.registry import registry
from dicompiler.target.records import RunOptions
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler_targets.mpi import tools

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


def on_one_device(artifact: Path, target: str, frames: int) -> Side:
    """The frames of an artifact, one after another."""
    model = Model.load(artifact / "reference" / "model.onnx")
    inputs = {v.name: np.full(v.shape or (), 0.5, "float32") for v in graph_inputs(model)}
    runner = registry().make("targets", target)

    def run() -> Sequence[float]:
        result = runner.run(artifact, [inputs] * (frames + FIRST), RunOptions(in_flight=1, keep=1))
        return result.frames_s[FIRST:]

    return run


def one(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """One device of sockets and of mpi beside onnxruntime at its defaults, in Python and in C++."""
    figures = []
    for name in names or NETWORKS:
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch)
            proto, samples = build(name, place)
            model = place / "model.onnx"
            prepare(Model.load(proto), calibrate=samples).model.save(model) if samples else onnx.save(proto, model)
            for target, base in (("sockets", in_python(model, frames)), ("mpi", in_cpp(model, frames, place))):
                dicompiler.compile(
                    proto,
                    platform="rpi4x1",
                    strategy="single",
                    target=f"{target}{{threads={THREADS}}}",
                    calibrate=samples,
                    output=place / target,
                )
                other = on_one_device(place / target, target, frames)
                figures.append(alternately(f"{name}, {target}", base, other, rounds, ONE))
                click.echo(figures[-1])
    return figures


FIGURES = {"one": one}


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
