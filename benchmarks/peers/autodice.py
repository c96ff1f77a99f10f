"""Compare target `mpi` with AutoDiCE on two ranks: the same mapping of layers to ranks, and dicompiler's own plan.

AutoDiCE's own scripts split the network and generate the C++ program, from a checkout that you name. The program is
built with the ncnn library of target `mpi`. It is changed in these places:

- It computes a constant image, without OpenCV, and as many frames as dicompiler.
- ncnn computes in float32, as in dicompiler. Two options that today's ncnn does not have are omitted.
- To measure the latency, the last rank sends a message to the first one after each frame.

Both sides get the same network, with folded batch normalisation. Each rank has one thread.

    python benchmarks/peers/autodice.py --checkout AutoDiCE --converter AutoDiCE/tools/onnx/onnx2ncnn

The table has medians in milliseconds: the latency with one frame in flight, and the period, which is the time between
two frames of a stream.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click
import onnx
import onnxruntime

import dicompiler
from dicompiler import networks
from dicompiler.ir.onnx.model import Model
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler_targets.mpi import MpiTarget
from dicompiler_targets.mpi.fetch_ncnn import get_ncnn_directory
from dicompiler_targets.mpi.toolchain import find_toolchain

NETWORKS = ("alexnet", "vgg16", "resnet18", "resnet50")
KEYS = ("host_cpu0", "host_cpu1")
"""Keys of AutoDiCE's mapping: the first and the second core of one host."""
SIDES = ("AutoDiCE", "dicompiler, same mapping", "dicompiler, own plan")
WARM_UP_FRAMES = 4
GENERATE = """
import sys, types
sys.modules["psutil"] = types.ModuleType("psutil")  # imported by AutoDiCE, but not used
from interface import EngineCode, Interface
import json
made = Interface(model="model.onnx", mappings=json.load(open("mapping.json")), platforms=["host"])
EngineCode(CppName="./models/multinode", Platforms=made.platforms, NodesList=made.nodes, Inputs=made.inputs,
           ComputingNodes=made.computingnodes, ValueInfos=made.value_map, Outputs=made.outputs, Benchmark=True)
"""
"""Code that calls AutoDiCE's scripts: it splits model.onnx by mapping.json, and writes the C++ program."""
IMAGE_READER = """static int read_input(const char*, ncnn::Mat& in)
{
    in = ncnn::Mat(224, 224, 3);
    in.fill(0.5f);
    return 0;
}
"""
"""Function instead of AutoDiCE's, which reads an image with OpenCV before the first frame."""
FP16_OPTIONS = r"(opt\.use_fp16_\w+ = )true"
HOST = """
format = "dicompiler.platform/2"
[network]
kind = "switch"
bandwidth = "10 Gbit/s"
[[host]]
name = "host"
memory = "16 GB"
"""
CORE = """
[[device]]
name = "NAME"
host = "host"
rate = "36 GFLOP/s"
memory_bandwidth = "10 GB/s"
engine_rates = { ncnn = { Conv3x3 = "66 GFLOP/s", Conv1x1 = "36 GFLOP/s", Conv = "40 GFLOP/s" } }
"""
PLATFORM = HOST + "".join(CORE.replace("NAME", key) for key in KEYS)
"""The platform of dicompiler's own plan: two cores of an AMD EPYC with AVX2. Only the ratios of its rates matter."""
END_OF_WARM_UP = "    }\n\n    double time_min"
END_OF_LOOP = "        double end = ncnn::get_current_time();"


@dataclass(frozen=True)
class Times:
    """Seconds: with one frame in flight, and between two frames of a stream."""

    latency_s: float
    period_s: float


Program = Callable[[int], Times]
"""A function that measures this number of frames."""


