"""The ONNX model in memory: a small protobuf with the structure, and the weights as views of the mapped file.

In: a path, bytes or a ModelProto. Out: the same, or views of it: a graphsurgeon graph and back, a copy without weights
for checks and inference, arrays, shapes, a structural digest. Everything here is immutable; changes make a new Model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnx
from numpy.typing import NDArray

from dicompiler.base.atomic_output import atomic_file
from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.ir.onnx import graph_structure, loader
from dicompiler.ir.onnx import protobuf_io as modelfile
from dicompiler.ir.onnx.weights import (
    MIN_WEIGHT_BYTES,
    PLACEHOLDER_LOCATION,
    Weight,
    copy_without_data,
    is_placeholder,
    make_placeholder,
    to_dense,
)
from dicompiler.ir.operator_rule import TensorInfo
from dicompiler.ir.regions import Shape

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

    from dicompiler.ir.onnx.graph import ModelGraph

__all__ = ["MIN_WEIGHT_BYTES", "PLACEHOLDER_LOCATION", "Model", "Weight", "is_placeholder", "make_placeholder"]

_INTEGER_DTYPES = (onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.BOOL)
ORT_STANDARD_OPERATORS = ("LayerNormalization", "SimplifiedLayerNormalization")
"""Operators that onnxruntime's optimiser puts into the standard's domain in whatever opset, and onnx does not know
there."""
_WRITE_ERROR = "cannot write the model"
_MAX_INTEGER_ELEMENTS = 1024
_MAX_FLOAT_ELEMENTS = 8
"""So many floats are a parameter of an operator (the scales of a Resize); more are weights."""


@dataclass(frozen=True)
class Model:
    """`proto`: the model as onnx.ModelProto, never to be changed, in which each initializer with much raw data is a
    hollow (see `weights.is_hollow`); `weights`: the data of the hollows, by name; `place`: what errors call it: its
    file, where it has one.
    """

    proto: onnx.ModelProto = field(repr=False)
    weights: Mapping[str, Weight] = field(repr=False, default_factory=dict)
    display_name: str = field(repr=False, compare=False, default="the model")

    @classmethod
    def load(cls, source: str | Path | bytes | onnx.ModelProto | Model) -> Model:
        """The model in a file (mapped, with its external data), in bytes or in memory (which stays as it is).

        Nodes without a name get one (that of their first output), and so do namesakes. DicompilerError, one line, for a
        file that is missing, truncated or not ONNX, for external data that is missing, too short or outside the model's
        directory, and for a version that the installed onnxruntime is too old for.
        """
        if isinstance(source, Model):
            return source
        proto, weights = loader.load_model(source)
        place = str(source) if isinstance(source, (str, Path)) else "the model"
        return cls(proto, MappingProxyType(weights), place)

    def save(self, path: str | Path, external: bool | None = None) -> tuple[Path, ...]:
        """Writes the model, moved in whole. `external`: weights go to `<name>.data` beside it (None: if over 2 GB).

        Returns what was written, the model first."""
        path = Path(path)
        if external is None:
            external = self._nbytes() > modelfile.MAX_PROTOBUF_BYTES
        if not external:
            _write_buffers(path, modelfile.write_inline(self.proto, self.weights))
            return (path,)
        data = path.with_name(path.name + ".data")
        head, buffers = modelfile.write_external(self.proto, self.weights, data.name)
        with atomic_file(path, _WRITE_ERROR) as skeleton, atomic_file(data, _WRITE_ERROR) as weights:
            skeleton.write_bytes(head)
            with weights.open("wb") as file:
                file.writelines(buffers)
        return (path, data)

    def _nbytes(self) -> int:
        return int(self.proto.ByteSize()) + sum(weight.nbytes + 16 for weight in self.weights.values())

    def to_bytes(self) -> bytes:
        """The model file's bytes, weights included. DicompilerError over 2 GB."""
        return b"".join(modelfile.write_inline(self.proto, self.weights))

    def to_proto(self) -> onnx.ModelProto:
        """A ModelProto of its own, weights included. DicompilerError over 2 GB."""
        if self._nbytes() > modelfile.MAX_PROTOBUF_BYTES:
            raise DicompilerError("the model is over the 2 GB of a protobuf message: save it to a file instead")
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for tensor in proto.graph.initializer:
            if is_placeholder(tensor):
                tensor.CopyFrom(copy_without_data(tensor))
                tensor.raw_data = bytes(self.weights[tensor.name].data)
        return proto

    def graph(self) -> ModelGraph:
        """A graphsurgeon graph of its own to edit; weights stay views, attributes and types are read when asked for."""
        from dicompiler.ir.onnx.graph import to_graph

        return to_graph(self.proto, self.weights)

    def with_graph(self, graph: gs.Graph) -> Model:
        """The model that `graph`, made by `graph()` and then changed, has become; keeps all that gs drops."""
        from dicompiler.ir.onnx.graph_export import from_graph

        proto, weights = from_graph(graph, self.proto, self.weights)
        return Model(proto, MappingProxyType(weights), self.display_name)

    @cached_property
    def _initializer_by_name(self) -> Mapping[str, onnx.TensorProto | onnx.SparseTensorProto]:
        graph = self.proto.graph
        return {t.name: t for t in graph.initializer} | {t.values.name: t for t in graph.sparse_initializer}

    def array(self, name: str) -> NDArray[Any]:
        """The values of an initializer; a read-only view of the file where it is large. Unknown: DicompilerError."""
        if name in self.weights:
            return self.weights[name].array()
        if name not in self._initializer_by_name:
            raise DicompilerError(
                f"the model has no initializer {name!r}{did_you_mean(name, self._initializer_by_name)}"
            )
        tensor = self._initializer_by_name[name]
        return to_dense(tensor) if isinstance(tensor, onnx.SparseTensorProto) else onnx.numpy_helper.to_array(tensor)

    def initializers(self) -> Mapping[str, tuple[int, Shape]]:
        """(onnx.TensorProto.DataType, shape) of every initializer, sparse ones included, in file order."""
        return {
            name: (tensor.values.data_type, tuple(tensor.dims))
            if isinstance(tensor, onnx.SparseTensorProto)
            else (tensor.data_type, tuple(tensor.dims))
            for name, tensor in self._initializer_by_name.items()
        }

    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is known of every tensor: graph inputs, initializers, value_info and outputs.

        `shape` is None where a dimension is not static (and for values that are not tensors, whose dtype is 0). An
        initializer is constant even where it is also an input: its default is what is compiled in. int32, int64 and
        bool initializers of at most 1024 elements have their value, and float ones of at most 8.
        """
        graph, tensors = self.proto.graph, dict[str, TensorInfo]()
        for value in (*graph.output, *graph.value_info, *graph.input):
            known = TensorInfo(value.name, value.type.tensor_type.elem_type, _static_shape(value.type))
            if known.shape is not None or value.name not in tensors:
                tensors[value.name] = known
        for name, (dtype, shape) in self.initializers().items():
            most = (
                _MAX_INTEGER_ELEMENTS
                if dtype in _INTEGER_DTYPES
                else _MAX_FLOAT_ELEMENTS
                if dtype == onnx.TensorProto.FLOAT
                else 0
            )
            small = math.prod(shape) <= most and most > 0
            tensors[name] = TensorInfo(name, dtype, shape, is_constant=True, value=self.array(name) if small else None)
        return tensors

    def without_weights(self) -> onnx.ModelProto:
        """A copy for the checker and for shape inference: hollows are graph inputs, small initializers are kept."""
        graph = modelfile.copy_without(self.proto.graph, "initializer")
        inputs = {value.name for value in graph.input}
        for tensor in self.proto.graph.initializer:
            if not is_placeholder(tensor):
                graph.initializer.append(tensor)
            elif tensor.name not in inputs:
                graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        copy = modelfile.copy_without(self.proto, "graph")
        copy.graph.CopyFrom(graph)
        return copy

    def check(self, place: str) -> None:
        """Whether the model is legal ONNX, in milliseconds, without its weights. DicompilerError naming `place`."""
        light = self.without_weights()
        for value in (*light.graph.input, *light.graph.output):
            kind = value.type  # the checker wants a type and a shape there, onnxruntime does not
            if value in light.graph.output and kind.WhichOneof("value") is None:
                kind.tensor_type.elem_type = onnx.TensorProto.FLOAT
            if kind.HasField("tensor_type"):
                kind.tensor_type.shape.SetInParent()
        _hide_deprecated_operators(light)
        try:
            onnx.checker.check_model(light)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            cause = graph_structure.describe_undefined_tensor(light.graph) or _describe_checker_error(str(error))
            raise DicompilerError(
                f"{place}: not a legal ONNX model: {cause}: correct it, or export it again"
            ) from error

    def digest(self) -> str:
        """sha256 of the structure: names, shapes, types, operators, attributes; the same for a retrained model."""
        return graph_structure.structural_digest(self.proto)


def _describe_checker_error(said: str) -> str:
    """What onnx's checker said, on one line, and behind it the node that it said it of where it did."""
    cause, _, context = said.partition("==>")
    cause, named = " ".join(cause.split()).rstrip("."), re.search(r"Name: (.*) OpType: (\S+)", context)
    return f"{named[2]} {named[1]!r}: {cause}" if named else cause


def _hide_deprecated_operators(proto: onnx.ModelProto) -> None:
    """In place: operators that are deprecated in this opset, or onnxruntime's own within the standard's domain, go to a
    domain of their own: the checker refuses them otherwise, but onnxruntime runs them (GroupNormalization of 18)."""
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    for node in proto.graph.node:
        known = node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type, opset)
        own = node.op_type in ORT_STANDARD_OPERATORS and not known
        if own or (known and onnx.defs.get_schema(node.op_type, opset).deprecated):
            node.domain = "deprecated"
    if any(node.domain == "deprecated" for node in proto.graph.node):
        proto.opset_import.append(onnx.helper.make_opsetid("deprecated", 1))


def _static_shape(kind: onnx.TypeProto) -> Shape | None:
    """The tensor's shape, or None where it is unknown or has a dimension that is not a number."""
    if not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(_is_static(dim) for dim in dims) else None


def _is_static(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Whether it is a size; some exporters write -1 for an open one."""
    return dim.HasField("dim_value") and dim.dim_value >= 0


def _write_buffers(path: Path, buffers: Iterable[bytes | memoryview]) -> None:
    with atomic_file(path, _WRITE_ERROR) as stage, stage.open("wb") as file:
        file.writelines(buffers)
