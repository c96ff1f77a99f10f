"""Choice and declaration of stand-ins: exact integer functions that replace operators that round.

A node with a stand-in keeps its name, operator type, attributes, inputs and outputs. Only its domain becomes
`dicompiler.check`, or `dicompiler.check.DOMAIN` for an operator with a non-standard domain DOMAIN. Its operator rule
does not change, so it is split like the original node.
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
"""First IR version with functions in a model."""


@dataclass(frozen=True)
class StandIn:
    """The stand-in (exact integer function) that replaces a node.

    Attributes:
        body: How the function is built: a key of BODIES, or the operator type of its only node.
        domain: Operator domain of the function, which becomes the domain of the node.
        weight_input: Index of the input that is a filter of ±1; None if there is none.
    """

    body: str
    domain: str
    weight_input: int | None = None


def _single_node_body(op: str) -> BodyBuilder:
    return lambda call: [call.node(op, call.input_names, ["Y"])]


def _sign_node(call: StandInCall, target: str = "Y") -> NodeProto:
    """Return a Sign node. Before opset 9, which added Sign, it is a Clip of integers to -1 … 1."""
    if call.opset >= 9:
        return call.node("Sign", ["X0"], [target])
    return helper.make_node("Clip", ["X0"], [target], min=-1.0, max=1.0)


def _window_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces AveragePool.

    It computes the sum of (x modulo 16) over each window with LpPool. If LpPool does not support the type or the
    attributes, it computes the maximum of the window.
    """
    later = (
        call.nonzero_attributes
        - onnx.defs.get_schema("LpPool", call.opset, "").attributes.keys()
        - {"count_include_pad"}
    )
    if call.dtype != onnx.TensorProto.FLOAT or later:
        return [call.node("MaxPool", ["X0"], ["Y"])]
    return [*nonnegative_mod(call), call.node("LpPool", ["bounded"], ["Y"], p=1)]


def _map_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces global pools.

    It computes the sum of (x modulo 16) over all positions of each channel. In 16-bit types, it computes the maximum,
    because the sum could be too large to be exact.
    """
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
    """Return the nodes of an integer function that replaces means over axes.

    It computes the sum of (x modulo 16), or the maximum in 16-bit types.
    """
    if call.dtype not in _SUMMABLE_TYPES:
        return [call.node("ReduceMax", call.input_names, ["Y"])]
    return [*nonnegative_mod(call), call.node("ReduceL1", ["bounded", *call.input_names[1:]], ["Y"])]


def _lrn_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces LRN.

    It computes x + floor(32 · sign(x) / (1 + n) + 1/2), where n is the number of nonzero channels in the window. An LRN
    node computes the quotient: `prepare_node` sets its alpha to the size of its window, and its beta and bias to 1.
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
    "attention": attention.attention_body,
    "global_pool": _map_body,
    "lrn": _lrn_body,
    "pool": _window_body,
    "reduction": _reduce_body,
    **normalization.BODIES,
    **generic.BODIES,
}
"""Builders of functions that replace operators, by the name that operator rules use.

