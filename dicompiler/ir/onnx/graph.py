"""Editable graph of a model: a graphsurgeon graph that keeps the model's protobuf messages. All passes edit it.

Attributes and weights are read from the messages on demand. `graph_export` converts the graph back to a model.
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
_SCALAR_FIELDS = {_KINDS.FLOAT: "f", _KINDS.INT: "i", _KINDS.STRING: "s"}
_LIST_FIELDS = {_KINDS.FLOATS: "floats", _KINDS.INTS: "ints", _KINDS.STRINGS: "strings"}


@dataclass(frozen=True)
class OpaqueAttribute:
    """Attribute that graphsurgeon cannot represent: an empty list, text that is not UTF-8, a sparse tensor, or a type.

    Such an attribute appears in `node.attrs` under its name, so passes can detect, move or delete it.

    Attributes:
        attribute: The protobuf message of the attribute.
    """

    attribute: onnx.AttributeProto


class ConstantValues(LazyValues):  # type: ignore[misc]
    """Values of a constant. They refer to a protobuf message or to a weight, and are not copied.

    Args:
        source: The protobuf message of the initializer.
        weight: Data of the initializer, if `source` is a placeholder without data.
    """

    def __init__(self, source: onnx.TensorProto, weight: Weight | None = None) -> None:
        self.source, self.weight, self.shape = source, weight, list(source.dims)

    @cached_property
    def tensor(self) -> onnx.TensorProto:
        """A copy of the protobuf message, which graphsurgeon's export may rename."""
        return copy_without(self.source)

    @cached_property
    def dtype(self) -> Any:
        """The numpy type, or the number of the onnx type if graphsurgeon has no numpy type for it."""
        with G_LOGGER.suppress():  # This hides graphsurgeon's warning about element types that numpy lacks.
            return onnx_importer.get_onnx_tensor_dtype(self.source)

    @property
    def is_large(self) -> bool:
        """True if the values occupy at least MIN_WEIGHT_BYTES, so that the model stores them as a weight."""
        kind = self.source.data_type
        return kind != onnx.TensorProto.STRING and raw_nbytes(kind, tuple(self.source.dims)) >= MIN_WEIGHT_BYTES

    def load(self) -> NDArray[Any]:
        """Return the values as an array, which is read-only if they are large.

        Returns:
            The array.
        """
        array = self.weight.array() if self.weight is not None else onnx.numpy_helper.to_array(self.source)
        return array if self.is_large else array.copy()


class SparseConstantValues(SparseValues):  # type: ignore[misc]
    """Values of a sparse constant in their own type. graphsurgeon would convert them to float64."""

    def load(self) -> NDArray[Any]:
        return to_dense(self.tensor)


class _LazyAttributes:
    """Base class of `Constant` and `Variable`, which computes attributes on demand, because most tensors need none."""

    def __getattr__(self, name: str) -> Any:
        if name in _OPPOSITE_LINK:
            value: Any = SynchronizedList(self, _OPPOSITE_LINK[name], ())
        else:
            value = self._late(name)
        self.__dict__[name] = value
        return value


class Constant(_LazyAttributes, gs.Constant):  # type: ignore[misc]
    """Initializer of the model.

    Args:
        name: Name of the initializer.
        source: The protobuf message of the initializer. If the values change, the new message gets its `doc_string` and
            metadata.
        weight: Data of the initializer, if `source` is a placeholder without data.
    """

    def __init__(self, name: str, source: onnx.TensorProto, weight: Weight | None = None) -> None:
        self.__dict__.update(name=name, source=source, weight=weight, data_location=None, _export_dtype=None)

    def _late(self, name: str) -> Any:
        if name != "_values":
            raise AttributeError(name)
        return ConstantValues(self.source, self.weight)

    def to_variable(self, dtype: Any = None, shape: Any = ()) -> gs.Variable:
        super().to_variable(dtype, list(shape))
        self.__class__, self.info = Variable, None
        return self


