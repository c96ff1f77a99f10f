"""Compare target `mpi` with AutoDiCE: the same mapping of layers to ranks, and dicompiler's own plan.

AutoDiCE's own scripts split the network and generate the C++ program, from a checkout that you name. The program is
built with the ncnn library of target `mpi`. It is changed in these places:

- It fills the image with a constant instead of reading a file, so that OpenCV is not needed.
- It measures as many frames as dicompiler.
- ncnn computes in float32, as in dicompiler. Two options that today's ncnn does not have are omitted.
- To measure the latency, the last rank sends a message to the first one after each frame.

All sides get the same network, with folded batch normalisation. Each rank has one thread: the mapping gives AutoDiCE
one core for each rank. With the same mapping, dicompiler uses ncnn too, and computes at most one frame on each rank at
the same time, as AutoDiCE does. For its own plan, it profiles this host, and chooses the split and the engine.

    python benchmarks/peers/autodice.py --checkout AutoDiCE --converter AutoDiCE/tools/onnx/onnx2ncnn

The latency is the time of a frame if one frame is in flight. A run reports its median. The period is the time between
two frames of a stream. A run reports its mean. The table has the medians of several runs, in milliseconds.
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
from itertools import pairwise
from pathlib import Path

import click
import onnx
import onnxruntime

import dicompiler
from dicompiler import networks
from dicompiler.ir.onnx.model import Model
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler_targets.mpi import MpiTarget
from dicompiler_targets.mpi.fetch_ncnn import get_ncnn_directory
from dicompiler_targets.mpi.toolchain import find_toolchain

NETWORKS = ("alexnet", "vgg16", "resnet18", "resnet50")
SIDES = ("AutoDiCE", "dicompiler, same mapping", "dicompiler, own plan")
"""The compared programs."""
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
rate = "50 GFLOP/s"
"""
END_OF_WARM_UP = "    }\n\n    double time_min"
END_OF_LOOP = "        double end = ncnn::get_current_time();"


@dataclass(frozen=True)
class Times:
    """Times of a run.

    Attributes:
        latency_s: Seconds of a frame, with one frame in flight.
        period_s: Seconds between two frames of a stream.
    """

    latency_s: float
    period_s: float


MeasureTimes = Callable[[int], Times]
"""A function that runs one of SIDES with a number of frames, and returns its times."""


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


def make_mapping(proto: onnx.ModelProto, ranks: int) -> dict[str, list[str]]:
    """Return AutoDiCE's mapping of layers to ranks: cuts at single tensors, with nearly equal numbers of FLOPs.

    The keys name the cores of one host.
    """
    nodes = list(proto.graph.node)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.value_info}
    weights = {tensor.name: math.prod(tensor.dims) / tensor.dims[0] for tensor in proto.graph.initializer}
    flops = [math.prod(shapes.get(n.output[0], [0])) * max(weights.get(i, 0) for i in n.input) for n in nodes]
    cuts = []
    for i in range(1, len(nodes)):
        computed = {node.output[0] for node in nodes[:i]}
        if len({name for node in nodes[i:] for name in node.input if name in computed}) == 1:
            cuts.append(i)
    shares = [rank / ranks * sum(flops) for rank in range(1, ranks)]
    chosen = [0, *(min(cuts, key=lambda i: abs(sum(flops[:i]) - share)) for share in shares), len(nodes)]
    names = [node.name for node in nodes]
    return {f"host_cpu{rank}": names[start:stop] for rank, (start, stop) in enumerate(pairwise(chosen))}


class AutodiceProgram:
    """The C++ program that AutoDiCE generates for a mapping, built once to measure the latency and once for streams."""

    def __init__(self, checkout: Path, converter: Path, mapping: Mapping[str, Sequence[str]], scratch: Path) -> None:
        """Generate and build the programs in a directory that contains model.onnx."""
        self._ranks, self._models = len(mapping), scratch / "models"
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
        source.write_text(adapt_source(text, mode, self._ranks))
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
        placement = ["--oversubscribe"] if self._ranks > len(os.sched_getaffinity(0)) else ["--bind-to", "core"]
        command = [str(find_toolchain().mpirun), "-n", str(self._ranks), *placement, f"./{mode}", "image"]
        if os.geteuid() == 0:
            command.insert(1, "--allow-run-as-root")
        environment = os.environ | {"FRAMES": str(frames)}
        done = subprocess.run(command, cwd=self._models, env=environment, check=True, capture_output=True, text=True)
        found = re.findall(r"^loop (\d+) (\S+)$", done.stdout, re.MULTILINE)
        return [[float(ms) / 1000 for rank, ms in found if int(rank) == i] for i in range(self._ranks)]


