"""Structure of a model: the tensors that nodes read, and a digest of everything on which a plan depends.

The digest ignores documentation, producers, metadata, inferred types and the values of weights, so a retrained model
has the same digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx

Record = list[Any]


def structural_digest(model: onnx.ModelProto) -> str:
    """Return the SHA-256 digest of the model's structure as 64 hexadecimal digits."""
    opsets = sorted([entry.domain if entry.domain != "ai.onnx" else "", entry.version] for entry in model.opset_import)
    text = json.dumps([opsets, _graph_record(model.graph), sorted(map(_function_record, model.functions))])
    return hashlib.sha256(text.encode()).hexdigest()


def control_flow_bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs in a node's attributes: the bodies of If, Loop and Scan."""
    return [g for a in node.attribute for g in ([a.g] if a.HasField("g") else []) + list(a.graphs)]


def graph_and_bodies(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Yield a graph and all control-flow bodies in it."""
    yield graph
    for node in graph.node:
        for body in control_flow_bodies(node):
            # protobuf does not parse bodies that are nested more than 33 times, so the recursion has a limit.
            yield from graph_and_bodies(body)


def produced_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of a graph's inputs, initializers and computed tensors, except those in control-flow bodies."""
    yield from (value.name for value in (*graph.input, *graph.initializer))
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    yield from (name for node in graph.node for name in node.output if name)


def tensors_read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of the tensors that a node reads: its inputs, and outer tensors that its bodies read."""
    yield from (name for name in node.input if name)
    yield from body_reads(node)


def describe_undefined_tensor(graph: onnx.GraphProto) -> str:
    """Describe the first tensor that is read, or is a graph output, without being defined; '' if there is none."""
    defined = set(produced_names(graph))
    for node in graph.node:
        for name in tensors_read(node):
            if name not in defined:
                kinds = "neither an input nor a weight nor the output of a node"
                return f"{node.op_type} {node.name!r} reads {name!r}, which is {kinds}"
    undefined_output = next((value.name for value in graph.output if value.name not in defined), None)
    return "" if undefined_output is None else f"no node computes the output {undefined_output!r}"


def body_reads(node: onnx.NodeProto) -> dict[str, None]:
    """Return the names of the outer tensors that a node's control-flow bodies read, as keys in order of first use."""
    return dict.fromkeys(name for body in control_flow_bodies(node) for name in _captured_by_body(body))


def body_names(node: onnx.NodeProto) -> Iterator[str]:
    for body in control_flow_bodies(node):
        for inner in body.node:
            yield from (*inner.input, *inner.output, *body_names(inner))


def rename_captures(node: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    """Rename the outer tensors that a node's control-flow bodies read. `renamed` maps old to new names."""
    for body in control_flow_bodies(node):
        inside = set(produced_names(body))
        outer = {old: new for old, new in renamed.items() if old not in inside}
        for inner in body.node:
            inner.input[:] = [outer.get(name, name) for name in inner.input]
            rename_captures(inner, outer)
        for value in body.output:
            value.name = outer.get(value.name, value.name)


def captured_names(node: onnx.NodeProto) -> set[str]:
    """Return the names of the outer tensors that a node's control-flow bodies read.

    Args:
        node: Node that may have control-flow bodies.

    Returns:
        Names of tensors of the enclosing graphs.
    """
    return set(body_reads(node))


def _captured_by_body(body: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of the outer tensors that a control-flow body reads."""
    inside = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
    inside |= {tensor.values.name for tensor in body.sparse_initializer}
    for node in body.node:
        yield from (name for name in (*node.input, *body_reads(node)) if name and name not in inside)
        inside.update(node.output)
    yield from (value.name for value in body.output if value.name not in inside)


def _function_record(function: onnx.FunctionProto) -> Record:
    names = [list(function.input), list(function.output), list(function.attribute)]
    content = [_attribute_records(function.attribute_proto), *map(_node_record, function.node)]
    return [function.domain, function.name, function.overload, *names, *content]


def _graph_record(graph: onnx.GraphProto) -> Record:
    sparse = sorted([t.values.name, t.values.data_type, list(t.dims)] for t in graph.sparse_initializer)
    return [
        [_value_record(value) for value in graph.input],
        [_value_record(value) for value in graph.output],
        sorted(_tensor_record(tensor) for tensor in graph.initializer),
        sparse,
        [_node_record(node) for node in graph.node],
    ]


def _value_record(value: onnx.ValueInfoProto) -> Record:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return [value.name, value.type.SerializeToString(deterministic=True).hex()]
    tensor = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]
    return [value.name, tensor.elem_type, dims if tensor.HasField("shape") else None]


def _tensor_record(tensor: onnx.TensorProto) -> Record:
    """Return the name, type, shape and values of a tensor for the digest.

    Only values of 64-bit integer tensors are included, because these are shapes and axes, not weights.
    """
    values: list[int] = []
    if tensor.data_type == onnx.TensorProto.INT64 and tensor.data_location != onnx.TensorProto.EXTERNAL:
        values = onnx.numpy_helper.to_array(tensor).reshape(-1).tolist()
    return [tensor.name, tensor.data_type, list(tensor.dims), values]


def _node_record(node: onnx.NodeProto) -> Record:
    domain = node.domain if node.domain != "ai.onnx" else ""
    row = [node.name, domain, node.op_type, node.overload, list(node.input), list(node.output)]
    return [*row, _attribute_records(node.attribute)]


def _attribute_records(attributes: Iterable[onnx.AttributeProto]) -> Record:
    # The order of attributes has no meaning.
    return sorted((_attribute_record(attribute) for attribute in attributes), key=lambda row: str(row[0]))


def _attribute_record(attribute: onnx.AttributeProto) -> Record:
    value: Any
    kinds = onnx.AttributeProto
    if attribute.ref_attr_name:
        value = attribute.ref_attr_name
    elif attribute.type in (kinds.FLOAT, kinds.INT, kinds.FLOATS, kinds.INTS):
        value = onnx.helper.get_attribute_value(attribute)
        value = list(value) if attribute.type in (kinds.FLOATS, kinds.INTS) else value
    elif attribute.type in (kinds.STRING, kinds.STRINGS):
        value = [text.hex() for text in ([attribute.s] if attribute.type == kinds.STRING else attribute.strings)]
    elif attribute.type in (kinds.TENSOR, kinds.TENSORS):
        value = [_tensor_record(t) for t in ([attribute.t] if attribute.type == kinds.TENSOR else attribute.tensors)]
    elif attribute.type in (kinds.GRAPH, kinds.GRAPHS):
        value = [_graph_record(g) for g in ([attribute.g] if attribute.type == kinds.GRAPH else attribute.graphs)]
    else:
        value = attribute.SerializeToString(deterministic=True).hex()
    return [attribute.name, attribute.type, value]
