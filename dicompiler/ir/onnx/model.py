"""ONNX model in memory: a small protobuf with the structure, and weights as views of the mapped file.

path, bytes or ModelProto ⇔ Model ⇔ graphsurgeon graph. A Model is immutable; changes make a new one.
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
"""Operators that onnxruntime's optimizer adds to the standard domain in any opset, although onnx does not know them."""
_WRITE_ERROR = "cannot write the model"
_MAX_INTEGER_ELEMENTS = 1024
_MAX_FLOAT_ELEMENTS = 8
"""Up to this size, floats are a parameter of an operator (scales of a Resize), else weights."""


@dataclass(frozen=True)
class Model:
    """ONNX model.

    Attributes:
        proto: The model, which must not be changed. Initializers with much raw data are placeholders (see
            `weights.is_placeholder`).
        weights: Data of the placeholders, by name.
        display_name: Name in error messages: its file, if it has one.
    """

    proto: onnx.ModelProto = field(repr=False)
    weights: Mapping[str, Weight] = field(repr=False, default_factory=dict)
    display_name: str = field(repr=False, compare=False, default="the model")

    @classmethod
    def load(cls, source: str | Path | bytes | onnx.ModelProto | Model) -> Model:
        """Return a model from a file, from bytes or from memory.

        Files and their external data are memory-mapped. Nodes without a name get the name of their first output, and
        equal names are made unique.

        Args:
            source: Path, bytes, ModelProto (which is not changed), or a Model, which is returned unchanged.

        Returns:
            The model.

        Raises:
            DicompilerError: The file is missing, truncated or not ONNX, its external data is missing, too short or
                outside of the model's directory, or the installed onnxruntime is too old for it.
        """
        if isinstance(source, Model):
            return source
        proto, weights = loader.load_model(source)
        place = str(source) if isinstance(source, (str, Path)) else "the model"
        return cls(proto, MappingProxyType(weights), place)

    def save(self, path: str | Path, external: bool | None = None) -> tuple[Path, ...]:
        """Write the model atomically.

        Args:
            path: File of the model.
            external: Whether weights are written to `<name>.data` next to it; None: only if the file would exceed 2 GB.

        Returns:
            The written files, the model first.
        """
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
        """Return the content of a model file, including weights.

        Returns:
            The bytes.

        Raises:
            DicompilerError: The model is larger than 2 GB.
        """
        return b"".join(modelfile.write_inline(self.proto, self.weights))

    def to_proto(self) -> onnx.ModelProto:
        """Return a new ModelProto with all weights.

        Returns:
            The ModelProto.

        Raises:
            DicompilerError: The model is larger than 2 GB.
        """
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
        """Return a new graphsurgeon graph to edit.

        Weights stay views; attributes and types are read on demand.

        Returns:
            The graph.
        """
        from dicompiler.ir.onnx.graph import to_graph

        return to_graph(self.proto, self.weights)

    def with_graph(self, graph: gs.Graph) -> Model:
        """Return the model with an edited graph, including all data that graphsurgeon does not carry.

        Args:
            graph: A graph that `graph()` returned, after edits.

        Returns:
            The new model.
        """
        from dicompiler.ir.onnx.graph_export import from_graph

        proto, weights = from_graph(graph, self.proto, self.weights)
        return Model(proto, MappingProxyType(weights), self.display_name)

    @cached_property
    def _initializer_by_name(self) -> Mapping[str, onnx.TensorProto | onnx.SparseTensorProto]:
        graph = self.proto.graph
        return {t.name: t for t in graph.initializer} | {t.values.name: t for t in graph.sparse_initializer}

    def array(self, name: str) -> NDArray[Any]:
        """Return the values of an initializer, as a read-only view of the file if it is large.

        Args:
            name: Name of the initializer.

        Returns:
            The values.

        Raises:
            DicompilerError: There is no such initializer.
        """
        if name in self.weights:
            return self.weights[name].array()
        if name not in self._initializer_by_name:
            raise DicompilerError(
                f"the model has no initializer {name!r}{did_you_mean(name, self._initializer_by_name)}"
            )
        tensor = self._initializer_by_name[name]
        return to_dense(tensor) if isinstance(tensor, onnx.SparseTensorProto) else onnx.numpy_helper.to_array(tensor)

    def initializers(self) -> Mapping[str, tuple[int, Shape]]:
        """Return the type (onnx.TensorProto.DataType) and shape of each initializer, including sparse ones.

        Returns:
            Type and shape by name, in file order.
        """
        return {
            name: (tensor.values.data_type, tuple(tensor.dims))
            if isinstance(tensor, onnx.SparseTensorProto)
            else (tensor.data_type, tuple(tensor.dims))
            for name, tensor in self._initializer_by_name.items()
        }

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return the known types and shapes of all tensors.

        Initializers are constants even if they are also inputs: their default value is compiled in. Integer and bool
        initializers of at most 1024 elements, and float initializers of at most 8, have their value.

        Returns:
            Tensors by name. `shape` is None if a dimension is not static, or if the value is not a tensor (dtype 0).
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
        """Return a copy for the checker and for shape inference: placeholders become graph inputs.

        Returns:
            The copy.
        """
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
        """Raise DicompilerError if the model is not valid ONNX. Weights are not read.

        Args:
            place: Prefix of the message: the file, or "after pass …".

        Raises:
            DicompilerError: The model is not valid ONNX.
        """
        light = self.without_weights()
        for value in (*light.graph.input, *light.graph.output):
            kind = value.type  # The checker requires a type and a shape, onnxruntime does not.
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
                f"{place}: not a valid ONNX model: {cause}: correct it, or export it again"
            ) from error

    def digest(self) -> str:
        """Return the structural digest, which does not cover the values of weights.

        It covers names, shapes, types, operators and attributes.

        Returns:
            SHA-256 as 64 hexadecimal digits.
        """
        return graph_structure.structural_digest(self.proto)


def _describe_checker_error(message: str) -> str:
    """Return the checker's message on one line, starting with the node that it names."""
    cause, _, context = message.partition("==>")
    cause, named = " ".join(cause.split()).rstrip("."), re.search(r"Name: (.*) OpType: (\S+)", context)
    return f"{named[2]} {named[1]!r}: {cause}" if named else cause


def _hide_deprecated_operators(proto: onnx.ModelProto) -> None:
    """Move operators that the checker rejects but onnxruntime runs to another domain, in place.

    These are operators that are deprecated in this opset, and onnxruntime's own operators in the standard domain.
    """
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    for node in proto.graph.node:
        known = node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type, opset)
        own = node.op_type in ORT_STANDARD_OPERATORS and not known
        if own or (known and onnx.defs.get_schema(node.op_type, opset).deprecated):
            node.domain = "deprecated"
    if any(node.domain == "deprecated" for node in proto.graph.node):
        proto.opset_import.append(onnx.helper.make_opsetid("deprecated", 1))


def _static_shape(kind: onnx.TypeProto) -> Shape | None:
    if not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(_is_static(dim) for dim in dims) else None


def _is_static(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Return True if the dimension is known; some exporters write -1 for unknown dimensions."""
    return dim.HasField("dim_value") and dim.dim_value >= 0


def _write_buffers(path: Path, buffers: Iterable[bytes | memoryview]) -> None:
    with atomic_file(path, _WRITE_ERROR) as stage, stage.open("wb") as file:
        file.writelines(buffers)
