"""The graph of a segment (an ONNX submodel of a device), in the form that the lowering to TFLite reads.

It contains nodes, constants as arrays, and static shapes and types of all tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Segment, Shape
from dicompiler.plugin_api.onnx import Weight, dtype_name, is_placeholder
from dicompiler_targets.tflm.expand_qlinear import expand_qlinear
from dicompiler_targets.tflm.flatbuffer import TFLITE_TYPES, QuantizationParams

_HIGH_RANK_OPERATORS = ("Reshape", "Transpose")
"""Operators that may read and write tensors with more than four axes, as in a channel shuffle."""


@dataclass(frozen=True)
class SegmentNode:
    """An ONNX node of a segment.

    Attributes:
        op: Operator, with its domain if that is not ONNX's.
        name: Name of the node.
        inputs: Names of the inputs; empty for an omitted input.
        outputs: Names of the outputs.
        attributes: Attributes by name.
        opset: Version of ONNX's operator set.
        activation: TFLite activation that is fused into the node, such as "RELU"; "NONE" for none.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 17
    activation: str = "NONE"

    @property
    def output(self) -> str:
        return self.outputs[0]

    def has_input(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] != ""

    def get_attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


@dataclass(frozen=True)
class SegmentGraph:
    """The graph of a segment (an ONNX submodel of a device).

    Attributes:
        name: Name of the segment.
        nodes: Nodes in topological order.
        constants: Constants by name.
        shapes: Shapes of all tensors that are not constants, in ONNX's order of axes.
        dtypes: NumPy's names of the element types of these tensors.
        inputs: Names of the inputs.
        outputs: Names of the outputs.
        quantizations: Quantization of the quantized tensors.
    """

    name: str
    nodes: tuple[SegmentNode, ...]
    constants: Mapping[str, NDArray[Any]]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    quantizations: Mapping[str, QuantizationParams] = field(default_factory=dict)

    def map_readers(self) -> dict[str, list[SegmentNode]]:
        readers: dict[str, list[SegmentNode]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(node)
        return readers

    def get_shape(self, name: str) -> Shape:
        return self.constants[name].shape if name in self.constants else self.shapes[name]


def make_refusal(node: SegmentNode, cause: str, remedy: str) -> DicompilerError:
    return DicompilerError(f"target tflm: node {node.name!r} ({node.op}): {cause}: {remedy}")


def read_segment(segment: Segment, weights: Mapping[str, Weight]) -> SegmentGraph:
    """Return the graph of a segment (an ONNX submodel of a device), for the lowering to TFLite.

    Raises:
        DicompilerError: A tensor has no static shape, or a type that TFLite-micro lacks. The error names the node.
    """
    model = expand_qlinear(segment.model, weights)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    constants = {
        t.name: weights[t.name].array() if is_placeholder(t) else onnx.numpy_helper.to_array(t)
        for t in model.graph.initializer
    }
    nodes: list[SegmentNode] = []
    for proto in model.graph.node:
        if proto.op_type == "Constant" and proto.attribute[0].name == "value":
            constants[proto.output[0]] = onnx.numpy_helper.to_array(proto.attribute[0].t)
        else:
            nodes.append(_make_node(proto, opset))
    inferred = onnx.shape_inference.infer_shapes(model).graph
    known = {v.name: v.type.tensor_type for v in (*inferred.value_info, *inferred.input, *inferred.output)}
    for node in nodes:
        for name in (*node.inputs, *node.outputs):
            if name and name not in constants:
                _check_tensor(node, name, known.get(name))
    names = [*segment.inputs, *(name for node in nodes for name in node.outputs if name)]
    shapes = {name: tuple(d.dim_value for d in known[name].shape.dim) for name in names}
    dtypes = {name: get_type_name(known[name].elem_type) for name in names}
    return SegmentGraph(segment.name, tuple(nodes), constants, shapes, dtypes, segment.inputs, segment.outputs)


def select_needed(steps: Sequence[Any], outputs: Iterable[Any]) -> list[Any]:
    """Return those nodes or operations of `steps` on which the tensors `outputs` depend, in the same order."""
    wanted, chosen = set(outputs), []
    for step in reversed(steps):
        if wanted.intersection(step.outputs):
            wanted.update(step.inputs)
            chosen.append(step)
    return chosen[::-1]


def _make_node(proto: onnx.NodeProto, opset: int) -> SegmentNode:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute}
    plain = {key: value.decode() if isinstance(value, bytes) else value for key, value in attributes.items()}
    op = proto.op_type if proto.domain in ("", "ai.onnx") else f"{proto.domain}::{proto.op_type}"
    return SegmentNode(op, proto.name, tuple(proto.input), tuple(proto.output), plain, opset)


def get_type_name(element: int) -> str:
    """Return NumPy's name of an onnx.TensorProto.DataType, or ONNX's name if NumPy lacks the type."""
    try:
        return str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element)))
    except KeyError:
        return dtype_name(element)


WIRE_DTYPE_REMEDY = "send it unchanged, or as int8 (--wire-dtype)"
_CAST_REMEDIES = {("Cast", "float16"): WIRE_DTYPE_REMEDY, ("Cast", "bfloat16"): WIRE_DTYPE_REMEDY}


def _check_tensor(node: SegmentNode, name: str, kind: Any) -> None:
    if kind is None or not kind.HasField("shape") or not all(d.HasField("dim_value") for d in kind.shape.dim):
        raise make_refusal(node, f"tensor {name!r} has no static shape", "give the shapes of the inputs (--shape)")
    shape = tuple(d.dim_value for d in kind.shape.dim)
    if 0 in shape:
        raise make_refusal(node, f"tensor {name!r} is empty", "remove the node that computes it")
    dtype = get_type_name(kind.elem_type)
    if dtype not in TFLITE_TYPES:
        usual = "quantise to int8" if dtype == "uint8" else f"take one of {', '.join(TFLITE_TYPES)}"
        remedy = _CAST_REMEDIES.get((node.op, dtype), usual)
        raise make_refusal(node, f"tensor {name!r} is of type {dtype}", remedy)


def check_ranks(graph: SegmentGraph) -> None:
    """Raise DicompilerError, which names the node, if a tensor has more than four axes.

    Tensors of Reshape and Transpose may have more.
    """
    for node in graph.nodes:
        for name in (*node.inputs, *node.outputs):
            rank = len(graph.get_shape(name)) if name else 0
            if rank > 4 and node.op not in _HIGH_RANK_OPERATORS:
                raise make_refusal(
                    node, f"tensor {name!r} has rank {rank}", "TFLite-micro supports up to 4; use target sockets"
                )
