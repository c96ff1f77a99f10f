"""Sanity checks of a loaded model.

They find errors that no library detects, or only after it has used all memory.

The limits are listed in docs/reference/limits.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.graph_structure import control_flow_bodies
from dicompiler.ir.onnx.weights import raw_nbytes

MAX_TENSOR_AXES = 32
"""Maximum number of axes of a tensor, the limit of numpy before 2."""

MAX_TENSOR_BYTES = 2**50
"""Maximum size of a tensor: more than any device has, and small enough for sums in 64 bits."""

MAX_SPARSE_BYTES = 2**31 - 1
"""Maximum size of a sparse tensor's dense form, which onnxruntime stores as a protobuf message."""

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
"""Smallest and largest value (None: no limit) of each number in an attribute, by operator and attribute."""

AUTO_PAD_MODES = (b"NOTSET", b"SAME_UPPER", b"SAME_LOWER", b"VALID", b"")
_KNOWN_DTYPES = frozenset(onnx.TensorProto.DataType.values())
_STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
_CHECKED_DOMAINS = ("", "ai.onnx", "com.microsoft")

FunctionKey = tuple[str, str, str]


def check_sanity(model: onnx.ModelProto, place: str) -> None:
    """Raise DicompilerError for absurd models.

    Attributes, sizes or indices are out of range, functions are recursive, or there is no output.
    """
    if not model.graph.output:
        raise DicompilerError(f"{place}: it has no output: export it with at least one")
    for value in model.graph.input:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
            raise DicompilerError(f"{place}: input {value.name!r} has no type: export it again")
    for graph in _graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            kind, where = value.type.tensor_type, f"{place}: tensor {value.name!r}"
            if kind.elem_type not in _KNOWN_DTYPES:
                raise DicompilerError(f"{where} has the unknown type {kind.elem_type}: export it again")
            check_tensor_size(kind.elem_type, [dim.dim_value for dim in kind.shape.dim], where)
        for tensor in graph.initializer:
            _check_tensor(tensor, place)
        for sparse in graph.sparse_initializer:
            _check_sparse(sparse, place)
        _check_nodes(graph.node, place)
    for function in model.functions:
        for graph in _graphs(function):
            _check_nodes(graph.node, place)
    if model.functions:
        _check_calls(model, place)


def check_tensor_size(dtype: int, dims: Sequence[int], place: str) -> None:
    """Raise DicompilerError if a tensor has too many axes or bytes.

    Args:
        dtype: Element type, an onnx.TensorProto.DataType.
        dims: Dimensions; negative ones are unknown.
        place: Prefix of the message.

    Raises:
        DicompilerError: The tensor is too large.
    """
    if len(dims) > MAX_TENSOR_AXES:
        raise DicompilerError(f"{place} has {len(dims)} axes: at most {MAX_TENSOR_AXES} are supported")
    known = [dim for dim in dims if dim > 0]
    if math.prod(known) <= MAX_TENSOR_BYTES // 16:  # The usual case: no element type has more than 16 bytes.
        return
    try:
        nbytes = raw_nbytes(dtype or onnx.TensorProto.UINT8, tuple(known))
    except (KeyError, TypeError):  # Other checks report unknown types, and strings have no fixed size.
        nbytes = math.prod(known)
    if nbytes > MAX_TENSOR_BYTES:
        shape = "x".join(map(str, dims))
        raise DicompilerError(f"{place} of shape {shape} has more than 2^50 bytes: export the model with smaller sizes")


