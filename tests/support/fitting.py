"""Quantised networks and boards of any size, for tests and benchmarks of networks that hardly fit in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx

from dicompiler.driver.compiler import compile
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import Platform, platform_from_toml
from dicompiler.networks.builder import NetworkBuilder
from dicompiler.plugin.pass_manager import PassManager, make_pipeline
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.verify.comparison import random_inputs
from dicompiler_targets.tflm.target import TflmTarget


def relative(size: int = 64) -> onnx.ModelProto:
    """Return a small network like MobileNetV2: the first tensors are the largest, and some layers have stride 2."""
    net = NetworkBuilder("relative", (1, 3, size, size))
    x = net.clip(net.conv("input", "stem", 8, 3, 2, 1), "stem.relu", 0, 6)
    for name, wide, channels, stride in (("one", 8, 8, 1), ("two", 48, 8, 2), ("three", 48, 8, 1), ("four", 48, 16, 2)):
        start = x
        x = net.clip(net.conv(x, f"{name}.expand", wide, 1), f"{name}.relu1", 0, 6)
        x = net.clip(net.conv(x, f"{name}.deep", wide, 3, stride, 1, group=wide), f"{name}.relu2", 0, 6)
        x = net.conv(x, f"{name}.project", channels, 1)
        x = net.add(start, x, f"{name}.add") if net.shapes[start] == net.shapes[x] else x
    x = net.flatten(net.global_average(x, "average"), "flatten")
    return net.to_model(net.gemm(x, "classifier", 10), 0)


def quantised(network: onnx.ModelProto) -> Model:
    """Return the network in int8. Its input is also int8, as from a camera, and needs a quarter of the memory."""
    shape = [d.dim_value for d in network.graph.input[0].type.tensor_type.shape.dim]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "samples.npz"
        np.savez(path, input=np.random.default_rng(0).standard_normal((4, *shape)).astype(np.float32))
        passes = make_pipeline(f"normalise,quantise{{samples={path} inputs=int8}}")
        return PassManager(passes).run(PipelineState(model=Model.load(network))).model


def boards(count: int, ram: str, flash: str = "2 MiB") -> Platform:
    """Return boards m1, m2, … with this RAM and flash."""
    text = 'network = {kind = "switch", bandwidth = "0.8 Mbit/s"}\n'
    for number in range(1, count + 1):
        text += f'[[host]]\nname = "m{number}"\nmemory = "{ram}"\nflash = "{flash}"\n'
        text += f'[[device]]\nname = "m{number}"\nrate = "12.8 MFLOP/s"\n'
    return platform_from_toml(text, f"boards{count}.toml")


def fitted(model: Model, platform: Platform, directory: Path, strategy: str = "fit") -> PipelineState:
    """Compile the model for the boards with target tflm, and write the artifact to `directory`."""
    return compile(model, platform, strategy, target="tflm", output=directory)


def run(directory: Path, model: Model) -> RunResult:
    """Run an artifact in TFLite Micro for two frames with random inputs of `model`."""
    from dicompiler.verify.comparison import graph_inputs

    frames = [random_inputs(graph_inputs(model), seed) for seed in (0, 1)]
    return TflmTarget().run(directory, frames, RunOptions())


def same_bits(model: Model, directory: Path, whole: Path) -> bool:
    """Return True if the artifacts in `directory` and in `whole`, that of the uncut network, have equal outputs."""
    pairs = zip(run(directory, model).outputs, run(whole, model).outputs, strict=True)
    return all(np.array_equal(own[name], theirs[name]) for own, theirs in pairs for name in theirs)
