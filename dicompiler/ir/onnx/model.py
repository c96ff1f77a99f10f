"""ONNX model in memory: a small ModelProto with the structure, and weights as views of the mapped file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnx
from numpy.typing import NDArray

from dicompiler.base.atomic_output import atomic_file
from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.ir.onnx import graph_structure, loader, protobuf_io
from dicompiler.ir.onnx.weights import (
    MIN_WEIGHT_BYTES,
    PLACEHOLDER_LOCATION,
    Weight,
    embed_data,
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

_ORT_STANDARD_OPERATORS = ("LayerNormalization", "SimplifiedLayerNormalization")
"""Operators that onnxruntime's optimizer adds to the standard domain, although onnx does not know them there."""
_WRITE_ERROR = "cannot write the model"
_MAX_PARAMETER_ELEMENTS: Mapping[int, int] = {
    onnx.TensorProto.INT32: 1024,
    onnx.TensorProto.INT64: 1024,
    onnx.TensorProto.BOOL: 1024,
    onnx.TensorProto.FLOAT: 8,
}
"""Maximum number of elements of an operator's parameter, such as the scales of a Resize, by element type.

Initializers that are larger, or of another type, are weights.
"""


@dataclass(frozen=True)
class Model:
    """ONNX model in memory. It is immutable: a pass edits a graph of the model and makes a new model of it.

    Attributes:
        proto: The model, which must not be changed. Initializers with at least MIN_WEIGHT_BYTES of raw data are
            placeholders without data.
        weights: Data of the placeholders, by name.
        display_name: Name of the model in error messages: its file, if it has one.
    """

    proto: onnx.ModelProto = field(repr=False)
    weights: Mapping[str, Weight] = field(repr=False, default_factory=dict)
    display_name: str = field(repr=False, compare=False, default="the model")

    @classmethod
    def load(cls, source: str | Path | bytes | onnx.ModelProto | Model) -> Model:
        """Return a model from a file, from bytes or from a ModelProto.

        Files and their external data are memory-mapped. Nodes without a name get the name of their first output, and
        equal names of nodes are made unique.

        Args:
            source: Path, content of a file, ModelProto (which is not changed), or a Model, which is returned unchanged.

        Returns:
            The model.

        Raises:
            DicompilerError: The file is missing, truncated or not ONNX, its external data is missing, too short or
                outside of the model's directory, or the installed onnxruntime is too old for the model.
        """
        if isinstance(source, Model):
            return source
        proto, weights = loader.load_model(source)
        place = str(source) if isinstance(source, (str, Path)) else "the model"
        return cls(proto, MappingProxyType(weights), place)

    def save(self, path: str | Path, external: bool | None = None) -> tuple[Path, ...]:
        """Write the model to a file. Each file appears as a whole or not at all.

        Args:
            path: File of the model.
            external: True: weights are written to `<name>.data` next to the file. False: they are written into the
                file. None: they are written into the file unless it would exceed 2 GB.

        Returns:
            The written files, the model first.
        """
        path = Path(path)
        if external is None:
            external = self._nbytes() > protobuf_io.MAX_PROTOBUF_BYTES
        if not external:
            with atomic_file(path, _WRITE_ERROR) as staged, staged.open("wb") as file:
                file.writelines(protobuf_io.write_inline(self.proto, self.weights))
            return (path,)
        data = path.with_name(path.name + ".data")
        head, buffers = protobuf_io.write_external(self.proto, self.weights, data.name)
        before = data.stat() if data.exists() else None
        with atomic_file(path, _WRITE_ERROR) as staged, atomic_file(data, _WRITE_ERROR) as staged_data:
            staged.write_bytes(head)
            with staged_data.open("wb") as file:
                file.writelines(buffers)
        if before is not None and not os.path.samestat(before, data.stat()):
            # The data file was replaced. Build systems look only at the model file, so its time is renewed too.
            os.utime(path)
        return (path, data)

    def _nbytes(self) -> int:
        return int(self.proto.ByteSize()) + sum(weight.nbytes + 16 for weight in self.weights.values())

    def to_bytes(self) -> bytes:
        """Return the content of a model file that includes the weights.

        Returns:
            The bytes.

        Raises:
            DicompilerError: The model is larger than 2 GB.
        """
        return b"".join(protobuf_io.write_inline(self.proto, self.weights))

    def to_proto(self) -> onnx.ModelProto:
        """Return a new ModelProto that includes the weights.

        Returns:
            The ModelProto.

        Raises:
            DicompilerError: The model is larger than 2 GB.
        """
        if self._nbytes() > protobuf_io.MAX_PROTOBUF_BYTES:
            raise DicompilerError("the model is larger than 2 GB, the limit of a protobuf message: save it to a file")
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for tensor in proto.graph.initializer:
            if is_placeholder(tensor):
                embed_data(tensor, self.weights[tensor.name].data)
        return proto

    def graph(self) -> ModelGraph:
        """Return a new graphsurgeon graph of the model, which can be edited. The weights are not copied.

        Returns:
            The graph.
        """
        from dicompiler.ir.onnx.graph import to_graph

        return to_graph(self.proto, self.weights)

    def with_graph(self, graph: gs.Graph) -> Model:
        """Return a new model of an edited graph. Data that graphsurgeon does not represent is copied from this model.

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
        """Return the values of an initializer. If it is large, the array is a read-only view of the model file.

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
            close = did_you_mean(name, self._initializer_by_name)
            raise DicompilerError(f"the model has no initializer {name!r}{close}")
        tensor = self._initializer_by_name[name]
        return to_dense(tensor) if isinstance(tensor, onnx.SparseTensorProto) else onnx.numpy_helper.to_array(tensor)

    def initializers(self) -> Mapping[str, tuple[int, Shape]]:
        """Return the element type and the shape of each initializer, including sparse ones.

        Returns:
            An onnx.TensorProto.DataType and a shape by name, in file order.
        """
        dense = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in self.proto.graph.initializer}
        sparse = self.proto.graph.sparse_initializer
        return dense | {tensor.values.name: (tensor.values.data_type, tuple(tensor.dims)) for tensor in sparse}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return the types and shapes of all tensors, as far as the model states them.

        Initializers are constants even if they are also inputs, because their default value is compiled in.

        Returns:
            Tensors by name. `shape` is None if a dimension is not static, or if the value is not a tensor (dtype 0).
            `value` is set for small initializers: integers and bools of at most 1024 elements, and floats of at most 8.
        """
        graph, tensors = self.proto.graph, dict[str, TensorInfo]()
        for value in (*graph.output, *graph.value_info, *graph.input):
            tensor = TensorInfo(value.name, value.type.tensor_type.elem_type, _static_shape(value.type))
            if tensor.shape is not None or value.name not in tensors:
                tensors[value.name] = tensor
        for name, (dtype, shape) in self.initializers().items():
            is_small = math.prod(shape) <= _MAX_PARAMETER_ELEMENTS.get(dtype, -1)
            value = self.array(name) if is_small else None
            tensors[name] = TensorInfo(name, dtype, shape, is_constant=True, value=value)
        return tensors

    def without_weights(self) -> onnx.ModelProto:
        """Return a ModelProto for the checker and for shape inference, which cannot read the data of placeholders.

        Each placeholder (an initializer without data) becomes a graph input of the same name, type and shape.

        Returns:
            The ModelProto.
        """
        graph = protobuf_io.copy_without(self.proto.graph, "initializer")
        inputs = {value.name for value in graph.input}
        for tensor in self.proto.graph.initializer:
            if not is_placeholder(tensor):
                graph.initializer.append(tensor)
            elif tensor.name not in inputs:
                graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        copy = protobuf_io.copy_without(self.proto, "graph")
        copy.graph.CopyFrom(graph)
        return copy

    def check(self, place: str) -> None:
        """Raise DicompilerError if the model is not valid ONNX. Weights are not read.

        Args:
            place: Start of the error message: the file, or "after pass …".

        Raises:
            DicompilerError: The model is not valid ONNX.
        """
        light = self.without_weights()
        for value in (*light.graph.input, *light.graph.output):
            # onnxruntime runs models with outputs without a type and with tensors without a shape, but the checker
            # rejects them. The copy `light` therefore gets a type and an empty shape.
            kind = value.type
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
        """Return the digest of the model's structure: names, shapes, types, operators and attributes, but not weights.

        Returns:
            SHA-256 digest as 64 hexadecimal digits.
        """
        return graph_structure.structural_digest(self.proto)


def _describe_checker_error(message: str) -> str:
    cause, _, context = message.partition("==>")
    cause, node = " ".join(cause.split()).rstrip("."), re.search(r"Name: (.*) OpType: (\S+)", context)
    return f"{node[2]} {node[1]!r}: {cause}" if node else cause


def _hide_deprecated_operators(proto: onnx.ModelProto) -> None:
    """Hide the operators of a model that the checker would reject although onnxruntime runs them.

    Nodes with operators that are deprecated or unknown in the standard domain get the domain "deprecated", which the
    checker does not know. The model is changed in place.
    """
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    for node in proto.graph.node:
        is_standard = node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type, opset)
        is_deprecated = is_standard and onnx.defs.get_schema(node.op_type, opset).deprecated
        if is_deprecated or (node.op_type in _ORT_STANDARD_OPERATORS and not is_standard):
            node.domain = "deprecated"
    if any(node.domain == "deprecated" for node in proto.graph.node):
        proto.opset_import.append(onnx.helper.make_opsetid("deprecated", 1))


def _static_shape(kind: onnx.TypeProto) -> Shape | None:
    if not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    # Some exporters write -1 for unknown dimensions, so a negative dimension is not static.
    is_static = all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims)
    return tuple(dim.dim_value for dim in dims) if is_static else None
