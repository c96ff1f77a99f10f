"""The graphsurgeon view of a model, and the way back that loses nothing.

In: a skeleton ModelProto with its weights → a gs.Graph whose constants are lazy views. Out: the same model again, where
each node, attribute, tensor and constant that the graph left as it was is the original message, with all that
graphsurgeon does not carry (documentation, metadata, annotations, shardings, overloads, unread initializers …).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.importers.onnx_importer import OnnxImporter
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues
from onnx_graphsurgeon.logger import G_LOGGER

from dicompiler.ir.onnx.file import without
from dicompiler.ir.onnx.structure import reads
from dicompiler.ir.onnx.weights import LARGE, Weight, dense, hollow, is_hollow

_KINDS = onnx.AttributeProto
_SIMPLE = (_KINDS.FLOAT, _KINDS.INT, _KINDS.STRING, _KINDS.FLOATS, _KINDS.INTS, _KINDS.STRINGS)


@dataclass(frozen=True)
class Held:
    """An attribute that graphsurgeon cannot carry (an empty list, text that is not UTF-8, a sparse tensor, a type …).

    It stands in `node.attrs` under its name, so that a pass can see that it is there, move or delete it.
    """

    attribute: onnx.AttributeProto


class View(LazyValues):  # type: ignore[misc]
    """The values of a constant that a weight holds. `tensor` is made anew, because graphsurgeon renames it in place."""

    def __init__(self, name: str, weight: Weight) -> None:
        super().__init__(hollow(name, weight))
        self.weight = weight

    def load(self) -> NDArray[Any]:
        """The weight's values, not copied."""
        return self.weight.array()


class Sparse(SparseValues):  # type: ignore[misc]
    """The values of a sparse constant, in its own type (graphsurgeon makes them float64)."""

    def load(self) -> NDArray[Any]:
        """The dense array."""
        return dense(self.tensor)


# --- model → graph ------------------------------------------------------------------------------------------------


def to_graph(proto: onnx.ModelProto, weights: Mapping[str, Weight]) -> gs.Graph:
    """The model as a gs.Graph of its own: nothing done to it reaches `proto` or `weights`."""
    copy = without(proto, "functions")
    held = _hold(copy.graph)
    with G_LOGGER.suppress():  # it prints to standard output
        graph = gs.import_onnx(copy)
    _give_back(graph, held)
    for inner in (graph, *graph.subgraphs(recursive=True)):
        for tensor in inner.tensors().values():
            if isinstance(tensor, gs.Constant):
                _make_view(tensor, weights)
    return graph


def _make_view(constant: gs.Constant, weights: Mapping[str, Weight]) -> None:
    values = constant._values
    if type(values) is SparseValues:
        constant._values = Sparse(values.tensor)
    elif type(values) is LazyValues and is_hollow(values.tensor):
        constant._values, constant.data_location = View(constant.name, weights[constant.name]), None


@dataclass
class _HeldNodes:
    """What was taken out of a graph: by node index its attributes, and by (node index, attribute) that of bodies."""

    attributes: dict[int, list[onnx.AttributeProto]] = field(default_factory=dict)
    bodies: dict[tuple[int, str], _HeldNodes] = field(default_factory=dict)


def _hold(graph: onnx.GraphProto) -> _HeldNodes:
    """Takes the attributes out of `graph` that graphsurgeon would drop or refuse."""
    held = _HeldNodes()
    for index, node in enumerate(graph.node):
        taken = [attribute for attribute in node.attribute if not _carried(attribute)]
        if taken:
            kept = [attribute for attribute in node.attribute if _carried(attribute)]
            held.attributes[index] = taken
            del node.attribute[:]
            node.attribute.extend(kept)
        for attribute in node.attribute:
            if attribute.type == _KINDS.GRAPH:
                held.bodies[index, attribute.name] = _hold(attribute.g)
    return held


