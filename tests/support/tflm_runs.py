"""Networks and artifacts for tests of target tflm, and models run in LiteRT and TFLite Micro."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.driver.compiler import run_strategy
from dicompiler.driver.prepare import prepare
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import uniform_platform
from dicompiler.networks.builder import NetworkBuilder
from dicompiler.partition.lowering import lower
from dicompiler.plugin.registry import registry
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_passes.normalise import normalise
from dicompiler_passes.quantise import quantise
from dicompiler_targets.tflm.lowering import lower_segment
from dicompiler_targets.tflm.reference_checks import MicroRuntime, ModelRuntime
from dicompiler_targets.tflm.target import TflmTarget

CODES = Path(__file__).parents[1] / "fixtures" / "tflm"
"""Declarations of TFLite-micro's interfaces, and a stand-in for it."""


def block() -> onnx.ModelProto:
    """Return a network of MobileNet's blocks: expansion, depthwise convolution, projection, shortcut, and ReLU6."""
    net = NetworkBuilder("block", (1, 3, 24, 24))
    x = "input"
    for name, channels, stride in (("stem", 8, 2), ("one", 8, 1), ("two", 16, 2)):
        start = x
        x = net.batch_norm(net.conv(x, f"{name}.wide", 24, 1, bias=False), f"{name}.bn1")
        x = net.clip(x, f"{name}.relu1", 0, 6)
        x = net.batch_norm(net.conv(x, f"{name}.deep", 24, 3, stride, group=24, bias=False), f"{name}.bn2")
        x = net.clip(x, f"{name}.relu2", 0, 6)
        x = net.batch_norm(net.conv(x, f"{name}.narrow", channels, 1, bias=False), f"{name}.bn3")
        x = net.add(start, x, f"{name}.add") if net.shapes[start] == net.shapes[x] else x
    x = net.flatten(net.global_average(x, "average"), "flatten")
    return net.to_model(net.gemm(x, "classifier", 10), 0)


def compiled(network: onnx.ModelProto | Model, strategy: str = "single", devices: int = 1) -> PipelineState:
    """Return the program of a network under a strategy's plan, on this number of equal devices."""
    base = replace(prepare(Model.load(network)), platform=uniform_platform(devices))
    plan = run_strategy(make_problem(base), registry().make("strategies", strategy))
    return lower(replace(base, plan=plan))


def int8(source: Model, samples: int = 8) -> Model:
    """Return the network quantised with this number of random samples."""
    model = normalise(source)
    values = graph_inputs(model)
    return quantise(model, [random_inputs(values, seed) for seed in range(samples)])


def play(
    compilation: PipelineState, inputs: Mapping[str, NDArray[Any]], make: type[ModelRuntime] = MicroRuntime
) -> dict[str, NDArray[Any]]:
    """Return the outputs of a program whose segments are run in this process, by runtimes of the class `make`.

    Raises:
        DicompilerError: A transfer has another number of bytes than predicted.
    """
    program = lower(compilation).program
    assert program is not None
    return (
        ProgramExecutor(program, make_runner=lambda segment: make(lower_segment(segment, program.weights)))
        .run(inputs)
        .outputs
    )


def emitted(compilation: PipelineState, directory: Path, **options: Any) -> Path:
    """Write the artifact of a program, and return its directory."""
    directory.mkdir(exist_ok=True)
    TflmTarget(**options).emit(compilation, directory)
    write_digests_and_checksum(directory)
    return directory


def checked(compilation: PipelineState, model: Model, directory: Path, tolerance: float) -> RunResult:
    """Run a program for two frames, compare outputs with onnxruntime's and sent bytes with the prediction.

    `tolerance` is the largest allowed difference as a share of the largest absolute output.
    """
    assert compilation.program is not None
    emitted(compilation, directory)
    frames = [random_inputs(compilation.program.inputs, seed) for seed in (0, 1)]
    result = TflmTarget().run(directory, frames, RunOptions(timeout_s=60))
    for inputs, delivered in zip(frames, result.outputs_by_device, strict=True):
        reference = run_model(model, inputs)
        for outputs in delivered.values():
            for name, value in outputs.items():
                assert value.dtype == reference[name].dtype and value.shape == reference[name].shape
                assert difference(reference[name], value) <= tolerance, name
    sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
    assert sent == {transfer.index: 2 * transfer.value.nbytes for transfer in compilation.program.transfers}
    return result


def difference(reference: NDArray[Any], got: NDArray[Any]) -> float:
    """Return the largest difference as a share of the largest absolute value in `reference`."""
    wide = reference.astype(np.float64)
    return float(np.abs(wide - got.astype(np.float64)).max() / max(np.abs(wide).max(), 1e-30))


def litert(data: bytes, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the outputs of a TFLite model in LiteRT."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=data)
    interpreter.allocate_tensors()
    for about, value in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(about["index"], value)
    interpreter.invoke()
    return [interpreter.get_tensor(about["index"]) for about in interpreter.get_output_details()]


def micro(data: bytes, inputs: Sequence[NDArray[Any]], arena: int) -> list[NDArray[Any]]:
    """Return the outputs of a TFLite model in TFLite Micro, with an arena of this number of bytes."""
    from tflite_micro.python.tflite_micro import runtime

    interpreter = runtime.Interpreter.from_bytes(data, arena_size=arena)
    for index, value in enumerate(inputs):
        interpreter.set_input(value, index)
    interpreter.invoke()
    return [interpreter.get_output(index) for index in range(_outputs(data))]


def _outputs(data: bytes) -> int:
    import tflite

    return int(tflite.Model.GetRootAs(data, 0).Subgraphs(0).OutputsLength())


def numbers(data: bytes, seed: int = 0) -> list[NDArray[Any]]:
    """Return random inputs of a TFLite model."""
    import tflite
    from tflite_micro.python.tflite_micro import runtime

    rng = np.random.default_rng(seed)
    count = int(tflite.Model.GetRootAs(data, 0).Subgraphs(0).InputsLength())
    interpreter = runtime.Interpreter.from_bytes(data, arena_size=1 << 24)
    made: list[NDArray[Any]] = []
    for about in (interpreter.get_input_details(index) for index in range(count)):
        if about["dtype"] == np.int8:
            made.append(rng.integers(-128, 128, about["shape"]).astype(np.int8))
        else:
            made.append(rng.standard_normal(about["shape"]).astype(np.float32))
    return made
