"""Replacement of a matrix product and the Split of its columns by several products, such as Q, K and V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from dicompiler.plugin_api import Interval
from dicompiler.plugin_api.onnx import ModelGraph, TensorInfo, Variable
from dicompiler_passes.constant_folding import STANDARD_DOMAINS

SplitCuts = Mapping[int, tuple[int, Sequence[Interval]]]


def split_products(graph: ModelGraph, tensors: Mapping[str, TensorInfo], cuts: SplitCuts) -> None:
    """Replace Splits of a product's columns by one product for each piece.

    x → MatMul(w) → Add(b) → Split → q, k    ⇒  x → MatMul(w[:, :n]) → Add(b[:n]) → q,  x → MatMul(w[:, n:]) → …

    Between product and Split, an Add of a vector and a Reshape that keeps the columns are allowed. If another node
    reads a tensor between product and Split, the Split stays.

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

    The result is [] if there is no such product, or if nodes are in between that cannot be split by columns.
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
    """Return a copy of the nodes of `chain` that computes only the columns in `interval`, as the tensor `output`.

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
    """Return the part of a node's constant that belongs to the columns in `interval`.

    For a Reshape, it is the target shape for these columns.
    """
    array = np.asarray(value.values)
    if node.op == "Reshape":
        piece = np.append(array[:-1], interval[1] - interval[0]).astype(array.dtype)
    elif array.ndim == 2 and node.attrs.get("transB", 0):
        piece = array[interval[0] : interval[1]]
    else:
        piece = array[..., interval[0] : interval[1]]
    return graph.add_initializer(graph.unused_tensor_name(f"{value.name}_{interval[0]}"), np.ascontiguousarray(piece))
