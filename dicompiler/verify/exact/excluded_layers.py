"""Replacement of nodes that are excluded from the exact check.

The exact check runs the split and the whole network on small integers, and compares the results. A node is excluded if
its numbers cannot be exact, or are random. If no plan splits the node, its outputs become integers that differ by
position. Otherwise the node returns zeros, and a new Add after it adds random integers. Each piece of the node adds its
region of these integers, so a piece at a wrong place changes the result.
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
"""Suffixes of tensor names: the zeros that an excluded node returns, and the initializer that is added to them."""
_MIN_ADD_OPSET = 7
"""First opset in which Add broadcasts like NumPy, without the attributes `axis` and `broadcast`."""


def _why_no_add(node: NodeProto, facts: GraphFacts) -> str:
    """Return the reason why no Add of random integers can follow an excluded node; "" if one can.

    The Add must become one more element-wise node in the layer of the excluded node, so that it is split like this
    node.
    """
    rule, add_rule = facts.rule(node), facts.rules.get(("", "Add"))
    if len(node.output) != 1:
        return f"{node.op_type} computes {len(node.output)} tensors, of which plans split only one"
    if None in (facts.shape(name) for name in (*node.input, *node.output) if name):
        return "a shape is not known"
    if facts.opset < _MIN_ADD_OPSET or add_rule is None or facts.dtype(node.output[0]) not in SIGNIFICAND_BITS:
        return "Add does not accept its type"
    if rule is None or rule.is_elementwise:
        return "it is inside a layer"
    return "a sub-graph reads it" if node.output[0] in facts.captured else ""


def excluded_stand_in(node: NodeProto, facts: GraphFacts) -> str:
    """Return the key of `generic.BODIES` for the function that replaces an excluded node."""
    if facts.is_whole(node):
        return "position_values"
    return "ones" if _why_no_add(node, facts) else "zeros"


def describe_unchecked(node: NodeProto, facts: GraphFacts) -> str:
    """Return a note if the exact check cannot notice misplaced pieces of an excluded node's output; otherwise ""."""
    if excluded_stand_in(node, facts) != "ones":
        return ""
    return f" (ones replace its output, so pieces from a wrong place do not show: {_why_no_add(node, facts)})"


def replacement_values(facts: GraphFacts, seed: int, size: int) -> dict[str, NDArray[Any]]:
    """Return random integers from -size to size to be added to the zeros of excluded nodes, by tensor name.

    Excluded nodes that no plan splits are omitted.
    """
    nodes = [
        node
        for node in facts.nodes
        if node.name in facts.relaxation.excluded and excluded_stand_in(node, facts) == "zeros"
    ]
    tensors = [node.output[0] for node in nodes]
    return {name: alternating_values(facts.dtype(name), facts.shape(name) or (), seed, name, size) for name in tensors}


def alternating_values(dtype: int, shape: Shape, seed: int, name: str, size: int) -> NDArray[Any]:
    """Return an array of seeded integers from -size to size; even and odd values alternate along every axis."""
    random = named_generator(seed, f"{name}/input")
    parity = sum(np.indices(shape, sparse=True), np.zeros(shape, np.int64)) % 2
    values = 2 * random.integers(0, size + 1 - parity, shape) + parity - size
    return np.asarray(values).astype(helper.tensor_dtype_to_np_dtype(dtype))


def add_replacements(proto: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Insert an Add of random integers after each excluded node that computes a tensor in `arrays`.

    The node itself returns zeros. The integers differ by position, so misplaced pieces are noticed.
    """
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
