"""The pass `infer-shapes`: set input sizes, and infer the type and shape of every tensor.

Model + sizes of open dimensions ⇒ model with value_info for all tensors, and constants instead of shape computations
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from dicompiler.plugin_api import DicompilerError, Model, Pass, PipelineState, Shape, UsageError
from dicompiler.plugin_api.onnx import ModelGraph, TensorInfo, Variable, write_output_names
from dicompiler.plugin_api.utilities import did_you_mean
from dicompiler_passes.constant_folding import STANDARD_DOMAINS, fold_constants
from dicompiler_passes.node_rewrites import int64_array, make_ranges_scalar, outputs_from_nodes, split_to_slices
from dicompiler_passes.shape_checks import check_nodes, check_sizes, infer_checked, write_explicit_pads
from dicompiler_passes.unfuse import unfuse

_USUAL_IMAGE_SHAPE, _USUAL_SEQUENCE_SHAPE = (1, 3, 224, 224), (128,)
"""Input sizes for examples in error messages: an image, and the length of a text or recording."""


@dataclass(frozen=True)
class InferShapes(Pass):
    """Set input sizes, infer the shape of every tensor, and fold the nodes that compute shapes.

    x: [N, 3, H, W], shape=x=1x3x224x224         ⇒  x: [1, 3, 224, 224]; N, H and W are replaced everywhere
    Shape(x) → Gather → Concat → Reshape(y, ·)   ⇒  Reshape(y, (constant))
    Split → a, b into equal pieces               ⇒  Slice → a, Slice → b
    pool with auto_pad and dilations             ⇒  pool with pads, if ONNX infers another shape than onnxruntime
    node that only a Shape has read              ⇒  (removed)

    In the text of a pipeline, the value of `shape` must be quoted: infer-shapes{shape="x=1x3x224x224"}.
    """

    name: ClassVar[str] = "infer-shapes"

    shape: tuple[str, ...] = field(
        default=(),
        metadata={"help": "shapes of inputs, such as x=1x3x224x224; past*=1x8x128x64 sets all inputs that match"},
    )

    def run(self, state: PipelineState) -> PipelineState:
        return replace(state, model=infer_shapes(state.model, parse_shapes(self.shape)))


def parse_shapes(texts: Iterable[str]) -> dict[str, Shape]:
    """Parse input shapes: ("x=1x3x224x224",) → {"x": (1, 3, 224, 224)}. The text `x=` means a scalar.

    Args:
        texts: One text per input.

    Returns:
        Shapes by input name.

    Raises:
        UsageError: A text has another form, or two texts name the same input.
    """
    shapes: dict[str, Shape] = {}
    for text in texts:
        name, equals, dims = text.rpartition("=")
        parts = dims.split("x") if dims else []
        if not equals or not name or not all(part.isdecimal() for part in parts):
            raise UsageError(f"shape {text!r}: expected the form INPUT=1x3x224x224")
        if name in shapes:
            raise UsageError(f"shape {text!r}: input {name!r} has a shape already: give each input one shape")
        shapes[name] = tuple(int(part) for part in parts)
    return shapes


def infer_shapes(model: Model, shapes: Mapping[str, Shape]) -> Model:
    """Return the model with the given input shapes, and the shapes of all other tensors inferred.

    Args:
        model: Model, which may have open dimensions.
        shapes: Shapes by input name or pattern (past*).

    Returns:
        Model with value_info for all tensors.

    Raises:
        UsageError: An input does not exist.
        DicompilerError: A dimension of an input is still open, or a size contradicts the model.
    """
    graph = model.graph()
    _bind_shapes(graph, shapes)
    hints: list[onnx.ValueInfoProto] = []
    while True:
        fold_constants(graph)
        folded = model.with_graph(graph)
        hints = hints or [*folded.proto.graph.value_info, *folded.proto.graph.output]
        inferred = _infer_all(folded, hints)
        graph.set_inferred_info(inferred.graph)
        tensors = Model(inferred).tensors()
        edits = (_fold_shapes, write_explicit_pads, split_to_slices, make_ranges_scalar, unfuse)
        if not any(edit(graph, tensors) for edit in edits):
            break
    check_nodes(inferred.graph, tensors, model.display_name)
    graph.prune()
    renamed = outputs_from_nodes(graph)
    result = model.with_graph(graph)
    write_output_names(result.proto, renamed)
    return result


def _bind_shapes(graph: ModelGraph, shapes: Mapping[str, Shape]) -> None:
    """Set the shapes of the graph's inputs, and replace named dimensions ("N") by sizes in all tensors."""
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        names = [name] if name in inputs else [input_name for input_name in inputs if fnmatchcase(input_name, name)]
        if not names:
            raise UsageError(f"shape: the model has no input {name!r}{did_you_mean(name, inputs)}")
        for input_name in names:
            _bind_input(inputs[input_name], shape, sizes)
    for tensor in graph.tensors().values() if sizes else ():
        if isinstance(tensor, Variable) and tensor.shape is not None:
            tensor.shape = [sizes.get(size, size) for size in tensor.shape]
    for tensor in inputs.values():
        _check_static(tensor)


