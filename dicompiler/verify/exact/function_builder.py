"""Building blocks of stand-ins: nodes of ONNX functions that compute with small integers.

A stand-in replaces an operator that rounds. It is an ONNX model-local function with inputs X0, X1, … and outputs Y, Y1,
…. `StandInCall` describes the nodes that call the function, and a body builder turns it into the nodes of the function.
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
"""Modulus that stand-ins (integer functions that replace operators) apply to the terms of sums.

It is a power of two, so that its reciprocal is exact.
"""
ODD_MODULUS, ODD_MODULUS_16_BIT = 15, 3
"""Moduli that stand-ins (integer functions that replace operators) apply to the factors of products.

ODD_MODULUS_16_BIT is for 16-bit types, and ODD_MODULUS for types with 24 or more significand bits.

Multiplication by two maps different remainders of an odd modulus to different remainders, so it hides no difference. No
integer is half-way between two multiples of an odd modulus, so the nearest multiple, which is subtracted, is unique.
"""


@dataclass(frozen=True)
class StandInCall:
    """The common properties of all nodes that call a stand-in (an integer function that replaces an operator).

    Attributes:
        op: Operator type.
        opset: Version of the standard operators.
        arity: Largest number of inputs.
        dtype: ONNX type of the first input.
        nonzero_attributes: Attributes that are not 0 in at least one calling node.
        domain: Domain of the original operator.
        example: One of the calling nodes.
        outputs: (ONNX type, shape) of each output; the shape is None if it is unknown.
        input_types: ONNX types of the inputs, 0 if omitted or unknown.
        input_ranks: Ranks of the inputs, 0 if omitted or unknown.
        weight_input: Index of the input that is a filter of ±1 in all calls; None if there is none.
        output_limits: Valid values of integer outputs, set by the operators that read them; None if all values are
            valid.
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
        """Names of the attributes of the stand-in, the ONNX function that replaces an operator.

        For a standard operator, they are all attributes of the operator. A node that computes a part of the output may
        set attributes that have their default in the whole node. For any other operator, they are the attributes with
        a value other than 0 in at least one calling node.
        """
        if self.domain or not onnx.defs.has(self.op, self.opset, ""):
            return sorted(self.nonzero_attributes)
        return sorted(onnx.defs.get_schema(self.op, self.opset, "").attributes)

    @property
    def input_names(self) -> list[str]:
        return [f"X{index}" for index in range(self.arity)]

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **own: Any) -> NodeProto:
        """Return a node of the stand-in function. Its attributes refer to those of the node that calls the function.

        Attributes in `own` have the given values instead.
        """
        node = helper.make_node(op, inputs, outputs, **own)
        if op == self.op and self.example is not None and (self.domain or not onnx.defs.has(op, self.opset, "")):
            for entry in self.example.attribute:
                node.attribute.add(name=entry.name, ref_attr_name=entry.name).type = entry.type
            node.domain = self.domain
            return node
        for name, definition in sorted(onnx.defs.get_schema(op, self.opset, "").attributes.items()):
            if name in self.attribute_names and name not in own:
                entry = node.attribute.add(name=name, ref_attr_name=name)
                entry.type = AttributeProto.AttributeType.Value(str(definition.type).rpartition(".")[2])
        return node

    def typed_constant(self, name: str, value: float) -> NodeProto:
        return constant_node(name, np.array(value, helper.tensor_dtype_to_np_dtype(self.dtype)))


BodyBuilder = Callable[[StandInCall], list[NodeProto]]
"""Function that returns the nodes of a stand-in (an integer function that computes Y from X0, X1, …)."""


def constant_node(name: str, value: NDArray[np.generic]) -> NodeProto:
    """Return a Constant node that outputs the tensor `name`."""
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def cast_for_old_opset(body: list[NodeProto]) -> list[NodeProto]:
    """Return `body` with each integer constant replaced by a float constant and a Cast, as opsets before 9 require."""
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


def attribute_constant(
    name: str, value: str, attribute: str, attribute_type: AttributeProto.AttributeType
) -> NodeProto:
    """Return a Constant node for an ONNX function: its value is an attribute of the node that calls the function.

    `value` is the attribute of Constant that is set, such as "value_int".
    """
    node = helper.make_node("Constant", [], [name])
    refer_attribute(node, value, attribute, attribute_type)
    return node


def refer_attribute(node: NodeProto, name: str, attribute: str, attribute_type: AttributeProto.AttributeType) -> None:
    """Let an attribute of a node in an ONNX function refer to an attribute of the node that calls the function."""
    node.attribute.add(name=name, ref_attr_name=attribute).type = attribute_type


def nonnegative_mod(call: StandInCall, tensor: str = "X0") -> list[NodeProto]:
    """Return nodes that compute `bounded` = tensor modulo 16, which is 0 to 15, so that sums stay small."""
    return [
        call.typed_constant("modulus", float(MODULUS)),
        call.typed_constant("fraction", 1 / MODULUS),
        helper.make_node("Mul", [tensor, "fraction"], ["shares"]),
        helper.make_node("Floor", ["shares"], ["floors"]),
        helper.make_node("Mul", ["floors", "modulus"], ["multiples"]),
        helper.make_node("Sub", [tensor, "multiples"], ["bounded"]),
    ]


def modulus_for(dtype: int) -> int:
    """Return the odd modulus that keeps the integers of check models small: 3 for 16-bit floats, otherwise 15.

    `dtype` is an ONNX type.
    """
    return ODD_MODULUS_16_BIT if dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16) else ODD_MODULUS


def centred_mod(call: StandInCall, tensor: str, target: str) -> list[NodeProto]:
    """Return nodes that compute the tensor `target`: x modulo m, from -m/2 to m/2.

    x is `tensor`, and m is 15, or 3 for 16-bit types. The formula is x - m · floor(x / m + 1/2), so 0 stays 0. Infinite
    values, and values so large that they would be rounded, are clipped first.
    """
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
    """Return nodes that compute `target` = round(tensor · factor) without the operator Round, which opset 11 added."""
    return [
        call.typed_constant(f"{target}_factor", float(factor)),
        call.typed_constant(f"{target}_half", 0.5),
        helper.make_node("Mul", [tensor, f"{target}_factor"], [f"{target}_scaled"]),
        helper.make_node("Add", [f"{target}_scaled", f"{target}_half"], [f"{target}_raised"]),
        helper.make_node("Floor", [f"{target}_raised"], [target]),
    ]


def reduce_sum(call: StandInCall, tensor: str, axis: int, target: str) -> list[NodeProto]:
    """Return nodes that compute the tensor `target`: the sum of `tensor` over `axis`, which is kept with length 1.

    The axes of ReduceSum are an input since opset 13 and an attribute before.
    """
    if call.opset < 13:
        return [helper.make_node("ReduceSum", [tensor], [target], axes=[axis])]
    return [
        constant_node(f"{target}_axes", np.array([axis], np.int64)),
        helper.make_node("ReduceSum", [tensor, f"{target}_axes"], [target]),
    ]
