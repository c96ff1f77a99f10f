"""A model while a pass rewrites it: a copy of its structure that may be edited, with constants put in by array.

In: a Model, which stays as it is. Out: the new Model; nodes, names and weights that were not touched are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.ir.onnx.importing import unique
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.structure import bodies, node_reads, reads
from dicompiler.ir.onnx.weights import LARGE, Weight, dense, hollow, raw_nbytes


class Draft:
    """`graph` may be edited freely; initializers are put in with `put`, because large ones are weights."""

    def __init__(self, model: Model) -> None:
        self.proto = onnx.ModelProto()
        self.proto.CopyFrom(model.proto)
        self.graph = self.proto.graph
        self._weights = dict(model.weights)
        self._names = {name for node in self.graph.node for name in (*node_reads(node), *node.output, *_made(node))}
        self._names |= {v.name for v in (*self.graph.input, *self.graph.output)} | set(self.initializers)
        self._node_names = {node.name for node in self.graph.node}

    @property
    def initializers(self) -> set[str]:
        """The names of all initializers, sparse ones included."""
        graph = self.graph
        return {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}

    @property
    def constants(self) -> set[str]:
        """The initializers that cannot be overridden from outside: those that are not graph inputs as well."""
        return self.initializers - {value.name for value in self.graph.input}

    @property
    def outputs(self) -> set[str]:
        """The names of the graph's outputs."""
        return {value.name for value in self.graph.output}

    def opset(self) -> int:
        """The version of the standard operators."""
        return max((entry.version for entry in self.proto.opset_import if entry.domain in ("", "ai.onnx")), default=1)

    def name(self, wish: str) -> str:
        """A tensor name that nobody has: `wish` or `wish_1` …"""
        return unique(wish, self._names)

    def node_name(self, wish: str) -> str:
        """A node name that nobody has."""
        return unique(wish, self._node_names)

    def put(self, name: str, value: Weight | NDArray[Any]) -> None:
        """Adds an initializer; `name` must be new among them. Large data becomes a weight, which is not copied."""
        if not isinstance(value, Weight) and value.dtype.kind in "OUS":
            self.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(object), name))
            return
        weight = value if isinstance(value, Weight) else Weight.of(value)
        if weight.nbytes >= LARGE:
            self._weights[name] = weight
            self.graph.initializer.append(hollow(name, weight))
        else:
            data = bytes(weight.data)
            self.graph.initializer.add(name=name, data_type=weight.dtype, dims=weight.shape, raw_data=data)

    def put_tensor(self, name: str, tensor: onnx.TensorProto) -> None:
        """The same for a TensorProto with its data inside."""
        if tensor.data_type == onnx.TensorProto.STRING or raw_nbytes(tensor.data_type, tuple(tensor.dims)) < LARGE:
            self.graph.initializer.append(tensor)
            self.graph.initializer[-1].name = name
        elif tensor.HasField("raw_data"):
            self.put(name, Weight(tensor.data_type, tuple(tensor.dims), memoryview(tensor.raw_data)))
        else:
            self.put(name, onnx.numpy_helper.to_array(tensor))

    def lift(self) -> bool:
        """Makes weights of large initializers that are typed lists or sparse; whether there were any."""
        typed = [t for t in self.graph.initializer if _is_large_list(t)]
        sparse = list(self.graph.sparse_initializer)
        lifted = {t.name for t in typed}
        keep(self.graph.initializer, [t for t in self.graph.initializer if t.name not in lifted])
        del self.graph.sparse_initializer[:]
        for tensor in typed:
            self.put_tensor(tensor.name, tensor)
        for tensor in sparse:
            self.put(tensor.values.name, dense(tensor))
        return bool(typed or sparse)

    def rename_initializer(self, name: str, new: str) -> None:
        """The initializer `name` is called `new`; its readers follow."""
        for tensor in self.graph.initializer:
            if tensor.name == name:
                tensor.name = new
        if name in self._weights:
            self._weights[new] = self._weights.pop(name)
        for node in self.graph.node:
            rename_reads(node, {name: new})

    def prune(self) -> None:
        """Drops nodes of which nobody reads an output, then initializers that nobody reads, then stale value_info."""
        live, nodes = self.outputs, list[onnx.NodeProto]()
        for node in reversed(self.graph.node):
            if any(name in live for name in node.output):
                live |= set(node_reads(node))
                nodes.append(node)
        keep(self.graph.node, nodes[::-1])
        live |= {value.name for value in self.graph.input}
        keep(self.graph.initializer, [t for t in self.graph.initializer if t.name in live])
        keep(self.graph.sparse_initializer, [t for t in self.graph.sparse_initializer if t.values.name in live])
        present = {name for node in nodes for name in node.output} | self.initializers
        keep(self.graph.value_info, [v for v in self.graph.value_info if v.name in present])

    def model(self) -> Model:
        """The finished model; the draft must not be used afterwards."""
        names = [t.name for t in self.graph.initializer]
        return Model(self.proto, MappingProxyType({n: self._weights[n] for n in names if n in self._weights}))


def _made(node: onnx.NodeProto) -> Iterable[str]:
    """The tensor names that the bodies of a node introduce."""
    for body in bodies(node):
        yield from (v.name for v in body.input)
        yield from (t.name for t in body.initializer)
        for inner in body.node:
            yield from inner.output
            yield from _made(inner)


def _is_large_list(tensor: onnx.TensorProto) -> bool:
    """Whether the data is in a typed field (float_data …) and would be a weight as raw data."""
    if tensor.data_type == onnx.TensorProto.STRING or tensor.HasField("raw_data"):
        return False
    inside = tensor.data_location != onnx.TensorProto.EXTERNAL and math.prod(tensor.dims) > 0
    return inside and raw_nbytes(tensor.data_type, tuple(tensor.dims)) >= LARGE


def keep(field: Any, items: list[Any]) -> None:
    """Replaces the content of a repeated protobuf field by `items`, which may come from it."""
    copies = [type(item)() for item in items]
    for copy, item in zip(copies, items, strict=True):
        copy.CopyFrom(item)
    del field[:]
    field.extend(copies)


def rename_reads(node: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    """Where the node, or a body in it, reads a tensor in `renamed`, it reads the tensor that that maps to."""
    for index, name in enumerate(node.input):
        if name in renamed:
            node.input[index] = renamed[name]
    for body in bodies(node):
        for inner in body.node:
            rename_reads(inner, renamed)
        for value in body.output:
            value.name = renamed.get(value.name, value.name)


def int64(*values: int) -> NDArray[np.int64]:
    """A vector of 64-bit integers."""
    return np.array(values, np.int64)


def all_reads(graph: onnx.GraphProto) -> set[str]:
    """Every tensor that a node reads or that is an output."""
    return set(reads(graph)) | {value.name for value in graph.output}