def write_model(name: str, path: Path) -> onnx.ModelProto:
    """Write a network as AutoDiCE needs it, and return it.

    Tensors have names of C++ variables, initializers are inputs too, and onnxruntime has folded batch normalisation.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(networks.build(name).SerializeToString(), options, ["CPUExecutionProvider"])
    proto = onnx.load(path)
    for node in proto.graph.node:
        node.name = re.sub(r"\W", "_", node.output[0])
        for names in (node.input, node.output):
            names[:] = [re.sub(r"\W", "_", tensor) for tensor in names]
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        value.name = re.sub(r"\W", "_", value.name)
    del proto.graph.value_info[:]
    for tensor in proto.graph.initializer:
        proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    proto = onnx.shape_inference.infer_shapes(proto)
    onnx.save(proto, path)
    return proto


def make_mapping(proto: onnx.ModelProto) -> dict[str, list[str]]:
    """Return AutoDiCE's mapping of layers to two ranks: the cut at one tensor with the most equal numbers of FLOPs."""
    nodes = list(proto.graph.node)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.value_info}
    weights = {tensor.name: math.prod(tensor.dims) / tensor.dims[0] for tensor in proto.graph.initializer}
    flops = [math.prod(shapes.get(n.output[0], [0])) * max(weights.get(i, 0) for i in n.input) for n in nodes]
    differences = {}
    for i in range(1, len(nodes)):
        computed = {node.output[0] for node in nodes[:i]}
        if len({name for node in nodes[i:] for name in node.input if name in computed}) == 1:
            differences[i] = abs(sum(flops[:i]) - sum(flops[i:]))
    cut = min(differences, key=lambda i: differences[i])
    names = [node.name for node in nodes]
    return {KEYS[0]: names[:cut], KEYS[1]: names[cut:]}


class AutodiceProgram:
    """The C++ program that AutoDiCE generates for a mapping, built once to measure the latency and once for streams."""

    def __init__(self, checkout: Path, converter: Path, mapping: Mapping[str, Sequence[str]], scratch: Path) -> None:
        """Generate and build the programs in a directory that contains model.onnx."""
        self._models = scratch / "models"
        self._models.mkdir()
        (scratch / "mapping.json").write_text(json.dumps(mapping))
        environment = os.environ | {"PYTHONPATH": str(checkout / "tools" / "distributed" / "vertical")}
        subprocess.run([sys.executable, "-c", GENERATE], cwd=scratch, env=environment, check=True, capture_output=True)
        for key in mapping:
            files = [self._models / f"{key}{suffix}" for suffix in (".onnx", ".param", ".bin")]
            subprocess.run([converter, *files], check=True, capture_output=True)
        (self._models / "synset_words.txt").write_text("0 a class\n" * 1000)
        for mode in ("latency", "stream"):
            self._build(mode, scratch)

    def _build(self, mode: str, scratch: Path) -> None:
        ncnn, tools = get_ncnn_directory(version("ncnn")), find_toolchain()
        source = scratch / f"{mode}.cpp"
        text = (self._models / "multinode_bench.cpp").read_text().replace("\0", "\\0")
        source.write_text(adapt_source(text, mode))
        includes = [f"-I{path}" for path in (ncnn / "include", ncnn / "include" / "ncnn")]
        headers = [word for name in ("cfloat", "cstring", "iostream") for word in ("-include", name)]
        command: list[str | Path] = [
            tools.mpicxx,
            "-O3",
            "-fopenmp",
            "-w",
            *includes,
            *headers,
            source,
            ncnn / "lib" / "libncnn.a",
        ]
        subprocess.run([*command, "-o", self._models / mode], check=True)

    def run(self, frames: int) -> Times:
        latency = statistics.median(self._loop_seconds("latency", frames)[0])
        return Times(latency, statistics.fmean(self._loop_seconds("stream", frames)[-1]))

    def _loop_seconds(self, mode: str, frames: int) -> list[list[float]]:
        """Return the seconds of each frame's loop on each rank."""
        command = [str(find_toolchain().mpirun), "-n", str(len(KEYS)), "--bind-to", "core", f"./{mode}", "image"]
        if os.geteuid() == 0:
            command.insert(1, "--allow-run-as-root")
        environment = os.environ | {"FRAMES": str(frames)}
        done = subprocess.run(command, cwd=self._models, env=environment, check=True, capture_output=True, text=True)
        found = re.findall(r"^loop (\d+) (\S+)$", done.stdout, re.MULTILINE)
        return [[float(ms) / 1000 for rank, ms in found if int(rank) == i] for i in range(len(KEYS))]


