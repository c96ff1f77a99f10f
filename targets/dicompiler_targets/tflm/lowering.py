"""Lowering of a segment (an ONNX submodel of a device) to a TFLite model.

    Segment ──hoist_segment_copies──► HoistedSegment ──lower_segment──► LoweredModel (the .tflite file)

`hoist_segment_copies` removes the Slices and Concats at the inputs and outputs of the segment. The device's program
copies their bytes itself, without TFLite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from onnx import TensorProto

from dicompiler.plugin_api import Segment, Shape, TensorSpec
from dicompiler.plugin_api.onnx import Weight
from dicompiler_targets import artifact_files
from dicompiler_targets.artifact_files import CopiedTensor, HoistedSegment, StridedCopy
from dicompiler_targets.tflm import (
    average_pool,
    axis_ops,
    conv_pool,
    data_movement,
    elementwise,
    integer_ops,
    matmul,
    resize,
)
from dicompiler_targets.tflm.conv_pool import widen_windows
from dicompiler_targets.tflm.fusion import fuse_operators
from dicompiler_targets.tflm.graph import SegmentGraph, SegmentNode, check_ranks, make_refusal, read_segment
from dicompiler_targets.tflm.writer import NCHW_TO_NHWC, TfliteWriter, get_natural_form, permute

MAX_COPY_LOOPS = 3
"""Maximum number of nested loops of a strided copy.

Tensors have up to four axes. The last axis is contiguous and needs no loop.
"""
HOISTABLE_TYPES = (TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT32, TensorProto.BOOL)
"""Element types of tensors that the device's program can slice and concatenate: the types of TFLite-micro."""
_ANY_TYPE_LOWERINGS: Mapping[str, Callable[[TfliteWriter, SegmentNode], None]] = {
    **dict.fromkeys(("Identity", "Dropout"), elementwise.lower_alias),
    "Cast": elementwise.lower_cast,
    "Concat": data_movement.lower_concat,
    "Slice": data_movement.lower_slice,
    "Split": data_movement.lower_split,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), data_movement.lower_reshape),
    "Transpose": data_movement.lower_transpose,
    "Pad": data_movement.lower_pad,
    "DepthToSpace": partial(data_movement.lower_depth_space, "DEPTH_TO_SPACE", "DepthToSpace"),
    "SpaceToDepth": partial(data_movement.lower_depth_space, "SPACE_TO_DEPTH", "SpaceToDepth"),
    integer_ops.DEQUANTIZE_OP: partial(elementwise.lower_unary, "DEQUANTIZE", "Dequantize"),
    **dict.fromkeys((integer_ops.QUANTIZE_OP, "Requantise"), partial(elementwise.lower_unary, "QUANTIZE", "Quantize")),
}
"""Lowerings of ONNX operators with inputs of any type. All other operators need float32 or quantized integers."""
_UNARY_CODES = {
    **{"Exp": ("EXP", "Exp"), "Log": ("LOG", ""), "Sqrt": ("SQRT", ""), "Abs": ("ABS", "Abs"), "Neg": ("NEG", "Neg")},
    **{"Floor": ("FLOOR", ""), "Ceil": ("CEIL", ""), "Sin": ("SIN", ""), "Cos": ("COS", "")},
    **{"Sigmoid": ("LOGISTIC", ""), "Tanh": ("TANH", ""), "HardSwish": ("HARD_SWISH", "")},
}
_BINARY_CODES = {
    "Add": "ADD",
    "Sum": "ADD",
    "Sub": "SUB",
    "Mul": "MUL",
    "Div": "DIV",
    "Max": "MAXIMUM",
    "Min": "MINIMUM",
}
LOWERINGS: Mapping[str, Callable[[TfliteWriter, SegmentNode], None]] = {
    **_ANY_TYPE_LOWERINGS,
    "Conv": conv_pool.lower_conv,
    "ConvTranspose": conv_pool.lower_conv_transpose,
    "MaxPool": conv_pool.lower_max_pool,
    "GlobalMaxPool": conv_pool.lower_global_max_pool,
    "AveragePool": average_pool.lower_average_pool,
    "GlobalAveragePool": average_pool.lower_global_average_pool,
    "Gemm": matmul.lower_gemm,
    "MatMul": matmul.lower_matmul,
    **{op: partial(elementwise.lower_variadic, code) for op, code in _BINARY_CODES.items()},
    **{op: partial(elementwise.lower_unary, *codes) for op, codes in _UNARY_CODES.items()},
    **dict.fromkeys(("Clip", "Relu"), elementwise.lower_clip),
    "LeakyRelu": elementwise.lower_leaky_relu,
    "PRelu": elementwise.lower_prelu,
    "Elu": elementwise.lower_elu,
    "Reciprocal": elementwise.lower_reciprocal,
    "Pow": elementwise.lower_power,
    "HardSigmoid": elementwise.lower_hard_sigmoid,
    "BatchNormalization": elementwise.lower_batch_normalization,
    "Softmax": partial(axis_ops.lower_softmax, "SOFTMAX", "Softmax"),
    "LogSoftmax": partial(axis_ops.lower_softmax, "LOG_SOFTMAX", "LogSoftmax"),
    "ReduceMean": partial(axis_ops.lower_reduction, "MEAN"),
    "ReduceSum": partial(axis_ops.lower_reduction, "SUM"),
    "ReduceMax": partial(axis_ops.lower_reduction, "REDUCE_MAX"),
    "ReduceMin": partial(axis_ops.lower_reduction, "REDUCE_MIN"),
    "LRN": axis_ops.lower_lrn,
    **dict.fromkeys(("Resize", "Upsample"), resize.lower_resize),
}
"""Functions that lower the supported ONNX operators, by operator. Each adds TFLite operations for a node."""


