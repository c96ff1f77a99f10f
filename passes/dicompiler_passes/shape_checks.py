"""Shapes as onnxruntime computes them, and checks of nodes against the shapes of their tensors.

ONNX infers another shape than onnxruntime for a few nodes:

- `infer_as_onnxruntime` writes onnxruntime's shape of such a node into the model, and repeats ONNX's inference.
- `write_explicit_pads` changes the attributes of these nodes, so that both infer the same shape. This is needed because
  targets infer the shapes in segments (submodels of devices) with ONNX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from dicompiler.plugin_api import DicompilerError, Model, Shape
from dicompiler.plugin_api.onnx import (
    STAND_IN_DOMAIN,
    ModelGraph,
    OpaqueAttribute,
    TensorInfo,
    Variable,
    check_tensor_size,
    onnx_window_attributes,
    onnxruntime_output_shape,
)
from dicompiler.plugin_api.utilities import memory_limit

_DISPUTED_ATTRIBUTES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), frozenset({"auto_pad", "ceil_mode"})),
    "ConvTranspose": frozenset({"auto_pad", "output_shape"}),
    "Resize": frozenset({"keep_aspect_ratio_policy"}),
}
"""Attributes by operator for which ONNX and onnxruntime may compute different output shapes."""

_STANDARD_DOMAIN = re.compile(rf"(ai\.onnx|{re.escape(STAND_IN_DOMAIN)}(#\d+)?)?")
"""Domains of the standard operators, and of the integer functions that replace them in exact checks."""

_OPAQUE_DOMAIN = "dicompiler.opaque"
"""Domain without operators. For its nodes, ONNX uses the shapes that are written in the model."""


def infer_as_onnxruntime(
    model: onnx.ModelProto, infer: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Return the model with inferred shapes: those of onnxruntime if ONNX infers others.

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


def write_explicit_pads(graph: ModelGraph, tensors: Mapping[str, TensorInfo]) -> bool:
    """Replace attributes for which ONNX and onnxruntime infer different shapes. Return True on a change.

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
    """Drop the negative axes of a Resize that keeps the aspect ratio. Return True on a change.

    onnxruntime ignores these axes and their sizes, but ONNX does not.
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
    """Insert a Slice of the first `extents` elements along each spatial axis of the node's input."""
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
    """Yield nodes for which ONNX has inferred no shape, or another shape than onnxruntime computes.

    Args:
        inferred: The model with ONNX's shapes.
        disputed: The nodes to compare, by index in the graph.

    Yields:
        The index of the node, and its outputs with onnxruntime's shape.
    """
    tensors = Model(inferred).tensors()
    for index, node in disputed.items():
        shape = onnxruntime_output_shape(node.op_type, _attributes(node), [tensors.get(name) for name in node.input])
        result = tensors.get(node.output[0])
        if shape is not None and min(shape) >= 0 and (result is None or result.shape != shape):
            # The second output, which only a MaxPool has, contains indices.
            types = [tensors[node.input[0]].dtype, onnx.TensorProto.INT64]
            pairs = zip(node.output, types, strict=False)
            yield index, [helper.make_tensor_value_info(name, dtype, shape) for name, dtype in pairs if name]


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _hide_nodes(model: onnx.ModelProto, outputs: Mapping[int, list[onnx.ValueInfoProto]]) -> onnx.ModelProto:
    """Return a copy of the model in which ONNX uses given shapes for some nodes.

    Args:
        model: The model.
        outputs: Type and shape of each output of these nodes, by index of the node.
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


Attributes = Mapping[str, Any]

MAX_INFERENCE_BYTES = 2**29
"""Memory limit of shape inference in bytes."""


def infer_checked(bare: onnx.ModelProto, place: str) -> onnx.ModelProto:
    """Return a model without weights with inferred shapes. `place` begins error messages.

    Raises:
        DicompilerError: Neither ONNX nor onnxruntime accepts the model.
    """
    try:
        return propagate_shapes(bare, strict=True)
    except onnx.shape_inference.InferenceError as error:
        if not _is_accepted_by_ort(bare):
            reason = " ".join(str(error).split())
            raise DicompilerError(
                f"{place}: infer-shapes: the shapes do not fit the model: {reason}: give other shapes (--shape), or "
                "correct the model"
            ) from error
        return propagate_shapes(bare)


def propagate_shapes(model: onnx.ModelProto, strict: bool = False) -> onnx.ModelProto:
    """Return the model with inferred shapes, even if nodes compute a shape (as for Reshape).

    If onnxruntime computes other shapes than ONNX, the result has those of onnxruntime.

    Args:
        model: A model without weights.
        strict: True to raise InferenceError for a node with contradictory shapes.
    """

    def infer(copy: onnx.ModelProto) -> onnx.ModelProto:
        try:
            with memory_limit(MAX_INFERENCE_BYTES):
                return onnx.shape_inference.infer_shapes(copy, strict_mode=strict, data_prop=True)
        except MemoryError:  # `data_prop` computes small integer tensors element by element. Go on without it.
            return onnx.shape_inference.infer_shapes(copy, strict_mode=strict)

    return infer_as_onnxruntime(model, infer)


def _is_accepted_by_ort(model: onnx.ModelProto) -> bool:
    """Return True if onnxruntime loads the model, as some models that ONNX's strict inference refuses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime's errors have no narrower common base class.
        return False
    return True


