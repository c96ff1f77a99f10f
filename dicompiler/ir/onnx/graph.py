"""The graphsurgeon graph in which every pass edits a model.

In: a skeleton ModelProto with its weights. Out: a gs.Graph whose nodes and tensors hold the messages that they come
from; attributes are read from these when asked for, weights stay views. The way back is in graph_export.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.importers import onnx_importer
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues
from onnx_graphsurgeon.logger import G_LOGGER
from onnx_graphsurgeon.util.misc import SynchronizedList

from dicompiler.ir.onnx.names import unique_name
from dicompiler.ir.onnx.protobuf_io import copy_without
from dicompiler.ir.onnx.weights import MIN_WEIGHT_BYTES, Weight, raw_nbytes, to_dense

_KINDS = onnx.AttributeProto
_OPPOSITE_LINK = {"inputs": "outputs", "outputs": "inputs"}
_INFO_KEYS = ("dtype", "shape", "type")
_VALUE_INFO_FIELDS = ("input", "output", "value_info")
_SCALAR_FIELDS = {_KINDS.FLOAT: "f", _KINDS.INT: "i", _KINDS.STRING: "s"}
_LIST_FIELDS = {_KINDS.FLOATS: "floats", _KINDS.INTS: "ints", _KINDS.STRINGS: "strings"}


@dataclass(frozen=True)
class OpaqueAttribute:
    """An attribute that graphsurgeon cannot carry (an empty list, text that is not UTF-8, a sparse tensor, a type …).

    It stands in `node.attrs` under its name, so that a pass can see that it is there, move or delete it.
    """

    attribute: onnx.AttributeProto


class ConstantValues(LazyValues):  # type: ignore[misc]
    """The values of a constant: those of the message `source`, or of the weight that it stands for, not copied."""

    def __init__(self, source: onnx.TensorProto, weight: Weight | None = None) -> None:
        self.source, self.weight, self.shape = source, weight, list(source.dims)

    @cached_property
    def tensor(self) -> onnx.TensorProto:
        """A copy of the message, because graphsurgeon's own export renames it in place."""
        return copy_without(self.source)

    @cached_property
    def dtype(self) -> Any:
        """The numpy type, or the number of an onnx type that graphsurgeon has none for."""
        with G_LOGGER.suppress():  # it prints to standard output
            return onnx_importer.get_onnx_tensor_dtype(self.source)

    @property
    def is_large(self) -> bool:
        """Whether they are a weight, or would be one as raw data of an initializer."""
        kind = self.source.data_type
        return kind != onnx.TensorProto.STRING and raw_nbytes(kind, tuple(self.source.dims)) >= MIN_WEIGHT_BYTES

    def load(self) -> NDArray[Any]:
        """The values; read-only where they are large."""
        array = self.weight.array() if self.weight is not None else onnx.numpy_helper.to_array(self.source)
        return array if self.is_large else array.copy()


class SparseConstantValues(SparseValues):  # type: ignore[misc]
    """The values of a sparse constant, in its own type (graphsurgeon makes them float64)."""

    def load(self) -> NDArray[Any]:
        """The dense array."""
        return to_dense(self.tensor)


class _LazyAttributes:
    """What is made only when it is asked for: most tensors of a graph are never looked at."""

    def __getattr__(self, name: str) -> Any:
        if name in _OPPOSITE_LINK:
            value: Any = SynchronizedList(self, _OPPOSITE_LINK[name], ())
        else:
            value = self._late(name)
        self.__dict__[name] = value
        return value


class Constant(_LazyAttributes, gs.Constant):  # type: ignore[misc]
    """An initializer; `source` is its message, if the model had it, and keeps its documentation when values change."""

    def __init__(self, name: str, source: onnx.TensorProto, weight: Weight | None = None) -> None:
        self.__dict__.update(name=name, source=source, weight=weight, data_location=None, _export_dtype=None)

    def _late(self, name: str) -> Any:
        if name != "_values":
            raise AttributeError(name)
        return ConstantValues(self.source, self.weight)

    def to_variable(self, dtype: Any = None, shape: Any = ()) -> gs.Variable:
        """Turns it into a variable, in place: whoever reads it reads that."""
        super().to_variable(dtype, list(shape))
        self.__class__, self.info = Variable, None
        return self