def _bind_input(tensor: Variable, shape: Shape, sizes: dict[str, int]) -> None:
    """Set the shape of one input, and add the sizes of its named dimensions ("N") to `sizes`.

    Raises:
        UsageError: The shape contradicts the model.
    """
    text = "x".join(map(str, shape))
    if not _is_tensor(tensor):
        raise UsageError(f"shape {tensor.name}={text}: this input is not a tensor: omit it")
    old_shape: list[Any] = tensor.shape if tensor.shape is not None else [None] * len(shape)
    if len(old_shape) != len(shape):
        raise UsageError(
            f"shape {tensor.name}={text}: the input has {len(old_shape)} dimensions: {_shape_example(tensor)}"
        )
    for axis, (old_size, size) in enumerate(zip(old_shape, shape, strict=True)):
        old_or_named = (
            old_size
            if _is_static(old_size)
            else sizes.setdefault(old_size, size)
            if isinstance(old_size, str) and old_size
            else size
        )
        if old_or_named != size:
            dimension_name = f" ({old_size!r})" if isinstance(old_size, str) else ""
            conflict = f"dimension {axis}{dimension_name} is {size}, but {old_or_named} in the model"
            raise UsageError(f"shape {tensor.name}={text}: {conflict}: {_shape_example(tensor, sizes)}")
    tensor.shape = list(shape)


def _is_tensor(tensor: Variable) -> bool:
    # Other graph inputs are sequences, maps or optional values.
    return tensor.info is not None and tensor.info.type.HasField("tensor_type")


def _is_static(size: int | str | None) -> bool:
    # An open dimension is None, a name, or -1 (in files of some exporters).
    return isinstance(size, int) and size >= 0


def _check_static(tensor: Variable) -> None:
    if not _is_tensor(tensor):
        return
    if tensor.shape is None:
        raise DicompilerError(f"infer-shapes: input {tensor.name!r} has no shape: {_shape_example(tensor)}")
    for axis, size in enumerate(tensor.shape):
        if not _is_static(size):
            dimension = f"dimension {axis} ({size!r})" if isinstance(size, str) and size else f"dimension {axis}"
            raise DicompilerError(
                f"infer-shapes: {dimension} of input {tensor.name!r} is open: {_shape_example(tensor)}"
            )


def _shape_example(tensor: Variable, named: Mapping[Any, int] | None = None) -> str:
    """Return a remedy for an error message: the option --shape with a size for each dimension.

    `named` has the sizes of named dimensions. Other open dimensions get a usual size.
    """
    sizes = [(named or {}).get(size, size) for size in tensor.shape or [None] * len(_USUAL_IMAGE_SHAPE)]
    defaults = _USUAL_IMAGE_SHAPE if len(sizes) == len(_USUAL_IMAGE_SHAPE) else (1, *_USUAL_SEQUENCE_SHAPE * len(sizes))
    shape = [size if _is_static(size) else defaults[axis] for axis, size in enumerate(sizes)]
    return f"give it as --shape {tensor.name}={'x'.join(map(str, shape))}"


def _infer_all(model: Model, hints: Iterable[onnx.ValueInfoProto]) -> onnx.ModelProto:
    """Return a copy of the model without weights, with value_info that is inferred from its inputs.

    Static shapes come from ONNX, otherwise from `hints` (value_info of the file), otherwise from onnxruntime. ONNX
    comes first, because the file may have been exported for other input sizes.
    """
    bare = _without_shapes(model)
    inferred = infer_checked(bare, model.display_name)
    check_sizes(inferred.graph, model.display_name)
    results = {name for node in bare.graph.node for name in node.output}
    outputs, used_hints = {value.name: value for value in bare.graph.output}, set[str]()
    while True:
        tensors = Model(inferred).tensors()
        unknown = {name for name in results - used_hints if name not in tensors or tensors[name].shape is None}
        hints_by_name = {value.name: value for value in hints if value.name in unknown}
        missing = {name: value for name, value in hints_by_name.items() if _has_static_shape(value)}
        # Ask onnxruntime only if neither ONNX nor the file has a static shape. From each new shape, ONNX infers others
        # in the next iteration.
        missing = (
            missing
            or {name: value for name, value in infer_missing_shapes(bare, tensors).items() if name in unknown}
            or hints_by_name
        )
        if not missing:
            return inferred
        used_hints |= missing.keys()
        bare.graph.value_info.extend(value for name, value in missing.items() if name not in outputs)
        for name in missing.keys() & outputs.keys():
            outputs[name].CopyFrom(missing[name])
        inferred = infer_checked(bare, model.display_name)


