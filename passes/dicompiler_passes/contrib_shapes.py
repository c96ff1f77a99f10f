"""Shapes that ONNX inference does not find: operators of onnxruntime and of ai.onnx.ml."""

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


def _same_shape(shape: Shape, given: _Attributes) -> Shape:  # noqa: ARG001
    return shape


def _row_per_input_row(columns: Callable[[_Attributes], int]) -> Callable[[Shape, _Attributes], Shape]:
    """Return a shape function with one row for each row of the input, and one row for a vector."""
    return lambda shape, given: (shape[0] if len(shape) > 1 else 1, columns(given))


def _target_count(given: _Attributes) -> int:
    return int(given.get("n_targets", given.get("targets", 1)))


OUTPUT_SHAPES: Mapping[str, Callable[[Shape, _Attributes], Shape]] = {
    **dict.fromkeys(("Binarizer", "Imputer", "Normalizer", "Scaler"), _same_shape),
    **dict.fromkeys(("LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"), _row_per_input_row(_target_count)),
    "ArrayFeatureExtractor": lambda shape, given: (*(shape[:-1] or (1,)), given[""]),  # of a vector one row
    "FeatureVectorizer": _row_per_input_row(lambda given: sum(given["inputdimensions"])),
}
"""Operator of ai.onnx.ml → output shape, from the input shape and the attributes."""
CLASSIFIER_OPS = ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier")
LABEL_ATTRIBUTES = ("classlabels_int64s", "classlabels_ints", "classlabels_strings")


def infer_contrib_shapes(bare: onnx.ModelProto, known: Mapping[str, TensorInfo]) -> dict[str, onnx.ValueInfoProto]:
    """Return value infos with static shapes for tensors that lack one, by name."""
    own, ask = dict[str, onnx.ValueInfoProto](), False
    for node in bare.graph.node:
        unknown = [name for name in node.output if name and (name not in known or known[name].shape is None)]
        if unknown and node.domain == ML_DOMAIN:
            own |= _infer_ml_node(node, known)
        untyped = any(name not in known for name in unknown) and all(name in known for name in node.input if name)
        ask = ask or (bool(unknown) and (node.domain not in (*STANDARD_DOMAINS, ML_DOMAIN) or untyped))
    return own or (_ask_onnxruntime(bare, known) if ask else {})


def _infer_ml_node(node: onnx.NodeProto, known: Mapping[str, TensorInfo]) -> dict[str, onnx.ValueInfoProto]:
    tensor = known.get(node.input[0])
    if tensor is None or not tensor.shape:
        return {}
    given, shape = {a.name: helper.get_attribute_value(a) for a in node.attribute}, tensor.shape
    shapes = dict[str, tuple[int, Shape]]()
    if node.op_type in CLASSIFIER_OPS:
        count = next((len(given[name]) for name in LABEL_ATTRIBUTES if given.get(name)), 0)
        labels = TensorProto.STRING if given.get("classlabels_strings") else TensorProto.INT64
        rows = shape[0] if len(shape) > 1 else 1
        results = [(labels, (rows,)), (TensorProto.FLOAT, (rows, count))]
        shapes = {name: one for name, one in zip(node.output, results, strict=False) if name}
    elif node.op_type in OUTPUT_SHAPES:
        if node.op_type == "ArrayFeatureExtractor":
            index = known.get(node.input[1])
            if index is None or index.shape is None:
                return {}
            given[""] = math.prod(index.shape)
        # What is only picked or filled in keeps its type.
        kept = node.op_type in ("ArrayFeatureExtractor", "Imputer", "Binarizer")
        shapes = {
            node.output[0]: (tensor.dtype if kept else TensorProto.FLOAT, OUTPUT_SHAPES[node.op_type](shape, given))
        }
    return {name: helper.make_tensor_value_info(name, *one) for name, one in shapes.items()}


def _ask_onnxruntime(bare: onnx.ModelProto, known: Mapping[str, TensorInfo]) -> dict[str, onnx.ValueInfoProto]:
    """Return the shapes that onnxruntime infers; none if it refuses the model without its weights."""
    import onnxruntime

    names = [n for node in bare.graph.node for n in node.output if n and (n not in known or known[n].shape is None)]
    asked, outputs = onnx.ModelProto(), {value.name for value in bare.graph.output}
    asked.CopyFrom(bare)
    asked.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(asked.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception:  # onnxruntime's exceptions have no other common base
        return {}
    found = {}
    for value in session.get_outputs():
        kind = _ORT_TYPES.get(value.type)
        # It writes [] for a shape that it does not know.
        if value.name in names and kind and value.shape and all(isinstance(size, int) for size in value.shape):
            found[value.name] = helper.make_tensor_value_info(value.name, kind, value.shape)
    return found


_ORT_TYPES = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}
"""ONNX types by the names that onnxruntime uses."""
