"""The references with which `dicompiler verify` compares the outputs of TFLite-micro.

All outputs must equal those of onnxruntime within a tolerance. Outputs of a quantized network must also be bit-equal to
those of the unsplit network in TFLite-micro, and equal those of LiteRT within one step of the output's scale.

onnxruntime rounds a scaled sum once, TFLite's kernels twice, so that results can differ by one step. LiteRT's reference
kernels compute as TFLite-micro does; LiteRT's optimized kernels do not.
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
"""Largest difference of a float32 output from its reference, divided by max|reference|."""
SPARE_ARENA_BYTES = 1 << 20
"""Bytes that `MicroRuntime` adds to its arena for TFLite-micro's records of tensors and operators."""
LITERT_MODULE = "ai_edge_litert.interpreter"


def make_tolerances(model: Model) -> dict[str, Tolerance]:
    outputs = model.proto.graph.output
    floats = [value.name for value in outputs if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    return quantized_tolerances(model) or {name: Tolerance(FLOAT_TOLERANCE) for name in floats}


def check_quantized(
    model: Model, whole: Callable[[], Program], inputs: Mapping[str, NDArray[Any]], result: RunResult
) -> tuple[Check, ...]:
    """Compare the outputs of a quantized network with the unsplit network in TFLite-micro and in LiteRT.

    The result is () for a network that is not quantized.

    Args:
        model: The network.
        whole: Makes the program of the unsplit network.
        inputs: The inputs of the first frame.
        result: The outputs to check.
    """
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
        name: replace(tolerance, limit=1.0)
        for name, tolerance in make_tolerances(model).items()
        if tolerance.step is not None
    }
    return (*checks, *_compare_outputs("LiteRT", litert, result, one_step))


def _compare_outputs(
    name: str, reference: Mapping[str, Any], result: RunResult, allowed: Mapping[str, Tolerance] | None
) -> list[Check]:
    """Return a check for each output of each device, which compares it with `reference`.

    Args:
        name: Description of the reference in the names of the checks.
        reference: The reference outputs by name.
        result: The outputs to check.
        allowed: Tolerances by output name; None if outputs must be bit-equal.
    """
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
    """A TFLite model that is loaded in a runtime. Inputs and outputs have ONNX's order of axes."""

    def __init__(self, model: LoweredModel) -> None:
        self.model = model

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        values = [inputs[tensor.name] for tensor in self.model.inputs]
        outputs = self._run([value.transpose(NCHW_TO_NHWC) if value.ndim == 4 else value for value in values])
        plain = [value.transpose(NHWC_TO_NCHW) if value.ndim == 4 else value for value in outputs]
        return dict(zip((tensor.name for tensor in self.model.outputs), plain, strict=True))

    @abstractmethod
    def _run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the model and return its outputs. Inputs and outputs are in the model's order and have channels last."""


class MicroRuntime(ModelRuntime):
    """A model in TFLite-micro, with more memory than it needs.

    Raises:
        RunError: TFLite-micro rejects the model.
    """

    def __init__(self, model: LoweredModel) -> None:
        super().__init__(model)
        size = 2 * model.activation_bytes + len(model.data) + SPARE_ARENA_BYTES
        try:
            self.interpreter = import_optional(RUNTIME_MODULE).Interpreter.from_bytes(model.data, arena_size=size)
        except (RuntimeError, ValueError) as error:
            raise RunError(f"TFLite-micro cannot run the uncut network: {error}") from None

    def _run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        for index, value in enumerate(inputs):
            self.interpreter.set_input(value, index)
        self.interpreter.invoke()
        return [self.interpreter.get_output(index) for index in range(len(self.model.outputs))]


class LiteRtRuntime(ModelRuntime):
    """A model in LiteRT's reference kernels. Raises ImportError if LiteRT is not installed."""

    def __init__(self, model: LoweredModel) -> None:
        super().__init__(model)
        runtime = importlib.import_module(LITERT_MODULE)
        kernels = runtime.OpResolverType.BUILTIN_REF
        self.interpreter = runtime.Interpreter(model_content=model.data, experimental_op_resolver_type=kernels)
        self.interpreter.allocate_tensors()

    def _run(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        for details, value in zip(self.interpreter.get_input_details(), inputs, strict=True):
            self.interpreter.set_tensor(details["index"], value)
        self.interpreter.invoke()
        return [self.interpreter.get_tensor(details["index"]) for details in self.interpreter.get_output_details()]