class Variable(_LazyAttributes, gs.Variable):  # type: ignore[misc]
    """Computed tensor. Its type and shape are read from its protobuf message on demand.

    Args:
        name: Name of the tensor.
        info: The protobuf message of the tensor, if the model has one.
    """

    def __init__(self, name: str, info: onnx.ValueInfoProto | None = None) -> None:
        self.__dict__.update(name=name, info=info)

    def _late(self, name: str) -> Any:
        if name not in _INFO_KEYS:
            raise AttributeError(name)
        return tensor_info(self.info, name)

    def set_info(self, info: onnx.ValueInfoProto | None) -> None:
        """Replace the type and the shape of the tensor.

        Args:
            info: A message with the new type and shape; None: they are unknown.
        """
        self.info = info
        for key in _INFO_KEYS:
            self.__dict__.pop(key, None)

    def to_constant(self, values: Any, export_dtype: Any = None) -> gs.Constant:
        # The inherited method deletes `dtype` and `shape`, which do not exist yet if nothing has read them.
        self.__dict__.update(dtype=None, shape=None)
        super().to_constant(values, export_dtype)
        self.__class__, self.source, self.weight = Constant, None, None
        return self


def tensor_info(info: onnx.ValueInfoProto | None, key: str) -> Any:
    """Return a property of a tensor ("dtype", "shape" or "type") in the form that graphsurgeon uses."""
    if info is None or not info.HasField("type"):
        return "tensor_type" if key == "type" else None
    with G_LOGGER.suppress():  # This hides graphsurgeon's warning about element types that numpy lacks.
        return getattr(onnx_importer, f"get_onnx_tensor_{key}")(info)