class Variable(_LazyAttributes, gs.Variable):  # type: ignore[misc]
    """A tensor that is computed; `info` is what the model says of it, where dtype and shape are read when asked."""

    def __init__(self, name: str, info: onnx.ValueInfoProto | None = None) -> None:
        self.__dict__.update(name=name, info=info)

    def _late(self, name: str) -> Any:
        if name not in _INFO_KEYS:
            raise AttributeError(name)
        return tensor_info(self.info, name)

    def set_info(self, info: onnx.ValueInfoProto | None) -> None:
        """From now on this is known of the tensor, and nothing else."""
        self.info = info
        for key in _INFO_KEYS:
            self.__dict__.pop(key, None)

    def to_constant(self, values: Any, export_dtype: Any = None) -> gs.Constant:
        """Turns it into a constant, in place: whoever reads it reads that."""
        self.__dict__.update(dtype=None, shape=None)  # which graphsurgeon deletes
        super().to_constant(values, export_dtype)
        self.__class__, self.source, self.weight = Constant, None, None
        return self


def tensor_info(info: onnx.ValueInfoProto | None, key: str) -> Any:
    """What a message says of a tensor's "dtype", "shape" or "type", as graphsurgeon has it."""
    if info is None or not info.HasField("type"):
        return "tensor_type" if key == "type" else None
    with G_LOGGER.suppress():  # it prints to standard output
        return getattr(onnx_importer, f"get_onnx_tensor_{key}")(info)