def _has_static_shape(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def _without_shapes(model: Model) -> onnx.ModelProto:
    bare = model.without_weights()
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return bare


def _fold_shapes(graph: ModelGraph, tensors: Mapping[str, TensorInfo]) -> bool:
    """Replace Shape and Size nodes of tensors with a static shape by constants. Return True on a change."""
    gone: list[gs.Node] = []
    for node in graph.nodes:
        if node.op not in ("Shape", "Size") or node.domain not in STANDARD_DOMAINS or not node.inputs:
            continue
        source = tensors.get(node.inputs[0].name)
        if source is None or source.shape is None:
            continue
        shape = source.shape[slice(node.attrs.get("start", 0), node.attrs.get("end"))]
        graph.make_constant(
            node.outputs[0], int64_array(*shape) if node.op == "Shape" else np.array(math.prod(shape), np.int64)
        )
        gone.append(node)
    graph.remove_nodes(gone)
    return bool(gone)


ML_DOMAIN = "ai.onnx.ml"
_Attributes = Mapping[str, Any]


def _same_shape(shape: Shape, attributes: _Attributes) -> Shape:  # noqa: ARG001
    return shape


def _row_per_input_row(columns: Callable[[_Attributes], int]) -> Callable[[Shape, _Attributes], Shape]:
    """Return a function that computes the output shape of an operator with one output row per input row.

    The number of output columns is `columns(attributes)`. A vector is one row.
    """
    return lambda shape, attributes: (shape[0] if len(shape) > 1 else 1, columns(attributes))


def _target_count(attributes: _Attributes) -> int:
    return int(attributes.get("n_targets", attributes.get("targets", 1)))


OUTPUT_SHAPES: Mapping[str, Callable[[Shape, _Attributes], Shape]] = {
    **dict.fromkeys(("Binarizer", "Imputer", "Normalizer", "Scaler"), _same_shape),
    **dict.fromkeys(("LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"), _row_per_input_row(_target_count)),
    # A vector is one row.
    "ArrayFeatureExtractor": lambda shape, attributes: (*(shape[:-1] or (1,)), attributes[""]),
    "FeatureVectorizer": _row_per_input_row(lambda attributes: sum(attributes["inputdimensions"])),
}
"""For each operator of ai.onnx.ml: function from input shape and attributes to the output shape."""
CLASSIFIER_OPS = ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier")
LABEL_ATTRIBUTES = ("classlabels_int64s", "classlabels_ints", "classlabels_strings")


def infer_missing_shapes(model: onnx.ModelProto, tensors: Mapping[str, TensorInfo]) -> dict[str, onnx.ValueInfoProto]:
    """Return static shapes, by tensor name, of tensors of `model` that lack a shape in `tensors`."""
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
        # These operators keep the element type of their input. The others in the table output floats.
        keeps_type = node.op_type in ("ArrayFeatureExtractor", "Imputer", "Binarizer")
        shapes = {
            node.output[0]: (
                tensor.dtype if keeps_type else TensorProto.FLOAT,
                OUTPUT_SHAPES[node.op_type](shape, attributes),
            )
        }
    return {name: helper.make_tensor_value_info(name, *result) for name, result in shapes.items()}


def _ask_onnxruntime(model: onnx.ModelProto, tensors: Mapping[str, TensorInfo]) -> dict[str, onnx.ValueInfoProto]:
    """Return the shapes that onnxruntime infers for tensors without a shape, by tensor name.

    The result is empty if onnxruntime cannot load the model without weights.
    """
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
    except Exception:  # onnxruntime's errors have no narrower common base class.
        return {}
    inferred = {}
    for value in session.get_outputs():
        dtype = _ORT_TYPES.get(value.type)
        # onnxruntime returns [] for an unknown shape, so skip [].
        if value.name in names and dtype and value.shape and all(isinstance(size, int) for size in value.shape):
            inferred[value.name] = helper.make_tensor_value_info(value.name, dtype, value.shape)
    return inferred


_ORT_TYPES = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}
"""ONNX types by the names that onnxruntime uses."""
