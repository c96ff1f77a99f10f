"""Constant folding: compute constant tensors with onnxruntime at compile time.

Graph ⇒ the same graph without the nodes that compute constants; their results become initializers
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
"""Operators that are not folded, because dequantized weights are larger than quantized ones."""

NON_TENSOR_OPS = frozenset(
    "Optional SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceMap SplitToSequence".split()
)
"""Operators with a result that is not a tensor, and can therefore not be an initializer."""

MAX_TENSOR_BYTES, MAX_FOLDED_BYTES = 2**29, 2**30
"""Largest size of one folded tensor, and of all folded tensors together."""

MAX_TENSOR_GROWTH, MAX_GROWTH = 2**22, 2**24
"""Largest growth of the model in bytes: by one folded tensor, and by all of them.

The growth by a tensor is its size minus the sizes of the constants from which it is computed. If the model's weights
are larger than MAX_GROWTH, their size is the limit instead.
"""

WEIGHTED_OPS = ("BatchNormalization", "Conv", "ConvTranspose", "Gemm", "GRU", "LSTM", "MatMul", "RNN")
"""Operators that need constant weights (all inputs except the first) to be split well."""

FOLDING_TIMEOUT_S = 60.0
"""Time limit in seconds for each run of onnxruntime."""

BOUNDED_OUTPUT_OPS = ("Compress", "NonMaxSuppression", "NonZero", "Unique")
"""Operators with results of unknown size, which are not much larger than their inputs."""

_BRANCH_ONLY_OPS = ("Constant", "Identity", "If")
"""Operators in the branches of an If that may be folded: they only return constants."""
_MAX_VISIBLE_BYTES = 2**16
"""Constants up to this size are visible to shape inference, because they may be shapes."""

_CONSTANT_TYPES: Mapping[str, type] = {"float": np.float32, "int": np.int64, "string": object}


def fold_constants(graph: ModelGraph) -> None:
    """Compute the nodes with only constant inputs, and store their results as initializers, repeatedly.

    Constant → (initializer);  ConstantOfShape, Transpose(w), Concat(a, b) … → (initializer);  Identity(w) → w

    These nodes are not folded:

    * DequantizeLinear, random operators and operators of other domains,
    * control flow that computes something or reads tensors from outside its body,
    * nodes with results above MAX_TENSOR_BYTES, and nodes that onnxruntime cannot compute,
    * nodes that make the model much larger (see MAX_GROWTH), such as the Expand of a small constant.

    An initializer that is also a graph input is not constant.

    Raises:
        DicompilerError: onnxruntime takes longer than FOLDING_TIMEOUT_S.
    """
    _store_as_weights(graph)
    while _fold_once(graph):
        pass


def _fold_once(graph: ModelGraph) -> bool:
    """Fold the nodes that can be folded now. Return True if a second call may fold more.

    A second call can find the sizes of more results, because some nodes have become constants.
    """
    outputs = {tensor.name for tensor in graph.outputs}
    folded: set[str] = set()
    pending: list[gs.Node] = []
    removed: list[gs.Node] = []
    for node in graph.nodes:
        if not _is_foldable(graph, node, folded) or (node.op == "Identity" and node.outputs[0].name in outputs):
            continue  # An Identity that computes a graph output stays: it gives the output its name.
        if node.op == "Constant":
            graph.make_constant(node.outputs[0], _constant_value(node))
        elif node.op == "Identity":
            graph.replace_uses(node.outputs[0], node.inputs[0])
        else:
            folded.update(tensor.name for tensor in node.outputs)
            pending.append(node)
            continue
        removed.append(node)
    graph.remove_nodes(removed)
    if not pending:
        return False
    small = _select_small(graph, pending)
    computed = _compute(graph, small) if small else []
    graph.remove_nodes(computed)
    return 0 < len(computed) < len(pending)


def _store_as_weights(graph: ModelGraph) -> None:
    """Store sparse initializers, and large lists of numbers (float_data, int64_data, …), as dense arrays."""
    for constant in [constant for constant in graph.initializers if _needs_storing(constant._values)]:
        constant.source, constant.values = None, constant.values
        graph.initializers.remove(constant)
        graph.initializers.append(constant)


def _needs_storing(values: NDArray[Any] | LazyValues) -> bool:
    if not isinstance(values, ConstantValues) or values.weight is not None:
        return isinstance(values, SparseValues)
    return not values.source.HasField("raw_data") and values.is_large


def _is_foldable(graph: ModelGraph, node: gs.Node, folded: Collection[str]) -> bool:
    """Return True if the node's results depend only on constants and on tensors in `folded`."""
    if not all(graph.is_constant(tensor) or tensor.name in folded for tensor in node.inputs if tensor.name):
        return False
    if node.domain not in STANDARD_DOMAINS or node.op in (*UNFOLDED_OPS, *NON_TENSOR_OPS):
        return False
    # Fold no loops and no branches that compute something, because they may take any time and memory.
    only_branches = all(inner.op in _BRANCH_ONLY_OPS for body in node.subgraphs(recursive=True) for inner in body.nodes)
    proto = export_node(node)
    return any(t.name for t in node.outputs) and only_branches and not is_random(proto) and not captured_names(proto)


