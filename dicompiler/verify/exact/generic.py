"""Stand-ins for operators of many kinds: bodies that know no more of an operator than how it can be cut.

In: what the calls of an operator have in common. Out: the nodes of the function that stands in for it, whose results
are small whole numbers in which every element that the operator reads has a part.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from dicompiler.ir.regions import Shape
from dicompiler.verify.exact.function_builder import (
    StandInCall,
    attribute_constant,
    centred_mod,
    constant_node,
    reduce_sum,
    round_scaled,
)
from dicompiler.verify.index_inputs import ValueLimit

ROUNDING_FACTOR = 16
"""Numbers are rounded to this part of 1 before they are taken modulo 15, which leaves whole numbers as they are."""
DIGEST_PRIME, DIGEST_BOUND, DIGEST_FRACTION = 8191, 2.0**22, 1024
"""A digest counts in whole multiples of 1/STEPS, up to BOUND, modulo PRIME."""
MAX_INTEGER_VALUES = 4
"""So many whole numbers, from 0 on, are given to who takes any."""
_FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def same_operator_body(call: StandInCall) -> list[NodeProto]:
    """The operator on inputs modulo an odd number: sums of their products are small however deep a network is, and as
    each element is taken by itself, parts and partial sums of it are those of the whole. Filters are small already."""
    formal = onnx.defs.get_schema(call.op, call.opset, "").inputs
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    nodes, inputs = list[NodeProto](), call.input_names
    for i, name in enumerate(call.input_names):
        own = formal[min(i, len(formal) - 1)]
        if (
            own.type_str == formal[0].type_str
            and own.option != optional
            and call.input_types[i]
            and i != call.weight_input
        ):
            nodes += centred_mod(call, name, f"B{i}")
            inputs[i] = f"B{i}"
    return [*nodes, call.node(call.op, inputs, ["Y"])]


def bounded_body(call: StandInCall) -> list[NodeProto]:
    """The operator on its first input modulo an odd number: nothing of it is cut off by the range of the result."""
    return [*centred_mod(call, "X0", "B0"), call.node(call.op, ["B0", *call.input_names[1:]], ["Y"])]


def indexed_body(call: StandInCall) -> list[NodeProto]:
    """The operator with its indices modulo the length of the axis: computed ones can leave it."""
    return [
        attribute_constant("axis", "value_int", "axis", onnx.AttributeProto.INT),
        helper.make_node("Shape", ["X0"], ["extents"]),
        helper.make_node("Gather", ["extents", "axis"], ["extent"]),
        helper.make_node("Cast", ["extent"], ["length"], to=call.input_types[1]),
        helper.make_node("Mod", ["X1", "length"], ["index"]),
        call.node(call.op, ["X0", "index"], ["Y"]),
    ]


def recurrent_body(call: StandInCall) -> list[NodeProto]:
    """RNN, GRU, LSTM, of which y alone is read: what a step reads, and all steps, plus the weights of its direction."""
    shapes = {"by_step": [0, 1, -1, 1], "by_batch": [1, 1, -1, 1], "by_unit": [0, 0, 1, -1], "by_both": [0, 0, -1, 1]}
    nodes = [constant_node(name, np.array(value, np.int64)) for name, value in shapes.items()]
    nodes += centred_mod(call, "X0", "B0")
    nodes += [*reduce_sum(call, "B0", 2, "step"), *reduce_sum(call, "step", 0, "steps")]
    terms = [("step", "by_step"), ("steps", "by_batch")]
    for i in (1, 2):  # (directions, gates and units, features or units)
        nodes += [*centred_mod(call, f"X{i}", f"B{i}"), *reduce_sum(call, f"B{i}", 1, f"sum{i}")]
        nodes.append(helper.make_node("Transpose", [f"sum{i}"], [f"of{i}"], perm=[1, 0, 2]))
    nodes += reduce_sum(call, "of1", 2, "of3")
    terms += [("of2", "by_unit"), ("of3", "by_unit")]
    for i in (3, 5, 6, 7):  # a bias, what states begin with, peepholes
        if i < len(call.input_types) and call.input_types[i]:
            axis, turned = (2, [2, 0, 1]) if i in (5, 6) else (1, [1, 0])
            nodes += [*centred_mod(call, f"X{i}", f"B{i}"), *reduce_sum(call, f"B{i}", axis, f"sum{i}")]
            nodes.append(helper.make_node("Transpose", [f"sum{i}"], [f"begin{i}"], perm=turned))
            terms.append((f"begin{i}", "by_both" if axis == 2 else "by_unit"))
    if len(call.input_types) > 4 and call.input_types[4]:
        nodes.append(helper.make_node("Cast", ["X4"], ["lengths"], to=call.dtype))
        terms.append(("lengths", "by_batch"))
    nodes += [helper.make_node("Reshape", [tensor, shape], [f"{tensor}_all"]) for tensor, shape in terms]
    before = f"{terms[0][0]}_all"
    for tensor, _ in terms[1:]:
        target = "Y" if tensor == terms[-1][0] else f"{tensor}_mixed"
        nodes.append(helper.make_node("Add", [before, f"{tensor}_all"], [target]))
        before = target
    return [*nodes, *(helper.make_node("Identity", ["X0"], [output_name(i)]) for i in range(1, len(call.outputs)))]


def cumulative_body(call: StandInCall) -> list[NodeProto]:
    """The running sum of x modulo an odd number, for running products too: those would grow."""
    return [*centred_mod(call, "X0", "B0"), call.node("CumSum", ["B0", *call.input_names[1:]], ["Y"])]


def remainder_body(call: StandInCall) -> list[NodeProto]:
    """x modulo an odd number, in the place of what is bounded."""
    return centred_mod(call, "X0", "Y")


def weighted_sum_body(call: StandInCall, output: str = "Y") -> list[NodeProto]:
    """`made`: Σ (i + 1) · (xᵢ modulo an odd number) over the floating-point inputs: for any element-wise operator. The
    others of a BatchNormalization lie along the channels."""
    nodes, last = list[NodeProto](), ""
    if call.outputs and call.outputs[0][0] != call.dtype:  # it makes floats of what are none: of its first input alone
        cast = helper.make_node("Cast", ["X0"], ["typed_X0"], to=call.outputs[0][0])
        return [cast, *centred_mod(replace(call, dtype=call.outputs[0][0]), "typed_X0", output)]
    places = [i for i, kind in enumerate(call.input_types) if kind == call.dtype]
    upright = call.op == "BatchNormalization" and call.opset >= 9
    nodes += _channel_shape() if upright else []
    for count, i in enumerate(places, 1):
        target = f"S{i}" if count < len(places) else output
        turned = upright and i > 0
        nodes += [
            *round_scaled(call, f"X{i}", ROUNDING_FACTOR, f"W{i}"),
            *centred_mod(call, f"W{i}", f"C{i}" if turned else f"B{i}"),
        ]
        nodes += [helper.make_node("Reshape", [f"C{i}", "channels"], [f"B{i}"])] if turned else []
        nodes += [call.typed_constant(f"F{i}", float(count)), helper.make_node("Mul", [f"B{i}", f"F{i}"], [f"P{i}"])]
        nodes.append(
            helper.make_node("Add", [last, f"P{i}"], [target])
            if last
            else helper.make_node("Identity", [f"P{i}"], [target])
        )
        last = target
    return nodes


def _channel_shape() -> list[NodeProto]:
    """`channels`: the shape of a vector along the channels of X0, (-1, 1, …, 1), one axis less than X0 has."""
    one = helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])
    return [
        constant_node("minus", np.array([-1])),
        constant_node("two", np.array([2])),
        helper.make_node("Shape", ["X0"], ["sizes"]),
        helper.make_node("Shape", ["sizes"], ["rank"]),
        helper.make_node("Sub", ["rank", "two"], ["behind"]),
        helper.make_node("ConstantOfShape", ["behind"], ["ones"], value=one),
        helper.make_node("Concat", ["minus", "ones"], ["channels"], axis=0),
    ]


def resample_body(call: StandInCall) -> list[NodeProto]:
    """What blends whole numbers with weights that are the same in every tile, in whole multiples of 1/64."""
    return [
        *centred_mod(call, "X0", "B0"),
        call.node(call.op, ["B0", *call.input_names[1:]], ["blend"]),
        *round_scaled(call, "blend", 64, "Y"),
    ]


def ones_body(call: StandInCall) -> list[NodeProto]:
    """Ones of the shape that the operator gives, zeros in types that are no floats: the same in all parts of a layer
    that is left out, and what reads it is checked: a tap that is wrong shows."""
    return _filled_body(call, 1)


def position_values_body(call: StandInCall) -> list[NodeProto]:
    """In the place of floats of an operator that is left out and never cut: numbers that differ by place, of whatever
    shape it gives. What is no float is what the operator gives, as the parts run it on the same numbers."""
    names = [f"T{i}" if kind in _FLOAT_TYPES else output_name(i) for i, (kind, _) in enumerate(call.outputs)]
    nodes = [
        call.node(call.op, _given_inputs(call), names),
        _double_constant("prime", DIGEST_PRIME),
        _double_constant("share", 1 / DIGEST_PRIME),
    ]
    nodes += [_double_constant("half", 0.5), _double_constant("one", 1.0)]
    for i, (kind, _) in enumerate(call.outputs):
        if kind in _FLOAT_TYPES:
            nodes += _position_values(i, kind)
    return nodes


def zeros_body(call: StandInCall) -> list[NodeProto]:
    """Zeros of the shape that the operator gives, to which numbers are added that differ by place (see `left`)."""
    return _filled_body(call, 0)


def _filled_body(call: StandInCall, number: int) -> list[NodeProto]:
    nodes = [call.node(call.op, _given_inputs(call), [f"T{i}" for i in range(len(call.outputs))])]
    for i, (kind, _) in enumerate(call.outputs):
        element = np.full(1, number if kind in _FLOAT_TYPES else 0).astype(helper.tensor_dtype_to_np_dtype(kind))
        one = numpy_helper.from_array(element)
        nodes.append(helper.make_node("Shape", [f"T{i}"], [f"shape{i}"]))
        nodes.append(helper.make_node("ConstantOfShape", [f"shape{i}"], [output_name(i)], value=one))
    return nodes


def rounded_body(call: StandInCall) -> list[NodeProto]:
    """What an operator that is never cut gives, in whole multiples of 1/64, modulo an odd number: it runs on the same
    numbers, by the same kernel, in the parts and in the whole."""
    names = [f"T{i}" if kind in _FLOAT_TYPES else output_name(i) for i, (kind, _) in enumerate(call.outputs)]
    nodes = [call.node(call.op, _given_inputs(call), names)]
    for i, (kind, _) in enumerate(call.outputs):
        if kind in _FLOAT_TYPES:
            nodes += [*round_scaled(call, f"T{i}", 64, f"W{i}"), *centred_mod(call, f"W{i}", output_name(i))]
    return nodes


def digest_body(call: StandInCall) -> list[NodeProto]:
    """For an operator that is never cut, of whatever kind: a number in which every element of every input has a part by
    its place, spread over the outputs, whose shapes are known. In double precision, which holds all of it exactly."""
    nodes = [
        _double_constant("prime", DIGEST_PRIME),
        _double_constant("share", 1 / DIGEST_PRIME),
        _double_constant("half", 0.5),
        _double_constant("zero", 0.0),
    ]
    last = "zero"
    for i, kind in enumerate(call.input_types):
        if kind and kind != TensorProto.STRING:
            nodes += [*_position_weighted_sum(i), helper.make_node("Add", [last, f"h{i}"], [f"sum{i}"])]
            nodes += _mod(f"sum{i}", "prime", "share", f"H{i}")
            last = f"H{i}"
    for i, (kind, shape) in enumerate(call.outputs):
        assert shape is not None
        limit = call.output_limits[i] if i < len(call.output_limits) else None
        nodes += _spread_digest(last, i, kind, shape, limit)
    return nodes


def output_name(index: int) -> str:
    """The name of a function's output."""
    return f"Y{index or ''}"


