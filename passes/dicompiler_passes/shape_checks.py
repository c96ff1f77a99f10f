"""Checks of nodes against the shapes of their tensors, which ONNX shape inference omits.

Attributes with a range that does not depend on shapes are checked when the model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx

from dicompiler.plugin_api import DicompilerError, Shape
from dicompiler.plugin_api.onnx import TensorInfo, check_tensor_size
from dicompiler.plugin_api.utilities import memory_limit
from dicompiler_passes.onnxruntime_shapes import infer_as_onnxruntime

Attributes = Mapping[str, Any]

MAX_INFERENCE_BYTES = 2**29
"""Largest number of bytes that shape inference may take."""


def infer_checked(bare: onnx.ModelProto, place: str) -> onnx.ModelProto:
    """Return the model `bare`, which has no weights, with inferred shapes. Errors begin with `place`.

    Raises DicompilerError if neither ONNX nor onnxruntime accepts the model.
    """
    try:
        return propagate_shapes(bare, strict=True)
    except onnx.shape_inference.InferenceError as error:
        if not _ort_accepts(bare):
            reason = " ".join(str(error).split())
            raise DicompilerError(
                f"{place}: infer-shapes: the shapes do not fit the model: {reason}: give other shapes (--shape), or "
                "correct the model"
            ) from error
        return propagate_shapes(bare)


def propagate_shapes(model: onnx.ModelProto, strict: bool = False) -> onnx.ModelProto:
    """Return the model with inferred shapes, even if nodes compute a shape (for example that of a Reshape).

    For such shapes, ONNX computes all small integer tensors element by element, because they may be shapes. This step
    is omitted if it needs more than MAX_INFERENCE_BYTES. If onnxruntime infers other shapes than ONNX, onnxruntime's
    shapes are used. If `strict` is True, ONNX raises InferenceError for a node with shapes that contradict each other.
    """

    def infer(copy: onnx.ModelProto) -> onnx.ModelProto:
        try:
            with memory_limit(MAX_INFERENCE_BYTES):
                return onnx.shape_inference.infer_shapes(copy, strict_mode=strict, data_prop=True)
        except MemoryError:
            return onnx.shape_inference.infer_shapes(copy, strict_mode=strict)

    return infer_as_onnxruntime(model, infer)


def _ort_accepts(model: onnx.ModelProto) -> bool:
    """Return True if onnxruntime loads the model. It accepts some models that ONNX's strict inference refuses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime's exceptions have no other common base class.
        return False
    return True


def check_sizes(graph: onnx.GraphProto, place: str) -> None:
    """Raise DicompilerError if a tensor has a negative size, or more bytes than memory can hold."""
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
    """Raise DicompilerError if an attribute or a constant index of a node does not fit the shapes of its tensors.

    The tables NODE_CHECKS and INDEXED_OPS list the checks.
    """
    for node in graph.node:
        if node.domain in ("", "ai.onnx", "com.microsoft") and (wrong := _find_misfit(node, tensors)):
            raise DicompilerError(f"{place}: {node.op_type} {node.name!r}: {wrong}: correct the model")


def _find_misfit(node: onnx.NodeProto, tensors: Mapping[str, TensorInfo]) -> str:
    """Return a description of how a node does not fit the shapes of its tensors.

    The result is '' if there is no mistake, or if a shape is unknown.
    """
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
    """Return a description of a constant index that is not in -rows … rows - 1; '' if there is none.

    `rows` is the length of the table's axis that the attribute `axis` names.
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
    """Return a description of the mistake if a Reshape or similar node changes the number of elements, else ''."""
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
    """Return a description of the mistake if a convolution's kernel is larger than the padded input, else ''."""
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
    """Return a check of the weight shapes of a recurrent operator with `gates` gates.

    The weights must have the shapes (directions, gates · units, features) and (directions, gates · units, units).
    """

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
    """Return a description of the mistake if a window of a pool lies entirely in the padding, else ''."""
    kernel, pads = attributes.get("kernel_shape", ()), attributes.get("pads", ())
    spans = [
        (size - 1) * dilation + 1
        for size, dilation in zip(kernel, attributes.get("dilations") or [1] * len(kernel), strict=False)
    ]
    exceeds = any(pad >= size for pad, size in zip(pads, spans * 2, strict=False))
    return f"pads is {pads}, but each number must be below the extent of the kernel {kernel}" if exceeds else ""


def _check_heads(attributes: Attributes, shapes: list[Shape]) -> str:
    """Return a description of the mistake if heads cannot be divided evenly, else ''.

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
"""Function that checks a node's attributes against the shapes of its inputs and first output, by operator.

It returns a description of the mistake, or '' if there is none.
"""

INDEXED_OPS = ("Gather", "GatherElements", "ScatterElements")
"""Operators with a second input that indexes rows of the first along an axis."""