@dataclass(frozen=True)
class WireTensor:
    """An input or output of a model, in the form in which devices send it.

    Attributes:
        name: Name of the tensor.
        dtype: NumPy's name of the element type.
        shape: The shape; channels are last if there are four axes.
    """

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class LoweredModel:
    """The TFLite model of a segment.

    Attributes:
        data: Content of the .tflite file.
        operators: TFLite's names of the operators that the model uses, sorted.
        activation_bytes: Maximum bytes of the tensors that exist at the same time, without constants.
        inputs: Inputs of the model.
        outputs: Outputs of the model.
    """

    data: bytes = field(repr=False)
    operators: tuple[str, ...]
    activation_bytes: int
    inputs: tuple[WireTensor, ...]
    outputs: tuple[WireTensor, ...]


def to_wire_shape(shape: Shape) -> Shape:
    """Return the shape in which models and transfers have a tensor: (N, H, W, C) for four axes, else as in ONNX."""
    return permute(shape, NCHW_TO_NHWC) if get_natural_form(shape) == "image" else shape


def hoist_segment_copies(segment: Segment) -> HoistedSegment:
    """Return the segment without the Slices and Concats at its inputs and outputs, and the copies that replace them."""
    return artifact_files.hoist_copies(segment, HOISTABLE_TYPES, MAX_COPY_LOOPS + 1)


def make_wire_copies(
    target: str | int, copied: CopiedTensor, values: Mapping[str, TensorSpec]
) -> tuple[StridedCopy, ...]:
    """Return the copies that fill the tensor `target` with regions of other tensors.

    In memory, tensors with four axes have channels last.

    Args:
        target: The tensor to fill: its name, or its index among the model's inputs or outputs.
        copied: The regions.
        values: Type and shape of the other tensors, by name.
    """
    return artifact_files.make_copies(target, copied, values, NCHW_TO_NHWC if len(copied.shape) == 4 else None)


def lower_segment(segment: Segment, weights: Mapping[str, Weight]) -> LoweredModel:
    """Return the TFLite model of a segment (an ONNX submodel of a device).

    Raises:
        DicompilerError: TFLite-micro cannot express the segment. The error names the node.
    """
    graph = widen_windows(integer_ops.convert_to_integer(fuse_operators(read_segment(segment, weights))))
    check_ranks(graph)
    writer = TfliteWriter(graph)
    for node in graph.nodes:
        if node.op not in LOWERINGS:
            raise make_refusal(node, "TFLite-micro has no operator for it", "use target sockets for such a network")
        _check_types(graph, node)
        LOWERINGS[node.op](writer, node)
    data, codes, activations = writer.finish()
    return LoweredModel(
        data, codes, activations, _make_wire_tensors(graph, graph.inputs), _make_wire_tensors(graph, graph.outputs)
    )


def _check_types(graph: SegmentGraph, node: SegmentNode) -> None:
    for name in (node.output, node.inputs[0]):
        dtype = graph.dtypes.get(name, "float32")
        if node.op not in _ANY_TYPE_LOWERINGS and dtype != "float32" and name not in graph.quantizations:
            raise make_refusal(
                node, f"tensor {name!r} is of type {dtype}", "compute in float32, or quantise the network to int8"
            )


def _make_wire_tensors(graph: SegmentGraph, names: tuple[str, ...]) -> tuple[WireTensor, ...]:
    return tuple(WireTensor(name, graph.dtypes[name], to_wire_shape(graph.shapes[name])) for name in names)
