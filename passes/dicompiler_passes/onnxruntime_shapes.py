"""Shape inference with the shapes that onnxruntime computes, for nodes whose shapes ONNX infers differently.

Model ⇒ model with value_info. ONNX infers the shapes first. Nodes with another shape in onnxruntime become opaque to
ONNX, with that shape, and the inference is repeated for the tensors after them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnx
from onnx import helper

from dicompiler.plugin_api import Model
from dicompiler.plugin_api.onnx import STAND_IN_DOMAIN, onnxruntime_output_shape

_DISPUTED_ATTRIBUTES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), frozenset({"auto_pad", "ceil_mode"})),
    "ConvTranspose": frozenset({"auto_pad", "output_shape"}),
    "Resize": frozenset({"keep_aspect_ratio_policy"}),
}
"""Operator → attributes for which ONNX and onnxruntime may compute different shapes."""

_STANDARD_DOMAIN = re.compile(rf"(ai\.onnx|{re.escape(STAND_IN_DOMAIN)}(#\d+)?)?")
"""Domains of the standard operators and of their stand-ins, which have the same attributes and shapes."""

_OPAQUE_DOMAIN = "dicompiler.opaque"
"""Domain without operators. ONNX infers nothing for its nodes, and uses the shapes that the model states."""


def infer_as_onnxruntime(
    model: onnx.ModelProto, infer: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Return the result of the shape inference `infer`, with the shapes that onnxruntime computes.

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


def _is_disputed(node: onnx.NodeProto) -> bool:
    names = _DISPUTED_ATTRIBUTES.get(node.op_type)
    if names is None or not _STANDARD_DOMAIN.fullmatch(node.domain):
        return False
    return any(attribute.name in names for attribute in node.attribute)


def _find_other_outputs(
    inferred: onnx.ModelProto, disputed: Mapping[int, onnx.NodeProto]
) -> Iterator[tuple[int, list[onnx.ValueInfoProto]]]:
    """Yield the index and the outputs of each node whose inferred shape is not that of onnxruntime."""
    tensors = Model(inferred).tensors()
    for index, node in disputed.items():
        shape = onnxruntime_output_shape(node.op_type, _attributes(node), [tensors.get(name) for name in node.input])
        result = tensors.get(node.output[0])
        if shape is not None and min(shape) >= 0 and (result is None or result.shape != shape):
            # The second output of a MaxPool has indices.
            types = [tensors[node.input[0]].dtype, onnx.TensorProto.INT64]
            pairs = zip(node.output, types, strict=False)
            yield index, [helper.make_tensor_value_info(name, dtype, shape) for name, dtype in pairs if name]


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _hide_nodes(model: onnx.ModelProto, outputs: Mapping[int, list[onnx.ValueInfoProto]]) -> onnx.ModelProto:
    """Return a copy of the model in which some nodes, given by index, are opaque and have outputs of known shapes."""
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
