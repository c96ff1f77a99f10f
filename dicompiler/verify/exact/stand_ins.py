"""Exact stand-ins: the node stays as it is but for its domain; a function of the model's own computes something exact.

A node of an operator that rounds (Softmax, Sigmoid, an average of nine …) keeps its name, operator type, attributes,
inputs and outputs and moves to DOMAIN (one that is not the standard's to a domain below it), in the version of the
model's standard operators. So the rule of the operator, under DOMAIN, is the operator's own rule: each stand-in reads
at least what the operator reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import FunctionProto, NodeProto, helper

from dicompiler.base.rng import named_generator
from dicompiler.ir.operator_rule import STAND_IN_DOMAIN
from dicompiler.verify.exact import attention, excluded_layers, generic, normalization
from dicompiler.verify.exact.function_builder import (
    BodyBuilder,
    StandInCall,
    cast_for_old_opset,
    centred_mod,
    nonnegative_mod,
    reduce_sum,
    round_scaled,
)
from dicompiler.verify.exact.graph_facts import (
    SIGNIFICAND_BITS,
    GraphFacts,
    control_flow_bodies,
    get_attribute,
    original_domain,
    set_attribute,
)
from dicompiler.verify.exact.normalization import DEFAULT_AXES
from dicompiler.verify.exact.sparse_filters import weight_index
from dicompiler.verify.index_inputs import ValueLimit, find_value_limits

DOMAIN = STAND_IN_DOMAIN
MIN_IR_VERSION = 8
"""The first IR version with functions in a model."""


@dataclass(frozen=True)
class StandIn:
    """word: a name of BODIES or an operator's. domain: of the function. weight: the input that is a filter of ±1."""

    body: str
    domain: str
    weight_input: int | None = None


def _single_node_body(op: str) -> BodyBuilder:
    """The body that is one node of another operator."""
    return lambda call: [call.node(op, call.input_names, ["Y"])]


def _sign_node(call: StandInCall, target: str = "Y") -> NodeProto:
    """Sign, which came with opset 9; integers can be clipped instead."""
    if call.opset >= 9:
        return call.node("Sign", ["X0"], [target])
    return helper.make_node("Clip", ["X0"], [target], min=-1.0, max=1.0)


def _window_body(call: StandInCall) -> list[NodeProto]:
    """The sum over the window of x modulo 16; the greatest of the window where there is no such sum: in types other
    than float32, and where a call has what LpPool got in opset 18."""
    later = (
        call.nonzero_attributes
        - onnx.defs.get_schema("LpPool", call.opset, "").attributes.keys()
        - {"count_include_pad"}
    )
    if call.dtype != onnx.TensorProto.FLOAT or later:
        return [call.node("MaxPool", ["X0"], ["Y"])]
    return [*nonnegative_mod(call), call.node("LpPool", ["bounded"], ["Y"], p=1)]


def _map_body(call: StandInCall) -> list[NodeProto]:
    """The sum over the map of x modulo 16; its greatest element in types where sums are soon too large."""
    if call.dtype not in _SUMMABLE_TYPES:
        return [call.node("GlobalMaxPool", ["X0"], ["Y"])]
    return [
        *nonnegative_mod(call),
        helper.make_node("Flatten", ["bounded"], ["rows"], axis=2),
        *reduce_sum(call, "rows", 1, "sum"),
        helper.make_node("GlobalMaxPool", ["X0"], ["greatest"]),
        helper.make_node("Shape", ["greatest"], ["shape"]),
        helper.make_node("Reshape", ["sum", "shape"], ["Y"]),
    ]


def _reduce_body(call: StandInCall) -> list[NodeProto]:
    """The sum over the axes of x modulo 16; the greatest element in types where sums are soon too large."""
    if call.dtype not in _SUMMABLE_TYPES:
        return [call.node("ReduceMax", call.input_names, ["Y"])]
    return [*nonnegative_mod(call), call.node("ReduceL1", ["bounded", *call.input_names[1:]], ["Y"])]


