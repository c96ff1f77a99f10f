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
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from dicompiler.ir.regions import Shape
from dicompiler.verify.ranges import Limit

MODULUS = 16
"""Numbers are taken modulo this before they are summed up. A power of two: its reciprocal is exact."""
ODD, ODD_OF_HALVES = 15, 3
"""What numbers that are multiplied are taken modulo, in types of 24 bits and more, and of fewer: an odd number, so that
factors of two lose nothing, and no whole number lies half-way between two multiples."""


@dataclass(frozen=True)
class Call:
    """What the calls of the operator `op` in a model have in common: the greatest number of inputs (`arity`), the type
    of the first one, the opset; `given`: the attributes that are not 0 in some call; `domain`: of the operator;
    `first`: one of the calls; `results`: (type, shape or None) of each of its outputs; `kinds`: types of its inputs, 0
    of one that is left out or not known; `ranks`: their ranks, likewise; `weight`: which input is a filter of ±1
    in all of them; `limits`: what its outputs' readers take of whole numbers, None: any.
    """

    op: str
    opset: int
    arity: int
    dtype: int
    given: frozenset[str]
    domain: str = ""
    first: NodeProto | None = None
    results: tuple[tuple[int, Shape | None], ...] = ()
    kinds: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    weight: int | None = None
    limits: tuple[Limit | None, ...] = ()

    @property
    def attributes(self) -> list[str]:
        """All that the operator may have: a piece of a node can have some that the whole leaves to their defaults. Of
        an operator that is not the standard's: those that are given."""
        if self.domain or not onnx.defs.has(self.op, self.opset, ""):
            return sorted(self.given)
        return sorted(onnx.defs.get_schema(self.op, self.opset, "").attributes)

    @property
    def inputs(self) -> list[str]:
        return [f"X{index}" for index in range(self.arity)]

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **own: Any) -> NodeProto:
        """A node of the body; the attributes that `op` shares with the called operator are those of the call, unless
        they are its `own`."""
        node = helper.make_node(op, inputs, outputs, **own)
        if op == self.op and self.first is not None and (self.domain or not onnx.defs.has(op, self.opset, "")):
            for entry in self.first.attribute:
                node.attribute.add(name=entry.name, ref_attr_name=entry.name).type = entry.type
            node.domain = self.domain
            return node
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


def of_old(body: list[NodeProto]) -> list[NodeProto]:
    """The body as opsets before 9 have it, whose constants are floats: whole numbers are cast from them."""
    nodes = list[NodeProto]()
    for node in body:
        value = numpy_helper.to_array(node.attribute[0].t) if node.op_type == "Constant" and node.attribute else None
        if value is None or node.attribute[0].ref_attr_name or value.dtype != np.int64:
            nodes.append(node)
            continue
        name = node.output[0]
        nodes.append(constant(f"{name}_float", value.astype(np.float32)))
        nodes.append(helper.make_node("Cast", [f"{name}_float"], [name], to=TensorProto.INT64))
    return nodes


def given(name: str, value: str, attribute: str, kind: AttributeProto.AttributeType) -> NodeProto:
    """A constant `name` of the body whose value, of the form `value`, is the attribute `attribute` of the call."""
    node = helper.make_node("Constant", [], [name])
    refer(node, value, attribute, kind)
    return node


def refer(node: NodeProto, name: str, attribute: str, kind: AttributeProto.AttributeType) -> None:
    """The attribute `name` of a node of the body is the attribute `attribute` of the call."""
    node.attribute.add(name=name, ref_attr_name=attribute).type = kind


def bounded(call: Call, tensor: str = "X0") -> list[NodeProto]:
    """x modulo 16, at least 0: small numbers that still tell most of what is in x, to be summed up."""
    return [
        call.number("modulus", float(MODULUS)),
        call.number("fraction", 1 / MODULUS),
        helper.make_node("Mul", [tensor, "fraction"], ["shares"]),
        helper.make_node("Floor", ["shares"], ["floors"]),
        helper.make_node("Mul", ["floors", "modulus"], ["multiples"]),
        helper.make_node("Sub", [tensor, "multiples"], ["bounded"]),
    ]


def odd(dtype: int) -> int:
    """The modulus of `centred` in a type."""
    return ODD_OF_HALVES if dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16) else ODD


def centred(call: Call, tensor: str, target: str) -> list[NodeProto]:
    """`target`: x - m * floor(x / m + 1/2), m = `odd`: -m/2 to m/2, 0 where x is 0. What is infinite, or so large that
    it rounds, counts as what is as large as can be."""
    modulus, bound = odd(call.dtype), 2.0**9 if odd(call.dtype) == ODD_OF_HALVES else 2.0**22
    names = {name: f"{target}_{name}" for name in ("m", "share", "half", "low", "high", "cut", "y", "z", "f", "n")}
    numbers = {"m": modulus, "share": 1 / modulus, "half": 0.5}
    if call.opset >= 11:
        numbers |= {"low": -bound, "high": bound}
        clip = helper.make_node("Clip", [tensor, names["low"], names["high"]], [names["cut"]])
    else:
        clip = helper.make_node("Clip", [tensor], [names["cut"]], min=-bound, max=bound)
    return [
        *(call.number(names[name], float(value)) for name, value in numbers.items()),
        clip,
        helper.make_node("Mul", [names["cut"], names["share"]], [names["y"]]),
        helper.make_node("Add", [names["y"], names["half"]], [names["z"]]),
        helper.make_node("Floor", [names["z"]], [names["f"]]),
        helper.make_node("Mul", [names["f"], names["m"]], [names["n"]]),
        helper.make_node("Sub", [names["cut"], names["n"]], [target]),
    ]


def whole(call: Call, tensor: str, factor: int, target: str) -> list[NodeProto]:
    """`target`: `tensor` times `factor`, rounded; Round came with opset 11."""
    return [
        call.number(f"{target}_factor", float(factor)),
        call.number(f"{target}_half", 0.5),
        helper.make_node("Mul", [tensor, f"{target}_factor"], [f"{target}_scaled"]),
        helper.make_node("Add", [f"{target}_scaled", f"{target}_half"], [f"{target}_raised"]),
        helper.make_node("Floor", [f"{target}_raised"], [target]),
    ]


def total(call: Call, tensor: str, axis: int, target: str) -> list[NodeProto]:
    """`target`: `tensor` summed over `axis`, which stays with extent 1. The axes became an input in opset 13."""
    if call.opset < 13:
        return [helper.make_node("ReduceSum", [tensor], [target], axes=[axis])]
    return [
        constant(f"{target}_axes", np.array([axis], np.int64)),
        helper.make_node("ReduceSum", [tensor, f"{target}_axes"], [target]),
    ]
