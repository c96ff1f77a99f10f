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
from dicompiler.verify.index_inputs import ValueLimit

MODULUS = 16
"""Numbers are taken modulo this before they are summed up. A power of two: its reciprocal is exact."""
ODD_MODULUS, ODD_MODULUS_16_BIT = 15, 3
"""What numbers that are multiplied are taken modulo, in types of 24 bits and more, and of fewer: an odd number, so that
factors of two lose nothing, and no whole number lies half-way between two multiples."""


@dataclass(frozen=True)
class StandInCall:
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
    nonzero_attributes: frozenset[str]
    domain: str = ""
    example: NodeProto | None = None
    outputs: tuple[tuple[int, Shape | None], ...] = ()
    input_types: tuple[int, ...] = ()
    input_ranks: tuple[int, ...] = ()
    weight_input: int | None = None
    output_limits: tuple[ValueLimit | None, ...] = ()

    @property
    def attribute_names(self) -> list[str]:
        """All that the operator may have: a piece of a node can have some that the whole leaves to their defaults. Of
        an operator that is not the standard's: those that are given."""
        if self.domain or not onnx.defs.has(self.op, self.opset, ""):
            return sorted(self.nonzero_attributes)
        return sorted(onnx.defs.get_schema(self.op, self.opset, "").attributes)

    @property
    def input_names(self) -> list[str]:
        return [f"X{index}" for index in range(self.arity)]

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **own: Any) -> NodeProto:
        """A node of the body; the attributes that `op` shares with the called operator are those of the call, unless
        they are its `own`."""
        node = helper.make_node(op, inputs, outputs, **own)
        if op == self.op and self.example is not None and (self.domain or not onnx.defs.has(op, self.opset, "")):
            for entry in self.example.attribute:
                node.attribute.add(name=entry.name, ref_attr_name=entry.name).type = entry.type
            node.domain = self.domain
            return node
        for name, known in sorted(onnx.defs.get_schema(op, self.opset, "").attributes.items()):
            if name in self.attribute_names and name not in own:
                entry = node.attribute.add(name=name, ref_attr_name=name)
                entry.type = AttributeProto.AttributeType.Value(str(known.type).rpartition(".")[2])
        return node

    def typed_constant(self, name: str, value: float) -> NodeProto:
        """A constant of the first input's type."""
        return constant_node(name, np.array(value, helper.tensor_dtype_to_np_dtype(self.dtype)))


BodyBuilder = Callable[[StandInCall], list[NodeProto]]
"""Makes the nodes of a function, which turn X0, X1, … into Y."""


def constant_node(name: str, value: NDArray[np.generic]) -> NodeProto:
    """A node that makes the tensor `name`."""
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def cast_for_old_opset(body: list[NodeProto]) -> list[NodeProto]:
    """The body as opsets before 9 have it, whose constants are floats: whole numbers are cast from them."""
    nodes = list[NodeProto]()
    for node in body:
        value = numpy_helper.to_array(node.attribute[0].t) if node.op_type == "Constant" and node.attribute else None
        if value is None or node.attribute[0].ref_attr_name or value.dtype != np.int64:
            nodes.append(node)
            continue
        name = node.output[0]
        nodes.append(constant_node(f"{name}_float", value.astype(np.float32)))
        nodes.append(helper.make_node("Cast", [f"{name}_float"], [name], to=TensorProto.INT64))
    return nodes


def attribute_constant(name: str, value: str, attribute: str, kind: AttributeProto.AttributeType) -> NodeProto:
    """A constant `name` of the body whose value, of the form `value`, is the attribute `attribute` of the call."""
    node = helper.make_node("Constant", [], [name])
    refer_attribute(node, value, attribute, kind)
    return node


def refer_attribute(node: NodeProto, name: str, attribute: str, kind: AttributeProto.AttributeType) -> None:
    """The attribute `name` of a node of the body is the attribute `attribute` of the call."""
    node.attribute.add(name=name, ref_attr_name=attribute).type = kind


def nonnegative_mod(call: StandInCall, tensor: str = "X0") -> list[NodeProto]:
    """x modulo 16, at least 0: small numbers that still tell most of what is in x, to be summed up."""
    return [
        call.typed_constant("modulus", float(MODULUS)),
        call.typed_constant("fraction", 1 / MODULUS),
        helper.make_node("Mul", [tensor, "fraction"], ["shares"]),
        helper.make_node("Floor", ["shares"], ["floors"]),
        helper.make_node("Mul", ["floors", "modulus"], ["multiples"]),
        helper.make_node("Sub", [tensor, "multiples"], ["bounded"]),
    ]


def modulus_for(dtype: int) -> int:
    """The modulus of `centred` in a type."""
    return ODD_MODULUS_16_BIT if dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16) else ODD_MODULUS


def centred_mod(call: StandInCall, tensor: str, target: str) -> list[NodeProto]:
    """`target`: x - m * floor(x / m + 1/2), m = `odd`: -m/2 to m/2, 0 where x is 0. What is infinite, or so large that
    it rounds, counts as what is as large as can be."""
    modulus, bound = modulus_for(call.dtype), 2.0**9 if modulus_for(call.dtype) == ODD_MODULUS_16_BIT else 2.0**22
    names = {name: f"{target}_{name}" for name in ("m", "share", "half", "low", "high", "cut", "y", "z", "f", "n")}
    numbers = {"m": modulus, "share": 1 / modulus, "half": 0.5}
    if call.opset >= 11:
        numbers |= {"low": -bound, "high": bound}
        clip = helper.make_node("Clip", [tensor, names["low"], names["high"]], [names["cut"]])
    else:
        clip = helper.make_node("Clip", [tensor], [names["cut"]], min=-bound, max=bound)
    return [
        *(call.typed_constant(names[name], float(value)) for name, value in numbers.items()),
        clip,
        helper.make_node("Mul", [names["cut"], names["share"]], [names["y"]]),
        helper.make_node("Add", [names["y"], names["half"]], [names["z"]]),
        helper.make_node("Floor", [names["z"]], [names["f"]]),
        helper.make_node("Mul", [names["f"], names["m"]], [names["n"]]),
        helper.make_node("Sub", [names["cut"], names["n"]], [target]),
    ]


def round_scaled(call: StandInCall, tensor: str, factor: int, target: str) -> list[NodeProto]:
    """`target`: `tensor` times `factor`, rounded; Round came with opset 11."""
    return [
        call.typed_constant(f"{target}_factor", float(factor)),
        call.typed_constant(f"{target}_half", 0.5),
        helper.make_node("Mul", [tensor, f"{target}_factor"], [f"{target}_scaled"]),
        helper.make_node("Add", [f"{target}_scaled", f"{target}_half"], [f"{target}_raised"]),
        helper.make_node("Floor", [f"{target}_raised"], [target]),
    ]


def reduce_sum(call: StandInCall, tensor: str, axis: int, target: str) -> list[NodeProto]:
    """`target`: `tensor` summed over `axis`, which stays with extent 1. The axes became an input in opset 13."""
    if call.opset < 13:
        return [helper.make_node("ReduceSum", [tensor], [target], axes=[axis])]
    return [
        constant_node(f"{target}_axes", np.array([axis], np.int64)),
        helper.make_node("ReduceSum", [tensor, f"{target}_axes"], [target]),
    ]
