"""Layers that are left out: a new input of the check model takes the place of what each of them makes.

In: the check model, in which such a node makes zeros. Out: behind each of these nodes an Add of small whole numbers.
What a part adds is cut by the region that it makes, so that a piece which is read from the wrong place shows. A node
that is computed whole under every plan makes such numbers itself, in a function (`numbers` in `general`): whatever it
gives and however many tensors, whether a sub-graph captures them or their shapes are not static.
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
"""What the names of the zeros and of the numbers that are added to them end with."""
_MIN_ADD_OPSET = 7
"""Since it Add is what it is today."""


def _why_no_add(node: NodeProto, known: GraphFacts) -> str:
    """Why nothing can be added behind a node that can be cut; '' where the layers stay the same with one more
    element-wise node: one tensor leaves the layer as before, and all that it reads and makes has a static shape."""
    rule, there = known.rule(node), known.rules.get(("", "Add"))
    if len(node.output) != 1:
        return f"{node.op_type} makes {len(node.output)} tensors, of which one is cut"
    if None in (known.shape(name) for name in (*node.input, *node.output) if name):
        return "a shape is not known"
    if known.opset < _MIN_ADD_OPSET or there is None or known.dtype(node.output[0]) not in SIGNIFICAND_BITS:
        return "no Add takes it"
    if rule is None or rule.is_elementwise:
        return "it lies within a layer"
    return "a sub-graph reads it" if node.output[0] in known.captured else ""


def excluded_stand_in(node: NodeProto, known: GraphFacts) -> str:
    """What stands in for a node that is left out: a name of `general.BODIES`."""
    if known.is_whole(node):
        return "numbers"
    return "ones" if _why_no_add(node, known) else "zeros"


def describe_unchecked(node: NodeProto, known: GraphFacts) -> str:
    """What is not checked behind a node that is left out, and why, to follow what is said of it; '' where a piece from
    a wrong place shows."""
    if excluded_stand_in(node, known) != "ones":
        return ""
    return f" (what reads it gets ones everywhere, and from a wrong place too: {_why_no_add(node, known)})"


def replacement_values(known: GraphFacts, seed: int, size: int) -> dict[str, NDArray[Any]]:
    """What is added behind the nodes that are left out, -size … size, by the tensor that it becomes."""
    nodes = [
        node
        for node in known.nodes
        if node.name in known.relaxation.excluded and excluded_stand_in(node, known) == "zeros"
    ]
    tensors = [node.output[0] for node in nodes]
    return {name: alternating_values(known.dtype(name), known.shape(name) or (), seed, name, size) for name in tensors}


def alternating_values(dtype: int, shape: Shape, seed: int, name: str, size: int) -> NDArray[Any]:
    """Seeded whole numbers -size … size of a type and shape, of which neighbours along every axis differ: every second
    one is even."""
    random = named_generator(seed, f"{name}/input")
    odd = sum(np.indices(shape, sparse=True), np.zeros(shape, np.int64)) % 2
    values = 2 * random.integers(0, size + 1 - odd, shape) + odd - size
    return np.asarray(values).astype(helper.tensor_dtype_to_np_dtype(dtype))


def add_replacements(proto: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Puts `arrays`, by the tensors that they become, behind the nodes of `proto`, which is changed: those make zeros
    of another name, to which an Add adds them. They are initializers under the tensor's name and NUMBERS already."""
    nodes = list(_nodes_with_adds(proto.graph.node, arrays))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    for tensor, array in arrays.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        proto.graph.value_info.append(helper.make_tensor_value_info(f"{tensor}{ZEROS_SUFFIX}", kind, array.shape))


def _nodes_with_adds(nodes: Iterable[NodeProto], arrays: Mapping[str, NDArray[Any]]) -> Iterator[NodeProto]:
    for node in nodes:
        tensor = node.output[0] if node.output else ""
        if tensor in arrays:
            node.output[0] = f"{tensor}{ZEROS_SUFFIX}"
        yield node
        if tensor in arrays:
            inputs = [f"{tensor}{ZEROS_SUFFIX}", f"{tensor}{NUMBERS_SUFFIX}"]
            yield helper.make_node("Add", inputs, [tensor], f"{node.name}{NUMBERS_SUFFIX}")
