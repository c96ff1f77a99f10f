"""Rewrites that undo fusions of onnxruntime's optimizer, because plans cannot split the fused operators.

Graph with known shapes ⇒ equivalent graph of operators that plans can split

On each device, onnxruntime fuses the nodes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from dicompiler.plugin_api.onnx import ModelGraph, TensorInfo, Variable
from dicompiler_passes.unfuse_attention import ORT_DOMAIN, PrecedingNodes, open_attention

SHARED_ATTRIBUTES = ("num_heads", "unidirectional", "scale", "mask_filter_value")
"""Attributes that Attention and MultiHeadAttention share."""
SKIP_NORMALIZATIONS = {
    "SkipLayerNormalization": "LayerNormalization",
    "SkipSimplifiedLayerNormalization": "SimplifiedLayerNormalization",
}


def unfuse(graph: ModelGraph, tensors: Mapping[str, TensorInfo]) -> bool:
    """Replace fused operators by operators that can be split. Return True on a change.

    Attention(x, w, b, mask), without input `past`            ⇒  MatMul, Add → q, k, v → MultiHeadAttention
    SkipLayerNormalization(x, y) → n, s, if the sum s is read  ⇒  Add(x, y) → s → LayerNormalization → n
    MatMulNBits(x, w, scales of shape (N·B))                   ⇒  MatMulNBits(x, w, scales of shape (N, B))

    `open_attention` rewrites the other attention operators, `unfuse_product` separates products from activations.
    """
    changed = False
    for node in [node for node in graph.nodes if node.domain == ORT_DOMAIN or node.op == "Attention"]:
        if open_attention(graph, node, tensors) or unfuse_product(graph, node, tensors):
            changed = True
            continue
        if _reshape_nbits_scales(graph, node):
            changed = True
            continue
        if node.domain != ORT_DOMAIN:
            continue
        if node.op == "Attention" and _is_plain_attention(graph, node, tensors):
            replacement = _unfuse_attention(graph, node)
        elif node.op in SKIP_NORMALIZATIONS and _is_sum_read(graph, node):
            replacement = _unfuse_skip_norm(graph, node)
        else:
            continue
        graph.insert_nodes(replacement, before=node)
        graph.remove_nodes([node])
        changed = True
    return changed


def _is_sum_read(graph: ModelGraph, node: gs.Node) -> bool:
    """Return True if the sum of a skip normalization (output 3) is read, and outputs 1 and 2 are not."""
    names = graph.names_read()
    return [i for i, output in enumerate(node.outputs) if output.name in names] in ([0, 3], [3])


def _reshape_nbits_scales(graph: ModelGraph, node: gs.Node) -> bool:
    """Reshape constant scales and zero points of a MatMulNBits from vectors to matrices. Return True on a change.

    Plans can split only matrices: one row per column of the product, and one column per quantization block.
    """
    if node.op != "MatMulNBits":
        return False
    count, changed = node.attrs.get("N") or 1, False
    for index, value in enumerate(node.inputs[:4]):
        if index > 1 and graph.is_constant(value) and len(value.shape) == 1 and value.shape[0] % count == 0:
            rows = np.asarray(value.values).reshape(count, -1)
            node.inputs[index] = graph.add_initializer(graph.unused_tensor_name(f"{value.name}_rows"), rows)
            changed = True
    return changed


def _is_plain_attention(graph: ModelGraph, node: gs.Node, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return True if an Attention has constant weights, no cache, and a mask that the rewrite supports."""
    inputs, read_names = node.inputs, graph.names_read()
    weights = [value for value in inputs[1:3] if value.name]
    present = {index for index, value in enumerate(inputs) if value.name}
    x, mask = (tensors.get(inputs[i].name) if i in present else None for i in (0, 3))
    shape = None if mask is None else mask.shape
    is_lengths = x is not None and x.shape is not None and shape == x.shape[:1]
    mask_is_supported = 3 not in present or is_lengths or (shape is not None and len(shape) in (2, 3))
    only_first_output = all(output.name not in read_names for output in node.outputs[1:])
    attributes_are_known = not set(node.attrs) - {*SHARED_ATTRIBUTES, "qkv_hidden_sizes"}
    return (
        only_first_output
        and mask_is_supported
        and attributes_are_known
        and present <= {0, 1, 2, 3, 5}
        and all(map(graph.is_constant, weights))
        and 1 in present
    )


