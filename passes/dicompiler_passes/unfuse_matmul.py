"""Products and convolutions that onnxruntime fused with activations or transposed operands.

A fused node ⇒ the standard nodes that it was made of. onnxruntime fuses them again if they are on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from dicompiler.plugin_api.onnx import ModelGraph, TensorInfo
from dicompiler_passes.unfuse_attention import ORT_DOMAIN, PrecedingNodes

ACTIVATION_PARAMETERS = {
    "Clip": ("min", "max"), "Elu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",),
    "Selu": ("alpha", "gamma"), "ThresholdedRelu": ("alpha",),
    **dict.fromkeys(("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
}  # fmt: skip
"""Fused activations, and the names of their parameters in the order of the fused node's list."""


def unfuse_product(graph: ModelGraph, node: gs.Node, tensors: Mapping[str, TensorInfo]) -> bool:
    """Take a fused product apart; return True if the graph was changed.

    FusedConv(x, w, b, z)        ⇒  Conv(x, w, b), Add(z), activation
    FusedGemm(a, b, c)           ⇒  Gemm(a, b, c), activation
    FusedMatMul(a, b)            ⇒  Transpose of transposed operands, MatMul, Mul by alpha
    """
    maker = _UNFUSERS.get(node.op)
    if maker is None or node.domain != ORT_DOMAIN:
        return False
    before, output = PrecedingNodes(graph, node), node.outputs[0]
    made = maker(before, tensors)
    if made is None:
        return False
    before.nodes[-1].outputs = [output]
    graph.insert_nodes(before.nodes, before=node)
    graph.remove_nodes([node])
    return True


def _unfuse_conv(before: PrecedingNodes, tensors: Mapping[str, TensorInfo]) -> Any:
    attributes = dict(before.node.attrs)
    activation, numbers = attributes.pop("activation", ""), attributes.pop("activation_params", [])
    if activation not in ("", *ACTIVATION_PARAMETERS):
        return None
    added = before.node.inputs[3:4]
    made = before.add("Conv", *before.node.inputs[:3], **attributes)
    if added and added[0].name:
        made = before.add("Add", made, added[0])
    return _add_activation(before, made, activation, list(numbers), tensors)


def _unfuse_gemm(before: PrecedingNodes, tensors: Mapping[str, TensorInfo]) -> Any:
    attributes = dict(before.node.attrs)
    activation = attributes.pop("activation", "")
    given = {name: attributes.pop(f"activation_{name}", None) for name in ("alpha", "beta", "gamma")}
    if activation not in ("", *ACTIVATION_PARAMETERS) or activation == "Clip":
        return None
    numbers = [given[name] for name in ACTIVATION_PARAMETERS.get(activation, ())]
    made = before.add("Gemm", *before.node.inputs, **attributes)
    return _add_activation(before, made, activation, [one for one in numbers if one is not None], tensors)


def _add_activation(
    before: PrecedingNodes, made: Any, activation: str, numbers: list[float], tensors: Mapping[str, TensorInfo]
) -> Any:
    if not activation:
        return made
    if activation == "Clip" and before.graph.opset >= 11:
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensors[before.node.inputs[0].name].dtype)
        return before.add("Clip", made, *(before.add_constant(number, kind) for number in numbers))
    named: dict[str, Any] = dict(zip(ACTIVATION_PARAMETERS[activation], numbers, strict=False))
    return before.add(activation, made, **named)


def _unfuse_matmul(before: PrecedingNodes, tensors: Mapping[str, TensorInfo]) -> Any:
    attributes, operands = before.node.attrs, list[Any]()
    known = [tensors[value.name] for value in before.node.inputs if value.name in tensors]
    if len(known) < 2 or any(one.shape is None for one in known):
        return None
    for value, which, one in zip(before.node.inputs, "AB", known, strict=True):
        turned = axis_order(len(one.shape or ()), attributes.get(f"transBatch{which}"), attributes.get(f"trans{which}"))
        operands.append(value if turned == sorted(turned) else before.add("Transpose", value, perm=turned))
    made, alpha = before.add("MatMul", *operands), attributes.get("alpha", 1.0)
    kind = onnx.helper.tensor_dtype_to_np_dtype(known[0].dtype)
    return made if alpha == 1 else before.add("Mul", made, before.add_constant(alpha, kind))


def axis_order(rank: int, batch: Any, last: Any) -> list[int]:
    """Return the order of axes in which an operand is a stack of matrices. A vector stays.

    Args:
        rank: Rank of the operand.
        batch: Whether its rows come before the batch axes.
        last: Whether rows and columns are transposed.
    """
    axes = list(range(rank))
    if batch:
        axes = [*axes[1:-1], *axes[:1], *axes[-1:]] if rank > 1 else axes
    return [*axes[:-2], axes[-1], axes[-2]] if last and rank > 1 else axes


_UNFUSERS: Mapping[str, Callable[[PrecedingNodes, Mapping[str, TensorInfo]], Any]] = {
    "FusedConv": _unfuse_conv,
    "FusedGemm": _unfuse_gemm,
    "FusedMatMul": _unfuse_matmul,
}