def _position_values(i: int, kind: int) -> list[NodeProto]:
    """Output i of the shape of T{i}: at place j it is j · (j² + 1) modulo PRIME, in the range of its type."""
    modulus = 15.0 if kind in _FLOAT_TYPES[:2] else 3.0
    return [
        constant_node(f"flat{i}", np.array([-1], np.int64)),
        helper.make_node("Reshape", [f"T{i}", f"flat{i}"], [f"row{i}"]),
        *_positions(i),
        helper.make_node("Mul", [f"step{i}", f"step{i}"], [f"square{i}"]),
        *_mod(f"square{i}", "prime", "share", f"second{i}"),
        helper.make_node("Add", [f"second{i}", "one"], [f"raised{i}"]),
        helper.make_node("Mul", [f"raised{i}", f"step{i}"], [f"cube{i}"]),
        *_mod(f"cube{i}", "prime", "share", f"stirred{i}"),
        _double_constant(f"m{i}", modulus),
        _double_constant(f"s{i}", 1 / modulus),
        *_mod(f"stirred{i}", f"m{i}", f"s{i}", f"left{i}"),
        helper.make_node("Cast", [f"left{i}"], [f"typed{i}"], to=kind),
        helper.make_node("Shape", [f"T{i}"], [f"shape{i}"]),
        helper.make_node("Reshape", [f"typed{i}", f"shape{i}"], [output_name(i)]),
    ]


