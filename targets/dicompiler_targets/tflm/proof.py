"""What `verify` holds the outputs of TFLite-micro against: onnxruntime's within a tolerance, and of a quantised network
what it gives uncut, in TFLite-micro to the bit and in LiteRT within one step of the output's scale.

onnxruntime multiplies what a layer sums up with a float and rounds once; TFLite's kernels multiply with an integer,
round, shift, and round again. Where a sum lies near the middle of two numbers they differ by one; the layers behind it
carry such differences on. LiteRT's reference kernels do as TFLite-micro's, its optimised ones do not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.model import Model
from dicompiler.program import Program
from dicompiler.target import RunResult
from dicompiler.verify import Check, Tolerance, compare
from dicompiler_targets.tflm.lowering import Lowered, lower
from dicompiler_targets.tflm.measure import RUNTIME, arenas
from dicompiler_targets.tflm.packages import load
from dicompiler_targets.tflm.quantised import DEQUANTISE, MOVING, QUANTISING
from dicompiler_targets.tflm.writer import IMAGE, PLAIN

FLOAT = 1e-4
"""Of max|reference|, in float32."""
STEPS = 16.0
"""Between a quantised network in TFLite-micro and in onnxruntime: a layer is off by one at most, and over the 53
convolutions of MobileNetV2 that comes to 8."""
LITERT = "ai_edge_litert.interpreter"


def tolerances(model: Model) -> dict[str, Tolerance]:
    """What each output may differ by from onnxruntime's; see Target.tolerances."""
    makers = {name: node for node in model.proto.graph.node for name in node.output}
    if not any(node.op_type in QUANTISING for node in model.proto.graph.node):
        return {value.name: Tolerance(FLOAT) for value in model.proto.graph.output if _type(value) == np.float32}
    return {value.name: _steps(model, makers, value) for value in model.proto.graph.output}


def _type(value: onnx.ValueInfoProto) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def _steps(model: Model, makers: Mapping[str, onnx.NodeProto], value: onnx.ValueInfoProto) -> Tolerance:
    """STEPS of the scale that the output was dequantised with; where it was computed in float32 since, as large a share
    of the range as they are of the 256 numbers."""
    if _type(value) == np.int8:
        return Tolerance(STEPS, 1.0)
    node = makers.get(value.name)
    while node is not None and node.op_type in MOVING:
        node = makers.get(node.input[0])
    if node is not None and node.op_type == DEQUANTISE:
        return Tolerance(STEPS, float(np.max(model.array(node.input[1]))))
    return Tolerance(STEPS / 256)


def proofs(
    model: Model, whole: Callable[[], Program], inputs: Mapping[str, NDArray[Any]], result: RunResult
) -> tuple[Check, ...]:
    """The checks of a quantised network; see Target.proofs."""
    if not any(node.op_type in QUANTISING for node in model.proto.graph.node):
        return ()
    program = whole()
    segments = program.devices[0].segments
    models = [lower(segment, program.weights) for segment in segments]
    sizes = arenas([one.data for one in models], [f"segment {segment.name!r}" for segment in segments])
    uncut = _outputs(models, inputs, [_Micro(one, size) for one, size in zip(models, sizes, strict=True)])
    checks = _against("uncut", uncut, result, {name: Tolerance(0) for name in uncut})
    try:
        interpreters = [_LiteRt(one) for one in models]
    except ImportError:
        return (*checks, Check("LiteRT", True, "not installed: pip install ai-edge-litert", applies=False))
    litert = _outputs(models, inputs, interpreters)
    one_step = {name: replace(about, times=1.0) for name, about in tolerances(model).items() if about.step is not None}
    return (*checks, *_against("LiteRT", litert, result, one_step))


def _against(
    name: str, reference: Mapping[str, NDArray[Any]], result: RunResult, allowed: Mapping[str, Tolerance]
) -> list[Check]:
    """A check for each output of each device; exact where nothing is said of it."""
    frames = result.delivered[:1] or ({"": result.outputs[0]},)
    return [
        compare(f"{output} on {device}, {name}", reference[output], value, allowed=allowed.get(output))
        for device, outputs in frames[0].items()
        for output, value in outputs.items()
    ]


class _Runtime(Protocol):
    """A model in a runtime."""

    def run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Its outputs in order."""


class _Micro:
    """A model in TFLite-micro."""

    def __init__(self, model: Lowered, arena: int) -> None:
        self.interpreter = load(RUNTIME).Interpreter.from_bytes(model.data, arena_size=arena)
        self.count = len(model.outputs)

    def run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Its outputs in order."""
        for index, value in enumerate(inputs):
            self.interpreter.set_input(value, index)
        self.interpreter.invoke()
        return [self.interpreter.get_output(index) for index in range(self.count)]


class _LiteRt:
    """A model in LiteRT's reference kernels. ImportError where that is not installed."""

    def __init__(self, model: Lowered) -> None:
        runtime = importlib.import_module(LITERT)
        kernels = runtime.OpResolverType.BUILTIN_REF
        self.interpreter = runtime.Interpreter(model_content=model.data, experimental_op_resolver_type=kernels)
        self.interpreter.allocate_tensors()

    def run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Its outputs in order."""
        for about, value in zip(self.interpreter.get_input_details(), inputs, strict=True):
            self.interpreter.set_tensor(about["index"], value)
        self.interpreter.invoke()
        return [self.interpreter.get_tensor(about["index"]) for about in self.interpreter.get_output_details()]


def _outputs(
    models: Sequence[Lowered], inputs: Mapping[str, NDArray[Any]], runtimes: Sequence[_Runtime]
) -> dict[str, NDArray[Any]]:
    """All that the models make of the inputs, by name and in ONNX's order of axes."""
    held = dict(inputs)
    for model, runtime in zip(models, runtimes, strict=True):
        given = [held[border.name] for border in model.inputs]
        made = runtime.run([value.transpose(IMAGE) if value.ndim == 4 else value for value in given])
        for border, value in zip(model.outputs, made, strict=True):
            held[border.name] = value.transpose(PLAIN) if len(border.shape) == 4 else value.reshape(border.shape)
    return held
