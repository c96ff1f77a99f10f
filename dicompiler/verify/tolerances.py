"""How far outputs may lie from onnxruntime's on the whole model: by the types that they were computed through, or in
steps of a quantised tensor.

In: a Model. Out: Tolerances, by the output's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from dicompiler.ir.onnx.model import Model

RELATIVE_TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-10}
"""Largest difference that is allowed, as a share of max|reference|; all other types must be equal.

They hold at every level of onnxruntime. At "all" convolutions run in another layout and sum in another order: over 15
networks and 180 splits the largest difference of the parts from the whole was 1.2e-6 in float32 and 1.8e-3 in float16,
at "all" as at "extended".
"""
MAX_QUANTIZATION_STEPS = 16.0
"""Steps of its scale that an output of a quantised network may differ by.

A sum near the middle of two numbers becomes one or the other: whether onnxruntime fuses a layer's nodes into one on
integers (at "all") depends on what stands around them, so on where the network is cut, and multiplies in another order;
float convolutions of other shapes round otherwise; TFLite's kernels round twice. A layer is off by one at most, layers
behind it carry that on. Over the 53 convolutions of MobileNetV2 that came to 5 in onnxruntime (parts beside
the whole, and the whole at "all" beside "extended") and to 8 in TFLite-micro; over yolov2's 23 to 4 at either level.
"""
_QUANTIZED_OPS = (
    "DequantizeLinear", "QuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger",
)  # fmt: skip
_DATA_MOVEMENT_OPS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Concat", "Identity")
_FLOAT_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
_TOLERANCES_BY_TYPE: Mapping[int, float] = {
    int(kind): RELATIVE_TOLERANCES[str(onnx.helper.tensor_dtype_to_np_dtype(kind))] for kind in _FLOAT_TYPES
}
"""`TOLERANCE` by the numbers that onnx has for types."""
_INT8_TYPES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


@dataclass(frozen=True)
class Tolerance:
    """The largest difference from a reference that an output may have: so many times max|reference|, or, where `step`
    is given, so many times the step between two numbers of a quantised tensor, in the output's own values."""

    limit: float
    step: float | None = None


def output_tolerances(model: Model) -> dict[str, Tolerance]:
    """The tolerance of each output for which its own type's does not do: `in_steps`, else `through_types`."""
    return tolerances_by_coarsest_type(model) | quantized_tolerances(model)


def tolerances_by_coarsest_type(model: Model) -> dict[str, Tolerance]:
    """Outputs that were computed through a coarser type than their own, by name: what is rounded to float16 on its way
    differs by float16's steps, however wide it is in the end. What is given in a type, or constant, is not rounded."""
    tensors, rounded = model.tensors(), dict[str, float]()

    def share(name: str) -> float:
        return _TOLERANCES_BY_TYPE.get(tensors[name].dtype, 0.0) if name in tensors else 0.0

    for node in model.proto.graph.node:
        before = max((rounded.get(name, 0.0) for name in node.input), default=0.0)
        computed = any(name and not (name in tensors and tensors[name].is_constant) for name in node.input)
        rounded |= {name: max(before, share(name) * computed) for name in node.output}
    outputs = [value.name for value in model.proto.graph.output if share(value.name)]
    return {name: Tolerance(rounded[name]) for name in outputs if rounded.get(name, 0.0) > share(name)}


def quantized_tolerances(model: Model) -> dict[str, Tolerance]:
    """Of a quantised network the tolerance of each output of floats or 8-bit integers: so many steps of the scale that
    it was dequantised with; where it was computed in floats since, as large a share of the range as they are of the 256
    numbers. {} of any other network."""
    nodes = model.proto.graph.node
    if not any(node.op_type in _QUANTIZED_OPS for node in nodes):
        return {}
    makers = {name: node for node in nodes for name in node.output}
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.proto.graph.output}
    floats = {name: _dequantized_tolerance(model, makers, name) for name, kind in kinds.items() if kind in _FLOAT_TYPES}
    return floats | {
        name: Tolerance(MAX_QUANTIZATION_STEPS, 1.0) for name, kind in kinds.items() if kind in _INT8_TYPES
    }


def _dequantized_tolerance(model: Model, makers: Mapping[str, onnx.NodeProto], name: str) -> Tolerance:
    node = makers.get(name)
    while node is not None and node.op_type in _DATA_MOVEMENT_OPS:
        node = makers.get(node.input[0])
    if node is not None and node.op_type == "DequantizeLinear" and node.input[1] in model.initializers():
        return Tolerance(MAX_QUANTIZATION_STEPS, float(np.max(model.array(node.input[1]))))
    return Tolerance(MAX_QUANTIZATION_STEPS / 256)