def _lrn_body(call: StandInCall) -> list[NodeProto]:
    """x + floor(32 sign(x) / (1 + n) + 1/2), n: how many channels of the window are not zero.

    LRN itself counts them: the call's alpha is its size, its beta and bias are 1 (see `prepare`). Its rounding is far
    too small to reach the next integer. ReLU leaves about half of the channels zero, so n tells windows apart.
    """
    return [
        _sign_node(call, "sign"),
        call.node("LRN", ["sign"], ["share"]),
        call.typed_constant("factor", 32.0),
        call.typed_constant("half", 0.5),
        helper.make_node("Mul", ["share", "factor"], ["scaled"]),
        helper.make_node("Add", ["scaled", "half"], ["raised"]),
        helper.make_node("Floor", ["raised"], ["whole"]),
        helper.make_node("Add", ["X0", "whole"], ["Y"]),
    ]


_SUMMABLE_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
BODIES: Mapping[str, BodyBuilder] = {
    "lrn": _lrn_body,
    "map": _map_body,
    "reduce": _reduce_body,
    "window": _window_body,
    **normalization.BODIES,
    **generic.BODIES,
    "attended": attention.attention_body,
}
"""By the name that rules give them. Any other name is that of an operator, which takes the same inputs. What is bounded
stays bounded (Sigmoid → a remainder), what rectifies rectifies, an average becomes a sum over the same window of what
is bounded first: a maximum would hide most faults."""


def choose_body(node: NodeProto, known: GraphFacts) -> str:
    """What stands in for the node: a name of BODIES or an operator's; '' where it stays as it is."""
    if not all(known.is_tensor(name) for name in node.output):
        return ""
    rule, treatment = known.rule(node), known.relaxation
    word = rule.stand_in if rule is not None else ""
    if node.name in treatment.excluded:
        return excluded_layers.excluded_stand_in(node, known)
    if (original_domain(node), node.op_type) in treatment.generic_ops:
        if list(control_flow_bodies(node)):
            return ""
        if word == "indexed":
            return word
        if known.is_whole(node):
            return "digest" if _can_digest(node, known) else "rounded"
        if rule is not None and rule.is_elementwise:
            return "mixed"
    if not node.input or not known.is_float(node.input[0]) or word == "indexed":
        return ""
    if word == "itself":
        assert rule is not None
        return word if treatment.bounds_inputs and known.computed_input_count(node) > rule.is_elementwise else ""
    read = any(name and known.readers(name) != () for name in node.output[1:])
    never_cut = word in ("attended", "recurrent") and (read or not all(node.input[1:3]))
    if (
        never_cut
        or _is_uncuttable_recurrent(node, word)
        or (word == "attended" and not attention.supports_masks(node, known))
    ):
        word = "digest"
    if word == "digest":
        return word if _can_digest(node, known) else "rounded"
    if word in normalization.BODIES and len(list(filter(None, node.output))) > 1:
        return ""
    blends = b"linear" if node.op_type == "GridSample" else b"nearest"
    if word == "resampled" and get_attribute(node, "mode", blends) == b"nearest":
        return ""
    return "" if node.op_type == "AveragePool" and is_exact_average(node) and not treatment.bounds_inputs else word


def _is_uncuttable_recurrent(node: NodeProto, word: str) -> bool:
    """Whether a recurrent layer is not cut by directions and batch, or gives no steps."""
    others = ("layout", "activation_alpha", "activation_beta")
    return word == "recurrent" and (not node.output[0] or any(get_attribute(node, name, 0) for name in others))


def _can_digest(node: NodeProto, known: GraphFacts) -> bool:
    """Whether it takes tensors, and makes tensors of known shape, of an opset that can count elements."""
    shapes = [known.tensors[name].shape if name in known.tensors else None for name in node.output if name]
    countable = all(map(known.is_tensor, node.input)) and not any(map(known.is_string, node.output))
    return known.opset >= 9 and None not in shapes and countable


