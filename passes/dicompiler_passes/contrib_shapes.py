"""Shape inference for operators that ONNX's own inference omits: those of onnxruntime and of ai.onnx.ml."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

from dicompiler.plugin_api import Shape
from dicompiler.plugin_api.onnx import TensorInfo
from dicompiler_passes.constant_folding import STANDARD_DOMAINS

ML_DOMAIN = "ai.onnx.ml"
_Attributes = Mapping[str, Any]


def _same_shape(shape: Shape, attributes: _Attributes) -> Shape:  # noqa: ARG001
    return shape


def _row_per_input_row(columns: Callable[[_Attributes], int]) -> Callable[[Shape, _Attributes], Shape]:
    """Return a function that computes the output shape of an operator with one output row per input row.

    The number of output columns is `columns(attributes)`. An input vector counts as one row.
    """
    return lambda shape, attributes: (shape[0] if len(shape) > 1 else 1, columns(attributes))


def _target_count(attributes: _Attributes) -> int:
    return int(attributes.get("n_targets", attributes.get("targets", 1)))


OUTPUT_SHAPES: Mapping[str, Callable[[Shape, _Attributes], Shape]] = {
    **dict.fromkeys(("Binarizer", "Imputer", "Normalizer", "Scaler"), _same_shape),
    **dict.fromkeys(("LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"), _row_per_input_row(_target_count)),
    "ArrayFeatureExtractor": lambda shape, attributes: (*(shape[:-1] or (1,)), attributes[""]),  # A vector has one row.
    "FeatureVectorizer": _row_per_input_row(lambda attributes: sum(attributes["inputdimensions"])),
}
"""Function that computes the output shape from the input shape and the attributes, by operator of ai.onnx.ml."""
CLASSIFIER_OPS = ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier")
LABEL_ATTRIBUTES = ("classlabels_int64s", "classlabels_ints", "classlabels_strings")


def infer_contrib_shapes(model: onnx.ModelProto, tensors: Mapping[str, TensorInfo]) -> dict[str, onnx.ValueInfoProto]:
    """Return the static shapes of tensors of `model` that lack a shape in `tensors`, by tensor name.

    Tensors with a shape that cannot be inferred either are omitted.
    """
    inferred, asks_ort = dict[str, onnx.ValueInfoProto](), False
    for node in model.graph.node:
        unknown_names = [name for name in node.output if name and (name not in tensors or tensors[name].shape is None)]
        if unknown_names and node.domain == ML_DOMAIN:
            inferred |= _infer_ml_node(node, tensors)
        is_untyped = any(name not in tensors for name in unknown_names) and all(
            name in tensors for name in node.input if name
        )
        asks_ort = asks_ort or (
            bool(unknown_names) and (node.domain not in (*STANDARD_DOMAINS, ML_DOMAIN) or is_untyped)
        )
    return inferred or (_ask_onnxruntime(model, tensors) if asks_ort else {})


def _infer_ml_node(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> dict[str, onnx.ValueInfoProto]:
    tensor = tensors.get(node.input[0])
    if tensor is None or not tensor.shape:
        return {}
    attributes, shape = {a.name: helper.get_attribute_value(a) for a in node.attribute}, tensor.shape
    shapes = dict[str, tuple[int, Shape]]()
    if node.op_type in CLASSIFIER_OPS:
        count = next((len(attributes[name]) for name in LABEL_ATTRIBUTES if attributes.get(name)), 0)
        labels = TensorProto.STRING if attributes.get("classlabels_strings") else TensorProto.INT64
        rows = shape[0] if len(shape) > 1 else 1
        results = [(labels, (rows,)), (TensorProto.FLOAT, (rows, count))]
        shapes = {name: result for name, result in zip(node.output, results, strict=False) if name}
    elif node.op_type in OUTPUT_SHAPES:
        if node.op_type == "ArrayFeatureExtractor":
            index = tensors.get(node.input[1])
            if index is None or index.shape is None:
                return {}
            attributes[""] = math.prod(index.shape)
        # Operators that select elements or fill in missing ones keep the type of their input.
        keeps_type = node.op_type in ("ArrayFeatureExtractor", "Imputer", "Binarizer")
        shapes = {
            node.output[0]: (
                tensor.dtype if keeps_type else TensorProto.FLOAT,
                OUTPUT_SHAPES[node.op_type](shape, attributes),
            )
        }
    return {name: helper.make_tensor_value_info(name, *result) for name, result in shapes.items()}


def _ask_onnxruntime(model: onnx.ModelProto, tensors: Mapping[str, TensorInfo]) -> dict[str, onnx.ValueInfoProto]:
    """Return the shapes that onnxruntime infers; an empty result if it cannot load the model without weights."""
    import onnxruntime

    names = [
        n for node in model.graph.node for n in node.output if n and (n not in tensors or tensors[n].shape is None)
    ]
    extended, outputs = onnx.ModelProto(), {value.name for value in model.graph.output}
    extended.CopyFrom(model)
    extended.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(extended.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception:  # onnxruntime's exceptions have no other common base class.
        return {}
    inferred = {}
    for value in session.get_outputs():
        dtype = _ORT_TYPES.get(value.type)
        # onnxruntime returns [] if it does not know the shape.
        if value.name in names and dtype and value.shape and all(isinstance(size, int) for size in value.shape):
            inferred[value.name] = helper.make_tensor_value_info(value.name, dtype, value.shape)
    return inferred


_ORT_TYPES = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}
"""ONNX types by the names that onnxruntime uses."""
