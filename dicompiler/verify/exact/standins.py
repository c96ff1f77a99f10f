"""Exact stand-ins: the node stays as it is but for its domain; a function of the model's own computes something exact.

A node of an operator that rounds (Softmax, Sigmoid, an average of nine …) keeps its name, operator type, attributes,
inputs and outputs and moves to DOMAIN (one that is not the standard's to a domain below it), in the version of the
model's standard operators. So the rule of the operator, under DOMAIN, is the operator's own rule: each stand-in reads
at least what the operator reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, NodeProto, helper

from dicompiler.ir.rule import STAND_IN_DOMAIN
from dicompiler.verify.exact import normalised
from dicompiler.verify.exact.calls import Body, Call, bounded, constant, total
from dicompiler.verify.exact.facts import FLOATS, Facts, attribute, set_attribute
from dicompiler.verify.exact.normalised import AXES

DOMAIN = STAND_IN_DOMAIN
MIN_IR = 8
"""The first IR version with functions in a model."""


def _one(op: str) -> Body:
    """The body that is one node of another operator."""
    return lambda call: [call.node(op, call.inputs, ["Y"])]


def _sign(call: Call, target: str = "Y") -> NodeProto:
    """Sign, which came with opset 9; integers can be clipped instead."""
    if call.opset >= 9:
        return call.node("Sign", ["X0"], [target])
    return helper.make_node("Clip", ["X0"], [target], min=-1.0, max=1.0)


def _window(call: Call) -> list[NodeProto]:
    """The sum over the window of x modulo 16; the greatest of the window where there is no such sum: in types other
    than float32, and where a call has what LpPool got in opset 18."""
    later = call.given - onnx.defs.get_schema("LpPool", call.opset, "").attributes.keys() - {"count_include_pad"}
    if call.dtype != onnx.TensorProto.FLOAT or later:
        return [call.node("MaxPool", ["X0"], ["Y"])]
    return [*bounded(call), call.node("LpPool", ["bounded"], ["Y"], p=1)]


def _map(call: Call) -> list[NodeProto]:
    """The sum over the map of x modulo 16; its greatest element in types where sums are soon too large."""
    if call.dtype not in _SUMMED:
        return [call.node("GlobalMaxPool", ["X0"], ["Y"])]
    return [
        *bounded(call),
        helper.make_node("Flatten", ["bounded"], ["rows"], axis=2),
        *total(call, "rows", 1, "sum"),
        helper.make_node("GlobalMaxPool", ["X0"], ["greatest"]),
        helper.make_node("Shape", ["greatest"], ["shape"]),
        helper.make_node("Reshape", ["sum", "shape"], ["Y"]),
    ]


def _reduce(call: Call) -> list[NodeProto]:
    """The sum over the axes of x modulo 16; the greatest element in types where sums are soon too large."""
    if call.dtype not in _SUMMED:
        return [call.node("ReduceMax", call.inputs, ["Y"])]
    return [*bounded(call), call.node("ReduceL1", ["bounded", *call.inputs[1:]], ["Y"])]


def _lrn(call: Call) -> list[NodeProto]:
    """x + floor(32 sign(x) / (1 + n) + 1/2), n: how many channels of the window are not zero.

    LRN itself counts them: the call's alpha is its size, its beta and bias are 1 (see `prepare`). Its rounding is far
    too small to reach the next integer. ReLU leaves about half of the channels zero, so n tells windows apart.
    """
    return [
        _sign(call, "sign"),
        call.node("LRN", ["sign"], ["share"]),
        call.number("factor", 32.0),
        call.number("half", 0.5),
        helper.make_node("Mul", ["share", "factor"], ["scaled"]),
        helper.make_node("Add", ["scaled", "half"], ["raised"]),
        helper.make_node("Floor", ["raised"], ["whole"]),
        helper.make_node("Add", ["X0", "whole"], ["Y"]),
    ]


def _softmax(call: Call) -> list[NodeProto]:
    """x - max(x): Softmax's own first step. Before opset 13 over all axes from `axis` on, since then over that one."""
    if call.opset >= 13:
        return [
            constant("one", np.array([1], np.int64)),
            call.node("TopK", ["X0", "one"], ["max", "place"]),
            helper.make_node("Sub", ["X0", "max"], ["Y"]),
        ]
    return [
        call.node("Flatten", ["X0"], ["rows"]),
        helper.make_node("ReduceMax", ["rows"], ["max"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["rows", "max"], ["flat"]),
        helper.make_node("Shape", ["X0"], ["shape"]),
        helper.make_node("Reshape", ["flat", "shape"], ["Y"]),
    ]


_SUMMED = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
BODIES: Mapping[str, Body] = {
    "lrn": _lrn,
    "map": _map,
    "reduce": _reduce,
    "sign": lambda call: [_sign(call)],
    "softmax": _softmax,
    "window": _window,
    **normalised.BODIES,
}
"""By the name that rules give them. Any other name is that of an operator, which takes the same inputs. What is bounded
stays bounded (Sigmoid → Sign), what rectifies rectifies, an average becomes a sum over the same window of numbers that
are bounded first: a maximum would hide most faults."""


def needs_stand_in(node: NodeProto, known: Facts) -> bool:
    """Whether `node` rounds, even where its inputs are small integers."""
    rule = known.rule(node)
    if rule is None or not rule.stand_in or not known.is_float(node.input[0]):
        return False
    # What follows from a stand-in must not be what nobody knew of another operator: the layers would be others.
    if rule.domain and not known.static.issuperset(filter(None, node.output)):
        return False
    if rule.stand_in in normalised.BODIES and (len(node.output) > 1 or not _alike(node, known)):
        return False
    return node.op_type != "AveragePool" or not averages_exactly(node)


def _alike(node: NodeProto, known: Facts) -> bool:
    """Whether all nodes of the operator have as many inputs as `node`: a function cannot tell which are there."""
    return "" not in node.input and all(
        len(other.input) == len(node.input) for other in known.nodes if other.op_type == node.op_type
    )


def averages_exactly(node: NodeProto) -> bool:
    """Whether an AveragePool divides by the same power of two everywhere."""
    area = math.prod(attribute(node, "kernel_shape", ()))
    padded = any(attribute(node, "pads", ())) or attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")
    counted = not padded or bool(attribute(node, "count_include_pad", 0))
    return area & (area - 1) == 0 and counted and not attribute(node, "ceil_mode", 0)


def prepare(node: NodeProto, known: Facts) -> None:
    """Makes `node`, which is changed, exact: DOMAIN where it rounds, and attributes that are whole numbers.

    Clip's bounds go out of the way (0 stays), LeakyRelu becomes |x|, Gemm's factors and LRN's exponent become 1; the
    axes of what normalises are written out, as a body cannot know its operator's defaults.
    """
    rule, numbers = known.rule(node), dict[str, Any]()
    stand_in = rule.stand_in if rule is not None else ""
    if needs_stand_in(node, known):
        node.domain = DOMAIN if node.domain in ("", "ai.onnx") else f"{DOMAIN}.{node.domain}"
    if stand_in == "lrn":
        numbers = {"alpha": float(attribute(node, "size", 1)), "beta": 1.0, "bias": 1.0}
    elif stand_in in ("layer", "lp"):
        numbers = {"axis": attribute(node, "axis", -1)}
    elif stand_in == "mean variance":
        numbers = {"axes": list(attribute(node, "axes", AXES))}
    elif node.op_type == "LeakyRelu":
        numbers = {"alpha": -1.0}
    elif node.op_type == "Gemm":
        numbers = {"alpha": 1.0, "beta": 1.0}
    elif node.op_type == "BatchNormalization" and all(known.constant(node, index) for index in range(1, 5)):
        numbers = {"epsilon": 0.0}
    elif node.op_type == "Clip":
        bounds = {name: attribute(node, name, None) for name in ("min", "max")}
        dtype = known.dtypes.get(node.input[0], onnx.TensorProto.FLOAT)
        numbers = {name: wide(name, value, dtype) for name, value in bounds.items() if value is not None}
    for name, value in numbers.items():
        set_attribute(node, name, value)


def wide(name: str, value: float, dtype: int) -> float:
    """The bound that takes the place of Clip's `min` or `max`: 0 stays 0, so that ReLU6 still rectifies; others become
    as large as is exact in the floating-point type `dtype`.
    """
    bound = 2.0 ** (FLOATS.get(dtype, 8) - 1)
    if name == "min":
        return 0.0 if value >= 0 else -bound
    return 0.0 if value <= 0 else bound


def declare(proto: onnx.ModelProto, known: Facts) -> None:
    """Gives `proto`, which is changed, the functions that its nodes in DOMAIN call, and an IR that has functions."""
    calls: dict[tuple[str, str], list[NodeProto]] = {}
    for node in proto.graph.node:
        if node.domain == DOMAIN or node.domain.startswith(f"{DOMAIN}."):
            calls.setdefault((node.domain, node.op_type), []).append(node)
    if not calls:
        return
    proto.ir_version = max(proto.ir_version, MIN_IR)
    proto.opset_import.extend(helper.make_opsetid(d, known.opset) for d in sorted({domain for domain, _ in calls}))
    proto.functions.extend(_function(*calling, calls[calling], known) for calling in sorted(calls))


def _function(domain: str, op: str, nodes: Sequence[NodeProto], known: Facts) -> FunctionProto:
    dtype, most = known.dtypes.get(nodes[0].input[0], onnx.TensorProto.FLOAT), max(nodes, key=lambda n: len(n.input))
    given = frozenset(a.name for node in nodes for a in node.attribute if helper.get_attribute_value(a) != 0)
    own = domain.removeprefix(DOMAIN).removeprefix(".")
    call, stand_in = Call(op, known.opset, len(most.input), dtype, given, own), known.rules[own, op].stand_in
    body = BODIES.get(stand_in, _one(stand_in))(call)
    opsets = [helper.make_opsetid("", known.opset)]
    return helper.make_function(domain, op, call.inputs, ["Y"], body, opsets, call.attributes)