def _positions(i: int) -> list[NodeProto]:
    """`step{i}`: the places of the elements of `row{i}`, modulo PRIME."""
    one = numpy_helper.from_array(np.ones(1, np.int64))
    return [
        helper.make_node("Shape", [f"row{i}"], [f"count{i}"]),
        helper.make_node("ConstantOfShape", [f"count{i}"], [f"ones{i}"], value=one),
        helper.make_node("NonZero", [f"ones{i}"], [f"places{i}"]),
        helper.make_node("Cast", [f"places{i}"], [f"ramp{i}"], to=TensorProto.DOUBLE),
        *_mod(f"ramp{i}", "prime", "share", f"step{i}"),
    ]


def _given_inputs(call: StandInCall) -> list[str]:
    return [name if kind else "" for name, kind in zip(call.input_names, call.input_types, strict=True)]


def _double_constant(name: str, value: float) -> NodeProto:
    return constant_node(name, np.array(value, np.float64))


def _mod(tensor: str, modulus: str, share: str, target: str) -> list[NodeProto]:
    return [
        helper.make_node("Mul", [tensor, share], [f"{target}_y"]),
        helper.make_node("Add", [f"{target}_y", "half"], [f"{target}_z"]),
        helper.make_node("Floor", [f"{target}_z"], [f"{target}_f"]),
        helper.make_node("Mul", [f"{target}_f", modulus], [f"{target}_n"]),
        helper.make_node("Sub", [tensor, f"{target}_n"], [target]),
    ]