def adapt_source(text: str, mode: str, ranks: int) -> str:
    """Return AutoDiCE's benchmark program with the changes that the module's docstring lists."""
    text = re.sub(r".*(opencv2/|use_shader_pack8|use_image_storage).*\n", "", text)
    text = re.sub(r"static int read_input\(.*?\n}\n", IMAGE_READER, text, flags=re.DOTALL)
    text = re.sub(FP16_OPTIONS, r"\1false", text)
    text = text.replace("g_loop_count = 20;", 'g_loop_count = atoi(getenv("FRAMES"));')
    text = text.replace("time_avg += time;", 'time_avg += time; printf("loop %d %f\\n", irank, time);')
    if mode == "latency":
        last, tag = ranks - 1, 9999
        answer = (
            f"{{ char done = 0; if (irank == {last}) MPI_Send(&done, 1, MPI_CHAR, 0, {tag}, MPI_COMM_WORLD); "
            f"if (irank == 0) MPI_Recv(&done, 1, MPI_CHAR, {last}, {tag}, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }}\n"
        )
        text = text.replace(END_OF_LOOP, answer + END_OF_LOOP).replace(END_OF_WARM_UP, answer + END_OF_WARM_UP)
    return text


def run_artifact(artifact: Path, in_flight: int, frames: int) -> Times:
    """Measure an artifact of target `mpi`: frames one by one, and a stream with `in_flight` frames (0: the default).

    The period excludes the first frames of a stream: it is the difference between the times of two streams of different
    lengths, divided by the difference of their lengths.
    """
    inputs = random_inputs(graph_inputs(Model.load(artifact / "reference" / "model.onnx")))

    def run(count: int, limit: int) -> RunResult:
        return MpiTarget().run(artifact, [inputs] * count, RunOptions(in_flight=limit, kept_frames=1))

    count = frames + WARM_UP_FRAMES
    latency_s = statistics.median(run(count, 1).frames_s[WARM_UP_FRAMES:])
    return Times(latency_s, (run(count, in_flight).total_s - run(WARM_UP_FRAMES, in_flight).total_s) / frames)


def compile_sides(scratch: Path, ranks: int) -> tuple[Path, Path]:
    """Compile model.onnx for AutoDiCE's mapping, and with dicompiler's own plan; return the artifacts."""
    model, platform, profile = (scratch / name for name in ("model.onnx", "platform.toml", "profile.json"))
    platform.write_text(HOST + "".join(CORE.replace("NAME", f"host_cpu{rank}") for rank in range(ranks)))
    tiles = ",".join(map(str, range(1, ranks + 1)))
    options = ["--threads", "1", "--tiles", tiles, "--target", "mpi", "--device", "host_cpu*", "-o", str(profile)]
    subprocess.run(["dicompiler", "profile", str(model), *options], check=True, capture_output=True)
    same, own = scratch / "same", scratch / "own"
    compile_model = partial(dicompiler.compile, model, platform, target="mpi{threads=1}")
    compile_model(strategy=f"manual{{mapping={scratch / 'mapping.json'}}}", engine="ncnn", output=same)
    # The search for a plan uses the measured times of the profile instead of the rate in CORE.
    compile_model(strategy="auto", engine="auto", cost=f"profile{{file={profile}}}", output=own)
    return same, own


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--checkout", type=click.Path(exists=True, path_type=Path), required=True, help="Checkout of AutoDiCE.")
@click.option("--converter", type=click.Path(exists=True, path_type=Path), required=True, help="Its onnx2ncnn, built.")
@click.option("--network", "names", multiple=True, default=NETWORKS, help="Networks.")
@click.option("--ranks", default=2, help="Number of ranks.")
@click.option("--frames", default=20, help="Frames of each run.")
@click.option("--rounds", default=5, help="How often each side is measured.")
def main(checkout: Path, converter: Path, names: Sequence[str], ranks: int, frames: int, rounds: int) -> None:
    logging.getLogger("dicompiler").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        prepare = partial(prepare_sides, checkout.resolve(), converter.resolve(), Path(place), ranks)
        sides = {name: prepare(name) for name in names}
        click.echo(f"| network | time | {' | '.join(SIDES)} | ratios to AutoDiCE |")
        click.echo("|---" * (len(SIDES) + 3) + "|")
        for name, programs in sides.items():
            print_times(name, measure_sides(programs, frames, rounds))


def prepare_sides(checkout: Path, converter: Path, place: Path, ranks: int, name: str) -> Sequence[MeasureTimes]:
    """Return, for each of SIDES, the function that measures a network."""
    scratch = place / name
    scratch.mkdir()
    mapping = make_mapping(write_model(name, scratch / "model.onnx"), ranks)
    program = AutodiceProgram(checkout, converter, mapping, scratch)
    same, own = compile_sides(scratch, ranks)
    return [program.run, partial(run_artifact, same, ranks), partial(run_artifact, own, 0)]


def measure_sides(programs: Sequence[MeasureTimes], frames: int, rounds: int) -> list[Times]:
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
