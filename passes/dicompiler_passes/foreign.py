"""Shapes of what onnx's inference does not know: onnxruntime's own operators, and those of ai.onnx.ml.

In: a model without weights, and what onnx has inferred. Out: value_info with static shapes, of what lacks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

from dicompiler.plugin_api import Shape, Tensor
from dicompiler_passes.folding import STANDARD

ML = "ai.onnx.ml"
_Given = Mapping[str, Any]


def _same(shape: Shape, given: _Given) -> Shape:  # noqa: ARG001
    return shape


def _rows(columns: Callable[[_Given], int]) -> Callable[[Shape, _Given], Shape]:
    """A row for each row of the input; one row of what is a vector."""
    return lambda shape, given: (shape[0] if len(shape) > 1 else 1, columns(given))


def _targets(given: _Given) -> int:
    return int(given.get("n_targets", given.get("targets", 1)))


SHAPES: Mapping[str, Callable[[Shape, _Given], Shape]] = {
    **dict.fromkeys(("Binarizer", "Imputer", "Normalizer", "Scaler"), _same),
    **dict.fromkeys(("LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"), _rows(_targets)),
    "ArrayFeatureExtractor": lambda shape, given: (*(shape[:-1] or (1,)), given[""]),  # of a vector one row
    "FeatureVectorizer": _rows(lambda given: sum(given["inputdimensions"])),
}
"""Operator of ai.onnx.ml → the shape of its result in floating point, by that of its input and its attributes."""
CLASSIFIERS = ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier")
LABELS = ("classlabels_int64s", "classlabels_ints", "classlabels_strings")


def learned(bare: onnx.ModelProto, known: Mapping[str, Tensor]) -> dict[str, onnx.ValueInfoProto]:
    """What can be said of tensors without a static shape, by name."""
    own, ask = dict[str, onnx.ValueInfoProto](), False
    for node in bare.graph.node:
        unknown = [name for name in node.output if name and (name not in known or known[name].shape is None)]
        if unknown and node.domain == ML:
            own |= _learned(node, known)
        untyped = any(name not in known for name in unknown) and all(name in known for name in node.input if name)
        ask = ask or (bool(unknown) and (node.domain not in (*STANDARD, ML) or untyped))
    return own or (_asked(bare, known) if ask else {})


def _learned(node: onnx.NodeProto, known: Mapping[str, Tensor]) -> dict[str, onnx.ValueInfoProto]:
    tensor = known.get(node.input[0])
    if tensor is None or not tensor.shape:
        return {}
    given, shape = {a.name: helper.get_attribute_value(a) for a in node.attribute}, tensor.shape
    shapes = dict[str, tuple[int, Shape]]()
    if node.op_type in CLASSIFIERS:
        count = next((len(given[name]) for name in LABELS if given.get(name)), 0)
        labels = TensorProto.STRING if given.get("classlabels_strings") else TensorProto.INT64
        rows = shape[0] if len(shape) > 1 else 1
        results = [(labels, (rows,)), (TensorProto.FLOAT, (rows, count))]
        shapes = {name: one for name, one in zip(node.output, results, strict=False) if name}
    elif node.op_type in SHAPES:
        if node.op_type == "ArrayFeatureExtractor":
            index = known.get(node.input[1])
            if index is None or index.shape is None:
                return {}
            given[""] = math.prod(index.shape)
        # What is only picked or filled in keeps its type.
        kept = node.op_type in ("ArrayFeatureExtractor", "Imputer", "Binarizer")
        shapes = {node.output[0]: (tensor.dtype if kept else TensorProto.FLOAT, SHAPES[node.op_type](shape, given))}
    return {name: helper.make_tensor_value_info(name, *one) for name, one in shapes.items()}


def _asked(bare: onnx.ModelProto, known: Mapping[str, Tensor]) -> dict[str, onnx.ValueInfoProto]:
    """What onnxruntime says, which knows its own operators; nothing where it refuses the model without its weights."""
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
        kind = _TYPES.get(value.type)
        # It writes [] for a shape that it does not know.
        if value.name in names and kind and value.shape and all(isinstance(size, int) for size in value.shape):
            found[value.name] = helper.make_tensor_value_info(value.name, kind, value.shape)
    return found


_TYPES = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}
"""How onnxruntime calls types."""