def _position_weighted_sum(i: int) -> list[NodeProto]:
    """`h{i}`: Σ over the elements of input i of (x modulo PRIME) · (place³ + place + 1 modulo PRIME)."""
    limits = [
        _double_constant(f"low{i}", -DIGEST_BOUND),
        _double_constant(f"high{i}", DIGEST_BOUND),
        _double_constant(f"steps{i}", DIGEST_FRACTION),
    ]
    return [
        *limits,
        constant_node(f"flat{i}", np.array([-1], np.int64)),
        helper.make_node("Cast", [f"X{i}"], [f"wide{i}"], to=TensorProto.DOUBLE),
        helper.make_node("Reshape", [f"wide{i}", f"flat{i}"], [f"row{i}"]),
        helper.make_node("Max", [f"row{i}", f"low{i}"], [f"above{i}"]),
        helper.make_node("Min", [f"above{i}", f"high{i}"], [f"within{i}"]),
        helper.make_node("Mul", [f"within{i}", f"steps{i}"], [f"scaled{i}"]),
        helper.make_node("Floor", [f"scaled{i}"], [f"numbers{i}"]),
        *_mod(f"numbers{i}", "prime", "share", f"small{i}"),
        *_positions(i),
        helper.make_node("Mul", [f"step{i}", f"step{i}"], [f"square{i}"]),  # so that equal sums tell places apart
        *_mod(f"square{i}", "prime", "share", f"second{i}"),
        _double_constant(f"raise{i}", 1.0),
        helper.make_node("Add", [f"second{i}", f"raise{i}"], [f"raised{i}"]),
        helper.make_node("Mul", [f"raised{i}", f"step{i}"], [f"cube{i}"]),
        helper.make_node("Add", [f"cube{i}", f"raise{i}"], [f"weight{i}"]),
        *_mod(f"weight{i}", "prime", "share", f"weights{i}"),
        helper.make_node("Mul", [f"small{i}", f"weights{i}"], [f"products{i}"]),
        helper.make_node("ReduceSum", [f"products{i}"], [f"h{i}"]),  # over all axes, which stay with extent 1
    ]


