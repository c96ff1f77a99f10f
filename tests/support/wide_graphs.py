"""Graphs with any number of nodes: long, wide, and both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx
from onnx import TensorProto, helper


def graph(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> onnx.ModelProto:
    """Return a graph of tensors of one shape, with the input t0."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 8, 8]) for name in ("t0", *outputs)]
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:]), ir_version=8, opset_imports=opsets)


def max_pool(source: str, output: str, name: str) -> onnx.NodeProto:
    return helper.make_node("MaxPool", [source], [output], name, kernel_shape=[3, 3], pads=[1, 1, 1, 1])


def chain(count: int) -> onnx.ModelProto:
    """Return one layer: each node is absorbed by the one before."""
    return graph([helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"], f"n{i}") for i in range(count)], [f"t{count}"])


def pools(count: int) -> onnx.ModelProto:
    """Return as many layers as nodes."""
    nodes = [max_pool(f"t{i}", f"t{i + 1}", f"n{i}") for i in range(count)]
    return graph(nodes, [f"t{count}"])


def parallel(count: int) -> onnx.ModelProto:
    """Return nodes that read the input, and one that reads all of them."""
    nodes = [helper.make_node("Relu", ["t0"], [f"t{i + 1}"], f"n{i}") for i in range(count - 1)]
    return graph([*nodes, helper.make_node("Sum", [f"t{i + 1}" for i in range(count - 1)], ["y"], "sum")], ["y"])


def outputs(count: int) -> onnx.ModelProto:
    """Return nodes that read the input and make graph outputs."""
    nodes = [helper.make_node("Relu", ["t0"], [f"t{i + 1}"], f"n{i}") for i in range(count)]
    return graph(nodes, [f"t{i + 1}" for i in range(count)])


def namesakes(count: int) -> onnx.ModelProto:
    """Return `pools` with equal names of all nodes."""
    model = pools(count)
    for node in model.graph.node:
        node.name = "same"
    return model


def residual(count: int) -> onnx.ModelProto:
    """Return blocks of pool, activation, and a shortcut over both."""
    nodes, last, skip = [], "t0", "t0"
    for i in range(count // 3):
        nodes.append(max_pool(last, f"p{i}", f"pool{i}"))
        nodes.append(helper.make_node("Relu", [f"p{i}"], [f"r{i}"], f"relu{i}"))
        nodes.append(helper.make_node("Add", [f"r{i}", skip], [f"a{i}"], f"add{i}"))
        skip, last = last, f"a{i}"
    return graph(nodes, [last])


GRAPHS: Mapping[str, Callable[[int], onnx.ModelProto]] = {
    made.__name__: made for made in (chain, pools, parallel, outputs, namesakes, residual)
}
