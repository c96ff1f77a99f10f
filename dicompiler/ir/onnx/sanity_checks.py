"""Sanity checks of a loaded model, for errors that onnx and onnxruntime detect too late or not at all.

The limits are listed in docs/reference/limits.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import onnx

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.graph_structure import graph_and_bodies
from dicompiler.ir.onnx.weights import raw_nbytes

MAX_TENSOR_AXES = 32
"""Maximum number of axes of a tensor, which is the limit of numpy before version 2."""

MAX_TENSOR_BYTES = 2**50
"""Maximum size of a tensor in bytes. It exceeds the memory of any device, and sums of such sizes fit into 64 bits."""

MAX_SPARSE_BYTES = 2**31 - 1
"""Maximum size in bytes of the dense form of a sparse tensor, which onnxruntime stores as a protobuf message."""

MAX_INLINED_NODES = 10**6
"""Maximum number of nodes of a model after its functions are inlined."""

_MAX_INT32 = 2**31 - 1
_WINDOW_LIMITS = {
    "strides": (1, None),
    "dilations": (1, None),
    "kernel_shape": (1, None),
    "group": (1, None),
    "pads": (0, _MAX_INT32),
    "output_padding": (0, _MAX_INT32),
    "p": (1, None),
}
_WINDOW_OPERATORS = (
    "Conv ConvInteger QLinearConv ConvTranspose DeformConv FusedConv NhwcConv NhwcFusedConv MaxPool AveragePool"
)
ATTRIBUTE_LIMITS: Mapping[str, Mapping[str, tuple[int, int | None]]] = {
    **dict.fromkeys(f"{_WINDOW_OPERATORS} LpPool MaxUnpool NhwcMaxPool QLinearAveragePool".split(), _WINDOW_LIMITS),
    **{op: {"blocksize": (1, _MAX_INT32)} for op in ("SpaceToDepth", "DepthToSpace")},
    **{op: {"hidden_size": (1, _MAX_INT32)} for op in ("RNN", "GRU", "LSTM")},
    "GlobalLpPool": {"p": (1, None)},
    "LRN": {"size": (1, _MAX_INT32)},
    "Split": {"num_outputs": (1, _MAX_INT32)},
}
"""Smallest and largest value (None: no limit) of each integer in an attribute, by operator and attribute name."""

AUTO_PAD_MODES = (b"NOTSET", b"SAME_UPPER", b"SAME_LOWER", b"VALID", b"")
_KNOWN_DTYPES = frozenset(onnx.TensorProto.DataType.values())
_STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
_CHECKED_DOMAINS = ("", "ai.onnx", "com.microsoft")

FunctionKey = tuple[str, str, str]


def check_sanity(model: onnx.ModelProto, place: str) -> None:
    """Raise DicompilerError if a loaded model would make onnx or onnxruntime fail without a clear error."""
    if not model.graph.output:
        raise DicompilerError(f"{place}: the model has no output: export it with at least one output")
    for value in model.graph.input:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
            raise DicompilerError(f"{place}: input {value.name!r} has no type: export the model again")
    for graph in graph_and_bodies(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            kind, tensor_place = value.type.tensor_type, f"{place}: tensor {value.name!r}"
            if kind.elem_type not in _KNOWN_DTYPES:
                raise DicompilerError(f"{tensor_place} has the unknown type {kind.elem_type}: export the model again")
            check_tensor_size(kind.elem_type, [dim.dim_value for dim in kind.shape.dim], tensor_place)
        for tensor in graph.initializer:
            _check_tensor(tensor, place)
        for sparse in graph.sparse_initializer:
            _check_sparse(sparse, place)
        _check_nodes(graph.node, place)
    for function in model.functions:
        for body in graph_and_bodies(function):
            _check_nodes(body.node, place)
    _check_calls(model, place)


def check_tensor_size(dtype: int, dims: Sequence[int], place: str) -> None:
    """Raise DicompilerError if a tensor has too many axes or bytes.

    Args:
        dtype: Element type, an onnx.TensorProto.DataType.
        dims: Dimensions of the tensor. Zero or a negative number is an unknown dimension.
        place: Start of the error message, which names the tensor.

    Raises:
        DicompilerError: The tensor is too large.
    """
    if len(dims) > MAX_TENSOR_AXES:
        raise DicompilerError(f"{place} has {len(dims)} axes: export the model with at most {MAX_TENSOR_AXES}")
    known_dims = tuple(dim for dim in dims if dim > 0)
    # The largest element type has 16 bytes, so a tensor with at most this number of elements has no more than
    # MAX_TENSOR_BYTES.
    if math.prod(known_dims) <= MAX_TENSOR_BYTES // 16:
        return
    try:
        nbytes = raw_nbytes(dtype or onnx.TensorProto.UINT8, known_dims)
    # Each element of a string tensor, or of an unknown type, is counted as one byte.
    except (KeyError, TypeError):
        nbytes = math.prod(known_dims)
    if nbytes > MAX_TENSOR_BYTES:
        shape = "x".join(map(str, dims))
        raise DicompilerError(f"{place} of shape {shape} has more than 2^50 bytes: export the model with smaller sizes")


def _check_tensor(tensor: onnx.TensorProto, place: str) -> None:
    place = f"{place}: tensor {tensor.name!r}"
    if any(dim < 0 for dim in tensor.dims):
        shape = "x".join(map(str, tensor.dims))
        raise DicompilerError(f"{place} has the invalid shape {shape}: export the model again")
    check_tensor_size(tensor.data_type, tensor.dims, place)


def _check_sparse(sparse: onnx.SparseTensorProto, place: str) -> None:
    """Raise DicompilerError if a sparse tensor is too large, or if its indices do not match its values and shape."""
    dims = tuple(sparse.dims)
    _check_tensor(onnx.TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=dims), place)
    place = f"{place}: sparse tensor {sparse.values.name!r} of shape {'x'.join(map(str, dims))}"
    if raw_nbytes(sparse.values.data_type, dims) > MAX_SPARSE_BYTES:
        raise DicompilerError(f"{place} has more than 2 GB: store it as a dense tensor with external data")
    indices, count = onnx.numpy_helper.to_array(sparse.indices), math.prod(sparse.values.dims)
    if indices.dtype.kind != "i" or indices.shape not in ((count,), (count, len(dims))):
        raise DicompilerError(
            f"{place}: indices of type {indices.dtype} and shape {indices.shape} do not match its {count} values: "
            "export the model again"
        )
    limits = math.prod(dims) if indices.ndim == 1 else dims
    outside = indices[((indices < 0) | (indices >= limits)).reshape(count, -1).any(axis=1)] if count else indices
    if len(outside):
        raise DicompilerError(f"{place}: index {outside[0].tolist()} is outside of the shape: export the model again")


def _check_nodes(nodes: Iterable[onnx.NodeProto], place: str) -> None:
    for node in nodes:
        limits = ATTRIBUTE_LIMITS.get(node.op_type, {}) if node.domain in _CHECKED_DOMAINS else {}
        for attribute in node.attribute:
            key = f"{place}: {node.op_type} {_node_label(node)!r}: {attribute.name}"
            if attribute.name in limits and not attribute.ref_attr_name:
                low, high = limits[attribute.name]
                values = list(attribute.ints) if attribute.type == onnx.AttributeProto.INTS else [attribute.i]
                if any(number < low or (high is not None and number > high) for number in values):
                    most = "" if high is None else f" and at most {high}"
                    raise DicompilerError(f"{key} is {values}: each must be at least {low}{most}: correct the model")
            if limits is _WINDOW_LIMITS and attribute.name == "auto_pad" and attribute.s not in AUTO_PAD_MODES:
                names = ", ".join(name.decode() for name in AUTO_PAD_MODES if name)
                raise DicompilerError(f"{key} is {attribute.s.decode(errors='replace')!r}: it must be one of {names}")
            if attribute.HasField("sparse_tensor"):
                _check_sparse(attribute.sparse_tensor, key)
            if attribute.HasField("t"):
                _check_tensor(attribute.t, key)


def check_known_operators(model: onnx.ModelProto) -> None:
    """Raise DicompilerError if the model has an operator that onnxruntime cannot run.

    Known operators are the standard operators, the operators of onnxruntime, and the model's functions.
    """
    functions = {(function.domain, function.name) for function in model.functions}
    graphs = (graph for top in (model.graph, *model.functions) for graph in graph_and_bodies(top))
    nodes = [node for graph in graphs for node in graph.node if node.domain not in _STANDARD_DOMAINS]
    nodes = [node for node in nodes if (node.domain, node.op_type) not in functions]
    if nodes:
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

        operators = {(schema.domain, schema.name) for schema in get_all_operator_schema()}
        for node in nodes:
            if (node.domain, node.op_type) not in operators:
                raise DicompilerError(
                    f"model: {_node_label(node)!r}: onnxruntime {onnxruntime.__version__} has no operator "
                    f"{node.op_type!r} of domain {node.domain!r}: export the model without it, or install an "
                    "onnxruntime that has it"
                )


def _check_calls(model: onnx.ModelProto, place: str) -> None:
    """Raise DicompilerError if functions are recursive, or if the model would be too large after inlining.

    The functions are not inlined for this check, because the number of nodes can grow exponentially.
    """
    calls = {
        (function.domain, function.name, function.overload): [
            _function_key(node) for graph in graph_and_bodies(function) for node in graph.node
        ]
        for function in model.functions
    }
    sorter = TopologicalSorter({key: [called for called in calls[key] if called in calls] for key in calls})
    sizes: dict[FunctionKey, int] = {}
    try:
        for key in sorter.static_order():
            sizes[key] = min(MAX_INLINED_NODES + 1, sum(sizes.get(called, 1) for called in calls[key]))
    except CycleError as error:
        domain, name, _ = error.args[1][0]
        raise DicompilerError(
            f"{place}: function {domain}::{name} calls itself, directly or through another function: rewrite it"
        ) from None
    total = 0
    for node in (node for graph in graph_and_bodies(model.graph) for node in graph.node):
        total += sizes.get(_function_key(node), 1)
        if total > MAX_INLINED_NODES:
            raise DicompilerError(
                f"{place}: after inlining of functions up to {node.op_type} {_node_label(node)!r}, the model has more "
                f"than {MAX_INLINED_NODES} nodes: nest fewer functions"
            )


def _function_key(node: onnx.NodeProto) -> FunctionKey:
    return node.domain, node.op_type, node.overload


def _node_label(node: onnx.NodeProto) -> str:
    return node.name or next(iter(node.output), "")
