"""One segment of a program becomes one TFLite model.

Segment + weights → Lowered: the file's bytes, the operators that it uses, and its inputs and outputs as on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dicompiler.plugin_api import Segment, Shape, Weight
from dicompiler_targets.tflm import across, averages, dense, elementwise, quantised, resize, shaping, windows
from dicompiler_targets.tflm.folding import fold
from dicompiler_targets.tflm.graph import Graph, Node, check_ranks, read, refusal
from dicompiler_targets.tflm.widening import widened
from dicompiler_targets.tflm.writer import IMAGE, Writer, natural, permuted

_MOVES: Mapping[str, Callable[[Writer, Node], None]] = {
    **dict.fromkeys(("Identity", "Dropout"), elementwise.alias),
    "Cast": elementwise.cast,
    "Concat": shaping.concat,
    "Slice": shaping.slice_,
    "Split": shaping.split,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), shaping.reshape),
    "Transpose": shaping.transpose,
    "Pad": shaping.pad,
    "DepthToSpace": partial(shaping.depth_space, "DEPTH_TO_SPACE", "DepthToSpace"),
    "SpaceToDepth": partial(shaping.depth_space, "SPACE_TO_DEPTH", "SpaceToDepth"),
    quantised.DEQUANTISE: partial(elementwise.unary, "DEQUANTIZE", "Dequantize"),
    **dict.fromkeys((quantised.QUANTISE, "Requantise"), partial(elementwise.unary, "QUANTIZE", "Quantize")),
}
"""Operators that take numbers of any type; all others compute in float32, or on quantised numbers."""
_UNARY = {
    **{"Exp": ("EXP", "Exp"), "Log": ("LOG", ""), "Sqrt": ("SQRT", ""), "Abs": ("ABS", "Abs"), "Neg": ("NEG", "Neg")},
    **{"Floor": ("FLOOR", ""), "Ceil": ("CEIL", ""), "Sin": ("SIN", ""), "Cos": ("COS", "")},
    **{"Sigmoid": ("LOGISTIC", ""), "Tanh": ("TANH", ""), "HardSwish": ("HARD_SWISH", "")},
}
_BINARY = {"Add": "ADD", "Sum": "ADD", "Sub": "SUB", "Mul": "MUL", "Div": "DIV", "Max": "MAXIMUM", "Min": "MINIMUM"}
LOWERINGS: Mapping[str, Callable[[Writer, Node], None]] = {
    **_MOVES,
    "Conv": windows.conv,
    "ConvTranspose": windows.conv_transpose,
    "MaxPool": windows.max_pool,
    "GlobalMaxPool": windows.global_max_pool,
    "AveragePool": averages.average_pool,
    "GlobalAveragePool": averages.global_average_pool,
    "Gemm": dense.gemm,
    "MatMul": dense.matmul,
    **{op: partial(elementwise.combine, code) for op, code in _BINARY.items()},
    **{op: partial(elementwise.unary, *codes) for op, codes in _UNARY.items()},
    **dict.fromkeys(("Clip", "Relu"), elementwise.clip),
    "LeakyRelu": elementwise.leaky_relu,
    "PRelu": elementwise.prelu,
    "Elu": elementwise.elu,
    "Reciprocal": elementwise.reciprocal,
    "Pow": elementwise.power,
    "HardSigmoid": elementwise.hard_sigmoid,
    "BatchNormalization": elementwise.batch_normalization,
    "Softmax": partial(across.softmax, "SOFTMAX", "Softmax"),
    "LogSoftmax": partial(across.softmax, "LOG_SOFTMAX", "LogSoftmax"),
    "ReduceMean": partial(across.reduction, "MEAN"),
    "ReduceSum": partial(across.reduction, "SUM"),
    "ReduceMax": partial(across.reduction, "REDUCE_MAX"),
    "ReduceMin": partial(across.reduction, "REDUCE_MIN"),
    "LRN": across.lrn,
    **dict.fromkeys(("Resize", "Upsample"), resize.resize),
}
"""ONNX's operators that can be expressed: how each is written."""


@dataclass(frozen=True)
class Border:
    """A tensor that a model reads or makes. dtype: numpy's name; shape: as on the wire, channels last for rank 4."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Lowered:
    """data: the .tflite file. operators: the codes that it uses, sorted. activations: the most bytes that its tensors
    take at once."""

    data: bytes = field(repr=False)
    operators: tuple[str, ...]
    activations: int
    inputs: tuple[Border, ...]
    outputs: tuple[Border, ...]


def wire_shape(shape: Shape) -> Shape:
    """ONNX's shape → that of the same tensor between devices and in a model: (N, H, W, C) for rank 4."""
    return permuted(shape, IMAGE) if natural(shape) == "image" else shape


def lower(segment: Segment, weights: Mapping[str, Weight]) -> Lowered:
    """The TFLite model of a segment. DicompilerError, one line, naming the node that cannot be expressed."""
    graph = widened(quantised.quantised(fold(read(segment, weights))))
    check_ranks(graph)
    writer = Writer(graph)
    for node in graph.nodes:
        if node.op not in LOWERINGS:
            raise refusal(node, "TFLite-micro has no operator for it", "use target sockets for such a network")
        _check_types(graph, node)
        LOWERINGS[node.op](writer, node)
    data, codes, activations = writer.finish()
    return Lowered(data, codes, activations, _borders(graph, graph.inputs), _borders(graph, graph.outputs))


def _check_types(graph: Graph, node: Node) -> None:
    for name in (node.output, node.inputs[0]):
        dtype = graph.dtypes.get(name, "float32")
        if node.op not in _MOVES and dtype != "float32" and name not in graph.quantisations:
            raise refusal(node, f"tensor {name!r} is of type {dtype}", "TFLite-micro computes in float32 or quantised")


def _borders(graph: Graph, names: tuple[str, ...]) -> tuple[Border, ...]:
    return tuple(Border(name, graph.dtypes[name], wire_shape(graph.shapes[name])) for name in names)
