"""For tests of the tflm target: networks made for it, artifacts compiled by it, and models run in LiteRT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.driver.compiler import lower, run_strategy
from dicompiler.driver.prepare import make_problem, prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import uniform_platform
from dicompiler.networks.builder import NetworkBuilder
from dicompiler.plugin.registry import registry
from dicompiler.target.integrity import write_integrity
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
    """What MobileNet is made of: widening, depthwise with stride, narrowing, a residual, ReLU6 throughout."""
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
    """The program of a network on as many nameless devices."""
    base = replace(prepare(Model.load(network)), platform=uniform_platform(devices))
    plan = run_strategy(make_problem(base), registry().make("strategies", strategy))
    return lower(replace(base, plan=plan))


def int8(source: Model, samples: int = 8) -> Model:
    """The network quantised with seeded samples."""
    model = normalise(source)
    values = graph_inputs(model)
    return quantise(model, [random_inputs(values, seed) for seed in range(samples)])


def play(
    compilation: PipelineState, inputs: Mapping[str, NDArray[Any]], make: type[ModelRuntime] = MicroRuntime
) -> dict[str, NDArray[Any]]:
    """What the segments of a compilation with a plan give in a runtime, in this process. DicompilerError where a
    transfer does not carry the bytes predicted."""
    program = lower(compilation).program
    assert program is not None
    return (
        ProgramExecutor(program, make_runner=lambda segment: make(lower_segment(segment, program.weights)))
        .run(inputs)
        .outputs
    )


def emitted(compilation: PipelineState, directory: Path, **options: Any) -> Path:
    """The artifact of a compilation."""
    directory.mkdir(exist_ok=True)
    TflmTarget(**options).emit(compilation, directory)
    write_integrity(directory)
    return directory


def checked(compilation: PipelineState, model: Model, directory: Path, tolerance: float) -> RunResult:
    """Emits and runs a compilation for two frames: outputs as onnxruntime's within `tolerance` of the range, and all
    bytes as predicted."""
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
    """The largest difference as a share of max|reference|."""
    wide = reference.astype(np.float64)
    return float(np.abs(wide - got.astype(np.float64)).max() / max(np.abs(wide).max(), 1e-30))


def litert(data: bytes, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """What LiteRT makes of a model's inputs."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=data)
    interpreter.allocate_tensors()
    for about, value in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(about["index"], value)
    interpreter.invoke()
    return [interpreter.get_tensor(about["index"]) for about in interpreter.get_output_details()]


def micro(data: bytes, inputs: Sequence[NDArray[Any]], arena: int) -> list[NDArray[Any]]:
    """What TFLite-micro makes of them."""
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
    """Seeded inputs of a model."""
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
