"""Export of an edited graph to a model, without losing data.

Unchanged nodes, attributes, tensors and constants keep their protobuf messages, including data that graphsurgeon does
not represent: documentation, metadata, annotations, shardings, overloads, unread initializers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues
from onnx_graphsurgeon.logger import G_LOGGER

from dicompiler.ir.onnx.graph import ConstantValues, GraphNode, ModelGraph, OpaqueAttribute, adopt_graph, tensor_info
from dicompiler.ir.onnx.protobuf_io import copy_without
from dicompiler.ir.onnx.weights import MIN_WEIGHT_BYTES, Weight, is_placeholder, make_placeholder

_KINDS = onnx.AttributeProto


def from_graph(
    graph: gs.Graph, proto: onnx.ModelProto, weights: Mapping[str, Weight]
) -> tuple[onnx.ModelProto, dict[str, Weight]]:
    """Return the model of an edited graph, and its weights by name.

    Data that the graph does not represent is copied from the original model, `proto`.
    """
    new = copy_without(proto, "graph", "opset_import")
    if graph.ir_version is not None:
        new.ir_version = graph.ir_version
    new.opset_import.extend(graph.import_domains if graph.import_domains is not None else proto.opset_import)
    imported = {opset.domain for opset in new.opset_import}
    imported |= {"", "ai.onnx"} if imported & {"", "ai.onnx"} else set()
    used = {node.domain or "" for inner in (graph, *graph.subgraphs(recursive=True)) for node in inner.nodes}
    for domain in sorted(used - imported):
        new.opset_import.add(domain=domain, version=1)
    if not isinstance(graph, ModelGraph):
        graph = adopt_graph(graph, proto.graph, weights)
    exported: dict[str, Weight] = {}
    with G_LOGGER.suppress():
        new.functions.extend(OnnxExporter.export_function(function) for function in graph.functions)
        _export_graph(graph, new.graph, exported, frozenset())
    return new, exported


def _export_graph(
    graph: ModelGraph, new: onnx.GraphProto, weights: dict[str, Weight] | None, outer: Collection[str]
) -> None:
    """Write an edited graph to the empty message `new`, and reuse unchanged messages.

    Args:
        graph: The edited graph.
        new: Message that is filled.
        weights: Receives the data of large constants, by name; None (for a control-flow body): the message stores it.
        outer: Names of the constants of enclosing graphs. A control-flow body refers to them and does not contain them.
    """
    rewritten = ("node", "input", "output", "initializer", "sparse_initializer", "value_info")
    new.MergeFrom(copy_without(graph.source_graph, *rewritten))
    for key in ("name", "doc_string"):
        if (getattr(graph, key) or "") != getattr(new, key):
            setattr(new, key, getattr(graph, key) or "")
    tensors = graph.tensors()
    constants = _own_constants(graph, tensors, outer)
    for constant in constants.values():
        if isinstance(constant._values, SparseValues):
            sparse = new.sparse_initializer.add()
            sparse.CopyFrom(constant._values.tensor)
            sparse.values.name = constant.name
        else:
            new.initializer.append(_export_constant(constant, weights))
    _add_values(new, graph, tensors, constants)
    outer = {*outer, *constants}
    namesakes: dict[str, onnx.NodeProto] = {}
    if not all(isinstance(node, GraphNode) for node in graph.nodes):
        namesakes = {node.name: node for node in graph.source_graph.node if node.name}
    new.node.extend(export_node(node, outer, namesakes.get(node.name)) for node in graph.nodes)


def _own_constants(
    graph: ModelGraph, tensors: Mapping[str, gs.Tensor], outer: Collection[str]
) -> dict[str, gs.Constant]:
    """Return the constants that a graph stores itself (not an enclosing graph), by name, in file order.

    New constants follow in order of first use. `tensors` has the tensors of the graph by name. `outer` has the names of
    the constants of enclosing graphs.
    """
    read = dict(tensors)
    for body in graph.subgraphs(recursive=True):
        inside = {id(constant) for constant in vars(body).get("initializers", ())}
        for name, tensor in body.tensors().items():
            if isinstance(tensor, gs.Constant) and id(tensor) not in inside:
                read.setdefault(name, tensor)
    spare = {id(constant) for constant in graph.unread_initializers}
    constants: dict[str, gs.Constant] = {}
    for constant in graph.initializers:
        reader = read.get(constant.name, constant if id(constant) in spare else None)
        if isinstance(reader, gs.Constant):
            constants[constant.name] = reader
    for name, tensor in tensors.items():
        if isinstance(tensor, gs.Constant) and name not in outer:
            constants.setdefault(name, tensor)
    return constants


def _export_constant(constant: gs.Constant, weights: dict[str, Weight] | None) -> onnx.TensorProto:
    """Return the initializer of a constant, which is the original message if nothing changed.

    The data of a large constant is added to `weights`. If `weights` is None, the data is stored in the message.
    """
    source: onnx.TensorProto | None = getattr(constant, "source", None)
    name, values = constant.name, constant._values
    if isinstance(values, LazyValues):
        is_own = isinstance(values, ConstantValues)
        message, weight = (values.source, values.weight) if is_own else (values.tensor, None)
        if weight is not None:
            if weights is None:
                return _export_weight(name, weight, message, None)
            weights[name] = weight
        tensor: onnx.TensorProto = message if message.name == name else copy_without(message)
        if tensor.name != name:
            tensor.name = name
        return tensor
    array = np.asarray(values)
    if source is not None and source.name == name and not is_placeholder(source) and _has_same_content(source, array):
        return source
    if array.dtype.kind in "OUS":
        return onnx.numpy_helper.from_array(array.astype(object), name)
    return _export_weight(name, Weight.from_array(array), source, weights)


def _export_weight(
    name: str, weight: Weight, source: onnx.TensorProto | None, weights: dict[str, Weight] | None
) -> onnx.TensorProto:
    """Return an initializer with new data, and with the `doc_string` and the metadata of the old initializer `source`.

    Large data is added to `weights`. If `weights` is None, the data is stored in the message.
    """
    if weights is not None and weight.nbytes >= MIN_WEIGHT_BYTES:
        weights[name] = weight
        tensor = make_placeholder(name, weight)
    else:
        tensor = onnx.TensorProto(name=name, data_type=weight.dtype, dims=weight.shape, raw_data=bytes(weight.data))
    if source is not None:
        tensor.metadata_props.extend(source.metadata_props)
        if source.HasField("doc_string"):
            tensor.doc_string = source.doc_string
    return tensor


def _has_same_content(tensor: onnx.TensorProto, array: NDArray[Any]) -> bool:
    other = onnx.numpy_helper.to_array(tensor)
    if other.dtype != array.dtype or other.shape != array.shape:
        return False
    return bool(np.array_equal(other, array)) if array.dtype.kind == "O" else other.tobytes() == array.tobytes()


def _add_values(
    new: onnx.GraphProto, graph: ModelGraph, tensors: Mapping[str, gs.Tensor], constants: Mapping[str, gs.Constant]
) -> None:
    """Add inputs, outputs and types of tensors to the graph message `new`.

    `tensors` and `constants` are those of `graph`, by name.
    """
    inputs, outputs, values = (graph.value_infos[field] for field in ("input", "output", "value_info"))
    new_inputs = [_export_info(tensor, inputs.get(tensor.name)) for tensor in graph.inputs]
    for index, (name, value) in enumerate(inputs.items()):
        if name in graph.overridable_names and name in constants:
            new_inputs.insert(index, value)
    new.input.extend(new_inputs)
    new.output.extend(_export_info(tensor, outputs.get(tensor.name)) for tensor in graph.outputs)
    present = {**constants, **tensors}
    new.value_info.extend(_export_info(present[name], value) for name, value in values.items() if name in present)
    done = {value.name for value in (*new.input, *new.output)} | values.keys()
    for tensor in (tensor for node in graph.nodes for tensor in node.outputs if tensor.name not in done):
        if tensor.name and isinstance(tensor, gs.Variable) and tensor.dtype is not None:
            new.value_info.append(_export_info(tensor, None))


def _export_info(tensor: gs.Tensor, original: onnx.ValueInfoProto | None) -> onnx.ValueInfoProto:
    """Return the protobuf message with the type of a tensor: `original`, unless the graph changed the tensor."""
    # `info` is the message from which the graph read the tensor's type. It can differ from `original`: a model output
    # can have one message in the field `output` and another one in `value_info`.
    info: Any = getattr(tensor, "info", original)
    original = original if original is not None else info
    keys = () if isinstance(tensor, gs.Constant) else tensor.__dict__.keys() & {"dtype", "shape"}
    changed = any(getattr(tensor, key) != tensor_info(info, key) for key in keys)
    if original is not None and not changed and original.name == tensor.name:
        return original
    new = onnx.ValueInfoProto()
    if original is None or (changed and tensor.dtype is not None and tensor.type == "tensor_type"):
        new = OnnxExporter.export_value_info_proto(tensor, do_type_check=False)
    if original is None:
        return new
    kept = copy_without(original)
    kept.name = tensor.name
    if new.HasField("type"):
        new_type, old_type = new.type.tensor_type, kept.type.tensor_type
        for new_dim, old_dim in zip(new_type.shape.dim, old_type.shape.dim, strict=False):
            if old_dim.denotation:
                new_dim.denotation = old_dim.denotation
        if tensor.dtype == tensor_info(info, "dtype"):
            # graphsurgeon's export loses element types that numpy lacks, such as INT4, so the old type is copied.
            new_type.elem_type = old_type.elem_type
        old_type.CopyFrom(new_type)
    return kept


def export_node(node: gs.Node, outer: Collection[str] = (), namesake: onnx.NodeProto | None = None) -> onnx.NodeProto:
    """Return the protobuf message of a node, including data of its original message that graphsurgeon would drop.

    Args:
        node: Node of an edited graph.
        outer: Names of constants of enclosing graphs. A control-flow body of the node refers to them without a copy.
        namesake: Node of the original graph with the same name. If graphsurgeon made `node` with the same operator,
            this is its original message.

    Returns:
        The message.
    """
    original = node.proto if isinstance(node, GraphNode) else namesake
    if original is None or (original is namesake and namesake.op_type != node.op):
        original = onnx.NodeProto()
    inputs, outputs = [tensor.name for tensor in node.inputs], [tensor.name for tensor in node.outputs]
    same = (original.name, original.op_type, original.domain) == (node.name, node.op, node.domain or "")
    read = "attrs" in node.__dict__
    if same and not read and original.input == inputs and original.output == outputs:
        return original
    new = copy_without(original, "input", "output", *(("attribute",) if read else ()))
    if node.op != original.op_type:
        new.op_type = node.op
        new.ClearField("overload")
    if new.name != node.name:
        new.name = node.name
    if node.domain is not None and new.domain != node.domain:
        new.domain = node.domain
    new.input.extend(inputs)
    new.output.extend(outputs)
    if read:
        kept = {attribute.name: attribute for attribute in original.attribute}
        order = {name: index for index, name in enumerate(kept)}
        for name in sorted(node.attrs, key=lambda name: order.get(name, len(order))):
            new.attribute.append(_export_attribute(name, node.attrs[name], kept.get(name), outer))
    return new


def _export_attribute(
    name: str, value: Any, original: onnx.AttributeProto | None, outer: Collection[str]
) -> onnx.AttributeProto:
    """Return the message of an attribute.

    Args:
        name: Name of the attribute.
        value: New value.
        original: Attribute of the same name in the original node. It has the data that the graph does not represent.
        outer: Names of the constants of enclosing graphs. A control-flow body refers to them and does not contain them.
    """
    if original is None or original.type not in (_KINDS.GRAPH, _KINDS.TENSOR):
        new, body = _KINDS(name=name), onnx.GraphProto()
    else:
        new, body = copy_without(original, "t", "g"), original.g
    new.name = name
    if isinstance(value, OpaqueAttribute):
        new.CopyFrom(value.attribute)
        new.name = name
    elif isinstance(value, gs.Graph):
        new.type = _KINDS.GRAPH
        _export_graph(value if isinstance(value, ModelGraph) else adopt_graph(value, body, {}), new.g, None, outer)
    elif isinstance(value, gs.Constant):
        new.type = _KINDS.TENSOR
        new.t.CopyFrom(_export_constant(value, None))
    else:
        new = _export_plain_attribute(name, value, original)
    return new


def _export_plain_attribute(name: str, value: Any, original: onnx.AttributeProto | None) -> onnx.AttributeProto:
    """Return the protobuf message of a number, text or list: `original`, if its value is the same."""
    if original is not None and isinstance(value, (list, tuple)) and not value:
        return onnx.helper.make_attribute(name, value, attr_type=original.type)
    new: onnx.AttributeProto = OnnxExporter.export_attributes({name: value})[0]
    if original is None or (original.type, original.ref_attr_name) != (new.type, new.ref_attr_name):
        return new
    return original if onnx.helper.get_attribute_value(original) == onnx.helper.get_attribute_value(new) else new
