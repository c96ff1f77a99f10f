"""Shape inference and rewrites for nodes of which ONNX infers other shapes than onnxruntime computes.

`infer_as_onnxruntime`: model ⇒ model with value_info. ONNX infers the shapes first. If onnxruntime computes another
shape for a node, this shape is written into the model, and the node gets a domain that ONNX does not know. The
inference is then repeated, so that it uses the written shape for the tensors after the node.

`state_window_pads`: graph ⇒ equivalent graph of which ONNX infers the shapes correctly. Targets and onnxruntime itself
infer shapes as ONNX does, so the segments of devices must have no nodes that ONNX infers differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from dicompiler.plugin_api import Model, Shape
from dicompiler.plugin_api.onnx import (
    STAND_IN_DOMAIN,
    ModelGraph,
    OpaqueAttribute,
    TensorInfo,
    Variable,
    onnx_window_attributes,
    onnxruntime_output_shape,
)

_DISPUTED_ATTRIBUTES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), frozenset({"auto_pad", "ceil_mode"})),
    "ConvTranspose": frozenset({"auto_pad", "output_shape"}),
    "Resize": frozenset({"keep_aspect_ratio_policy"}),
}
"""Operator → attributes for which ONNX and onnxruntime may compute different shapes."""

_STANDARD_DOMAIN = re.compile(rf"(ai\.onnx|{re.escape(STAND_IN_DOMAIN)}(#\d+)?)?")
"""Domains of the standard operators, and of their stand-ins (integer functions with the same attributes and shapes)."""

_OPAQUE_DOMAIN = "dicompiler.opaque"
"""Domain without operators. ONNX infers nothing for its nodes, and uses the shapes that the model states."""


def infer_as_onnxruntime(
    model: onnx.ModelProto, infer: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Return the model with inferred shapes: those of onnxruntime if it disagrees with ONNX.

    Args:
        model: A model without weights, which is not changed.
        infer: Function that returns a copy of a model with the shapes that ONNX infers.
    """
    disputed = {index: node for index, node in enumerate(model.graph.node) if _is_disputed(node)}
    inferred = infer(model)
    outputs: dict[int, list[onnx.ValueInfoProto]] = {}
    while disputed and (corrected := outputs | dict(_find_other_outputs(inferred, disputed))) != outputs:
        outputs = corrected
        inferred = infer(_hide_nodes(model, outputs))
        for index in outputs:
            inferred.graph.node[index].CopyFrom(disputed[index])
        del inferred.opset_import[len(model.opset_import) :]
    return inferred


def state_window_pads(graph: ModelGraph, tensors: Mapping[str, TensorInfo]) -> bool:
    """Replace attributes from which ONNX infers another shape than onnxruntime; return True if there were any.

    ConvTranspose(auto_pad=SAME_UPPER, output_padding)      ⇒  ConvTranspose(pads, output_padding)
    MaxPool(ceil_mode=1), a last window outside of the input  ⇒  Slice → MaxPool(ceil_mode=1)
    """
    changed = False
    for node in [node for node in graph.nodes if node.op in _DISPUTED_ATTRIBUTES]:
        if not _STANDARD_DOMAIN.fullmatch(node.domain or "") or any(map(_is_opaque, node.attrs.values())):
            continue
        if node.op == "Resize":
            changed |= _drop_negative_axes(graph, node, tensors)
            continue
        stated = onnx_window_attributes(node.op, node.attrs, [tensors.get(tensor.name) for tensor in node.inputs])
        if stated is None:
            continue
        attributes, extents = stated
        shape = tensors[node.inputs[0].name].shape
        assert shape is not None
        if extents != shape[2:]:
            # A Slice of the input would change the second output of a MaxPool, which has indices into the whole input.
            if len(node.outputs) > 1:
                continue
            _slice_input(graph, node, extents)
        node.attrs.update(attributes)
        for name in [name for name, value in attributes.items() if value is None]:
            del node.attrs[name]
        changed = True
    return changed


