"""Building blocks of integer functions that replace operators that round in the exact check (stand-ins).

A stand-in is an ONNX model-local function with inputs X0, X1, … and outputs Y, Y1, …. `StandInCall` describes the nodes
that call it, and a body builder returns the nodes of the function.
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
"""Modulus that is applied to the terms of sums. It is a power of two, so its reciprocal is exact."""
ODD_MODULUS, ODD_MODULUS_16_BIT = 15, 3
"""Moduli that are applied to the factors of products: ODD_MODULUS_16_BIT in 16-bit types, otherwise ODD_MODULUS.

They are odd, so that a factor of two hides no difference, and so that the nearest multiple of an integer is unique.
"""


@dataclass(frozen=True)
class StandInCall:
    """The common properties of all nodes that call one stand-in (an integer function that replaces an operator).

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
        output_limits: Valid values of integer outputs, as the operators that read them require; None if all are valid.
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
        """Names of the ONNX function's attributes.

        A function for a standard operator has all attributes of the operator, because a node for a piece of the output
        may set more attributes than the whole node. Other functions have only `nonzero_attributes`.
        """
        if self.domain or not onnx.defs.has(self.op, self.opset, ""):
            return sorted(self.nonzero_attributes)
        return sorted(onnx.defs.get_schema(self.op, self.opset, "").attributes)

    @property
    def input_names(self) -> list[str]:
        return [f"X{index}" for index in range(self.arity)]

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **own: Any) -> NodeProto:
        """Return a node of the function; its attributes refer to those of the calling node, except those in `own`."""
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
"""Function that returns the nodes of an ONNX function, which computes Y from X0, X1, …."""


def constant_node(name: str, value: NDArray[np.generic]) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def cast_for_old_opset(body: list[NodeProto]) -> list[NodeProto]:
    """Return `body` with each int64 constant replaced by a float constant and a Cast, as opsets before 9 require."""
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
    """Return a Constant node for an ONNX function, with an attribute of the calling node as its value.

    `value` is the attribute of Constant that is set, such as "value_int".
    """
    node = helper.make_node("Constant", [], [name])
    refer_attribute(node, value, attribute, attribute_type)
    return node


def refer_attribute(node: NodeProto, name: str, attribute: str, attribute_type: AttributeProto.AttributeType) -> None:
    """Let the attribute `name` of a node in an ONNX function refer to the calling node's `attribute`."""
    node.attribute.add(name=name, ref_attr_name=attribute).type = attribute_type


def nonnegative_mod(call: StandInCall, tensor: str = "X0") -> list[NodeProto]:
    """Return nodes that compute the tensor `bounded` = `tensor` modulo 16 (from 0 to 15)."""
    return [
        call.typed_constant("modulus", float(MODULUS)),
        call.typed_constant("fraction", 1 / MODULUS),
        helper.make_node("Mul", [tensor, "fraction"], ["shares"]),
        helper.make_node("Floor", ["shares"], ["floors"]),
        helper.make_node("Mul", ["floors", "modulus"], ["multiples"]),
        helper.make_node("Sub", [tensor, "multiples"], ["bounded"]),
    ]


def modulus_for(dtype: int) -> int:
    """Return the modulus for factors of products: 3 for 16-bit floats, otherwise 15. `dtype` is an ONNX type."""
    return ODD_MODULUS_16_BIT if dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16) else ODD_MODULUS


def centred_mod(call: StandInCall, tensor: str, target: str) -> list[NodeProto]:
    """Return nodes that compute the tensor `target`: x modulo m, from -m/2 to m/2.

    x is `tensor`, clipped to exact values; m is 15, or 3 for 16-bit types. The formula is x - m · floor(x / m + 1/2).
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
    """Return nodes that compute `target` = round(tensor · factor). The operator Round exists only since opset 11."""
    return [
        call.typed_constant(f"{target}_factor", float(factor)),
        call.typed_constant(f"{target}_half", 0.5),
        helper.make_node("Mul", [tensor, f"{target}_factor"], [f"{target}_scaled"]),
        helper.make_node("Add", [f"{target}_scaled", f"{target}_half"], [f"{target}_raised"]),
        helper.make_node("Floor", [f"{target}_raised"], [target]),
    ]


def reduce_sum(call: StandInCall, tensor: str, axis: int, target: str) -> list[NodeProto]:
    """Return nodes that compute the tensor `target`: the sum of `tensor` over `axis`, which is kept with length 1."""
    if call.opset < 13:
        return [helper.make_node("ReduceSum", [tensor], [target], axes=[axis])]
    return [
        constant_node(f"{target}_axes", np.array([axis], np.int64)),
        helper.make_node("ReduceSum", [tensor, f"{target}_axes"], [target]),
    ]