def _carried(attribute: onnx.AttributeProto) -> bool:
    """Whether graphsurgeon can hold the attribute."""
    if attribute.ref_attr_name or attribute.type not in (*_SIMPLE, _KINDS.TENSOR, _KINDS.GRAPH):
        return False
    lists = (_KINDS.FLOATS, _KINDS.INTS, _KINDS.STRINGS)
    if attribute.type in lists and not onnx.helper.get_attribute_value(attribute):
        return False
    texts = [attribute.s, *attribute.strings]
    try:
        return all(text.decode() is not None for text in texts)
    except UnicodeDecodeError:
        return False


def _give_back(graph: gs.Graph, held: _HeldNodes) -> None:
    """Puts what was held into the nodes of the graph as `Held` values."""
    for index, attributes in held.attributes.items():
        for attribute in attributes:
            graph.nodes[index].attrs[attribute.name] = Held(attribute)
    for (index, name), body in held.bodies.items():
        _give_back(graph.nodes[index].attrs[name], body)


# --- graph → model ------------------------------------------------------------------------------------------------


def from_graph(
    graph: gs.Graph, proto: onnx.ModelProto, weights: Mapping[str, Weight]
) -> tuple[onnx.ModelProto, dict[str, Weight]]:
    """The model that `graph` has become; `proto` and `weights` are what it was made of and give what it cannot hold."""
    new = without(proto, "graph", "opset_import")
    if graph.ir_version is not None:
        new.ir_version = graph.ir_version
    new.opset_import.extend(graph.import_domains if graph.import_domains is not None else proto.opset_import)
    known = {opset.domain for opset in new.opset_import}
    used = {node.domain or "" for inner in (graph, *graph.subgraphs(recursive=True)) for node in inner.nodes}
    aliases = {"", "ai.onnx"}
    for domain in sorted(used - known - (aliases if known & aliases else set())):
        new.opset_import.add(domain=domain, version=1)
    new.functions.extend(OnnxExporter.export_function(function) for function in graph.functions)
    made: dict[str, Weight] = {}
    with G_LOGGER.suppress():
        new.graph.CopyFrom(_Exporter(made, frozenset()).graph(graph, proto.graph))
    hollows = [tensor.name for tensor in new.graph.initializer if is_hollow(tensor)]
    return new, {name: made[name] if name in made else weights[name] for name in hollows}