def choose_stand_ins(known: GraphFacts) -> dict[int, StandIn]:
    """Index of each node for which something stands in → what, and in which domain: there is one function for the
    calls of an operator that are alike, and one for each node whose shape it must know."""
    found: dict[int, StandIn] = {}
    functions: dict[tuple[str, str], dict[tuple[Any, ...], int]] = {}
    for index, node in enumerate(known.nodes):
        if not (word := choose_body(node, known)):
            continue
        own, weight = original_domain(node), weight_index(known, node)
        made = (known.dtype(name) if name else None for name in node.output)
        signature = (weight, *(known.dtype(name) for name in node.input), *made)
        signature += (index,) if word == "digest" else known.ranks(node) if word == "attended" else ()
        numbers = functions.setdefault((own, node.op_type), {})
        number = numbers.setdefault((word, *signature), len(numbers))
        domain = f"{DOMAIN}.{own}" if own else DOMAIN
        found[index] = StandIn(word, f"{domain}#{number}" if number else domain, weight)
    return found


def is_exact_average(node: NodeProto) -> bool:
    """Whether an AveragePool divides by the same power of two everywhere."""
    area = math.prod(get_attribute(node, "kernel_shape", ()))
    padded = any(get_attribute(node, "pads", ())) or get_attribute(node, "auto_pad", b"NOTSET") not in (
        b"NOTSET",
        b"VALID",
    )
    counted = not padded or bool(get_attribute(node, "count_include_pad", 0))
    return area & (area - 1) == 0 and counted and not get_attribute(node, "ceil_mode", 0)


def prepare_node(node: NodeProto, known: GraphFacts, own: StandIn | None) -> None:
    """Makes `node`, which is changed, exact: a domain of functions where it rounds, whole numbers for attributes.

    Clip's bounds go out of the way (0 stays), LeakyRelu becomes |x|, Gemm's factors and LRN's exponent become 1; the
    axes of what normalises are written out, as a body cannot know its operator's defaults.
    """
    numbers, word = dict[str, Any](), own.body if own is not None else ""
    if own is not None:
        node.domain = own.domain
    elif (original_domain(node), node.op_type) in known.relaxation.generic_ops:
        for body in control_flow_bodies(node):
            _round_body_outputs(body, known)
    if word == "lrn":
        numbers = {"alpha": float(get_attribute(node, "size", 1)), "beta": 1.0, "bias": 1.0}
    elif word == "attended" and (flag := attention.causal_attribute(node)):
        numbers = {flag: int(attention.counts_rows(node))}
    elif word in ("layer", "lp"):
        numbers = {"axis": get_attribute(node, "axis", -1)}
    elif word == "softmax":
        numbers = {"axis": get_attribute(node, "axis", -1 if known.opset >= 13 else 1)}
    elif word == "indexed":
        numbers = {"axis": get_attribute(node, "axis", 0)}
    elif word == "mean variance":
        numbers = {"axes": list(get_attribute(node, "axes", DEFAULT_AXES))}
    elif node.op_type == "LeakyRelu":
        numbers = {"alpha": -1.0}
    elif node.op_type == "Gemm":
        numbers = {"alpha": 1.0, "beta": 1.0}
    elif node.op_type == "BatchNormalization" and all(known.has_float_constant(node, index) for index in range(1, 5)):
        numbers = {"epsilon": 0.0}
    elif node.op_type == "Clip":
        bounds = {name: get_attribute(node, name, None) for name in ("min", "max")}
        dtype = known.dtypes.get(node.input[0], onnx.TensorProto.FLOAT)
        numbers = {name: widen_bound(name, value, dtype) for name, value in bounds.items() if value is not None}
    rule = known.rule(node)
    for pair in (
        rule.attribute_stand_ins.split()
        if rule is not None and word not in ("numbers", "ones", "zeros", "rounded")
        else ()
    ):
        name, _, become = pair.partition("=")
        given = get_attribute(node, name, None)
        if given:
            fixed = int(become) if become.isdecimal() else become
            numbers[name] = integer_weights(node.name, name, len(given), become) if isinstance(given, list) else fixed
    for name, value in numbers.items():
        set_attribute(node, name, value)


