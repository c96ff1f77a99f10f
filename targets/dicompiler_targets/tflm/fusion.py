"""Fusion of normalization, bias and activation into the operator before them.

TFLite-micro has no BatchNormalization. A bias or activation that is an option of another operator saves an operation
and a tensor. Examples:

    Conv → BatchNormalization ⇒ Conv;   Conv → Add(constant) ⇒ Conv with bias;   Conv → Relu ⇒ Conv with activation
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler_targets.tflm.graph import SegmentGraph, SegmentNode, make_refusal

_ACTIVATION_FUSING_OPERATORS = ("Conv", "Gemm", "MatMul", "Add", "Sub", "Mul", "Div", "MaxPool", "AveragePool")
"""ONNX operators whose TFLite operators can apply an activation to their result."""


def fuse_operators(graph: SegmentGraph) -> SegmentGraph:
    """Return the graph with normalizations, biases and activations fused into the nodes before them.

    A node is fused only if the tensor between the two nodes has no other reader and is not an output of the graph.
    """
    changed = True
    while changed:
        graph, changed = _fuse_first(graph)
    return graph


def _fuse_first(graph: SegmentGraph) -> tuple[SegmentGraph, bool]:
    producers = {name: node for node in graph.nodes for name in node.outputs}
    readers = graph.map_readers()
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            before = producers.get(name)
            if before is None or name in graph.outputs or len(readers[name]) > 1 or len(before.outputs) > 1:
                continue
            folded = _fuse_pair(graph, before, node, name)
            if folded is not None:
                merged, constants = folded
                nodes = tuple(merged if n is node else n for n in graph.nodes if n is not before)
                return replace(graph, nodes=nodes, constants={**graph.constants, **constants}), True
    return graph, False


def _fuse_pair(
    graph: SegmentGraph, before: SegmentNode, node: SegmentNode, name: str
) -> tuple[SegmentNode, dict[str, NDArray[Any]]] | None:
    """Return the node that replaces two consecutive nodes, and its new constants; None if they cannot be fused.

    `name` is the tensor between the nodes.
    """
    if before.activation != "NONE" or node.activation != "NONE":
        return None
    activation = find_activation(graph, node)
    if activation is not None:
        fusing = before.op in _ACTIVATION_FUSING_OPERATORS and graph.dtypes[node.output] in ("float32", "int8")
        return (replace(before, outputs=node.outputs, activation=activation), {}) if fusing else None
    if before.op not in ("Conv", "Gemm", "MatMul") or graph.dtypes[node.output] != "float32":
        return None
    if not all(n in graph.constants for n in before.inputs[1:] if n):
        return None
    affine = _find_affine(graph, node, name)
    if affine is None:
        return None
    return _scale_weights(graph, before, node, *affine)


def find_activation(graph: SegmentGraph, node: SegmentNode) -> str | None:
    """Return TFLite's name of a node's activation ("RELU" or "RELU6"); None for other nodes."""
    if node.op == "Relu":
        return "RELU"
    if node.op == "Clip":
        low, high = get_clip_bounds(graph, node)
        if low == 0 and high == 6:
            return "RELU6"
        if low == 0 and high is None:
            return "RELU"
    return None


def get_clip_bounds(graph: SegmentGraph, node: SegmentNode) -> tuple[float | None, float | None]:
    """Return the constant lower and upper bound of a Clip; None for a bound that is missing."""
    bounds: list[float | None] = []
    for index, key in ((1, "min"), (2, "max")):
        if node.has_input(index) and node.inputs[index] not in graph.constants:
            raise make_refusal(
                node, f"its {key} is not constant", "TFLite-micro requires a constant; use target sockets"
            )
        bound = graph.constants.get(node.inputs[index]) if node.has_input(index) else node.get_attribute(key)
        value = None if bound is None else float(np.asarray(bound).reshape(()))
        bounds.append(None if value is not None and abs(value) >= np.finfo(np.float32).max else value)
    return bounds[0], bounds[1]


def get_batch_norm_affine(graph: SegmentGraph, node: SegmentNode) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return factor and shift (float64, for each channel) of a BatchNormalization: y = factor * x + shift."""
    scale, bias, mean, variance = (graph.constants[name].astype(np.float64) for name in node.inputs[1:5])
    factor = scale / np.sqrt(variance + node.get_attribute("epsilon", 1e-5))
    return factor, bias - mean * factor


def _find_affine(graph: SegmentGraph, node: SegmentNode, name: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return factor and shift for each channel if the node computes y = factor * x + shift; else None.

    The channel is axis 1 if x has four axes, else the last axis. `name` is the tensor x.
    """
    shape = graph.shapes[node.output]
    if node.op == "BatchNormalization" and node.inputs[0] == name:
        return get_batch_norm_affine(graph, node) if all(n in graph.constants for n in node.inputs[1:5]) else None
    if node.op not in ("Add", "Sub", "Mul", "Sum") or len(node.inputs) != 2 or graph.shapes[name] != shape:
        return None
    other = node.inputs[1 - node.inputs.index(name)]
    value = graph.constants.get(other)
    if value is None or (node.op == "Sub" and node.inputs[1] == name):
        return None
    axis = 1 if len(shape) == 4 else len(shape) - 1
    wide = value.reshape((1,) * (len(shape) - value.ndim) + value.shape) if value.ndim <= len(shape) else value
    if wide.ndim != len(shape) or any(d != 1 for i, d in enumerate(wide.shape) if i != axis):
        return None
    each = np.broadcast_to(wide.reshape(-1).astype(np.float64), (shape[axis],))
    zero = np.zeros(shape[axis])
    return (each, zero) if node.op == "Mul" else (zero + 1, -each if node.op == "Sub" else each)


def _scale_weights(
    graph: SegmentGraph, before: SegmentNode, node: SegmentNode, factor: NDArray[Any], shift: NDArray[Any]
) -> tuple[SegmentNode, dict[str, NDArray[Any]]] | None:
    """Return a convolution or matrix product with scaled weights and bias, and the new constants.

    Weights and bias are multiplied by `factor`, and `shift` is added to the bias.
    """
    weight = graph.constants[before.inputs[1]].astype(np.float64)
    bias = graph.constants[before.inputs[2]].astype(np.float64) if before.has_input(2) else np.zeros(1)
    if before.op == "Gemm":
        bias = bias * before.get_attribute("beta", 1.0)
        weight = weight * before.get_attribute("alpha", 1.0)
    bias = bias.reshape(-1) if bias.size in (1, len(factor)) else bias
    if bias.ndim != 1 or (before.op == "MatMul" and weight.ndim != 2):
        return None
    rows = before.op == "Conv" or bool(before.get_attribute("transB", 0))
    weight = weight * (factor.reshape(-1, *(1,) * (weight.ndim - 1)) if rows else factor)
    names = (f"{node.output}/weight", f"{node.output}/bias")
    scaled = (weight, np.broadcast_to(bias, factor.shape) * factor + shift)
    constants = {name: np.ascontiguousarray(v, np.float32) for name, v in zip(names, scaled, strict=True)}
    op = "Gemm" if before.op == "MatMul" and len(graph.shapes[before.inputs[0]]) == 2 else before.op
    attributes = {k: v for k, v in before.attributes.items() if k not in ("alpha", "beta")}
    merged = replace(before, op=op, inputs=(before.inputs[0], *names), outputs=node.outputs, attributes=attributes)
    return merged, constants