def check_sizes(graph: onnx.GraphProto, place: str) -> None:
    """Raise DicompilerError if a tensor has a negative size, or is too large for any memory."""
    makers = {name: node for node in graph.node for name in node.output if name}
    for value in (*graph.value_info, *graph.output):
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        maker = makers.get(value.name)
        by = "" if maker is None else f"{maker.op_type} {maker.name!r}: "
        if dims and min(dims) < 0 and maker is not None:
            shape = "x".join(map(str, dims))
            raise DicompilerError(
                f"{place}: {by}its output {value.name!r} would have a negative size (shape {shape}): correct the model"
            )
        check_tensor_size(value.type.tensor_type.elem_type, dims, f"{place}: {by}tensor {value.name!r}")


def check_nodes(graph: onnx.GraphProto, tensors: Mapping[str, TensorInfo], place: str) -> None:
    """Raise DicompilerError if an attribute or constant index of a node does not fit the tensors' shapes."""
    for node in graph.node:
        if node.domain in ("", "ai.onnx", "com.microsoft") and (wrong := _find_misfit(node, tensors)):
            raise DicompilerError(f"{place}: {node.op_type} {node.name!r}: {wrong}: correct the model")


def _find_misfit(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> str:
    """Return an error text if a node does not fit the shapes of its tensors; '' if it fits or a shape is unknown."""
    check = NODE_CHECKS.get(node.op_type)
    if check is None and node.op_type not in INDEXED_OPS:
        return ""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
    if check is None:
        return _check_indices(attributes, *(tensors.get(name) for name in node.input[:2]))
    names = [name for name in (*node.input, *node.output[:1]) if name]
    shapes = [tensors[name].shape if name in tensors else None for name in names]
    known_shapes = [shape for shape in shapes if shape is not None]
    return check(attributes, known_shapes) if len(known_shapes) == len(names) else ""


def _check_indices(attributes: Attributes, table: TensorInfo | None, index: TensorInfo | None) -> str:
    """Return a text about a constant index that is not in -rows … rows - 1; '' if there is none.

    `rows` is the length of `table` along the attribute `axis`.
    """
    if table is None or index is None or table.shape is None or index.value is None or not index.value.size:
        return ""
    axis = attributes.get("axis", 0)
    if not -len(table.shape) <= axis < len(table.shape):
        return f"axis is {axis}, but the tensor has {len(table.shape)} axes"
    rows, numbers = table.shape[axis], index.value.reshape(-1)
    invalid = numbers[(numbers < -rows) | (numbers >= rows)]
    if not invalid.size:
        return ""
    return f"{index.name!r} has the index {invalid[0]}, but {table.name!r} has {rows} elements along axis {axis}"


def _check_axis(attributes: Attributes, shapes: list[Shape]) -> str:
    axis, rank = attributes.get("axis", 1), len(shapes[0])
    return "" if -rank <= axis < rank else f"axis is {axis}, but the tensor has {rank} axes"


def _check_permutation(attributes: Attributes, shapes: list[Shape]) -> str:
    perm = attributes.get("perm")
    is_permutation = perm is None or sorted(perm) == [*range(len(shapes[0]))]
    return "" if is_permutation else f"perm is {perm}, but the tensor has {len(shapes[0])} axes"


def _check_element_count(attributes: Attributes, shapes: list[Shape]) -> str:  # noqa: ARG001
    """Return an error text if a node such as Reshape changes the number of elements, else ''."""
    input_shape, output_shape = shapes[0], shapes[-1]
    return (
        ""
        if math.prod(input_shape) == math.prod(output_shape)
        else f"its input of shape {input_shape} and its output of shape {output_shape} differ in the number of elements"
    )


def _check_filters(attributes: Attributes, shapes: list[Shape]) -> str:
    groups, (data, weight) = attributes.get("group", 1), shapes[:2]
    if len(data) != len(weight) or attributes.get("kernel_shape", weight[2:]) not in (weight[2:], [*weight[2:]]):
        kernel = attributes.get("kernel_shape")
        return f"weights of shape {weight} do not fit an input of shape {data} and kernel_shape {kernel}"
    if weight[0] % groups or data[1] != groups * weight[1]:
        return f"group is {groups}, which does not fit {data[1]} channels and weights of shape {weight}"
    return _check_window(attributes, data[2:], weight[2:])


def _check_window(attributes: Attributes, extents: Shape, kernel: Shape) -> str:
    """Return an error text if a convolution's kernel is larger than the padded input, else ''."""
    dilations, pads = attributes.get("dilations") or [1] * len(kernel), attributes.get("pads") or [0] * 2 * len(kernel)
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID") or len(dilations) + len(pads) != 3 * len(
        kernel
    ):
        return ""
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    padded = [sum(terms) for terms in zip(extents, pads[: len(kernel)], pads[len(kernel) :], strict=True)]
    exceeds = any(size > extent for size, extent in zip(spans, padded, strict=True))
    return f"its kernel spans {spans} elements, but its padded input has only {padded}" if exceeds else ""