def integer_weights(node: str, name: str, count: int, word: str) -> list[float]:
    """Whole numbers for an attribute of so many weights: ones, shifts of -4 to 8, or gains of -3 to 4 without 0."""
    start = named_generator(0, f"{node}/{name}").integers(13)
    places = (start + 5 * np.arange(count)) % (7 if word == "gain" else 13)
    values = {"one": places * 0 + 1, "shift": places - 4, "gain": places - 3 + (places >= 3)}[word]
    return [float(value) for value in values]


def widen_bound(name: str, value: float, dtype: int) -> float:
    """The bound that takes the place of Clip's `min` or `max`: 0 stays 0, so that ReLU6 still rectifies; others become
    as large as is exact in the floating-point type `dtype`.
    """
    bound = 2.0 ** (SIGNIFICAND_BITS.get(dtype, 8) - 1)
    if name == "min":
        return 0.0 if value >= 0 else -bound
    return 0.0 if value <= 0 else bound


def _round_body_outputs(body: onnx.GraphProto, known: GraphFacts) -> None:
    """The floating-point results of a control flow's body, which is changed, become small whole numbers."""
    for value in body.output:
        dtype = value.type.tensor_type.elem_type
        if dtype in SIGNIFICAND_BITS:
            call = StandInCall("Identity", known.opset, 1, dtype, frozenset())
            name, result = value.name, f"{value.name}@exact"
            nodes = [*round_scaled(call, name, 64, f"{result}_w"), *centred_mod(call, f"{result}_w", result)]
            body.node.extend(nodes)
            value.name = result


def declare_functions(proto: onnx.ModelProto, known: GraphFacts, stand_ins: Mapping[int, StandIn]) -> None:
    """Gives `proto`, which is changed, the functions that its nodes call, and an IR that has functions."""
    calls: dict[tuple[StandIn, str], list[NodeProto]] = {}
    for index, own in stand_ins.items():
        node = proto.graph.node[index]
        calls.setdefault((own, node.op_type), []).append(node)
    if not calls:
        return
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
    proto.opset_import.extend(helper.make_opsetid(d, known.opset) for d in sorted({own.domain for own, _ in calls}))
    order = sorted(calls, key=lambda calling: (calling[0].domain, calling[1]))
    digests = [node for (own, _), nodes in calls.items() if own.body == "digest" for node in nodes]
    wholes = [name for node in digests for name in node.output if name and not known.is_float(name)]
    takes = find_value_limits(known.model, wholes) if wholes else {}
    proto.functions.extend(_build_function(*calling, calls[calling], known, takes) for calling in order)


def _build_function(
    made: StandIn, op: str, nodes: Sequence[NodeProto], known: GraphFacts, takes: Mapping[str, ValueLimit]
) -> FunctionProto:
    most = max(nodes, key=lambda n: len(n.input))
    dtype = known.dtype(most.input[0]) if most.input else onnx.TensorProto.FLOAT
    given = frozenset(a.name for node in nodes for a in node.attribute if helper.get_attribute_value(a) != 0)
    own, results = original_domain(most), [name for name in most.output if name]
    shapes = [known.tensors[name].shape if name in known.tensors else None for name in results]
    call = StandInCall(
        op, known.opset, len(most.input), dtype, given, own, most,
        tuple((known.dtype(name), shape) for name, shape in zip(results, shapes, strict=True)),
        tuple(known.dtype(name) for name in most.input), known.ranks(most), made.weight_input,
        tuple(takes.get(name) for name in results),
    )  # fmt: skip
    body = BODIES.get(made.body, _single_node_body(made.body))(call)
    body = cast_for_old_opset(body) if known.opset < 9 else body
    used = {node.domain for node in body if node.domain}
    opsets = [helper.make_opsetid("", known.opset)]
    opsets += [entry for entry in known.model.proto.opset_import if entry.domain in used]
    outputs = [generic.output_name(i) for i in range(len(results))]
    return helper.make_function(made.domain, op, call.input_names, outputs, body, opsets, call.attribute_names)