def _constant_value(node: gs.Node) -> NDArray[Any] | LazyValues:
    ((name, value),) = node.attrs.items()
    if name == "sparse_value":
        return to_dense(value.attribute.sparse_tensor)
    if name != "value":
        attribute_value = (
            onnx.helper.get_attribute_value(value.attribute) if isinstance(value, OpaqueAttribute) else value
        )
        return np.array(attribute_value, _CONSTANT_TYPES[name.removeprefix("value_").removesuffix("s")])
    return value.values if value._values.is_large else value._values


def _select_small(graph: ModelGraph, pending: Sequence[gs.Node]) -> list[gs.Node]:
    """Return the nodes of `pending` with results that shape inference knows to be small.

    A node that reads the result of another node of `pending` is returned only together with that node.
    """
    model, feeds = _build_model(graph, pending, [], {})
    for name in [name for name, array in feeds.items() if array.nbytes <= _MAX_VISIBLE_BYTES]:
        model.graph.initializer.append(onnx.numpy_helper.from_array(feeds[name], name))
    try:
        inferred = propagate_shapes(model)
    except onnx.shape_inference.InferenceError:
        return []
    sizes = {v.name: _nbytes(v.type.tensor_type) for v in inferred.graph.value_info}
    remaining_bytes = MAX_FOLDED_BYTES - sum(
        c._values.nbytes for c in graph.initializers if isinstance(c._values, np.ndarray)
    )
    unknown = {tensor.name for node in pending for tensor in node.outputs if tensor.name}
    small = []
    for node in pending:
        names = [tensor.name for tensor in node.outputs if tensor.name]
        sizes_or_none = [0 if node.op in BOUNDED_OUTPUT_OPS else sizes.get(name) for name in names]
        fitting_sizes = [size for size in sizes_or_none if size is not None and size <= MAX_TENSOR_BYTES]
        all_fit = len(fitting_sizes) == len(names) and sum(fitting_sizes) <= remaining_bytes
        if all_fit and not any(tensor.name in unknown for tensor in node.inputs):
            unknown.difference_update(names)
            remaining_bytes -= sum(fitting_sizes)
            small.append(node)
    return _without_growth(graph, small, {name: size or 0 for name, size in sizes.items()})


def _without_growth(graph: ModelGraph, nodes: Sequence[gs.Node], sizes: Mapping[str, int]) -> list[gs.Node]:
    """Return `nodes` without those with results that would make the model much larger.

    Examples, in which Add is not a candidate for folding:

    Expand(small constant) → Add(x, ·)               ⇒  none, because the large result would be stored
    Expand(small constant) → ReduceSum → Add(x, ·)   ⇒  Expand, ReduceSum, because only the sum would be stored

    A ConstantOfShape that computes weights always stays in the result.

    Args:
        graph: The graph.
        nodes: Candidates for folding.
        sizes: Bytes of their results by tensor name.
    """
    folded_bytes = sum(_constant_nbytes(c) for c in graph.initializers if isinstance(c._values, np.ndarray))
    weight_bytes = sum(_constant_nbytes(c) for c in graph.initializers) - folded_bytes
    budget = max(MAX_GROWTH, weight_bytes) - folded_bytes
    weights = {tensor.name for node in graph.nodes if node.op in WEIGHTED_OPS for tensor in node.inputs[1:]}
    kept = list(nodes)
    while True:
        kept_ids = {id(node) for node in kept}
        read_names = {name for node in graph.nodes if id(node) not in kept_ids for name in names_read(node)}
        read_names |= {tensor.name for tensor in graph.outputs}
        source_bytes: dict[str, dict[str, int]] = {}
        growth, dropped = 0, set[str]()
        for node in kept:
            sources: dict[str, int] = {}
            for tensor in node.inputs:
                is_source = isinstance(tensor, gs.Constant)
                sources |= {tensor.name: _constant_nbytes(tensor)} if is_source else source_bytes.get(tensor.name, {})
            names = [tensor.name for tensor in node.outputs if tensor.name]
            source_bytes |= dict.fromkeys(names, sources)
            is_weight = node.op == "ConstantOfShape" and weights.issuperset(names)
            stored = 0 if is_weight else sum(sizes.get(name, 0) for name in names if name in read_names)
            added = max(0, stored - sum(sources.values()))
            needs_dropped = not dropped.isdisjoint(tensor.name for tensor in node.inputs)
            if needs_dropped or added > min(MAX_TENSOR_GROWTH, budget - growth):
                dropped.update(names)
            else:
                growth += added
        if not dropped:
            return kept
        kept = [node for node in kept if dropped.isdisjoint(tensor.name for tensor in node.outputs)]


