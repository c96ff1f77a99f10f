"""Layers that are left out: a new input of the check model takes the place of what each of them makes.

In: the check model, in which such a node makes zeros. Out: behind each of these nodes an Add of small whole numbers.
What a part adds is cut by the region that it makes, so that a piece which is read from the wrong place shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import NodeProto, helper

from dicompiler.verify.exact.facts import FLOATS, Facts

MADE, NUMBERS = "@left", "@numbers"
"""What the names of the zeros and of the numbers that are added to them end with."""
_OPSET = 7
"""Since it Add is what it is today."""


def numbered(node: NodeProto, known: Facts) -> bool:
    """Whether the layer of the node stays the same with one more element-wise node: one tensor leaves it, which can be
    cut, and all that it reads and makes has a static shape. What is of no such form gives ones everywhere."""
    rule, added = known.rule(node), known.rules.get(("", "Add"))
    if known.opset < _OPSET or rule is None or not rule.cuts or rule.elementwise or added is None:
        return False
    shapes = [known.shape(name) for name in (*node.input, *node.output) if name]
    if len(node.output) != 1 or None in shapes:
        return False
    return node.output[0] not in known.captured and known.dtype(node.output[0]) in FLOATS


def places(known: Facts) -> dict[str, tuple[int, tuple[int, ...]]]:
    """(dtype, shape) of the new inputs, by the tensor that each takes the place of."""
    nodes = (node for node in known.nodes if node.name in known.treatment.left and numbered(node, known))
    return {node.output[0]: (known.dtype(node.output[0]), known.shape(node.output[0]) or ()) for node in nodes}


def add(proto: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Puts `arrays`, by the tensors that they become, behind the nodes of `proto`, which is changed: those make zeros
    of another name, to which an Add adds them. They are initializers under the tensor's name and NUMBERS already."""
    nodes = list(_with_added(proto.graph.node, arrays))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    for tensor, array in arrays.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        proto.graph.value_info.append(helper.make_tensor_value_info(f"{tensor}{MADE}", kind, array.shape))


def _with_added(nodes: Iterable[NodeProto], arrays: Mapping[str, NDArray[Any]]) -> Iterator[NodeProto]:
    for node in nodes:
        tensor = node.output[0] if node.output else ""
        if tensor in arrays:
            node.output[0] = f"{tensor}{MADE}"
        yield node
        if tensor in arrays:
            inputs = [f"{tensor}{MADE}", f"{tensor}{NUMBERS}"]
            yield helper.make_node("Add", inputs, [tensor], f"{node.name}{NUMBERS}")
