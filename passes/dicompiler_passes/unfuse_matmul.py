"""Rewrites of products and convolutions that onnxruntime fused with activations or transposed operands.

A fused node ⇒ the standard nodes that it combines. onnxruntime fuses them again if they are on one device.
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
    """Replace a fused product by standard nodes; return True if the graph was changed.

    FusedConv(x, w, b, z)        ⇒  Conv(x, w, b), Add(z), activation
    FusedGemm(a, b, c)           ⇒  Gemm(a, b, c), activation
    FusedMatMul(a, b)            ⇒  Transpose of transposed operands, MatMul, Mul by alpha
    """
    unfuser = _UNFUSERS.get(node.op)
    if unfuser is None or node.domain != ORT_DOMAIN:
        return False
    preceding, output = PrecedingNodes(graph, node), node.outputs[0]
    result = unfuser(preceding, tensors)
    if result is None:
        return False
    preceding.nodes[-1].outputs = [output]
    graph.insert_nodes(preceding.nodes, before=node)
    graph.remove_nodes([node])
    return True


def _unfuse_conv(preceding: PrecedingNodes, tensors: Mapping[str, TensorInfo]) -> Any:
    attributes = dict(preceding.node.attrs)
    activation, parameters = attributes.pop("activation", ""), attributes.pop("activation_params", [])
    if activation not in ("", *ACTIVATION_PARAMETERS):
        return None
    sum_input = preceding.node.inputs[3:4]
    result = preceding.add("Conv", *preceding.node.inputs[:3], **attributes)
    if sum_input and sum_input[0].name:
        result = preceding.add("Add", result, sum_input[0])
    return _add_activation(preceding, result, activation, list(parameters), tensors)


def _unfuse_gemm(preceding: PrecedingNodes, tensors: Mapping[str, TensorInfo]) -> Any:
    attributes = dict(preceding.node.attrs)
    activation = attributes.pop("activation", "")
    parameters_by_name = {name: attributes.pop(f"activation_{name}", None) for name in ("alpha", "beta", "gamma")}
    if activation not in ("", *ACTIVATION_PARAMETERS) or activation == "Clip":
        return None
    parameters = [parameters_by_name[name] for name in ACTIVATION_PARAMETERS.get(activation, ())]
    result = preceding.add("Gemm", *preceding.node.inputs, **attributes)
    return _add_activation(preceding, result, activation, [value for value in parameters if value is not None], tensors)


def _add_activation(
    preceding: PrecedingNodes, tensor: Any, activation: str, parameters: list[float], tensors: Mapping[str, TensorInfo]
) -> Any:
    if not activation:
        return tensor
    if activation == "Clip" and preceding.graph.opset >= 11:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensors[preceding.node.inputs[0].name].dtype)
        return preceding.add("Clip", tensor, *(preceding.add_constant(number, dtype) for number in parameters))
    attributes: dict[str, Any] = dict(zip(ACTIVATION_PARAMETERS[activation], parameters, strict=False))
    return preceding.add(activation, tensor, **attributes)


def _unfuse_matmul(preceding: PrecedingNodes, tensors: Mapping[str, TensorInfo]) -> Any:
    attributes, operands = preceding.node.attrs, list[Any]()
    tensor_infos = [tensors[value.name] for value in preceding.node.inputs if value.name in tensors]
    if len(tensor_infos) < 2 or any(info.shape is None for info in tensor_infos):
        return None
    for value, letter, info in zip(preceding.node.inputs, "AB", tensor_infos, strict=True):
        order = axis_order(
            len(info.shape or ()), attributes.get(f"transBatch{letter}"), attributes.get(f"trans{letter}")
        )
        operands.append(value if order == sorted(order) else preceding.add("Transpose", value, perm=order))
    product, alpha = preceding.add("MatMul", *operands), attributes.get("alpha", 1.0)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor_infos[0].dtype)
    return product if alpha == 1 else preceding.add("Mul", product, preceding.add_constant(alpha, dtype))


def axis_order(rank: int, batch: Any, last: Any) -> list[int]:
    """Return the permutation of an operand's axes that turns it into a stack of matrices.

    If `batch` is true, the operand's rows come before its batch axes. If `last` is true, its matrices are transposed. A
    vector keeps its order.
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