def _constant_nbytes(constant: gs.Constant) -> int:
    values = constant._values
    if not isinstance(values, ConstantValues):
        return int(values.nbytes)
    kind = values.source.data_type
    return 0 if kind == onnx.TensorProto.STRING else raw_nbytes(kind, tuple(values.source.dims))


def _nbytes(tensor_type: onnx.TypeProto.Tensor) -> int | None:
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor_type.shape.dim]
    is_known = tensor_type.HasField("shape") and tensor_type.elem_type and -1 not in dims
    return raw_nbytes(tensor_type.elem_type, tuple(dims)) if is_known else None


def _compute(graph: ModelGraph, pending: Sequence[gs.Node]) -> list[gs.Node]:
    """Store the results of `pending` as initializers. Return the nodes that onnxruntime could compute."""
    pending_ids = {id(node) for node in pending}
    read_names = {name for node in graph.nodes if id(node) not in pending_ids for name in names_read(node)}
    read_names |= {tensor.name for tensor in graph.outputs}
    results = {tensor.name: tensor for node in pending for tensor in node.outputs if tensor.name}
    values: dict[str, NDArray[Any]] = {}
    failed: list[gs.Node] = []
    groups = [pending]  # Run all nodes together. If onnxruntime refuses this group, run each node separately.
    while groups:
        group, *groups = groups
        names = [t.name for node in group for t in node.outputs if t.name in read_names or (t.name and len(group) == 1)]
        try:
            values |= _run_nodes(graph, group, names, values)
        except _RejectedError:
            groups = [[node] for node in group] if len(group) > 1 else groups
            failed += group if len(group) == 1 else []
    read_names.update(name for node in failed for name in names_read(node))
    for name in sorted(values.keys() & read_names):
        graph.make_constant(results[name], values[name])
    return [node for node in pending if node not in failed]


class _RejectedError(Exception):
    """Raised if onnxruntime cannot compute a node, or if an input of a node is missing."""


def _build_model(
    graph: ModelGraph, nodes: Sequence[gs.Node], outputs: Sequence[str], values: Mapping[str, NDArray[Any]]
) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """Return a model of `nodes`, and the values of its inputs by name.

    Args:
        graph: The graph. Its constants are input values.
        nodes: The nodes.
        outputs: Names of the model's outputs.
        values: Further input values by name.

    Raises:
        _RejectedError: An input value is missing.
    """
    results = {"", *(tensor.name for node in nodes for tensor in node.outputs)}
    needed = {tensor.name: tensor for node in nodes for tensor in node.inputs if tensor.name not in results}
    graph_proto = onnx.GraphProto(name="constants", node=map(export_node, nodes))
    graph_proto.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    feeds: dict[str, NDArray[Any]] = {}
    for name, tensor in sorted(needed.items()):
        array = tensor.values if isinstance(tensor, gs.Constant) else values.get(name)
        if array is None:
            raise _RejectedError
        # onnxruntime accepts no inputs of types that NumPy lacks, such as bfloat16. Store them as initializers.
        if array.dtype.kind == "V":
            graph_proto.initializer.append(onnx.numpy_helper.from_array(array, name))
        else:
            feeds[name] = np.require(array, requirements=["C", "A"])
            graph_proto.input.append(onnx.helper.make_tensor_value_info(name, array_dtype(array), array.shape))
    return onnx.ModelProto(
        ir_version=max(4, graph.ir_version), graph=graph_proto, opset_import=graph.import_domains
    ), feeds


def _run_nodes(
    graph: ModelGraph, nodes: Sequence[gs.Node], outputs: Sequence[str], constants: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the tensors `outputs` by name, computed by `nodes` with onnxruntime.

    Inputs of the nodes are constants of the graph, or in `constants`.
    """
    import onnxruntime

    model, feeds = _build_model(graph, nodes, outputs, constants)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    run_options = onnxruntime.RunOptions()
    timer = Timer(FOLDING_TIMEOUT_S, setattr, (run_options, "terminate", True))
    timer.daemon = True
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        timer.start()
        values = session.run(list(outputs), feeds, run_options)
    except Exception as error:  # onnxruntime's errors have no narrower common base class.
        if run_options.terminate:
            names = ", ".join(repr(node.name) for node in nodes[:3]) + (" …" if len(nodes) > 3 else "")
            raise DicompilerError(
                f"folding: computing the constant results of {names} takes over {FOLDING_TIMEOUT_S:g} s: export the "
                "model with initializers instead of these nodes"
            ) from error
        raise _RejectedError from error
    finally:
        timer.cancel()
    if not all(isinstance(value, np.ndarray) for value in values):
        raise _RejectedError
    return dict(zip(outputs, values, strict=True))
