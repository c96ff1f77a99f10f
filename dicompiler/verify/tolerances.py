"""Allowed differences between outputs and onnxruntime's results on the whole model.

A tolerance depends on the types of the tensors from which an output was computed. For a quantized tensor, it is a
number of quantization steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from dicompiler.ir.onnx.model import Model

RELATIVE_TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-10}
"""Largest allowed difference as a share of max|reference|, by type. Values of all other types must be equal.

They apply to every optimization level of onnxruntime. The largest difference measured over 15 networks and 180 splits
was 1.2e-6 in float32 and 1.8e-3 in float16.
"""
MAX_QUANTIZATION_STEPS = 16.0
"""Quantization steps by which an output of a quantized network may differ.

A sum near the middle between two quantized values may be rounded to either of them, and later layers propagate this
difference. The largest difference measured in MobileNetV2 (53 convolutions) was 5 steps in onnxruntime, and 8 in TFLite
Micro.
"""
_QUANTIZED_OPS = "DequantizeLinear QuantizeLinear QLinearConv QLinearMatMul ConvInteger MatMulInteger".split()
INT8_ACTIVATIONS = 4
"""Value of MatMulNBits' attribute `accuracy_level` with which the first operand is quantized to 8 bits."""
_DATA_MOVEMENT_OPS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Concat", "Identity")
_FLOAT_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
_TOLERANCES_BY_TYPE: Mapping[int, float] = {
    int(kind): RELATIVE_TOLERANCES[str(onnx.helper.tensor_dtype_to_np_dtype(kind))] for kind in _FLOAT_TYPES
}
"""RELATIVE_TOLERANCES, by element type as a number of onnx.TensorProto.DataType."""
_INT8_TYPES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed difference between an output and its reference.

    Attributes:
        limit: The largest difference, as a share of max|reference|, or in steps if `step` is given.
        step: Difference between two adjacent values of a quantized tensor, in units of the output.
    """

    limit: float
    step: float | None = None


def output_tolerances(model: Model) -> dict[str, Tolerance]:
    """Return the tolerances of outputs for which the tolerance of their element type is too small, by output name.

    Examples are float32 outputs that were computed from float16 values, and outputs of quantized networks.
    """
    return tolerances_by_coarsest_type(model) | quantized_tolerances(model)


def tolerances_by_coarsest_type(model: Model) -> dict[str, Tolerance]:
    """Return tolerances for outputs that were computed through a coarser type than their own, by output name.

    If an intermediate value is rounded to float16, a float32 output can differ by the steps of float16.
    """
    tensors, coarsest = model.tensors(), dict[str, float]()

    def type_tolerance(name: str) -> float:
        return _TOLERANCES_BY_TYPE.get(tensors[name].dtype, 0.0) if name in tensors else 0.0

    for node in model.proto.graph.node:
        input_tolerance = max((coarsest.get(name, 0.0) for name in node.input), default=0.0)
        has_computed_input = any(name and not (name in tensors and tensors[name].is_constant) for name in node.input)
        coarsest |= {name: max(input_tolerance, type_tolerance(name) * has_computed_input) for name in node.output}
    outputs = [value.name for value in model.proto.graph.output if type_tolerance(value.name)]
    return {name: Tolerance(coarsest[name]) for name in outputs if coarsest.get(name, 0.0) > type_tolerance(name)}


def quantized_tolerances(model: Model) -> dict[str, Tolerance]:
    """Return the tolerances of the outputs of a quantized network, by output name.

    The allowed difference depends on the output:
    - result of a DequantizeLinear: MAX_QUANTIZATION_STEPS times the scale of the DequantizeLinear;
    - any other float output: MAX_QUANTIZATION_STEPS / 256 of its largest magnitude;
    - 8-bit integers: MAX_QUANTIZATION_STEPS.
    A network is quantized if it has quantized operators, or a MatMulNBits that quantizes its activations.

    Args:
        model: The network.

    Returns:
        Tolerances by output name; empty if the network is not quantized.
    """
    nodes = model.proto.graph.node
    if not any(node.op_type in _QUANTIZED_OPS or _has_int8_activations(node) for node in nodes):
        return {}
    makers = {name: node for node in nodes for name in node.output}
    tolerances = {}
    for value in model.proto.graph.output:
        if value.type.tensor_type.elem_type in _FLOAT_TYPES:
            tolerances[value.name] = _dequantized_tolerance(model, makers, value.name)
        elif value.type.tensor_type.elem_type in _INT8_TYPES:
            tolerances[value.name] = Tolerance(MAX_QUANTIZATION_STEPS, 1.0)
    return tolerances


def _has_int8_activations(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "accuracy_level" and attribute.i == INT8_ACTIVATIONS for attribute in node.attribute)


def _dequantized_tolerance(model: Model, makers: Mapping[str, onnx.NodeProto], name: str) -> Tolerance:
    node = makers.get(name)
    while node is not None and node.op_type in _DATA_MOVEMENT_OPS:
        node = makers.get(node.input[0])
    if node is not None and node.op_type == "DequantizeLinear" and node.input[1] in model.initializers():
        return Tolerance(MAX_QUANTIZATION_STEPS, float(np.max(model.array(node.input[1]))))
    return Tolerance(MAX_QUANTIZATION_STEPS / 256)