If an operator rule names an operator type instead, the function is one node of this type with the same inputs. Bounded
functions are replaced by bounded ones, and averages by sums: a maximum would hide most faults.
"""


def choose_body(node: NodeProto, facts: GraphFacts) -> str:
    """Return how the integer function that replaces a node is built; "" if the node is not replaced.

    The result is a key of BODIES, or the operator type of the function's only node.
    """
    if not all(facts.is_tensor(name) for name in node.output):
        return ""
    rule, relaxation = facts.rule(node), facts.relaxation
    body = rule.stand_in if rule is not None else ""
    if node.name in relaxation.excluded:
        return excluded_layers.excluded_stand_in(node, facts)
    if (original_domain(node), node.op_type) in relaxation.generic_ops:
        if list(control_flow_bodies(node)):
            return ""
        if body == "indexed":
            return body
        if facts.is_whole(node):
            return "digest" if _can_digest(node, facts) else "rounded"
        if rule is not None and rule.is_elementwise:
            return "weighted_sum"
    if not node.input or not facts.is_float(node.input[0]) or body == "indexed":
        return ""
    if body == "same_operator":
        assert rule is not None
        return body if relaxation.bounds_inputs and facts.computed_input_count(node) > rule.is_elementwise else ""
    reads_others = any(name and facts.readers(name) != () for name in node.output[1:])
    is_never_cut = body in ("attention", "recurrent") and (reads_others or not all(node.input[1:3]))
    lacks_masks = body == "attention" and not attention.supports_masks(node, facts)
    if is_never_cut or lacks_masks or _is_uncuttable_recurrent(node, body):
        body = "digest"
    if body == "digest":
        return body if _can_digest(node, facts) else "rounded"
    if body in normalization.BODIES and len(list(filter(None, node.output))) > 1:
        return ""
    default_mode = b"linear" if node.op_type == "GridSample" else b"nearest"
    if body == "resize" and get_attribute(node, "mode", default_mode) == b"nearest":
        return ""
    return "" if node.op_type == "AveragePool" and is_exact_average(node) and not relaxation.bounds_inputs else body


def _is_uncuttable_recurrent(node: NodeProto, body: str) -> bool:
    """Return True if the function "recurrent" was chosen, but does not support the node.

    It supports only nodes that plans can split and that have the output Y.
    """
    attributes = ("layout", "activation_alpha", "activation_beta")
    return body == "recurrent" and (not node.output[0] or any(get_attribute(node, name, 0) for name in attributes))


def _can_digest(node: NodeProto, facts: GraphFacts) -> bool:
    """Return True if a digest (a hash of all inputs) can replace the node's outputs.

    The node must have numeric inputs, outputs of static shape, and opset 9 or later.
    """
    shapes = [facts.tensors[name].shape if name in facts.tensors else None for name in node.output if name]
    is_countable = all(map(facts.is_tensor, node.input)) and not any(map(facts.is_string, node.output))
    return facts.opset >= 9 and None not in shapes and is_countable


def choose_stand_ins(facts: GraphFacts) -> dict[int, StandIn]:
    """Return the integer functions (stand-ins) of all nodes that need one, by node index.

    Nodes with the same operator, types and function body share a function, unless it contains the output shape.
    """
    stand_ins: dict[int, StandIn] = {}
    functions: dict[tuple[str, str], dict[tuple[Any, ...], int]] = {}
    for index, node in enumerate(facts.nodes):
        if not (body := choose_body(node, facts)):
            continue
        domain, weight_input = original_domain(node), weight_index(facts, node)
        output_types = (facts.dtype(name) if name else None for name in node.output)
        signature = (weight_input, *(facts.dtype(name) for name in node.input), *output_types)
        signature += (index,) if body == "digest" else facts.ranks(node) if body == "attention" else ()
        numbers = functions.setdefault((domain, node.op_type), {})
        number = numbers.setdefault((body, *signature), len(numbers))
        domain = f"{DOMAIN}.{domain}" if domain else DOMAIN
        stand_ins[index] = StandIn(body, f"{domain}#{number}" if number else domain, weight_input)
    return stand_ins


def is_exact_average(node: NodeProto) -> bool:
    """Return True if an AveragePool divides by the same power of two everywhere, so that its results are exact."""
    area = math.prod(get_attribute(node, "kernel_shape", ()))
    auto_pad = get_attribute(node, "auto_pad", b"NOTSET")
    is_padded = any(get_attribute(node, "pads", ())) or auto_pad not in (b"NOTSET", b"VALID")
    counts_all = not is_padded or bool(get_attribute(node, "count_include_pad", 0))
    return area & (area - 1) == 0 and counts_all and not get_attribute(node, "ceil_mode", 0)


def prepare_node(node: NodeProto, facts: GraphFacts, stand_in: StandIn | None) -> None:
    """Change a node in place so that it computes with integers.

    A node with a stand-in gets the stand-in's domain. Attributes such as the slope of a LeakyRelu become integers. The
    axes of normalizations are set even if they have their default, because the stand-in does not know the default.
    """
    values, body = dict[str, Any](), stand_in.body if stand_in is not None else ""
    if stand_in is not None:
        node.domain = stand_in.domain
    elif (original_domain(node), node.op_type) in facts.relaxation.generic_ops:
        for graph in control_flow_bodies(node):
            _round_body_outputs(graph, facts)
    if body == "lrn":
        values = {"alpha": float(get_attribute(node, "size", 1)), "beta": 1.0, "bias": 1.0}
    elif body == "attention" and (flag := attention.causal_attribute(node)):
        values = {flag: int(attention.depends_on_row_number(node))}
    elif body in ("layer_normalization", "lp_normalization"):
        values = {"axis": get_attribute(node, "axis", -1)}
    elif body == "softmax":
        values = {"axis": get_attribute(node, "axis", -1 if facts.opset >= 13 else 1)}
    elif body == "indexed":
        values = {"axis": get_attribute(node, "axis", 0)}
    elif body == "mean_variance_normalization":
        values = {"axes": list(get_attribute(node, "axes", DEFAULT_AXES))}
    elif node.op_type == "LeakyRelu":
        values = {"alpha": -1.0}
    elif node.op_type == "Gemm":
        values = {"alpha": 1.0, "beta": 1.0}
    elif node.op_type == "BatchNormalization" and all(facts.has_float_constant(node, index) for index in range(1, 5)):
        values = {"epsilon": 0.0}
    elif node.op_type == "Clip":
        bounds = {name: get_attribute(node, name, None) for name in ("min", "max")}
        dtype = facts.dtypes.get(node.input[0], onnx.TensorProto.FLOAT)
        values = {name: widen_bound(name, value, dtype) for name, value in bounds.items() if value is not None}
    rule = facts.rule(node)
    for pair in (
        rule.attribute_stand_ins.split()
        if rule is not None and body not in ("position_values", "ones", "zeros", "rounded")
        else ()
    ):
        name, _, kind = pair.partition("=")
        old = get_attribute(node, name, None)
        if old:
            new = int(kind) if kind.isdecimal() else kind
            values[name] = integer_weights(node.name, name, len(old), kind) if isinstance(old, list) else new
    for name, value in values.items():
        set_attribute(node, name, value)


def integer_weights(node: str, name: str, count: int, kind: str) -> list[float]:
    """Return `count` integers for the weights in attribute `name` of the node named `node`.

    The `kind` "one" gives ones, "shift" integers from -4 to 8, and "gain" nonzero integers from -3 to 4.
    """
    start = named_generator(0, f"{node}/{name}").integers(13)
    positions = (start + 5 * np.arange(count)) % (7 if kind == "gain" else 13)
    values = {"one": positions * 0 + 1, "shift": positions - 4, "gain": positions - 3 + (positions >= 3)}[kind]
    return [float(value) for value in values]


def widen_bound(name: str, value: float, dtype: int) -> float:
    """Return a bound with which a Clip does not change small integers, or acts like a ReLU.

    `name` is "min" or "max". A negative minimum becomes -n and a positive maximum n, for a large power of two n. All
    other bounds become 0.
    """
    largest = 2.0 ** (SIGNIFICAND_BITS.get(dtype, 8) - 1)
    if name == "min":
        return 0.0 if value >= 0 else -largest
    return 0.0 if value <= 0 else largest


def _round_body_outputs(body: onnx.GraphProto, facts: GraphFacts) -> None:
    """Round the floating-point outputs of a control-flow body to small integers, in place."""
    for value in body.output:
        dtype = value.type.tensor_type.elem_type
        if dtype in SIGNIFICAND_BITS:
            call = StandInCall("Identity", facts.opset, 1, dtype, frozenset())
            name, result = value.name, f"{value.name}@exact"
            nodes = [*round_scaled(call, name, 64, f"{result}_w"), *centred_mod(call, f"{result}_w", result)]
            body.node.extend(nodes)
            value.name = result


def declare_functions(proto: onnx.ModelProto, facts: GraphFacts, stand_ins: Mapping[int, StandIn]) -> None:
    """Add the integer functions that the nodes of `proto` call, and raise its IR version if needed, in place."""
    calls: dict[tuple[StandIn, str], list[NodeProto]] = {}
    for index, stand_in in stand_ins.items():
        node = proto.graph.node[index]
        calls.setdefault((stand_in, node.op_type), []).append(node)
    if not calls:
        return
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
    proto.opset_import.extend(
        helper.make_opsetid(d, facts.opset) for d in sorted({stand_in.domain for stand_in, _ in calls})
    )
    order = sorted(calls, key=lambda calling: (calling[0].domain, calling[1]))
    digests = [node for (stand_in, _), nodes in calls.items() if stand_in.body == "digest" for node in nodes]
    integers = [name for node in digests for name in node.output if name and not facts.is_float(name)]
    limits = find_value_limits(facts.model, integers) if integers else {}
    proto.functions.extend(_build_function(*calling, calls[calling], facts, limits) for calling in order)


def _build_function(
    stand_in: StandIn, op: str, nodes: Sequence[NodeProto], facts: GraphFacts, limits: Mapping[str, ValueLimit]
) -> FunctionProto:
    example = max(nodes, key=lambda n: len(n.input))
    dtype = facts.dtype(example.input[0]) if example.input else onnx.TensorProto.FLOAT
    nonzero = frozenset(a.name for node in nodes for a in node.attribute if helper.get_attribute_value(a) != 0)
    domain, results = original_domain(example), [name for name in example.output if name]
    shapes = [facts.tensors[name].shape if name in facts.tensors else None for name in results]
    call = StandInCall(
        op, facts.opset, len(example.input), dtype, nonzero, domain, example,
        tuple((facts.dtype(name), shape) for name, shape in zip(results, shapes, strict=True)),
        tuple(facts.dtype(name) for name in example.input), facts.ranks(example), stand_in.weight_input,
        tuple(limits.get(name) for name in results),
    )  # fmt: skip
    body = BODIES.get(stand_in.body, _single_node_body(stand_in.body))(call)
    body = cast_for_old_opset(body) if facts.opset < 9 else body
    domains = {node.domain for node in body if node.domain}
    opsets = [helper.make_opsetid("", facts.opset)]
    opsets += [entry for entry in facts.model.proto.opset_import if entry.domain in domains]
    outputs = [generic.output_name(i) for i in range(len(results))]
    return helper.make_function(stand_in.domain, op, call.input_names, outputs, body, opsets, call.attribute_names)