def adapt_source(text: str, mode: str) -> str:
    """Return AutoDiCE's benchmark program with the changes that the module's docstring lists."""
    text = re.sub(r".*(opencv2/|use_shader_pack8|use_image_storage).*\n", "", text)
    text = re.sub(r"static int read_input\(.*?\n}\n", IMAGE_READER, text, flags=re.DOTALL)
    text = re.sub(FP16_OPTIONS, r"\1false", text)
    text = text.replace("g_loop_count = 20;", 'g_loop_count = atoi(getenv("FRAMES"));')
    text = text.replace("time_avg += time;", 'time_avg += time; printf("loop %d %f\\n", irank, time);')
    if mode == "latency":
        last, tag = len(KEYS) - 1, 9999
        answer = (
            f"{{ char done = 0; if (irank == {last}) MPI_Send(&done, 1, MPI_CHAR, 0, {tag}, MPI_COMM_WORLD); "
            f"if (irank == 0) MPI_Recv(&done, 1, MPI_CHAR, {last}, {tag}, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }}\n"
        )
        text = text.replace(END_OF_LOOP, answer + END_OF_LOOP).replace(END_OF_WARM_UP, answer + END_OF_WARM_UP)
    return text


def run_artifact(artifact: Path, frames: int) -> Times:
    """Measure an artifact of target `mpi`: frames one by one, and a stream."""
    inputs = random_inputs(graph_inputs(Model.load(artifact / "reference" / "model.onnx")))
    given = [inputs] * (frames + WARM_UP_FRAMES)
    single = MpiTarget().run(artifact, given, RunOptions(in_flight=1, pin=True, kept_frames=1))
    stream = MpiTarget().run(artifact, given, RunOptions(in_flight=0, pin=True, kept_frames=1))
    latency = statistics.median(single.frames_s[WARM_UP_FRAMES:])
    return Times(latency, (stream.total_s - stream.frames_s[0]) / (len(given) - 1))


def compile_sides(scratch: Path) -> list[Path]:
    """Compile model.onnx for AutoDiCE's mapping, and with dicompiler's own plan; return the artifacts."""
    (scratch / "platform.toml").write_text(PLATFORM)
    artifacts = [scratch / "same", scratch / "own"]
    strategies = (f"manual{{mapping={scratch / 'mapping.json'}}}", "auto")
    for artifact, strategy in zip(artifacts, strategies, strict=True):
        target = "mpi{threads=1}"
        dicompiler.compile(
            scratch / "model.onnx", scratch / "platform.toml", strategy, engine="ncnn", target=target, output=artifact
        )
    return artifacts


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--checkout", type=click.Path(exists=True, path_type=Path), required=True, help="Checkout of AutoDiCE.")
@click.option("--converter", type=click.Path(exists=True, path_type=Path), required=True, help="Its onnx2ncnn, built.")
@click.option("--network", "names", multiple=True, default=NETWORKS, help="Networks.")
@click.option("--frames", default=20, help="Frames of each run.")
@click.option("--rounds", default=5, help="How often each side is measured.")
def main(checkout: Path, converter: Path, names: Sequence[str], frames: int, rounds: int) -> None:
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        sides = {name: prepare_sides(name, checkout.resolve(), converter.resolve(), Path(place)) for name in names}
        click.echo(f"| network | time | {' | '.join(SIDES)} | ratios to AutoDiCE |")
        click.echo("|---" * (len(SIDES) + 3) + "|")
        for name, programs in sides.items():
            print_times(name, measure_sides(programs, frames, rounds))


def prepare_sides(name: str, checkout: Path, converter: Path, place: Path) -> Sequence[Program]:
    """Return, for each of SIDES, the function that measures a network."""
    scratch = place / name
    scratch.mkdir()
    mapping = make_mapping(write_model(name, scratch / "model.onnx"))
    program = AutodiceProgram(checkout, converter, mapping, scratch)
    return [program.run, *(partial(run_artifact, path) for path in compile_sides(scratch))]


def measure_sides(programs: Sequence[Program], frames: int, rounds: int) -> list[Times]:
    """Measure all programs in turn, and return the medians of each."""
    turns = [[program(frames) for program in programs] for _ in range(rounds)]
    sides = zip(*turns, strict=True)
    return [
        Times(statistics.median(t.latency_s for t in side), statistics.median(t.period_s for t in side))
        for side in map(list, sides)
    ]


def print_times(name: str, sides: Sequence[Times]) -> None:
    for kind in ("latency_s", "period_s"):
        seconds = [getattr(side, kind) for side in sides]
        ratios = ", ".join(f"{one / seconds[0]:.2f}" for one in seconds[1:])
        cells = " | ".join(f"{1000 * one:.1f}" for one in seconds)
        click.echo(f"| {name} | {kind.removesuffix('_s')} | {cells} | {ratios} |")


if __name__ == "__main__":
    main()
