"""Calls of a stand-in: what the bodies of the functions that stand in for operators are made from.

In: what the calls of an operator have in common. Out: nodes of the body, which refer to the attributes of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, helper, numpy_helper

MODULUS = 16
"""Numbers are taken modulo this before they are summed up. A power of two: its reciprocal is exact."""


@dataclass(frozen=True)
class Call:
    """What the calls of the operator `op` in a model have in common: the greatest number of inputs (`arity`), the type
    of the first one, the opset; `given`: the attributes that are not 0 in some call; `domain`: of the operator.
    """

    op: str
    opset: int
    arity: int
    dtype: int
    given: frozenset[str]
    domain: str = ""

    @property
    def attributes(self) -> list[str]:
        """All that the operator may have: a piece of a node can have some that the whole leaves to their defaults. Of
        an operator that is not the standard's: those that are given."""
        if self.domain:
            return sorted(self.given)
        return sorted(onnx.defs.get_schema(self.op, self.opset, "").attributes)

    @property
    def inputs(self) -> list[str]:
        return [f"X{index}" for index in range(self.arity)]

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **own: Any) -> NodeProto:
        """A node of the body; the attributes that `op` shares with the called operator are those of the call, unless
        they are its `own`."""
        node = helper.make_node(op, inputs, outputs, **own)
        for name, known in sorted(onnx.defs.get_schema(op, self.opset, "").attributes.items()):
            if name in self.attributes and name not in own:
                entry = node.attribute.add(name=name, ref_attr_name=name)
                entry.type = AttributeProto.AttributeType.Value(str(known.type).rpartition(".")[2])
        return node

    def number(self, name: str, value: float) -> NodeProto:
        """A constant of the first input's type."""
        return constant(name, np.array(value, helper.tensor_dtype_to_np_dtype(self.dtype)))


Body = Callable[[Call], list[NodeProto]]
"""Makes the nodes of a function, which turn X0, X1, … into Y."""


def constant(name: str, value: NDArray[np.generic]) -> NodeProto:
    """A node that makes the tensor `name`."""
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def bounded(call: Call) -> list[NodeProto]:
    """x modulo 16, at least 0: small numbers that still tell most of what is in x, to be summed up."""
    return [
        call.number("modulus", float(MODULUS)),
        call.number("fraction", 1 / MODULUS),
        helper.make_node("Mul", ["X0", "fraction"], ["shares"]),
        helper.make_node("Floor", ["shares"], ["floors"]),
        helper.make_node("Mul", ["floors", "modulus"], ["multiples"]),
        helper.make_node("Sub", ["X0", "multiples"], ["bounded"]),
    ]


def total(call: Call, tensor: str, axis: int, target: str) -> list[NodeProto]:
    """`target`: `tensor` summed over `axis`, which stays with extent 1. The axes became an input in opset 13."""
    if call.opset < 13:
        return [helper.make_node("ReduceSum", [tensor], [target], axes=[axis])]
    return [
        constant("axes", np.array([axis], np.int64)),
        helper.make_node("ReduceSum", [tensor, "axes"], [target]),
    ]