def _drop_negative_axes(graph: ModelGraph, node: gs.Node, tensors: Mapping[str, TensorInfo]) -> bool:
    """Drop the negative axes of a Resize that keeps the aspect ratio; return True if there were any.

    onnxruntime ignores these axes and their sizes.
    """
    axes, policy = node.attrs.get("axes", ()), node.attrs.get("keep_aspect_ratio_policy", "stretch")
    sizes = tensors[node.inputs[3].name].value if len(node.inputs) > 3 else None
    if policy == "stretch" or sizes is None or all(axis >= 0 for axis in axes):
        return False
    sizes_by_axis = {axis: size for axis, size in zip(axes, sizes.tolist(), strict=True) if axis >= 0}
    if sizes_by_axis:
        node.attrs["axes"] = list(sizes_by_axis)
        name = graph.unused_tensor_name(f"{node.name}_sizes")
        node.inputs[3] = graph.add_initializer(name, np.array([*sizes_by_axis.values()], np.int64))
    else:
        node.op, node.inputs = "Identity", node.inputs[:1]
        node.attrs.clear()
    return True


def _is_opaque(value: Any) -> bool:
    return isinstance(value, OpaqueAttribute)


def _slice_input(graph: ModelGraph, node: gs.Node, extents: Shape) -> None:
    """Insert a Slice that keeps only the first elements of each spatial axis of the node's input.

    `extents` has the number of kept elements for each spatial axis.
    """
    name = graph.unused_tensor_name(f"{node.inputs[0].name}_read")
    axes = range(2, 2 + len(extents))
    bounds = {"starts": [0] * len(extents), "ends": list(extents), "axes": list(axes)}
    new = gs.Node("Slice", graph.unused_node_name(name), {}, [node.inputs[0]], [Variable(name)])
    for key, values in bounds.items():
        if graph.opset < 10:
            new.attrs[key] = values
        else:
            new.inputs.append(
                graph.add_initializer(graph.unused_tensor_name(f"{name}_{key}"), np.array(values, np.int64))
            )
    graph.insert_nodes([new], before=node)
    node.inputs[0] = new.outputs[0]


def _is_disputed(node: onnx.NodeProto) -> bool:
    names = _DISPUTED_ATTRIBUTES.get(node.op_type)
    if names is None or not _STANDARD_DOMAIN.fullmatch(node.domain):
        return False
    return any(attribute.name in names for attribute in node.attribute)


def _find_other_outputs(
    inferred: onnx.ModelProto, disputed: Mapping[int, onnx.NodeProto]
) -> Iterator[tuple[int, list[onnx.ValueInfoProto]]]:
    """Yield the nodes for which ONNX has inferred no shape, or another shape than onnxruntime computes.

    Each result is the index of a node, and its outputs with the shape that onnxruntime computes. `disputed` are the
    nodes to compare, by index.
    """
    tensors = Model(inferred).tensors()
    for index, node in disputed.items():
        shape = onnxruntime_output_shape(node.op_type, _attributes(node), [tensors.get(name) for name in node.input])
        result = tensors.get(node.output[0])
        if shape is not None and min(shape) >= 0 and (result is None or result.shape != shape):
            # The first output has the type of the input. The second one, which only a MaxPool has, contains indices.
            types = [tensors[node.input[0]].dtype, onnx.TensorProto.INT64]
            pairs = zip(node.output, types, strict=False)
            yield index, [helper.make_tensor_value_info(name, dtype, shape) for name, dtype in pairs if name]


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _hide_nodes(model: onnx.ModelProto, outputs: Mapping[int, list[onnx.ValueInfoProto]]) -> onnx.ModelProto:
    """Return a copy of the model in which ONNX infers nothing for some nodes and uses given shapes instead.

    `outputs` has the type and shape of each output of these nodes, by index of the node.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.opset_import.append(helper.make_opsetid(_OPAQUE_DOMAIN, 1))
    stated = {value.name: value for value in (*copy.graph.value_info, *copy.graph.output)}
    for index, values in outputs.items():
        copy.graph.node[index].domain = _OPAQUE_DOMAIN
        for value in values:
            if value.name in stated:
                stated[value.name].CopyFrom(value)
            else:
                copy.graph.value_info.append(value)
    return copy
