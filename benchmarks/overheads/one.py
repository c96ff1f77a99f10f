"""The figure `one` of overhead.py: one device of the targets `sockets` and `mpi`, compared with onnxruntime."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np
import onnx
import onnxruntime as ort

import dicompiler
from dicompiler import networks
from dicompiler.cli.file_io import write_npz
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler_targets.mpi import MpiTarget, toolchain
from overheads.measuring import WARM_UP_FRAMES, Figure, Side, alternately, inputs_of, timed

THREADS = 2
ONE = 1.03
"""Limit of the time of a frame on one device of dicompiler, divided by the time in onnxruntime."""
NETWORKS = ("resnet50", "mobilenet_v2", "vgg16", "densenet121", "mobilenet_v2 int8")


def build(name: str, place: Path) -> tuple[onnx.ModelProto, Path | None]:
    """Return the model of a network and, for an int8 network, the path of samples of its inputs (None for others).

    An int8 network has inputs of 160 × 160 pixels, and is quantised later with the samples.
    """
    if not name.endswith(" int8"):
        return networks.build(name), None
    proto = networks.build(name.removesuffix(" int8"), size=160)
    values = graph_inputs(Model.load(proto))
    drawn = [random_inputs(values, seed) for seed in range(4)]
    write_npz(place / "samples.npz", {value.name: np.stack([one[value.name] for one in drawn]) for value in values})
    return proto, place / "samples.npz"


def in_python(model: Path, frames: int) -> Side:
    """Return a function that measures frames in onnxruntime's Python API, with THREADS threads.

    It calls `InferenceSession(path).run`, as users do.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    inputs = {one.name: np.full(one.shape, 0.5, "float32") for one in session.get_inputs()}
    return timed(lambda: session.run(None, inputs), frames)


def in_cpp(model: Path, frames: int, place: Path) -> Side:
    """Return a function that measures frames in onnxruntime's C++ API.

    It runs bare.cc, built with the headers and the library of the target `mpi`.
    """
    found, program = toolchain.find_toolchain(), place / "bare"
    # Programs load the library by this name. The wheel's file has another name, so a link is needed.
    library = place / "libonnxruntime.so.1"
    library.symlink_to(found.library)
    source = Path(__file__).with_name("bare.cc")
    line: list[str | Path] = [
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
        words: list[str | Path] = [program, model, str(THREADS), str(frames + WARM_UP_FRAMES)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return [float(line) for line in done.stdout.split()][WARM_UP_FRAMES:]

    return run


def in_session(artifact: Path, frames: int, stack: ExitStack) -> Side:
    """Return a function that measures frames, one after another, in a session of an artifact.

    The session stays open, as in a user's program.
    """
    inputs = inputs_of(artifact)
    session = stack.enter_context(dicompiler.connect(artifact, RunOptions(in_flight=1)))
    return timed(lambda: session.infer(inputs), frames)


def in_runs(artifact: Path, frames: int, _stack: ExitStack) -> Side:
    """Return a function that measures frames, one after another, in the MPI program of an artifact."""
    inputs, options = inputs_of(artifact), RunOptions(in_flight=1, kept_frames=1)
    return lambda: MpiTarget().run(artifact, [inputs] * (frames + WARM_UP_FRAMES), options).frames_s[WARM_UP_FRAMES:]


def one(names: Sequence[str], frames: int, rounds: int) -> list[Figure]:
    """Compare one device of sockets and of mpi with onnxruntime at its defaults, in Python and in C++."""
    figures = []
    for name in names or NETWORKS:
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
            place = Path(scratch)
            proto, samples = build(name, place)
            model = place / "model.onnx"
            prepare(Model.load(proto), quantize_samples=samples).model.save(model) if samples else onnx.save(
                proto, model
            )
            python, cpp = in_python(model, frames), in_cpp(model, frames, place)
            for target, base, start in (("sockets", python, in_session), ("mpi", cpp, in_runs)):
                dicompiler.compile(
                    proto,
                    platform="rpi4x1",
                    strategy="single",
                    target=f"{target}{{threads={THREADS}}}",
                    quantize_samples=samples,
                    output=place / target,
                )
                other = start(place / target, frames, stack)
                figures.append(alternately(f"{name}, {target}", base, other, rounds, ONE))
                click.echo(figures[-1])
    return figures