class GraphNode(gs.Node):  # type: ignore[misc]
    """Node of the model. Its attributes are read from its protobuf message `proto` on demand.

    A node equals only itself: graphsurgeon would compare all fields, which makes removal from a list slow.
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
        # A node with control-flow bodies has `attrs` from the beginning, so a node without `attrs` has no bodies.
        return super().subgraphs(recursive) if "attrs" in self.__dict__ else iter(())

    def copy(self, inputs: Any = None, outputs: Any = None, tensor_map: Any = None) -> GraphNode:
        """Return a copy of the node, with its documentation and metadata, that reads and computes other tensors."""
        new = GraphNode(self.proto, inputs or (), outputs or ())
        new.__dict__.update({key: self.__dict__[key] for key in ("op", "name", "domain")})
        if "attrs" in self.__dict__:
            new.attrs = super().copy(tensor_map=tensor_map).attrs
        return new


class ModelGraph(gs.Graph):  # type: ignore[misc]
    """graphsurgeon graph with methods for frequent edits. It keeps the data that graphsurgeon would drop.

    Attributes:
        nodes: The nodes, in topological order.
        source_graph: The protobuf message from which the graph was made. It is never changed.
        value_infos: Messages with the types of tensors: by field ("input", "output" or "value_info"), then by tensor
            name.
        initializers: Initializers in file order. Those that become unread are dropped from the exported model.
        unread_initializers: Initializers that nothing read in the original graph. They are kept until `prune` is
            called.
        overridable_names: Names of initializers that are also inputs, so that a caller can override them.
    """

    nodes: list[gs.Node]
    source_graph: onnx.GraphProto
    value_infos: dict[str, dict[str, onnx.ValueInfoProto]]
    initializers: list[gs.Constant]
    unread_initializers: list[gs.Constant]
    overridable_names: set[str]

    def __init__(self, original: onnx.GraphProto, **parts: Any) -> None:
        """Create a graph from nodes and tensors.

        Args:
            original: Protobuf message that supplies the graph's name, its documentation and the types of tensors.
            **parts: Nodes, inputs, outputs and other arguments of `gs.Graph`.
        """
        super().__init__(name=original.name, doc_string=original.doc_string, **parts)
        self.source_graph = original
        fields = ("input", "output", "value_info")
        self.value_infos = {field: {value.name: value for value in getattr(original, field)} for field in fields}
        self.initializers, self.unread_initializers = [], []
        self.overridable_names = set()
        self._taken: tuple[dict[str, int], dict[str, int]] | None = None

    def unused_tensor_name(self, preferred_name: str) -> str:
        """Return a tensor name that is not in use: `preferred_name`, or else `preferred_name_1`, `preferred_name_2`, ….

        Args:
            preferred_name: The preferred name, without a number.

        Returns:
            The name, which is in use from now on.
        """
        return unique_name(preferred_name, self._taken_names()[0])

    def unused_node_name(self, preferred_name: str) -> str:
        """Return a node name that is not in use: `preferred_name`, or else `preferred_name_1`, `preferred_name_2`, ….

        Args:
            preferred_name: The preferred name, without a number.

        Returns:
            The name, which is in use from now on.
        """
        return unique_name(preferred_name, self._taken_names()[1])

    def _taken_names(self) -> tuple[dict[str, int], dict[str, int]]:
        if self._taken is None:
            graphs = (self, *self.subgraphs(recursive=True))
            tensors = {name for graph in graphs for name in graph.tensors()}
            tensors |= {constant.name for graph in graphs for constant in vars(graph).get("initializers", ())}
            self._taken = dict.fromkeys(tensors, 0), {node.name: 0 for node in self.nodes}
        return self._taken

    def names_read(self) -> set[str]:
        """Return the names of all tensors that nodes and control-flow bodies read, and of the graph's outputs.

        Returns:
            Names of tensors.
        """
        return {name for node in self.nodes for name in names_read(node)} | {tensor.name for tensor in self.outputs}

    def is_constant(self, tensor: gs.Tensor) -> bool:
        """Return True if a tensor has the same value in every run of the model.

        Args:
            tensor: A tensor of the graph.

        Returns:
            True for initializers, unless callers can override them with an input.
        """
        return isinstance(tensor, gs.Constant) and tensor.name not in self.overridable_names

    def set_inferred_info(self, inferred: onnx.GraphProto) -> None:
        """Replace the types and shapes of computed tensors by the results of shape inference.

        Args:
            inferred: The graph after shape inference.
        """
        values, outputs = {value.name: value for value in inferred.value_info}, self.value_infos["output"]
        for value in inferred.output:
            if value.type.tensor_type.HasField("shape"):
                outputs[value.name] = copy_without(outputs.get(value.name, value))
                output_type = outputs[value.name].type.tensor_type
                output_type.shape.CopyFrom(value.type.tensor_type.shape)
                output_type.elem_type = output_type.elem_type or value.type.tensor_type.elem_type
        for name, tensor in self.tensors().items():
            if isinstance(tensor, Variable) and tensor.inputs:
                tensor.set_info(values.get(name, outputs.get(name)))
        self.value_infos["value_info"] = values

    def add_initializer(self, name: str, values: NDArray[Any] | LazyValues) -> gs.Constant:
        """Add an initializer to the graph. Large values are not copied.

        Args:
            name: Name of the initializer.
            values: Values of the initializer.

        Returns:
            The new initializer.
        """
        constant = gs.Constant(name, values)
        self.initializers.append(constant)
        return constant

    def make_constant(self, tensor: gs.Variable, values: NDArray[Any] | LazyValues) -> None:
        """Turn a computed tensor into an initializer. The caller must remove the node that computed it.

        Args:
            tensor: Tensor that a node of the graph computes.
            values: Values of the initializer.
        """
        tensor.to_constant(values)
        self.initializers.append(tensor)

    def replace_uses(self, old: gs.Tensor, new: gs.Tensor) -> None:
        """Replace a tensor by another one in all nodes and control-flow bodies that read it.

        The outputs of the graph itself are not changed.

        Args:
            old: The tensor that is no longer read.
            new: The tensor that is read instead.
        """
        for reader in list(old.outputs):
            reader.inputs = [new if tensor is old else tensor for tensor in reader.inputs]
        for body in self.subgraphs(recursive=True):
            body.outputs = [new if tensor is old else tensor for tensor in body.outputs]

    def remove_nodes(self, nodes: Collection[gs.Node]) -> None:
        """Remove nodes from the graph, and disconnect them from their tensors.

        Args:
            nodes: Nodes of the graph.
        """
        removed_ids = {id(node) for node in nodes}
        self.nodes = [node for node in self.nodes if id(node) not in removed_ids]
        for node in nodes:
            for inner in (node, *(inner for body in node.subgraphs(recursive=True) for inner in body.nodes)):
                inner.inputs.clear()
                inner.outputs.clear()

    def insert_nodes(self, nodes: Sequence[gs.Node], before: gs.Node) -> None:
        """Insert nodes before another node.

        Args:
            nodes: New nodes, in order.
            before: Node of the graph that follows the new nodes.
        """
        index = next(index for index, node in enumerate(self.nodes) if node is before)
        self.nodes[index:index] = nodes

    def prune(self) -> None:
        """Remove the nodes that compute nothing that is read, then the initializers that nothing reads."""
        live = {tensor.name for tensor in self.outputs}
        dead = []
        for node in reversed(self.nodes):
            if any(tensor.name in live for tensor in node.outputs):
                live.update(names_read(node))
            else:
                dead.append(node)
        self.remove_nodes(dead)
        overridable = self.overridable_names
        self.unread_initializers = [constant for constant in self.unread_initializers if constant.name in overridable]


def names_read(node: gs.Node) -> Iterator[str]:
    """Yield the names of the tensors that a node and its control-flow bodies read.

    Args:
        node: Node of a graph.

    Yields:
        Names of tensors.
    """
    yield from (tensor.name for tensor in node.inputs if tensor.name)
    for body in node.subgraphs(recursive=True):
        yield from (tensor.name for inner in body.nodes for tensor in inner.inputs if tensor.name)
        yield from (tensor.name for tensor in body.outputs)


def to_graph(proto: onnx.ModelProto, weights: Mapping[str, Weight]) -> ModelGraph:
    """Return the editable graph of a model. Edits of the graph change neither `proto` nor `weights`."""
    opsets = onnx.ModelProto(opset_import=proto.opset_import).opset_import
    graph = _import_graph(proto.graph, weights, {})
    graph.opset = max((entry.version for entry in opsets if entry.domain in ("", "ai.onnx")), default=1)
    graph.import_domains, graph.ir_version = opsets, proto.ir_version
    graph.producer_name, graph.producer_version = proto.producer_name, proto.producer_version
    return graph


def _import_graph(proto: onnx.GraphProto, weights: Mapping[str, Weight], outer: Mapping[str, gs.Tensor]) -> ModelGraph:
    """Return the editable graph of a protobuf message.

    `outer` has the tensors of enclosing graphs, by name, because a control-flow body can read them.
    """
    values = (*proto.value_info, *proto.output, *proto.input)
    infos = {value.name: value for value in values if value.HasField("type")}
    graph = ModelGraph(proto)
    sparse = proto.sparse_initializer
    graph.initializers += [Constant(tensor.name, tensor, weights.get(tensor.name)) for tensor in proto.initializer]
    graph.initializers += [gs.Constant(tensor.values.name, SparseConstantValues(tensor)) for tensor in sparse]
    local: dict[str, gs.Tensor] = {constant.name: constant for constant in graph.initializers}
    graph.overridable_names |= local.keys() & graph.value_infos["input"].keys()
    # A name in a control-flow body hides the same name in an enclosing graph, so local names replace outer ones.
    visible = {**outer, **local}

    def tensor(name: str, tensors: Mapping[str, gs.Tensor]) -> gs.Tensor:
        if name in tensors:
            return tensors[name]
        new = Variable(name, infos.get(name))
        # Omitted inputs and outputs have the name "". Each needs an object of its own, so they are not stored by name.
        if name:
            visible[name] = local[name] = new
        return new

    graph.inputs = [tensor(value.name, local) for value in proto.input if value.name not in graph.overridable_names]
    for node in proto.node:
        bodies = {a.name: _attribute_value(a, visible) for a in node.attribute if a.type == _KINDS.GRAPH}
        inputs = [tensor(name, visible) for name in node.input]
        new = GraphNode(node, inputs, [tensor(name, local) for name in node.output])
        if bodies:
            new.attrs = {a.name: bodies.get(a.name) or _attribute_value(a, {}) for a in node.attribute}
        graph.nodes.append(new)
    graph.outputs = [tensor(value.name, visible) for value in proto.output]
    outputs, unread = graph.value_infos["output"], [entry for entry in graph.initializers if not entry.outputs]
    graph.unread_initializers = [constant for constant in unread if constant.name not in outputs]
    return graph


def _attribute_value(attribute: onnx.AttributeProto, outer: Mapping[str, gs.Tensor]) -> Any:
    """Return the value of an attribute in the form that graphsurgeon uses, or an OpaqueAttribute.

    `outer` has the tensors of enclosing graphs, by name, because a control-flow body can read them.
    """
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
    """Return a ModelGraph of a plain graphsurgeon graph. Data that it lacks is copied from the message `original`."""
    fields = ("nodes", "inputs", "outputs", "opset", "import_domains", "functions", "ir_version")
    new = ModelGraph(original, **{field: getattr(graph, field) for field in fields})
    new.name, new.doc_string = graph.name, graph.doc_string
    imported = _import_graph(original, weights, {})
    for field in ("initializers", "unread_initializers", "overridable_names"):
        setattr(new, field, getattr(imported, field))
    return new
