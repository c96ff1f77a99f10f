"""Compare dicompiler on one device with engines that run the whole network: onnxruntime, ncnn, MNN and OpenVINO.

All of them run in turn in one process, in float32, with the same number of threads. The table has the median time of a
frame in milliseconds, and the time of dicompiler with its faster engine divided by that of the fastest peer. dicompiler
converts the network for ncnn, and MNN's own converter does for MNN. Peers that are not installed are omitted:

    pip install ncnn MNN openvino
    python benchmarks/peers/engines.py --threads 1
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
import onnx

import dicompiler
from dicompiler import networks
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler_targets.engines.ncnn_converter import convert_to_ncnn
from dicompiler_targets.sockets.runtime.engine_ncnn import PRECISION_OPTIONS

NETWORKS = ("squeezenet", "mobilenet_v2", "alexnet", "resnet18", "resnet50", "yolov8n", "vgg16")
PAUSE_S = 0.05
"""Seconds of pause before an engine is measured, so that the threads of the previous engine no longer busy-wait."""
WARM_UP_FRAMES = 3
OWN_ENGINES = ("onnxruntime", "ncnn", "mnn")

Frame = Callable[[], object]
"""A function that computes one frame with an engine."""
Inputs = Mapping[str, np.ndarray]


def run_in_onnxruntime(model: Path, inputs: Inputs, threads: int) -> Frame:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    return lambda: session.run(None, dict(inputs))


def run_in_ncnn(model: Path, inputs: Inputs, threads: int) -> Frame:
    import ncnn

    prepared = prepare(Model.load(model)).model
    files = convert_to_ncnn(prepared.proto, prepared.weights)
    layers, weights = model.with_suffix(".param"), model.with_suffix(".bin")
    layers.write_bytes(files.network)
    weights.write_bytes(files.weights)
    network = ncnn.Net()
    network.opt.num_threads = threads
    for option in itertools.chain.from_iterable(PRECISION_OPTIONS.values()):
        setattr(network.opt, option, False)
    network.load_param(str(layers))
    network.load_model(str(weights))
    arrays = [inputs[value.name][0] for value in prepared.proto.graph.input]

    def run() -> object:
        extractor = network.create_extractor()
        for i, array in enumerate(arrays):
            extractor.input(f"in{i}", ncnn.Mat(array).clone())
        return [np.array(extractor.extract(f"out{i}")[1]) for i in range(len(prepared.proto.graph.output))]

    return run


def run_in_mnn(model: Path, inputs: Inputs, threads: int) -> Frame:
    import MNN

    converted = model.with_suffix(".mnn")
    arguments = ["-f", "ONNX", "--modelFile", str(model), "--MNNModel", str(converted), "--bizCode", "dicompiler"]
    # The module MNN.tools.mnnconvert would install a logging package, which replaces protobuf by an older version.
    code = "import sys, _tools; _tools.mnnconvert(sys.argv)"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    runtime = MNN.nn.create_runtime_manager(({"backend": "CPU", "numThread": threads, "precision": "high"},))
    proto = onnx.load(str(model), load_external_data=False)
    names = [[value.name for value in values] for values in (proto.graph.input, proto.graph.output)]
    module = MNN.nn.load_module_from_file(str(converted), *names, runtime_manager=runtime)
    arrays = [inputs[name] for name in names[0]]

    def run() -> object:
        variables = [MNN.expr.convert(MNN.expr.const(a, a.shape, MNN.expr.NCHW), MNN.expr.NC4HW4) for a in arrays]
        outputs = module.onForward(variables)
        return [np.array(MNN.expr.convert(value, MNN.expr.NCHW).read()) for value in outputs]

    return run


def run_in_openvino(model: Path, inputs: Inputs, threads: int) -> Frame:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    compiled = openvino.Core().compile_model(str(model), "CPU", settings)
    return lambda: compiled(dict(inputs))


PEERS: Mapping[str, tuple[str, Callable[[Path, Inputs, int], Frame]]] = {
    "onnxruntime": ("onnxruntime", run_in_onnxruntime),
    "ncnn": ("ncnn", run_in_ncnn),
    "MNN": ("MNN", run_in_mnn),
    "OpenVINO": ("openvino", run_in_openvino),
}
"""For each peer, its Python package, and the function that loads a model and returns a function for one frame."""


def run_in_dicompiler(model: Path, inputs: Inputs, threads: int, engine: str, stack: ExitStack) -> Frame:
    artifact = model.with_name(engine)
    target = f"sockets{{threads={threads}}}"
    dicompiler.compile(model, "rpi4x1", "single", target=target, engine=engine, output=artifact)
    session = stack.enter_context(dicompiler.connect(artifact, RunOptions(in_flight=1)))
    return lambda: session.infer(inputs)


def measure_in_turn(sides: Mapping[str, Frame], frames: int, rounds: int) -> dict[str, float]:
    """Measure the sides (engines, or dicompiler with an engine) in turn, and return their median seconds of a frame."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            time.sleep(PAUSE_S)
            for i in range(frames + WARM_UP_FRAMES):
                start = time.perf_counter()
                sides[name]()
                seconds[name] += [time.perf_counter() - start] * (i >= WARM_UP_FRAMES)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def measure_network(name: str, threads: int, frames: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of a frame of each installed peer and of dicompiler with each of its engines."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = Path(scratch, "model.onnx")
        proto = networks.build(name)
        onnx.save(proto, model)
        inputs = random_inputs(graph_inputs(Model.load(proto)))
        sides: dict[str, Frame] = {}
        for peer, (package, load) in PEERS.items():
            if find_spec(package) is None:
                continue
            try:
                sides[peer] = load(model, inputs, threads)
            except Exception as error:
                click.echo(f"{name}: {peer} cannot run it: {str(error).splitlines()[0]}", err=True)
        for engine in OWN_ENGINES:
            sides[f"dicompiler, {engine}"] = run_in_dicompiler(model, inputs, threads, engine, stack)
        return measure_in_turn(sides, frames, rounds)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--network", "names", multiple=True, default=NETWORKS, help="Networks.")
@click.option("--threads", default=1, help="Threads of each side.")
@click.option("--frames", default=10, help="Frames of each round.")
@click.option("--rounds", default=6, help="How often each side is measured.")
def main(names: Sequence[str], threads: int, frames: int, rounds: int) -> None:
    columns = [*PEERS, *(f"dicompiler, {engine}" for engine in OWN_ENGINES)]
    click.echo(f"| network | {' | '.join(columns)} | dicompiler / fastest peer |")
    click.echo("|---" * (len(columns) + 2) + "|")
    for name in names:
        medians = measure_network(name, threads, frames, rounds)
        own = min(seconds for side, seconds in medians.items() if side.startswith("dicompiler"))
        fastest = min(seconds for side, seconds in medians.items() if not side.startswith("dicompiler"))
        cells = [f"{1000 * medians[side]:.2f}" if side in medians else "–" for side in columns]
        click.echo(f"| {name} | {' | '.join(cells)} | {own / fastest:.3f} |")


if __name__ == "__main__":
    main()
