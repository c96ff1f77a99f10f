"""Replacement of layers that are excluded from the exact check.

A node that can be cut makes zeros, and a new Add behind it adds small random integers. A part adds its region of these
integers, so a piece that is read from a wrong place changes the result. A node that is computed whole under every plan
makes position-dependent values itself (`position_values_body`), whatever number of outputs it has and whether or not
their shapes are static.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, helper

from dicompiler.base.rng import named_generator
from dicompiler.ir.regions import Shape
from dicompiler.verify.exact.graph_facts import SIGNIFICAND_BITS, GraphFacts

ZEROS_SUFFIX, NUMBERS_SUFFIX = "@left", "@numbers"
"""Suffix of the initializer that is added to them."""
_MIN_ADD_OPSET = 7
"""Opset since which Add has its present form."""


def _why_no_add(node: NodeProto, facts: GraphFacts) -> str:
    """Return why no Add can follow a node that can be cut; '' if one can.

    One can if the layers stay the same with one more element-wise node.
    """
    rule, add_rule = facts.rule(node), facts.rules.get(("", "Add"))
    if len(node.output) != 1:
        return f"{node.op_type} makes {len(node.output)} tensors, of which one is cut"
    if None in (facts.shape(name) for name in (*node.input, *node.output) if name):
        return "a shape is not known"
    if facts.opset < _MIN_ADD_OPSET or add_rule is None or facts.dtype(node.output[0]) not in SIGNIFICAND_BITS:
        return "Add does not accept its type"
    if rule is None or rule.is_elementwise:
        return "it is inside a layer"
    return "a sub-graph reads it" if node.output[0] in facts.captured else ""


def excluded_stand_in(node: NodeProto, facts: GraphFacts) -> str:
    """Return the name of the stand-in of an excluded node."""
    if facts.is_whole(node):
        return "position_values"
    return "ones" if _why_no_add(node, facts) else "zeros"


def describe_unchecked(node: NodeProto, facts: GraphFacts) -> str:
    """Return an addition to an exclusion's reason if wrongly placed pieces would not show, else ''."""
    if excluded_stand_in(node, facts) != "ones":
        return ""
    return f" (ones replace its output, so pieces from a wrong place do not show: {_why_no_add(node, facts)})"


def replacement_values(facts: GraphFacts, seed: int, size: int) -> dict[str, NDArray[Any]]:
    """Return the integers -size … size that replace the outputs of excluded nodes, by tensor."""
    nodes = [
        node
        for node in facts.nodes
        if node.name in facts.relaxation.excluded and excluded_stand_in(node, facts) == "zeros"
    ]
    tensors = [node.output[0] for node in nodes]
    return {name: alternating_values(facts.dtype(name), facts.shape(name) or (), seed, name, size) for name in tensors}


def alternating_values(dtype: int, shape: Shape, seed: int, name: str, size: int) -> NDArray[Any]:
    """Return seeded integers -size … size in which even and odd values alternate along every axis."""
    random = named_generator(seed, f"{name}/input")
    parity = sum(np.indices(shape, sparse=True), np.zeros(shape, np.int64)) % 2
    values = 2 * random.integers(0, size + 1 - parity, shape) + parity - size
    return np.asarray(values).astype(helper.tensor_dtype_to_np_dtype(dtype))


def add_replacements(proto: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Insert an Add of the initializer with NUMBERS_SUFFIX behind each excluded node."""
    nodes = list(_nodes_with_adds(proto.graph.node, arrays))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    for tensor, array in arrays.items():
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        proto.graph.value_info.append(helper.make_tensor_value_info(f"{tensor}{ZEROS_SUFFIX}", dtype, array.shape))


def _nodes_with_adds(nodes: Iterable[NodeProto], arrays: Mapping[str, NDArray[Any]]) -> Iterator[NodeProto]:
    for node in nodes:
        tensor = node.output[0] if node.output else ""
        if tensor in arrays:
            node.output[0] = f"{tensor}{ZEROS_SUFFIX}"
        yield node
        if tensor in arrays:
            inputs = [f"{tensor}{ZEROS_SUFFIX}", f"{tensor}{NUMBERS_SUFFIX}"]
            yield helper.make_node("Add", inputs, [tensor], f"{node.name}{NUMBERS_SUFFIX}")
