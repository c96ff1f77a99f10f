"""What is rewritten in a float32 network before it is quantised, so that fewer numbers are rounded.

In: a normalised Model in float32. Out: one that computes the same but for float rounding.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.structure import reads
from dicompiler_passes.draft import Draft, keep


def simplify(model: Model) -> Model:
    """Norms go into the matrix products before them, and averages over whole images are called so."""
    draft = Draft(model)
    _fold_norms(draft, model)
    _whole_averages(draft, Model(onnx.shape_inference.infer_shapes(model.light()), model.weights))
    draft.prune()
    return draft.model()


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _fold_norms(draft: Draft, model: Model) -> None:
    """onnxruntime folds norms into convolutions, but not into this.

    Gemm(x, B, C) → BatchNormalization ⇒ Gemm(x, B', C')    (where nothing else reads the Gemm)
    """
    constants, gone = draft.constants, []
    counts = Counter((*reads(draft.graph), *draft.outputs))
    gemms = {node.output[0]: node for node in draft.graph.node if node.op_type == "Gemm"}
    for norm in draft.graph.node:
        gemm = gemms.get(norm.input[0]) if norm.op_type == "BatchNormalization" and len(norm.output) == 1 else None
        if gemm is None or counts[norm.input[0]] > 1 or not {*gemm.input[1:], *norm.input[1:]} <= constants:
            continue
        scale, shift, mean, variance = (model.array(name).astype(np.float64) for name in norm.input[1:5])
        factor = scale / np.sqrt(variance + _attribute(norm, "epsilon", 1e-5))
        weight, bias = _scaled(model, gemm, factor)
        inputs = {f"{gemm.name}/weight": weight, f"{gemm.name}/bias": bias + shift - mean * factor}
        names = [draft.name(name) for name in inputs]
        for name, value in zip(names, inputs.values(), strict=True):
            draft.put(name, np.ascontiguousarray(value, np.float32))
        gemm.input[1:] = names
        keep(gemm.attribute, [a for a in gemm.attribute if a.name not in ("alpha", "beta")])
        gemm.output[0] = norm.output[0]
        gone.append(norm.output[0])
    kept = [n for n in draft.graph.node if n.op_type != "BatchNormalization" or n.output[0] not in gone]
    keep(draft.graph.node, kept)


def _scaled(model: Model, gemm: onnx.NodeProto, factor: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The weights of a Gemm (as they lie there) and its bias, each output times its factor; alpha and beta are in."""
    weight = model.array(gemm.input[1]).astype(np.float64) * _attribute(gemm, "alpha", 1.0)
    bias = model.array(gemm.input[2]).astype(np.float64) if len(gemm.input) > 2 else np.zeros(1)
    rows = factor[:, None] if _attribute(gemm, "transB", 0) else factor
    return weight * rows, bias * _attribute(gemm, "beta", 1.0) * factor


def _whole_averages(draft: Draft, inferred: Model) -> None:
    """AveragePool with one window, the image ⇒ GlobalAveragePool"""
    tensors = inferred.tensors()
    for node in draft.graph.node:
        shape = tensors[node.input[0]].shape if node.op_type == "AveragePool" else None
        if not shape or list(shape[2:]) != list(_attribute(node, "kernel_shape", [])):
            continue
        if not any(_attribute(node, "pads", [0])) and _attribute(node, "auto_pad", b"NOTSET") in (b"NOTSET", b"VALID"):
            node.op_type = "GlobalAveragePool"
            del node.attribute[:]