class GraphNode(gs.Node):  # type: ignore[misc]
    """A node of the model; `proto` is its message, from which the attributes are read when asked for.

    It equals itself alone (graphsurgeon compares all fields, which makes taking it out of a list slow).
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, proto: onnx.NodeProto, inputs: Iterable[gs.Tensor], outputs: Iterable[gs.Tensor]) -> None:
        domain = proto.domain if proto.HasField("domain") else None
        self.__dict__.update(proto=proto, op=proto.op_type, name=proto.name, domain=domain)
        self.__dict__["inputs"] = SynchronizedList(self, "outputs", list(inputs))
        self.__dict__["outputs"] = SynchronizedList(self, "inputs", list(outputs))

    def __getattr__(self, name: str) -> Any:
        if name != "attrs":
            raise AttributeError(name)
        self.attrs = {attribute.name: _attribute_value(attribute, {}) for attribute in self.proto.attribute}
        return self.attrs

    def subgraphs(self, recursive: bool = False) -> Iterator[gs.Graph]:
        """The control-flow bodies (with theirs); the attributes of a node that has some are always read."""
        return super().subgraphs(recursive) if "attrs" in self.__dict__ else iter(())

    def copy(self, inputs: Any = None, outputs: Any = None, tensor_map: Any = None) -> GraphNode:
        """The same operator on other tensors; documentation and metadata are copied too."""
        new = GraphNode(self.proto, inputs or (), outputs or ())
        new.__dict__.update({key: self.__dict__[key] for key in ("op", "name", "domain")})
        if "attrs" in self.__dict__:
            new.attrs = super().copy(tensor_map=tensor_map).attrs
        return new


class ModelGraph(gs.Graph):  # type: ignore[misc]
    """A gs.Graph that remembers what graphsurgeon forgets, with the steps that most rewrites consist of.

    original: the message that it was made of, never to be changed.
    messages: "input", "output", "value_info" → what the model says of tensors there, by name.
    initializers: in file order, which the model keeps; those that nobody reads any more drop out of it.
    spare: those of them that nobody read from the start; they stay until `prune`.
    defaults: the names of those that are graph inputs too: a caller can give them another value.
    """

    nodes: list[gs.Node]

    def __init__(self, original: onnx.GraphProto, **parts: Any) -> None:
        super().__init__(name=original.name, doc_string=original.doc_string, **parts)
        self.source_graph = original
        self.value_infos = {
            place: {value.name: value for value in getattr(original, place)} for place in _VALUE_INFO_FIELDS
        }
        self.initializers: list[gs.Constant] = []
        self.unread_initializers: list[gs.Constant] = []
        self.overridable_names: set[str] = set()
        self._taken: tuple[dict[str, int], dict[str, int]] | None = None

    # --- names

    def unused_tensor_name(self, wish: str) -> str:
        """A tensor name that nobody has: `wish` or `wish_1` … What exists is looked up once, at the first question."""
        return unique_name(wish, self._taken_names()[0])

    def unused_node_name(self, wish: str) -> str:
        """A node name that nobody has."""
        return unique_name(wish, self._taken_names()[1])

    def _taken_names(self) -> tuple[dict[str, int], dict[str, int]]:
        if self._taken is None:
            graphs = (self, *self.subgraphs(recursive=True))
            tensors = {name for graph in graphs for name in graph.tensors()}
            tensors |= {constant.name for graph in graphs for constant in vars(graph).get("initializers", ())}
            self._taken = dict.fromkeys(tensors, 0), {node.name: 0 for node in self.nodes}
        return self._taken

    # --- what is read

    def names_read(self) -> set[str]:
        """The names of all tensors that a node reads, also within bodies, or that are outputs."""
        return {name for node in self.nodes for name in names_read(node)} | {tensor.name for tensor in self.outputs}

    def is_constant(self, tensor: gs.Tensor) -> bool:
        """Whether the tensor has the same value whenever the model runs."""
        return isinstance(tensor, gs.Constant) and tensor.name not in self.overridable_names

    def set_inferred_info(self, inferred: onnx.GraphProto) -> None:
        """Takes over what shape inference says of the tensors that nodes make; whatever else was known is forgotten."""
        values, outputs = {value.name: value for value in inferred.value_info}, self.value_infos["output"]
        for value in inferred.output:
            if value.type.tensor_type.HasField("shape"):
                outputs[value.name] = known = copy_without(outputs.get(value.name, value))
                known.type.tensor_type.shape.CopyFrom(value.type.tensor_type.shape)
                known.type.tensor_type.elem_type = known.type.tensor_type.elem_type or value.type.tensor_type.elem_type
        for name, tensor in self.tensors().items():
            if isinstance(tensor, Variable) and tensor.inputs:
                tensor.set_info(values.get(name, outputs.get(name)))
        self.value_infos["value_info"] = values

    # --- edits

    def add_initializer(self, name: str, values: NDArray[Any] | LazyValues) -> gs.Constant:
        """A new initializer. Large values become a weight, which is not copied."""
        constant = gs.Constant(name, values)
        self.initializers.append(constant)
        return constant

    def make_constant(self, tensor: gs.Variable, values: NDArray[Any] | LazyValues) -> None:
        """The tensor becomes an initializer of these values; the node that made it is to be removed."""
        tensor.to_constant(values)
        self.initializers.append(tensor)

    def replace_uses(self, old: gs.Tensor, new: gs.Tensor) -> None:
        """Whoever reads `old`, also within bodies, reads `new`. What is an output of the graph stays one."""
        for reader in list(old.outputs):
            reader.inputs = [new if tensor is old else tensor for tensor in reader.inputs]
        for body in self.subgraphs(recursive=True):
            body.outputs = [new if tensor is old else tensor for tensor in body.outputs]

    def remove_nodes(self, nodes: Collection[gs.Node]) -> None:
        """Takes the nodes out; they read and make nothing any more."""
        gone = {id(node) for node in nodes}
        self.nodes = [node for node in self.nodes if id(node) not in gone]
        for node in nodes:
            for inner in (node, *(inner for body in node.subgraphs(recursive=True) for inner in body.nodes)):
                inner.inputs.clear()
                inner.outputs.clear()

    def insert_nodes(self, nodes: Sequence[gs.Node], before: gs.Node) -> None:
        """Puts the nodes in front of another."""
        index = next(index for index, node in enumerate(self.nodes) if node is before)
        self.nodes[index:index] = nodes

    def prune(self) -> None:
        """Drops the nodes of which nobody reads an output, then the initializers that nobody reads."""
        live = {tensor.name for tensor in self.outputs}
        dead = []
        for node in reversed(self.nodes):
            if any(tensor.name in live for tensor in node.outputs):
                live.update(names_read(node))
            else:
                dead.append(node)
        self.remove_nodes(dead)
        self.unread_initializers = [
            constant for constant in self.unread_initializers if constant.name in self.overridable_names
        ]


def names_read(node: gs.Node) -> Iterator[str]:
    """What the node reads, and all that its bodies name."""
    yield from (tensor.name for tensor in node.inputs if tensor.name)
    for body in node.subgraphs(recursive=True):
        yield from (tensor.name for inner in body.nodes for tensor in inner.inputs if tensor.name)
        yield from (tensor.name for tensor in body.outputs)


# --- model → graph ------------------------------------------------------------------------------------------------


def to_graph(proto: onnx.ModelProto, weights: Mapping[str, Weight]) -> ModelGraph:
    """The model as a graph of its own: nothing done to it reaches `proto` or `weights`."""
    opsets = onnx.ModelProto(opset_import=proto.opset_import).opset_import
    graph = _import_graph(proto.graph, weights, {})
    graph.opset = max((entry.version for entry in opsets if entry.domain in ("", "ai.onnx")), default=1)
    graph.import_domains, graph.ir_version = opsets, proto.ir_version
    graph.producer_name, graph.producer_version = proto.producer_name, proto.producer_version
    return graph


def _import_graph(proto: onnx.GraphProto, weights: Mapping[str, Weight], outer: Mapping[str, gs.Tensor]) -> ModelGraph:
    """The graph; what a body reads of the tensors around it, `outer`, are these very objects."""
    values = (*proto.value_info, *proto.output, *proto.input)
    infos = {value.name: value for value in values if value.HasField("type")}
    graph = ModelGraph(proto)
    graph.initializers += [Constant(tensor.name, tensor, weights.get(tensor.name)) for tensor in proto.initializer]
    graph.initializers += [
        gs.Constant(tensor.values.name, SparseConstantValues(tensor)) for tensor in proto.sparse_initializer
    ]
    local: dict[str, gs.Tensor] = {constant.name: constant for constant in graph.initializers}
    graph.overridable_names |= local.keys() & graph.value_infos["input"].keys()
    known = {**outer, **local}  # names in a body may hide those around it

    def tensor(name: str, tensors: Mapping[str, gs.Tensor]) -> gs.Tensor:
        if name in tensors:
            return tensors[name]
        new = Variable(name, infos.get(name))
        if name:  # an omitted tensor is one of its own each time
            known[name] = local[name] = new
        return new

    graph.inputs = [tensor(value.name, local) for value in proto.input if value.name not in graph.overridable_names]
    for node in proto.node:
        bodies = {a.name: _attribute_value(a, known) for a in node.attribute if a.type == _KINDS.GRAPH}
        inputs = [tensor(name, known) for name in node.input]
        new = GraphNode(node, inputs, [tensor(name, local) for name in node.output])
        if bodies:
            new.attrs = {a.name: bodies.get(a.name) or _attribute_value(a, {}) for a in node.attribute}
        graph.nodes.append(new)
    graph.outputs = [tensor(value.name, known) for value in proto.output]
    outputs = graph.value_infos["output"].keys()
    graph.unread_initializers = [
        constant for constant in graph.initializers if not constant.outputs and constant.name not in outputs
    ]
    return graph


def _attribute_value(attribute: onnx.AttributeProto, outer: Mapping[str, gs.Tensor]) -> Any:
    """An attribute's value as graphsurgeon has it, or HeldAttribute."""
    kind = attribute.type
    if attribute.ref_attr_name:
        return OpaqueAttribute(attribute)
    if kind == _KINDS.GRAPH:
        return _import_graph(attribute.g, {}, outer)
    if kind == _KINDS.TENSOR:
        return Constant(attribute.t.name, attribute.t)
    value: Any = getattr(attribute, _SCALAR_FIELDS.get(kind) or _LIST_FIELDS.get(kind, "name"))
    try:
        if kind in _SCALAR_FIELDS:
            return value.decode() if kind == _KINDS.STRING else value
        if kind in _LIST_FIELDS and value:
            return [text.decode() for text in value] if kind == _KINDS.STRINGS else list(value)
        return OpaqueAttribute(attribute)
    except UnicodeDecodeError:
        return OpaqueAttribute(attribute)


def adopt_graph(graph: gs.Graph, original: onnx.GraphProto, weights: Mapping[str, Weight]) -> ModelGraph:
    """A graph that graphsurgeon made itself, with what it forgot of `original`."""
    parts = ("nodes", "inputs", "outputs", "opset", "import_domains", "functions", "ir_version")
    new, like = (
        ModelGraph(original, **{part: getattr(graph, part) for part in parts}),
        _import_graph(original, weights, {}),
    )
    new.name, new.doc_string = graph.name, graph.doc_string
    new.initializers, new.unread_initializers, new.overridable_names = (
        like.initializers,
        like.unread_initializers,
        like.overridable_names,
    )
    return new
