"""Graph rewrites of the passes `normalise` and `infer-shapes`, in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from dicompiler.plugin_api import Interval
from dicompiler.plugin_api.onnx import ModelGraph, TensorInfo, Variable
from dicompiler_passes.constant_folding import STANDARD_DOMAINS
from dicompiler_passes.unfuse import SKIP_NORMALIZATIONS

_FIRST_IR_WITH_FREE_INITIALIZERS = 4
_FIRST_SUPPORTED_OPSET, _FIRST_OPSET_WITH_SHAPE_INPUT = 7, 5


def raise_opset(graph: ModelGraph) -> None:
    """Raise an opset below 7 to at most 7: to the newest one in which all operators have the same meaning.

    Reshape(x), shape as an attribute (opset 4)  ⇒  Reshape(x, shape) (opset 7)

    The pieces of a split tensor are joined by Concat or Add, which onnxruntime supports from opset 4 and 7 on.
    """
    bodies = graph.subgraphs(recursive=True)
    nodes = [node for nodes in (graph.nodes, *(body.nodes for body in bodies)) for node in nodes]
    nodes = [node for node in nodes if node.domain in STANDARD_DOMAINS]
    reshapes = [node for node in graph.nodes if node.op == "Reshape" and "shape" in node.attrs]
    # Only changes of Reshape are rewritten.
    for opset in range(_FIRST_SUPPORTED_OPSET, graph.opset, -1):
        if all(_is_same_operator(node, graph.opset, opset) for node in nodes if node not in reshapes):
            for node in reshapes if opset >= _FIRST_OPSET_WITH_SHAPE_INPUT else ():
                name = graph.unused_tensor_name(f"{node.name}_shape")
                node.inputs.append(graph.add_initializer(name, int64_array(*node.attrs.pop("shape"))))
            graph.opset = opset
            for entry in graph.import_domains:
                entry.version = opset if entry.domain in STANDARD_DOMAINS else entry.version
            return


def _is_same_operator(node: gs.Node, old_opset: int, new_opset: int) -> bool:
    versions = [
        onnx.defs.get_schema(node.op, opset).since_version if onnx.defs.has(node.op, opset) else 0
        for opset in (old_opset, new_opset)
    ]
    return versions[0] == versions[1]


def fix_initializers(graph: ModelGraph) -> None:
    """Remove initializers from the graph inputs, so that callers cannot override their values."""
    graph.overridable_names.clear()
    # IR version 3 requires that initializers are graph inputs. Version 4 has no other difference.
    graph.ir_version = max(graph.ir_version, _FIRST_IR_WITH_FREE_INITIALIZERS)


def outputs_from_nodes(graph: ModelGraph) -> dict[str, str]:
    """Insert Identity nodes so that a node computes every graph output. Return {new name: old name} of renamed outputs.

    (w, an initializer) → output w         ⇒  (w_value) → Identity → w
    a → output a and again output a        ⇒  a → output a
    (x, a graph input) → output x          ⇒  x → Identity → x_1, with {x_1: x} as result
    """
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    graph.outputs = list({tensor.name: tensor for tensor in graph.outputs}.values())
    renamed: dict[str, str] = {}
    for index, (name, tensor) in enumerate([(tensor.name, tensor) for tensor in graph.outputs]):
        target = name
        if name in inputs:
            target = graph.unused_tensor_name(name)
            renamed[target] = name
        elif isinstance(tensor, gs.Constant):
            tensor.name = graph.unused_tensor_name(f"{name}_value")
        else:
            continue
        output = graph.outputs[index] = Variable(target, graph.value_infos["output"].get(name))
        graph.nodes.append(gs.Node("Identity", graph.unused_node_name(target), inputs=[tensor], outputs=[output]))
    return renamed


def trim_outputs(graph: ModelGraph) -> None:
    """Remove optional outputs that nothing reads, except those of nodes in training mode.

    Dropout → y, mask  ⇒  Dropout → y
    """
    standard_nodes = [node for node in graph.nodes if node.domain in STANDARD_DOMAINS and onnx.defs.has(node.op)]
    candidates = [
        node for node in graph.nodes if node.op in SKIP_NORMALIZATIONS and node.domain not in STANDARD_DOMAINS
    ] + standard_nodes
    candidates = [node for node in candidates if len(node.outputs) > 1 and not node.attrs.get("training_mode")]
    read_names = graph.names_read() if candidates else set()
    for node in candidates:
        while len(node.outputs) > 1 and node.outputs[-1].name not in read_names:
            if not _is_optional(node, len(node.outputs) - 1, graph.opset):
                break
            node.outputs.pop()


def _is_optional(node: gs.Node, index: int, opset: int) -> bool:
    """Return True if output number `index` of a node may be omitted."""
    op = node.op
    # An Attention with a cache as input must return the cache for the next frame.
    if op == "Attention" and index in (1, 2) and any(value.name for value in node.inputs[4:6]):
        return False
    if op in SKIP_NORMALIZATIONS:
        return index > 0
    try:
        outputs = onnx.defs.get_schema(op, max_inclusive_version=opset).outputs
    except onnx.defs.SchemaError:
        return False
    return index < len(outputs) and outputs[index].option == onnx.defs.OpSchema.FormalParameterOption.Optional


def split_to_slices(graph: ModelGraph, tensors: Mapping[str, TensorInfo]) -> bool:
    """Replace each Split by Slices, or by several products (see `split_products`). Return True on a change.

    Split(x, axis=1, sizes 2, 3) → a, b     ⇒  Slice(x, 0:2) → a,  Slice(x, 2:5) → b

    Plans can split only layers with one output. A Split of unknown sizes stays: the pass infer-shapes may find them
    later.
    """
    splits = [node for node in graph.nodes if node.op == "Split" and node.domain in STANDARD_DOMAINS]
    intervals_by_split = {
        id(node): cuts for node in splits if (cuts := _split_intervals(node, graph.opset, tensors)) is not None
    }
    split_products(graph, tensors, intervals_by_split)
    read_names = graph.names_read() if splits else set()
    slices: dict[int, list[gs.Node]] = {}
    for node in [node for node in graph.nodes if id(node) in intervals_by_split]:
        axis, intervals = intervals_by_split[id(node)]
        slices[id(node)] = [
            make_slice(graph, node, index, axis, interval)
            for index, (output, interval) in enumerate(zip(node.outputs, intervals, strict=True))
            if output.name in read_names
        ]
    graph.nodes = [new for node in graph.nodes for new in (*slices.get(id(node), ()), node)]
    graph.remove_nodes([node for node in splits if id(node) in slices])
    return bool(intervals_by_split)


def _split_intervals(
    node: gs.Node, opset: int, tensors: Mapping[str, TensorInfo]
) -> tuple[int, Sequence[Interval]] | None:
    """Return the axis of a Split and the interval of each output; None if the intervals are unknown."""
    axis = int(node.attrs.get("axis", 0))
    source = tensors.get(node.inputs[0].name)
    # Sizes are an input since opset 13 (and in opset 1), and an attribute in between. Without them, the pieces are
    # equal. Since opset 18, the last piece may be smaller.
    sizes: Sequence[int] | None = node.attrs.get("split")
    if sizes is None and len(node.inputs) > 1 and node.inputs[1].name:
        split_input = tensors.get(node.inputs[1].name)
        if split_input is None or split_input.value is None:
            return None
        sizes = [int(size) for size in split_input.value]
    if sizes is None:
        if source is None or source.shape is None:
            return None
        extent, count = source.shape[axis], len(node.outputs)
        part = math.ceil(extent / count)
        if extent % count and opset < 18:
            return None
        sizes = [max(0, min(part, extent - part * index)) for index in range(count)]
    if len(sizes) != len(node.outputs):
        return None
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return axis, [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def make_ranges_scalar(graph: ModelGraph, tensors: Mapping[str, TensorInfo]) -> bool:
    """Reshape inputs of Range that have shape [1] into scalars. Return True on a change.

    (x of shape [1]) → Range                ⇒  x → Reshape → Range

    onnxruntime accepts such inputs only if it does not know their shape. In the submodels of devices, it knows the
    shape.
    """
    changed = False
    for node in [node for node in graph.nodes if node.op == "Range" and node.domain in STANDARD_DOMAINS]:
        for index, tensor in enumerate(node.inputs):
            if tensor.name in tensors and tensors[tensor.name].shape == (1,):
                shape = graph.unused_tensor_name(f"{tensor.name}_no_axes")
                scalar = Variable(graph.unused_tensor_name(f"{tensor.name}_scalar"))
                name, inputs = (
                    graph.unused_node_name(scalar.name),
                    [tensor, graph.add_initializer(shape, int64_array())],
                )
                reshape = gs.Node("Reshape", name, inputs=inputs, outputs=[scalar], domain=node.domain)
                graph.insert_nodes([reshape], before=node)
                node.inputs[index] = scalar
                changed = True
    return changed


def make_slice(graph: ModelGraph, split: gs.Node, index: int, axis: int, interval: Interval) -> gs.Node:
    """Return a Slice that computes output `index` of a Split. `interval` is its range along the axis."""
    node = split.copy([split.inputs[0]], [split.outputs[index]])
    node.op, node.name, node.attrs = "Slice", graph.unused_node_name(f"{split.name}_{index}"), {}
    for key, value in {"starts": interval[0], "ends": interval[1], "axes": axis}.items():
        if graph.opset < 10:  # The bounds of a Slice are attributes.
            node.attrs[key] = [value]
        else:
            node.inputs.append(
                graph.add_initializer(graph.unused_tensor_name(f"{node.name}_{key}"), int64_array(value))
            )
    return node


def int64_array(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


SplitCuts = Mapping[int, tuple[int, Sequence[Interval]]]


def split_products(graph: ModelGraph, tensors: Mapping[str, TensorInfo], cuts: SplitCuts) -> None:
    """Replace Splits of a product's columns by one product for each piece.

    x → MatMul(w) → Add(b) → Split → q, k    ⇒  x → MatMul(w[:, :n]) → Add(b[:n]) → q,  x → MatMul(w[:, n:]) → …

    Only an Add of a vector and a Reshape that keeps the columns may be between product and Split.

    Args:
        graph: The graph, changed in place.
        tensors: Types and shapes of its tensors.
        cuts: For each Split, by id of its node: the axis and the interval of each output.
    """
    for split in [node for node in graph.nodes if id(node) in cuts]:
        axis, intervals = cuts[id(split)]
        source = tensors.get(split.inputs[0].name)
        if source is None or source.shape is None or axis % len(source.shape) != len(source.shape) - 1:
            continue
        chain = _product_chain(graph, split, source.shape[-1])
        read_names = graph.names_read() if chain else set()
        for copy_number, (output, interval) in enumerate(zip(list(split.outputs), intervals, strict=True)):
            if chain and output.name in read_names:
                graph.insert_nodes(_copy_chain(graph, chain, output, interval, copy_number), before=split)
        graph.remove_nodes([split, *chain] if chain else [])


def _product_chain(graph: ModelGraph, split: gs.Node, columns: int) -> list[gs.Node]:
    """Return the nodes from a matrix product with `columns` columns to `split`, without the Split itself.

    The result is [] if there is no such product, if a tensor between the nodes has other readers or is an output, or if
    a node between product and Split cannot be split by columns.
    """
    chain: list[gs.Node] = []
    tensor, outputs = split.inputs[0], {output.name for output in graph.outputs}
    while len(tensor.outputs) == 1 and len(tensor.inputs) == 1 and tensor.name not in outputs:
        node = tensor.inputs[0]
        is_fixed = [graph.is_constant(value) for value in node.inputs]
        if node.domain not in STANDARD_DOMAINS or not any(is_fixed) or len(node.outputs) != 1:
            return []
        chain.insert(0, node)
        shapes = [
            tuple(value.shape) if has_value else None for value, has_value in zip(node.inputs, is_fixed, strict=True)
        ]
        if node.op in ("MatMul", "Gemm"):
            weight = shapes[1] or ()
            has_columns = len(weight) == 2 and weight[0 if node.attrs.get("transB", 0) else 1] == columns
            bias_fits = node.op == "MatMul" or len(node.inputs) < 3 or shapes[2] == (columns,)
            return chain if has_columns and not is_fixed[0] and bias_fits else []
        if node.op == "Add" and (columns,) in shapes:
            tensor = node.inputs[is_fixed.index(False)] if False in is_fixed else tensor
        elif node.op == "Reshape" and is_fixed[1] and int(np.asarray(node.inputs[1].values)[-1]) == columns:
            tensor = node.inputs[0]
        else:
            return []
    return []


def _copy_chain(
    graph: ModelGraph, chain: Sequence[gs.Node], output: Any, interval: Interval, copy_number: int
) -> list[gs.Node]:
    """Return a copy of `chain` that computes only the columns in `interval`, as the tensor `output`.

    Copy number 0 keeps the names of the nodes.
    """
    pieces: list[gs.Node] = []
    previous = chain[0].inputs[0]
    for node in chain:
        inputs = [
            previous if not graph.is_constant(value) else _cut_constant(graph, node, value, interval)
            for value in node.inputs
        ]
        is_last = node is chain[-1]
        result = output if is_last else Variable(graph.unused_tensor_name(f"{node.outputs[0].name}_{copy_number}"))
        if is_last:
            output.inputs.clear()
        piece = node.copy(inputs, [result])
        piece.name = node.name if copy_number == 0 else graph.unused_node_name(f"{node.name}_{copy_number}")
        pieces.append(piece)
        previous = result
    return pieces


def _cut_constant(graph: ModelGraph, node: gs.Node, value: Any, interval: Interval) -> Any:
    """Return the columns in `interval` of the constant `value`: a weight, a bias, or the target shape of a Reshape."""
    array = np.asarray(value.values)
    if node.op == "Reshape":
        piece = np.append(array[:-1], interval[1] - interval[0]).astype(array.dtype)
    elif array.ndim == 2 and node.attrs.get("transB", 0):
        piece = array[interval[0] : interval[1]]
    else:
        piece = array[..., interval[0] : interval[1]]
    return graph.add_initializer(graph.unused_tensor_name(f"{value.name}_{interval[0]}"), np.ascontiguousarray(piece))