def _graphs(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Yield a graph and all bodies in it (protobuf limits their depth to 33)."""
    yield graph
    for node in graph.node:
        for body in control_flow_bodies(node):
            yield from _graphs(body)


def _check_tensor(tensor: onnx.TensorProto, place: str) -> None:
    where = f"{place}: tensor {tensor.name!r}"
    if any(dim < 0 for dim in tensor.dims):
        raise DicompilerError(f"{where} has the shape {'x'.join(map(str, tensor.dims))}: export it again")
    check_tensor_size(tensor.data_type, tensor.dims, where)


def _check_sparse(sparse: onnx.SparseTensorProto, place: str) -> None:
    """Raise DicompilerError if a sparse tensor lacks indices for its values, or if they are out of range."""
    where, dims = f"{place}: sparse tensor {sparse.values.name!r}", tuple(sparse.dims)
    _check_tensor(onnx.TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=dims), place)
    if raw_nbytes(sparse.values.data_type, dims) > MAX_SPARSE_BYTES:
        raise DicompilerError(
            f"{where} of shape {'x'.join(map(str, dims))} has more than 2 GB: store it as external data"
        )
    indices, count = onnx.numpy_helper.to_array(sparse.indices), math.prod(sparse.values.dims)
    if indices.dtype.kind != "i" or indices.shape not in ((count,), (count, len(dims))):
        raise DicompilerError(
            f"{where}: indices of type {indices.dtype} and shape {indices.shape} do not fit {count} values in {dims}"
        )
    most = math.prod(dims) if indices.ndim == 1 else dims
    wrong = indices[((indices < 0) | (indices >= most)).reshape(count, -1).any(axis=1)] if count else indices
    if len(wrong):
        raise DicompilerError(f"{where}: index {wrong[0].tolist()} is outside of its shape {dims}: export it again")


def _check_nodes(nodes: Iterable[onnx.NodeProto], place: str) -> None:
    for node in nodes:
        limits = ATTRIBUTE_LIMITS.get(node.op_type, {}) if node.domain in _CHECKED_DOMAINS else {}
        for attribute in node.attribute:
            where = f"{place}: {node.op_type} {_node_label(node)!r}: {attribute.name}"
            if attribute.name in limits and not attribute.ref_attr_name:
                low, high = limits[attribute.name]
                values = list(attribute.ints) if attribute.type == onnx.AttributeProto.INTS else [attribute.i]
                if any(number < low or (high is not None and number > high) for number in values):
                    most = "" if high is None else f" and at most {high}"
                    raise DicompilerError(f"{where} is {values}: each must be at least {low}{most}: correct the model")
            if limits is _WINDOW_LIMITS and attribute.name == "auto_pad" and attribute.s not in AUTO_PAD_MODES:
                names = ", ".join(name.decode() for name in AUTO_PAD_MODES if name)
                raise DicompilerError(f"{where} is {attribute.s.decode(errors='replace')!r}: it must be one of {names}")
            if attribute.HasField("sparse_tensor"):
                _check_sparse(attribute.sparse_tensor, where)
            if attribute.HasField("t"):
                _check_tensor(attribute.t, where)


def check_known_operators(model: onnx.ModelProto) -> None:
    """Raise DicompilerError for an unknown operator.

    Known operators are those of the standard, of onnxruntime, and the model's functions.
    """
    own = {(f.domain, f.name) for f in model.functions}
    nodes = (node for top in (model.graph, *model.functions) for graph in _graphs(top) for node in graph.node)
    others = [node for node in nodes if node.domain not in _STANDARD_DOMAINS and (node.domain, node.op_type) not in own]
    if others:
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

        known = {(schema.domain, schema.name) for schema in get_all_operator_schema()}
        for node in others:
            if (node.domain, node.op_type) not in known:
                raise DicompilerError(
                    f"model: {_node_label(node)!r}: onnxruntime {onnxruntime.__version__} has no operator "
                    f"{node.op_type!r} of domain {node.domain!r}: export the model without it, or install an "
                    "onnxruntime that has it"
                )


def _check_calls(model: onnx.ModelProto, place: str) -> None:
    """Raise DicompilerError if functions are recursive, or too large after inlining.

    Nodes are counted, not expanded.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    called = {
        key: [_function_key(node) for graph in _graphs(function) for node in graph.node]
        for key, function in functions.items()
    }
    sizes: dict[FunctionKey, int] = {}
    opened: set[FunctionKey] = set()
    waiting = list(functions)
    while waiting:
        key = waiting[-1]
        missing = {other for other in called[key] if other in functions and other not in sizes}
        if missing and missing & {*opened, key}:
            raise DicompilerError(
                f"{place}: function {key[0]}::{key[1]} calls itself, directly or through another function: rewrite it"
            )
        if missing and key not in sizes:
            opened.add(key)
            waiting += missing
        else:
            opened.discard(key)
            waiting.pop()
            sizes[key] = min(MAX_INLINED_NODES + 1, sum(sizes.get(other, 1) for other in called[key]))
    total = 0
    for node in (node for graph in _graphs(model.graph) for node in graph.node):
        total += sizes.get(_function_key(node), 1)
        if total > MAX_INLINED_NODES:
            called_by = f"{node.op_type} {_node_label(node)!r}"
            raise DicompilerError(
                f"{place}: with {called_by}, inlined functions exceed {MAX_INLINED_NODES} nodes: nest fewer functions"
            )


def _function_key(node: onnx.NodeProto) -> FunctionKey:
    return node.domain, node.op_type, node.overload


def _node_label(node: onnx.NodeProto) -> str:
    return node.name or next(iter(node.output), "")