def _copy_as(
    graph: ModelGraph, like: gs.Node, op: str, inputs: Sequence[Any], output: Any, domain: str, **attrs: Any
) -> gs.Node:
    """Return a node of operator `op`. Its name is derived from the node `like`."""
    node = like.copy(list(inputs), [output])
    node.op, node.domain, node.attrs = op, domain, attrs
    node.name = graph.unused_node_name(f"{like.name}_{op}")
    return node


def _unfuse_attention(graph: ModelGraph, node: gs.Node) -> list[gs.Node]:
    weight = np.asarray(node.inputs[1].values)
    bias = np.asarray(node.inputs[2].values) if len(node.inputs) > 2 and node.inputs[2].name else None
    sizes = node.attrs.get("qkv_hidden_sizes") or [weight.shape[1] // 3] * 3
    ends = np.cumsum(sizes)
    nodes, tensors = list[gs.Node](), list[Any]()
    for letter, stop, size in zip("qkv", ends, sizes, strict=True):
        for op, values in (("MatMul", weight), ("Add", bias)):
            if values is not None:
                constant = graph.add_initializer(
                    graph.unused_tensor_name(f"{node.name}_{letter}_{op}_weight"),
                    np.ascontiguousarray(values[..., stop - size : stop]),
                )
                source = node.inputs[0] if op == "MatMul" else tensors.pop()
                tensors.append(Variable(graph.unused_tensor_name(f"{node.name}_{letter}_{op}")))
                nodes.append(_copy_as(graph, node, op, [source, constant], tensors[-1], ""))
    absent = gs.Variable.empty()
    mask, bias_of = (node.inputs[i] if len(node.inputs) > i and node.inputs[i].name else absent for i in (3, 5))
    kept = {key: node.attrs[key] for key in SHARED_ATTRIBUTES if key in node.attrs}
    inputs = [*tensors, absent, mask, bias_of]
    while not inputs[-1].name:
        inputs.pop()
    output = node.outputs[0]
    output.inputs.clear()
    return [*nodes, _copy_as(graph, node, "MultiHeadAttention", inputs, output, ORT_DOMAIN, **kept)]


def _unfuse_skip_norm(graph: ModelGraph, node: gs.Node) -> list[gs.Node]:
    simple = node.op == "SkipSimplifiedLayerNormalization"
    norm, total = node.outputs[0], node.outputs[3]
    bias_index = 3 if simple else 4
    bias = node.inputs[bias_index] if len(node.inputs) > bias_index and node.inputs[bias_index].name else None
    shift = [] if simple else [value for value in node.inputs[3:4] if value.name]
    for output in (norm, total):
        output.inputs.clear()
    sum_output = total if bias is None else Variable(graph.unused_tensor_name(f"{node.name}_unbiased"))
    nodes = [_copy_as(graph, node, "Add", node.inputs[:2], sum_output, "")]
    if bias is not None:
        nodes.append(_copy_as(graph, node, "Add", [sum_output, bias], total, ""))
    attributes = {"axis": -1, "epsilon": node.attrs.get("epsilon", 1e-12)}
    return [
        *nodes,
        _copy_as(graph, node, SKIP_NORMALIZATIONS[node.op], [total, node.inputs[2], *shift], norm, "", **attributes),
    ]


ACTIVATION_PARAMETERS = {
    "Clip": ("min", "max"), "Elu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",),
    "Selu": ("alpha", "gamma"), "ThresholdedRelu": ("alpha",),
    **dict.fromkeys(("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
}  # fmt: skip
"""Parameter names of each fused activation, in the order of their values in the fused node."""


def unfuse_product(graph: ModelGraph, node: gs.Node, tensors: Mapping[str, TensorInfo]) -> bool:
    """Replace a fused product by standard nodes. Return True on a change.

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

    Args:
        rank: Number of axes.
        batch: Attribute transBatch: true if the rows come before the batch axes.
        last: Attribute trans: true if the matrices are transposed.
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
