"""Rewrites of a float32 network before quantization, so that fewer values are rounded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from dicompiler.plugin_api import Model
from dicompiler.plugin_api.onnx import ModelGraph, names_read


def simplify_for_quantization(model: Model) -> Model:
    """Return an equivalent network in which quantization rounds fewer values than in `model`.

    Batch normalizations are folded into the Gemm nodes before them. Average pools over the whole image become
    GlobalAveragePool nodes.
    """
    graph = model.graph()
    _fold_batch_norms(graph)
    _use_global_average(graph, Model(onnx.shape_inference.infer_shapes(model.without_weights())))
    graph.prune()
    return model.with_graph(graph)


def _fold_batch_norms(graph: ModelGraph) -> None:
    """Fold batch normalizations into the Gemm nodes before them, because onnxruntime's optimizer does not.

    Gemm(x, B, C) → BatchNormalization ⇒ Gemm(x, B', C')    (if nothing else reads the output of the Gemm)
    """
    read_counts = Counter(name for node in graph.nodes for name in names_read(node))
    read_counts.update(tensor.name for tensor in graph.outputs)
    folded = []
    for norm in graph.nodes:
        if norm.op != "BatchNormalization" or len(norm.outputs) != 1:
            continue
        gemm = next(iter(norm.inputs[0].inputs), None)
        if gemm is None or gemm.op != "Gemm" or read_counts[norm.inputs[0].name] > 1:
            continue
        if not all(graph.is_constant(tensor) for tensor in (*gemm.inputs[1:], *norm.inputs[1:])):
            continue
        scale, shift, mean, variance = (tensor.values.astype(np.float64) for tensor in norm.inputs[1:5])
        factor = scale / np.sqrt(variance + norm.attrs.get("epsilon", 1e-5))
        weight, bias = _scale_gemm(gemm, factor)
        values = {f"{gemm.name}/weight": weight, f"{gemm.name}/bias": bias + shift - mean * factor}
        constants = [
            graph.add_initializer(graph.unused_tensor_name(name), np.ascontiguousarray(v, np.float32))
            for name, v in values.items()
        ]
        gemm.inputs = [gemm.inputs[0], *constants]
        gemm.attrs = {key: value for key, value in gemm.attrs.items() if key not in ("alpha", "beta")}
        gemm.outputs = norm.outputs
        folded.append(norm)
    graph.remove_nodes(folded)


def _scale_gemm(gemm: gs.Node, factor: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the weight and the bias with which a Gemm computes its output channels multiplied by `factor`.

    The attributes alpha and beta of the Gemm are multiplied into the results. The weight keeps its layout.
    """
    weight = gemm.inputs[1].values.astype(np.float64) * gemm.attrs.get("alpha", 1.0)
    bias = gemm.inputs[2].values.astype(np.float64) if len(gemm.inputs) > 2 else np.zeros(1)
    scaled_by = factor[:, None] if gemm.attrs.get("transB", 0) else factor
    return weight * scaled_by, bias * gemm.attrs.get("beta", 1.0) * factor


def _use_global_average(graph: ModelGraph, inferred: Model) -> None:
    """Replace average pools with a single window over the whole image by GlobalAveragePool."""
    tensors = inferred.tensors()
    for node in graph.nodes:
        shape = tensors[node.inputs[0].name].shape if node.op == "AveragePool" else None
        if not shape or list(shape[2:]) != list(node.attrs.get("kernel_shape", [])):
            continue
        if not any(node.attrs.get("pads", [])) and node.attrs.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
            node.op, node.attrs = "GlobalAveragePool", {}