def _check_gates(gates: int) -> Callable[[Attributes, list[Shape]], str]:
    """Return a check of the weight shapes of a recurrent operator with `gates` gates."""

    def check(attributes: Attributes, shapes: list[Shape]) -> str:
        data, weights, recurrent = shapes[:3]
        units = attributes.get("hidden_size", recurrent[-1] if recurrent else 0)
        directions = 2 if attributes.get("direction") == b"bidirectional" else 1
        expected_shapes = [(directions, gates * units, data[-1] if data else 0), (directions, gates * units, units)]
        for name, shape, expected in zip("WR", (weights, recurrent), expected_shapes, strict=True):
            if tuple(shape) != expected:
                return f"its weights {name} have the shape {tuple(shape)}, but {units} units need {expected}"
        return ""

    return check


def _check_pads(attributes: Attributes, shapes: list[Shape]) -> str:  # noqa: ARG001
    """Return an error text if a pool's window could lie entirely in the padding, else ''."""
    kernel, pads = attributes.get("kernel_shape", ()), attributes.get("pads", ())
    spans = [
        (size - 1) * dilation + 1
        for size, dilation in zip(kernel, attributes.get("dilations") or [1] * len(kernel), strict=False)
    ]
    exceeds = any(pad >= size for pad, size in zip(pads, spans * 2, strict=False))
    return f"pads is {pads}, but each number must be below the extent of the kernel {kernel}" if exceeds else ""


def _check_heads(attributes: Attributes, shapes: list[Shape]) -> str:
    """Return an error text if heads cannot be divided evenly, else ''.

    The number of heads must divide the output columns, and the number of key heads must divide that of query heads.
    """
    heads = attributes.get("q_num_heads", attributes.get("num_heads", 0))
    key_heads, output = attributes.get("kv_num_heads", heads), shapes[-1]
    if heads and key_heads and heads % key_heads:
        return f"{heads} query heads cannot be divided evenly among {key_heads} heads of keys and values"
    is_uneven = heads and len(output) == 3 and output[-1] % heads
    return f"its {heads} heads do not divide the {output[-1]} columns of its output" if is_uneven else ""


NODE_CHECKS: Mapping[str, Callable[[Attributes, list[Shape]], str]] = {
    "Concat": _check_axis,
    "Transpose": _check_permutation,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _check_element_count),
    "Conv": _check_filters,
    **dict.fromkeys(("Attention", "MultiHeadAttention", "GroupQueryAttention"), _check_heads),
    **{op: _check_gates(gates) for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4))},
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _check_pads),
}
"""For each operator, a function from attributes and shapes (inputs, first output) to an error text, or ''."""

INDEXED_OPS = ("Gather", "GatherElements", "ScatterElements")
"""Operators with a second input that contains indices into the first along an axis."""