@dataclass(frozen=True)
class _Exporter:
    """Makes a GraphProto of a gs.Graph.

    weights: takes the large constants' data; None (a control-flow body): the data stays inside.
    outer: the constants of the enclosing graphs, which a body only names.
    """

    weights: dict[str, Weight] | None
    outer: frozenset[str]

    def graph(self, graph: gs.Graph, original: onnx.GraphProto) -> onnx.GraphProto:
        """The graph, with every message of `original` that it left as it was."""
        new = without(original, "node", "input", "output", "initializer", "sparse_initializer", "value_info")
        for key in ("name", "doc_string"):
            if (getattr(graph, key) or "") != getattr(new, key):
                setattr(new, key, getattr(graph, key) or "")
        tensors = {name: tensor for name, tensor in graph.tensors().items() if name}
        constants = {name: t for name, t in tensors.items() if isinstance(t, gs.Constant) and name not in self.outer}
        constants |= _captured(graph, _initializer_names(original))
        self._initializers(new, original, constants, set(tensors))
        _add_values(new, graph, original, tensors)
        inner = _Exporter(None, self.outer | set(constants))
        nodes = {_node_key(node.name, node.output): node for node in original.node}
        for node in graph.nodes:
            key = _node_key(node.name, [tensor.name for tensor in node.outputs])
            new.node.append(inner.node(node, nodes.get(key)))
        return new

    def _initializers(
        self, new: onnx.GraphProto, original: onnx.GraphProto, constants: Mapping[str, gs.Constant], taken: set[str]
    ) -> None:
        """In the original order (with those that nothing ever read), then the new ones in the order they are met."""
        kept = _unread(original) - taken
        for tensor in original.initializer:
            if tensor.name in constants and not _is_sparse(constants[tensor.name]):
                new.initializer.append(self.constant(constants[tensor.name], tensor))
            elif tensor.name in kept:
                new.initializer.append(tensor)
        for sparse in original.sparse_initializer:
            if sparse.values.name in constants and _is_sparse(constants[sparse.values.name]):
                new.sparse_initializer.append(_sparse(constants[sparse.values.name]))
            elif sparse.values.name in kept:
                new.sparse_initializer.append(sparse)
        done = _initializer_names(new)
        for name, constant in constants.items():
            if name not in done and _is_sparse(constant):
                new.sparse_initializer.append(_sparse(constant))
            elif name not in done:
                new.initializer.append(self.constant(constant, None))

    def constant(self, constant: gs.Constant, original: onnx.TensorProto | None) -> onnx.TensorProto:
        """The initializer of a constant: the original where nothing changed."""
        values = constant._values
        if isinstance(values, View):
            return self._weight(constant.name, values.weight, original)
        if isinstance(values, LazyValues):
            tensor = onnx.TensorProto()
            tensor.CopyFrom(values.tensor)
            if tensor.name != constant.name:
                tensor.name = constant.name
            return tensor
        array = np.asarray(values)
        if original is not None and not is_hollow(original) and _same(original, array):
            return original
        if array.dtype.kind in "OUS":
            return onnx.numpy_helper.from_array(array.astype(object), constant.name)
        return self._weight(constant.name, Weight.of(array), original)

    def _weight(self, name: str, weight: Weight, original: onnx.TensorProto | None) -> onnx.TensorProto:
        if self.weights is not None and weight.nbytes >= LARGE:
            self.weights[name] = weight
            made = hollow(name, weight)
        else:
            made = onnx.TensorProto(name=name, data_type=weight.dtype, dims=weight.shape, raw_data=bytes(weight.data))
        if original is not None:
            made.metadata_props.extend(original.metadata_props)
            if original.HasField("doc_string"):
                made.doc_string = original.doc_string
        return made

    def node(self, node: gs.Node, original: onnx.NodeProto | None) -> onnx.NodeProto:
        """The node; all of its namesake `original` that is not in the view is kept, if the operator is the same."""
        new, kept = onnx.NodeProto(), dict[str, onnx.AttributeProto]()
        if original is not None and (original.op_type, original.domain) == (node.op, node.domain or ""):
            new = without(original, "input", "output", "attribute")
            kept = {attribute.name: attribute for attribute in original.attribute}
        if new.name != node.name:
            new.name = node.name
        new.op_type = node.op
        if node.domain is not None and new.domain != node.domain:
            new.domain = node.domain
        new.input.extend(tensor.name for tensor in node.inputs)
        new.output.extend(tensor.name for tensor in node.outputs)
        order = {name: index for index, name in enumerate(kept)}
        for name in sorted(node.attrs, key=lambda name: order.get(name, len(order))):
            new.attribute.append(self._attribute(name, node.attrs[name], kept.get(name)))
        return new

    def _attribute(self, name: str, value: Any, original: onnx.AttributeProto | None) -> onnx.AttributeProto:
        if original is not None and original.type in (_KINDS.GRAPH, _KINDS.TENSOR):
            new = without(original, "name", "g", "t")
            new.name = name
        else:
            new = _KINDS(name=name)
        if isinstance(value, Held):
            new.CopyFrom(value.attribute)
            new.name = name
        elif isinstance(value, gs.Graph):
            new.type = _KINDS.GRAPH
            new.g.CopyFrom(self.graph(value, original.g if original is not None else onnx.GraphProto()))
        elif isinstance(value, gs.Constant):
            new.type = _KINDS.TENSOR
            new.t.CopyFrom(self.constant(value, original.t if original is not None else None))
        else:
            new = _plain_attribute(name, value, original)
        return new


def _plain_attribute(name: str, value: Any, original: onnx.AttributeProto | None) -> onnx.AttributeProto:
    """A number, text or list; `original` itself where it says the same (it may be documented)."""
    if original is not None and isinstance(value, (list, tuple)) and not value:
        return onnx.helper.make_attribute(name, value, attr_type=original.type)
    new: onnx.AttributeProto = OnnxExporter.export_attributes({name: value})[0]
    if original is not None and original.type == new.type and original.ref_attr_name == new.ref_attr_name:
        same = bool(onnx.helper.get_attribute_value(original) == onnx.helper.get_attribute_value(new))
        return original if same else new
    return new


