"""What `verify` holds the outputs of TFLite-micro against: onnxruntime's within a tolerance, and of a quantised network
what it gives uncut, in TFLite-micro to the bit and in LiteRT within one step of the output's scale.

onnxruntime multiplies what a layer sums up with a float and rounds once; TFLite's kernels multiply with an integer,
round, shift, and round again. Where a sum lies near the middle of two numbers they differ by one; the layers behind it
carry such differences on. LiteRT's reference kernels do as TFLite-micro's, its optimised ones do not.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import Model, Program, RunError, RunResult
from dicompiler.plugin_api.onnx import Check, ProgramExecutor, Tolerance, compare_value, quantized_tolerances
from dicompiler_targets.tflm.arena_size import RUNTIME_MODULE
from dicompiler_targets.tflm.flatbuffer import import_optional
from dicompiler_targets.tflm.integer_ops import QUANTIZATION_OPERATORS
from dicompiler_targets.tflm.lowering import LoweredModel, lower_segment
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC, NHWC_TO_NCHW

FLOAT_TOLERANCE = 1e-4
"""Of max|reference|, in float32."""
SPARE_ARENA_BYTES = 1 << 20
"""Bytes for TFLite-micro's records of tensors and operators."""
LITERT_MODULE = "ai_edge_litert.interpreter"


def make_tolerances(model: Model) -> dict[str, Tolerance]:
    """What each output may differ by from onnxruntime's; see Target.tolerances."""
    outputs = model.proto.graph.output
    floats = [value.name for value in outputs if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    return quantized_tolerances(model) or {name: Tolerance(FLOAT_TOLERANCE) for name in floats}


def check_quantized(
    model: Model, whole: Callable[[], Program], inputs: Mapping[str, NDArray[Any]], result: RunResult
) -> tuple[Check, ...]:
    """The checks of a quantised network; see Target.proofs."""
    if not any(node.op_type in QUANTIZATION_OPERATORS for node in model.proto.graph.node):
        return ()
    program = whole()
    uncut = (
        ProgramExecutor(program, make_runner=lambda segment: MicroRuntime(lower_segment(segment, program.weights)))
        .run(inputs)
        .outputs
    )
    checks = _compare_outputs("uncut", uncut, result, None)
    try:
        importlib.import_module(LITERT_MODULE)
    except ImportError:
        return (*checks, Check("LiteRT", True, "not installed: pip install ai-edge-litert", applies=False))
    litert = (
        ProgramExecutor(program, make_runner=lambda segment: LiteRtRuntime(lower_segment(segment, program.weights)))
        .run(inputs)
        .outputs
    )
    one_step = {
        name: replace(about, limit=1.0) for name, about in make_tolerances(model).items() if about.step is not None
    }
    return (*checks, *_compare_outputs("LiteRT", litert, result, one_step))


def _compare_outputs(
    name: str, reference: Mapping[str, Any], result: RunResult, allowed: Mapping[str, Tolerance] | None
) -> list[Check]:
    """A check for each output of each device; bit-equal where nothing is allowed."""
    frames = result.outputs_by_device[:1] or ({"": result.outputs[0]},)
    return [
        compare_value(
            f"{output} on {device}, {name}",
            reference[output],
            value,
            exact=allowed is None,
            tolerance=(allowed or {}).get(output),
        )
        for device, outputs in frames[0].items()
        for output, value in outputs.items()
    ]


class ModelRuntime(ABC):
    """A segment's model in a runtime, with its inputs and outputs as ONNX has them."""

    def __init__(self, model: LoweredModel) -> None:
        self.model = model

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Its outputs by name."""
        given = [inputs[border.name] for border in self.model.inputs]
        outputs = self._run([value.transpose(NCHW_TO_NHWC) if value.ndim == 4 else value for value in given])
        plain = [value.transpose(NHWC_TO_NCHW) if value.ndim == 4 else value for value in outputs]
        return dict(zip((border.name for border in self.model.outputs), plain, strict=True))

    @abstractmethod
    def _run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Its outputs in order, channels last as the inputs."""


class MicroRuntime(ModelRuntime):
    """In TFLite-micro, with more than enough memory. RunError where that refuses it."""

    def __init__(self, model: LoweredModel) -> None:
        super().__init__(model)
        size = 2 * model.activation_bytes + len(model.data) + SPARE_ARENA_BYTES
        try:
            self.interpreter = import_optional(RUNTIME_MODULE).Interpreter.from_bytes(model.data, arena_size=size)
        except (RuntimeError, ValueError) as error:
            raise RunError(f"TFLite-micro cannot run the network uncut: {error}") from None

    def _run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        for index, value in enumerate(inputs):
            self.interpreter.set_input(value, index)
        self.interpreter.invoke()
        return [self.interpreter.get_output(index) for index in range(len(self.model.outputs))]


class LiteRtRuntime(ModelRuntime):
    """In LiteRT's reference kernels. ImportError where that is not installed."""

    def __init__(self, model: LoweredModel) -> None:
        super().__init__(model)
        runtime = importlib.import_module(LITERT_MODULE)
        kernels = runtime.OpResolverType.BUILTIN_REF
        self.interpreter = runtime.Interpreter(model_content=model.data, experimental_op_resolver_type=kernels)
        self.interpreter.allocate_tensors()

    def _run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        for about, value in zip(self.interpreter.get_input_details(), inputs, strict=True):
            self.interpreter.set_tensor(about["index"], value)
        self.interpreter.invoke()
        return [self.interpreter.get_tensor(about["index"]) for about in self.interpreter.get_output_details()]
