"""Products and convolutions that onnxruntime's optimiser fused with what follows them or turns their operands.

In: a node, and what is known of its tensors. Out: the nodes of the standard that it was made of, in its place; the
runtime fuses them again where they end up on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from dicompiler.plugin_api import Graph, Tensor
from dicompiler_passes.unfusing_attention import ORT, Before

TAKES = {
    "Clip": ("min", "max"), "Elu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",),
    "Selu": ("alpha", "gamma"), "ThresholdedRelu": ("alpha",),
    **dict.fromkeys(("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
}  # fmt: skip
"""Activations that are fused, and the names of the numbers that each takes, in the order in which they are given."""


def divided(graph: Graph, node: gs.Node, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the node was taken apart.

    FusedConv(x, w, b, z)        ⇒  Conv(x, w, b), Add(z), activation
    FusedGemm(a, b, c)           ⇒  Gemm(a, b, c), activation
    FusedMatMul(a, b)            ⇒  Transpose of what is turned, MatMul, Mul by alpha
    """
    maker = _MAKERS.get(node.op)
    if maker is None or node.domain != ORT:
        return False
    before, output = Before(graph, node), node.outputs[0]
    made = maker(before, tensors)
    if made is None:
        return False
    before.nodes[-1].outputs = [output]
    graph.insert(before.nodes, before=node)
    graph.remove([node])
    return True


def _convolution(before: Before, tensors: Mapping[str, Tensor]) -> Any:
    attributes = dict(before.node.attrs)
    activation, numbers = attributes.pop("activation", ""), attributes.pop("activation_params", [])
    if activation not in ("", *TAKES):
        return None
    added = before.node.inputs[3:4]
    made = before.op("Conv", *before.node.inputs[:3], **attributes)
    if added and added[0].name:
        made = before.op("Add", made, added[0])
    return _activated(before, made, activation, list(numbers), tensors)


def _gemm(before: Before, tensors: Mapping[str, Tensor]) -> Any:
    attributes = dict(before.node.attrs)
    activation = attributes.pop("activation", "")
    given = {name: attributes.pop(f"activation_{name}", None) for name in ("alpha", "beta", "gamma")}
    if activation not in ("", *TAKES) or activation == "Clip":
        return None
    numbers = [given[name] for name in TAKES.get(activation, ())]
    made = before.op("Gemm", *before.node.inputs, **attributes)
    return _activated(before, made, activation, [one for one in numbers if one is not None], tensors)


def _activated(before: Before, made: Any, activation: str, numbers: list[float], tensors: Mapping[str, Tensor]) -> Any:
    if not activation:
        return made
    if activation == "Clip" and before.graph.opset >= 11:
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensors[before.node.inputs[0].name].dtype)
        return before.op("Clip", made, *(before.const(number, kind) for number in numbers))
    named: dict[str, Any] = dict(zip(TAKES[activation], numbers, strict=False))
    return before.op(activation, made, **named)


def _product(before: Before, tensors: Mapping[str, Tensor]) -> Any:
    attributes, operands = before.node.attrs, list[Any]()
    known = [tensors[value.name] for value in before.node.inputs if value.name in tensors]
    if len(known) < 2 or any(one.shape is None for one in known):
        return None
    for value, which, one in zip(before.node.inputs, "AB", known, strict=True):
        turned = order(len(one.shape or ()), attributes.get(f"transBatch{which}"), attributes.get(f"trans{which}"))
        operands.append(value if turned == sorted(turned) else before.op("Transpose", value, perm=turned))
    made, alpha = before.op("MatMul", *operands), attributes.get("alpha", 1.0)
    kind = onnx.helper.tensor_dtype_to_np_dtype(known[0].dtype)
    return made if alpha == 1 else before.op("Mul", made, before.const(alpha, kind))


def order(rank: int, batch: Any, last: Any) -> list[int]:
    """The order of the axes of an operand in which its product is one of matrices. batch: whether its rows stand before
    the axes of the batch; last: whether rows and columns are turned then. A vector stays."""
    axes = list(range(rank))
    if batch:
        axes = [*axes[1:-1], *axes[:1], *axes[-1:]] if rank > 1 else axes
    return [*axes[:-2], axes[-1], axes[-2]] if last and rank > 1 else axes


_MAKERS: Mapping[str, Callable[[Before, Mapping[str, Tensor]], Any]] = {
    "FusedConv": _convolution,
    "FusedGemm": _gemm,
    "FusedMatMul": _product,
}