def _spread_digest(tensor: str, i: int, kind: int, shape: Shape, limit: ValueLimit | None) -> list[NodeProto]:
    """Output i: an element at place j is (tensor + j) · (1 + j modulo 61) modulo PRIME, in the range of its type, and
    of whole numbers in what their readers take."""
    if isinstance(limit, tuple):
        return [constant_node(output_name(i), np.array(limit, helper.tensor_dtype_to_np_dtype(kind)).reshape(shape))]
    places = np.arange(math.prod(shape), dtype=np.float64)
    most = 2 if kind == TensorProto.BOOL else min(limit or MAX_INTEGER_VALUES, MAX_INTEGER_VALUES)
    modulus = 15.0 if kind in _FLOAT_TYPES[:2] else 3.0 if kind in _FLOAT_TYPES else float(most)
    nodes = [
        constant_node(f"place{i}", places),
        constant_node(f"times{i}", 1 + places % 61),
        constant_node(f"shape{i}", np.array(shape, np.int64)),
        _double_constant(f"m{i}", modulus),
        _double_constant(f"s{i}", 1 / modulus),
        helper.make_node("Add", [tensor, f"place{i}"], [f"moved{i}"]),
        helper.make_node("Mul", [f"moved{i}", f"times{i}"], [f"large{i}"]),
        *_mod(f"large{i}", "prime", "share", f"stirred{i}"),
        *_mod(f"stirred{i}", f"m{i}", f"s{i}", f"left{i}"),
    ]
    if kind not in _FLOAT_TYPES:
        nodes.append(helper.make_node("Abs", [f"left{i}"], [f"whole{i}"]))
    last = f"left{i}" if kind in _FLOAT_TYPES else f"whole{i}"
    nodes.append(helper.make_node("Cast", [last], [f"typed{i}"], to=kind))
    return [*nodes, helper.make_node("Reshape", [f"typed{i}", f"shape{i}"], [output_name(i)])]


BODIES = {
    "bounded": bounded_body,
    "cumulated": cumulative_body,
    "digest": digest_body,
    "indexed": indexed_body,
    "itself": same_operator_body,
    "mixed": weighted_sum_body,
    "numbers": position_values_body,
    "recurrent": recurrent_body,
    "remainder": remainder_body,
    "resampled": resample_body,
    "rounded": rounded_body,
    "ones": ones_body,
    "zeros": zeros_body,
}
"""By the names that rules give them; `numbers`, `ones` and `zeros` are no rule's."""