def _add_values(
    new: onnx.GraphProto, graph: gs.Graph, original: onnx.GraphProto, tensors: Mapping[str, gs.Tensor]
) -> None:
    """Inputs, outputs and value_info of `new`; an input that is also an initializer keeps its place."""
    seen_as: dict[str, onnx.ValueInfoProto] = {}  # graphsurgeon takes a tensor's type from its first mention
    for value in (*original.value_info, *original.input, *original.output):
        seen_as.setdefault(value.name, value)
    inputs, outputs = ({v.name: v for v in values} for values in (original.input, original.output))
    initializers, defaults = _initializer_names(new), _initializer_names(original)
    new.input.extend(_value(tensor, inputs.get(tensor.name), seen_as) for tensor in graph.inputs)
    present = {value.name for value in new.input}
    for index, value in enumerate(original.input):
        if value.name in initializers & defaults - present:
            new.input.insert(index, value)
    new.output.extend(_value(tensor, outputs.get(tensor.name), seen_as) for tensor in graph.outputs)
    for value in original.value_info:
        if value.name in tensors:
            new.value_info.append(_value(tensors[value.name], value, seen_as))
        elif value.name in initializers:
            new.value_info.append(value)
    done = {value.name for values in (new.input, new.output, new.value_info) for value in values}
    made = {tensor.name: tensor for node in graph.nodes for tensor in node.outputs if isinstance(tensor, gs.Variable)}
    for name, tensor in made.items():
        if name and name not in done and tensor.dtype is not None:
            new.value_info.append(_value(tensor, None, seen_as))


def _value(
    tensor: gs.Tensor, original: onnx.ValueInfoProto | None, seen_as: Mapping[str, onnx.ValueInfoProto]
) -> onnx.ValueInfoProto:
    """The tensor's type: `original` where the graph left it as it was."""
    if original is not None:
        if isinstance(tensor, gs.Constant):
            return original
        was = OnnxImporter.import_tensor(seen_as[original.name])
        if (was.dtype, _dims(was.shape)) == (tensor.dtype, _dims(tensor.shape)):
            return original
    made: onnx.ValueInfoProto = OnnxExporter.export_value_info_proto(tensor, do_type_check=False)
    return made


def _dims(shape: Any) -> list[Any] | None:
    return None if shape is None else list(shape)


def _captured(graph: gs.Graph, names: set[str]) -> dict[str, gs.Constant]:
    """The constants among `names` that only control-flow bodies within `graph` read (graphsurgeon forgets them)."""
    tensors = (item for body in graph.subgraphs(recursive=True) for item in body.tensors().items())
    return {name: tensor for name, tensor in tensors if name in names and isinstance(tensor, gs.Constant)}


def _initializer_names(graph: onnx.GraphProto) -> set[str]:
    return {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}


def _unread(graph: onnx.GraphProto) -> set[str]:
    """The initializers that no node, body or output of the graph reads."""
    return _initializer_names(graph) - set(reads(graph)) - {value.name for value in graph.output}


def _node_key(name: str, outputs: Any) -> str:
    """What a node is known by: its name; in a body, where names may be missing, else its first output."""
    return name or f"\n{next(iter(outputs), '')}"


def _is_sparse(constant: gs.Constant) -> bool:
    return isinstance(constant._values, SparseValues)


def _sparse(constant: gs.Constant) -> onnx.SparseTensorProto:
    tensor = onnx.SparseTensorProto()
    tensor.CopyFrom(constant._values.tensor)
    tensor.values.name = constant.name
    return tensor


def _same(tensor: onnx.TensorProto, array: NDArray[Any]) -> bool:
    """Whether the tensor has exactly the array's type, shape and content."""
    other = onnx.numpy_helper.to_array(tensor)
    if other.dtype != array.dtype or other.shape != array.shape:
        return False
    return bool(np.array_equal(other, array)) if array.dtype.kind == "O" else other.tobytes() == array.tobytes()
