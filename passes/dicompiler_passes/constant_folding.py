"""Constant folding: onnxruntime computes at compile time what depends on constants only.

Graph ⇒ the same graph, in which the results are initializers and the nodes that made them are gone
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from threading import Timer
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues

from dicompiler.plugin_api import DicompilerError
from dicompiler.plugin_api.onnx import (
    ConstantValues,
    ModelGraph,
    OpaqueAttribute,
    array_dtype,
    captured_names,
    export_node,
    is_random,
    names_read,
    raw_nbytes,
    to_dense,
)
from dicompiler_passes.shape_checks import propagate_shapes

STANDARD_DOMAINS = (None, "", "ai.onnx")

UNFOLDED_OPS = ("DequantizeLinear",)
"""Operators whose result is larger than their inputs, such as a dequantized weight."""

NON_TENSOR_OPS = frozenset(
    "Optional SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceMap SplitToSequence".split()
)
"""Operators whose result is not a tensor, so that no initializer can hold it."""

MAX_TENSOR_BYTES, MAX_FOLDED_BYTES = 2**29, 2**30
"""Largest number of bytes of one folded tensor. Nodes with larger results stay."""

FOLDING_TIMEOUT_S = 60.0
"""Largest number of seconds that onnxruntime may take for folding."""

BOUNDED_OUTPUT_OPS = ("Compress", "NonMaxSuppression", "NonZero", "Unique")
"""Operators whose results have an unknown size that is not larger than their inputs."""

_BRANCH_ONLY_OPS = ("Constant", "Identity", "If")  # what control flow that only chooses consists of
_MAX_VISIBLE_BYTES = 2**16  # bytes of a constant that shape inference sees: it may be a shape

_CONSTANT_TYPES: Mapping[str, type] = {"float": np.float32, "int": np.int64, "string": object}


def fold_constants(graph: ModelGraph) -> None:
    """Compute every node whose inputs are all constants, and then the nodes that depend on the results.

    Constant → (initializer);  ConstantOfShape, Transpose(w), Concat(a, b) … → (initializer);  Identity(w) → w

    Not folded are:

    * DequantizeLinear, random operators and operators of other domains,
    * control flow that computes something or reads tensors around it,
    * results above MAX_TENSOR_BYTES, and nodes that onnxruntime cannot compute.

    An initializer that is also a graph input is not constant. A constant graph output is an initializer afterwards.

    Raises:
        DicompilerError: onnxruntime takes longer than FOLDING_TIMEOUT_S.
    """
    _store_as_weights(graph)
    while _fold_once(graph):
        pass


def _fold_once(graph: ModelGraph) -> bool:
    """Fold once, and return True if the results may allow more folding because sizes may follow from them."""
    outputs = {tensor.name for tensor in graph.outputs}
    known: set[str] = set()
    pending: list[gs.Node] = []
    gone: list[gs.Node] = []
    for node in graph.nodes:
        if not _is_foldable(graph, node, known) or (node.op == "Identity" and node.outputs[0].name in outputs):
            continue  # such an Identity is there to give the output its name
        if node.op == "Constant":
            graph.make_constant(node.outputs[0], _constant_value(node))
        elif node.op == "Identity":
            graph.replace_uses(node.outputs[0], node.inputs[0])
        else:
            known.update(tensor.name for tensor in node.outputs)
            pending.append(node)
            continue
        gone.append(node)
    graph.remove_nodes(gone)
    if not pending:
        return False
    sized = _select_small(graph, pending)
    done = _compute(graph, sized) if sized else []
    graph.remove_nodes(done)
    return 0 < len(done) < len(pending)


def _store_as_weights(graph: ModelGraph) -> None:
    """Make weights of large initializers that are typed lists or sparse."""
    for constant in [constant for constant in graph.initializers if _needs_storing(constant._values)]:
        constant.source, constant.values = None, constant.values
        graph.initializers.remove(constant)
        graph.initializers.append(constant)


def _needs_storing(values: NDArray[Any] | LazyValues) -> bool:
    """Return True if the data is sparse, or in a typed field (float_data, …) although it is large."""
    if not isinstance(values, ConstantValues) or values.weight is not None:
        return isinstance(values, SparseValues)
    return not values.source.HasField("raw_data") and values.is_large


def _is_foldable(graph: ModelGraph, node: gs.Node, known: Collection[str]) -> bool:
    """Return True if the node always gives the same tensors, from constants and the `known` tensors alone."""
    if not all(graph.is_constant(tensor) or tensor.name in known for tensor in node.inputs if tensor.name):
        return False
    if node.domain not in STANDARD_DOMAINS or node.op in (*UNFOLDED_OPS, *NON_TENSOR_OPS):
        return False
    # Of what control flow computes nobody knows how long it takes, and how large it becomes.
    simple = all(inner.op in _BRANCH_ONLY_OPS for body in node.subgraphs(recursive=True) for inner in body.nodes)
    proto = export_node(node)
    return any(t.name for t in node.outputs) and simple and not is_random(proto) and not captured_names(proto)


def _constant_value(node: gs.Node) -> NDArray[Any] | LazyValues:
    ((name, value),) = node.attrs.items()
    if name == "sparse_value":
        return to_dense(value.attribute.sparse_tensor)
    if name != "value":
        given = onnx.helper.get_attribute_value(value.attribute) if isinstance(value, OpaqueAttribute) else value
        return np.array(given, _CONSTANT_TYPES[name.removeprefix("value_").removesuffix("s")])
    return value.values if value._values.is_large else value._values


def _select_small(graph: ModelGraph, pending: Sequence[gs.Node]) -> list[gs.Node]:
    """Return the nodes whose results are small enough by shape inference.

    They depend on such nodes alone.
    """
    model, feeds = _build_model(graph, pending, [], {})
    for name in [name for name, array in feeds.items() if array.nbytes <= _MAX_VISIBLE_BYTES]:
        model.graph.initializer.append(onnx.numpy_helper.from_array(feeds[name], name))
    try:
        inferred = propagate_shapes(model)
    except onnx.shape_inference.InferenceError:
        return []
    sizes = {v.name: _nbytes(v.type.tensor_type) for v in inferred.graph.value_info}
    room = MAX_FOLDED_BYTES - sum(c._values.nbytes for c in graph.initializers if isinstance(c._values, np.ndarray))
    open_ = {tensor.name for node in pending for tensor in node.outputs if tensor.name}
    fitting = []
    for node in pending:
        names = [tensor.name for tensor in node.outputs if tensor.name]
        known = [0 if node.op in BOUNDED_OUTPUT_OPS else sizes.get(name) for name in names]
        most = [size for size in known if size is not None and size <= MAX_TENSOR_BYTES]
        if len(most) == len(names) and sum(most) <= room and not any(tensor.name in open_ for tensor in node.inputs):
            open_.difference_update(names)
            room -= sum(most)
            fitting.append(node)
    return fitting


def _nbytes(kind: onnx.TypeProto.Tensor) -> int | None:
    """Return the bytes of a tensor; None if its shape or type is unknown."""
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
    known = kind.HasField("shape") and kind.elem_type and -1 not in dims
    return raw_nbytes(kind.elem_type, tuple(dims)) if known else None


def _compute(graph: ModelGraph, pending: Sequence[gs.Node]) -> list[gs.Node]:
    """Store results as initializers, and return the nodes that could be computed."""
    inner = {id(node) for node in pending}
    read = {name for node in graph.nodes if id(node) not in inner for name in names_read(node)}
    read |= {tensor.name for tensor in graph.outputs}
    results = {tensor.name: tensor for node in pending for tensor in node.outputs if tensor.name}
    found: dict[str, NDArray[Any]] = {}
    failed: list[gs.Node] = []
    groups = [pending]  # all at once; where onnxruntime refuses that, one by one
    while groups:
        group, *groups = groups
        names = [t.name for node in group for t in node.outputs if t.name in read or (t.name and len(group) == 1)]
        try:
            found |= _run_nodes(graph, group, names, found)
        except _RejectedError:
            groups = [[node] for node in group] if len(group) > 1 else groups
            failed += group if len(group) == 1 else []
    read.update(name for node in failed for name in names_read(node))
    for name in sorted(found.keys() & read):
        graph.make_constant(results[name], found[name])
    return [node for node in pending if node not in failed]


class _RejectedError(Exception):
    """onnxruntime cannot compute a node or one of its inputs."""


def _build_model(
    graph: ModelGraph, nodes: Sequence[gs.Node], wanted: Sequence[str], found: Mapping[str, NDArray[Any]]
) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """Return nodes as a model with the outputs `wanted`, and the values of its inputs."""
    results = {"", *(tensor.name for node in nodes for tensor in node.outputs)}
    needed = {tensor.name: tensor for node in nodes for tensor in node.inputs if tensor.name not in results}
    inner = onnx.GraphProto(name="constants", node=map(export_node, nodes))
    inner.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    feeds: dict[str, NDArray[Any]] = {}
    for name, tensor in sorted(needed.items()):
        array = tensor.values if isinstance(tensor, gs.Constant) else found.get(name)
        if array is None:
            raise _RejectedError
        if array.dtype.kind == "V":  # numpy does not know such a type (bfloat16 …), so it cannot be fed
            inner.initializer.append(onnx.numpy_helper.from_array(array, name))
        else:
            feeds[name] = np.require(array, requirements=["C", "A"])
            inner.input.append(onnx.helper.make_tensor_value_info(name, array_dtype(array), array.shape))
    return onnx.ModelProto(ir_version=max(4, graph.ir_version), graph=inner, opset_import=graph.import_domains), feeds


def _run_nodes(
    graph: ModelGraph, nodes: Sequence[gs.Node], wanted: Sequence[str], found: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the values of `wanted`."""
    import onnxruntime

    model, feeds = _build_model(graph, nodes, wanted, found)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    stop = onnxruntime.RunOptions()
    timer = Timer(FOLDING_TIMEOUT_S, setattr, (stop, "terminate", True))
    timer.daemon = True
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        timer.start()
        values = session.run(list(wanted), feeds, stop)
    except Exception as error:  # onnxruntime's exceptions have no other common base
        if stop.terminate:
            names = ", ".join(repr(node.name) for node in nodes[:3]) + (" …" if len(nodes) > 3 else "")
            raise DicompilerError(
                f"folding: computing the constants of {names} takes over {FOLDING_TIMEOUT_S:g} s"
            ) from error
        raise _RejectedError from error
    finally:
        timer.cancel()
    if not all(isinstance(value, np.ndarray) for value in values):
        raise _RejectedError
    return dict(zip(wanted, values, strict=True))
