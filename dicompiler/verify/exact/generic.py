"""Integer functions that can replace many operators in the exact check (generic stand-ins).

A generic stand-in is used for all operators that are split in the same way, whatever they compute. Each function of
this module returns the nodes of an ONNX function that outputs small integers. Every element that the original operator
reads affects the outputs.

Many functions take integers modulo 15 (3 in 16-bit types), so that they stay small. The modulus is odd, so that a
multiplication by two hides no fault: modulo 16, for example, 2 · 1 and 2 · 9 would be equal.
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
"""Factor by which numbers are multiplied before they are rounded and taken modulo 15 or 3.

It is 1 modulo 15 and modulo 3, so the remainders of integers do not change.
"""
DIGEST_PRIME, DIGEST_BOUND, DIGEST_FRACTION = 8191, 2.0**22, 1024
"""Parameters of a digest, i.e. a hash of all inputs of a node, which is an integer modulo DIGEST_PRIME.

Inputs are first clipped to ±DIGEST_BOUND, multiplied by DIGEST_FRACTION, and rounded down.
"""
MAX_INTEGER_VALUES = 4
"""Largest number of different values (0, 1, …) in an integer output that is computed from a digest."""
_FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def same_operator_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that apply the original operator to inputs modulo 15 (3 in 16-bit types).

    The modulus keeps sums of products small in networks of any depth. Filters of 0 and ±1 are used unchanged.
    """
    parameters = onnx.defs.get_schema(call.op, call.opset, "").inputs
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    nodes, inputs = list[NodeProto](), call.input_names
    for i, name in enumerate(call.input_names):
        parameter = parameters[min(i, len(parameters) - 1)]
        is_data = parameter.type_str == parameters[0].type_str and parameter.option != optional
        if is_data and call.input_types[i] and i != call.weight_input:
            nodes += centred_mod(call, name, f"B{i}")
            inputs[i] = f"B{i}"
    return [*nodes, call.node(call.op, inputs, ["Y"])]


def bounded_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that apply the original operator to its first input modulo 15 (3 in 16-bit types)."""
    return [*centred_mod(call, "X0", "B0"), call.node(call.op, ["B0", *call.input_names[1:]], ["Y"])]


def indexed_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that apply an indexing operator, such as Gather, to its indices modulo the length of the axis.

    Random integers as indices may exceed this length.
    """
    return [
        attribute_constant("axis", "value_int", "axis", onnx.AttributeProto.INT),
        helper.make_node("Shape", ["X0"], ["extents"]),
        helper.make_node("Gather", ["extents", "axis"], ["extent"]),
        helper.make_node("Cast", ["extent"], ["length"], to=call.input_types[1]),
        helper.make_node("Mod", ["X1", "length"], ["index"]),
        call.node(call.op, ["X0", "index"], ["Y"]),
    ]


def recurrent_body(call: StandInCall) -> list[NodeProto]:
    """Return the nodes of an integer function that replaces an RNN, GRU or LSTM of which only the output Y is read.

    The function keeps only the dependencies of Y: each element of Y is the sum of the inputs of its step, of the inputs
    of all steps, of the weights of its direction, and of the optional inputs.
    """
    shapes = {"by_step": [0, 1, -1, 1], "by_batch": [1, 1, -1, 1], "by_unit": [0, 0, 1, -1], "by_both": [0, 0, -1, 1]}
    nodes = [constant_node(name, np.array(value, np.int64)) for name, value in shapes.items()]
    nodes += centred_mod(call, "X0", "B0")
    nodes += [*reduce_sum(call, "B0", 2, "step"), *reduce_sum(call, "step", 0, "steps")]
    terms = [("step", "by_step"), ("steps", "by_batch")]
    # Inputs 1 and 2 are the weights W and R of shape (directions, gates · units, features or units).
    for i in (1, 2):
        nodes += [*centred_mod(call, f"X{i}", f"B{i}"), *reduce_sum(call, f"B{i}", 1, f"sum{i}")]
        nodes.append(helper.make_node("Transpose", [f"sum{i}"], [f"of{i}"], perm=[1, 0, 2]))
    nodes += reduce_sum(call, "of1", 2, "of3")
    terms += [("of2", "by_unit"), ("of3", "by_unit")]
    # Inputs 3, 5, 6 and 7 are optional: the bias, two initial states, and the peephole weights.
    for i in (3, 5, 6, 7):
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
    """Return nodes that compute the running sum of the first input, for CumSum and CumProd.

    The input is first taken modulo 15 (3 in 16-bit types). Running products would become too large to be exact.
    """
    return [*centred_mod(call, "X0", "B0"), call.node("CumSum", ["B0", *call.input_names[1:]], ["Y"])]


def remainder_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that compute the first input modulo 15, in place of bounded functions such as Sigmoid.

    The modulus is 3 in 16-bit types.
    """
    return centred_mod(call, "X0", "Y")


def weighted_sum_body(call: StandInCall, output: str = "Y") -> list[NodeProto]:
    """Return the nodes of an integer function that replaces any element-wise operator.

    It computes Σ (i + 1) · (xᵢ modulo 15), over the float inputs x₀, x₁, …. The modulus is 3 in 16-bit types.
    """
    nodes, previous = list[NodeProto](), ""
    # If the output has another type than the first input, the operator converts integers to floats, and so must the
    # function that replaces it.
    if call.outputs and call.outputs[0][0] != call.dtype:
        cast = helper.make_node("Cast", ["X0"], ["typed_X0"], to=call.outputs[0][0])
        return [cast, *centred_mod(replace(call, dtype=call.outputs[0][0]), "typed_X0", output)]
    float_inputs = [i for i, dtype in enumerate(call.input_types) if dtype == call.dtype]
    is_by_channel = call.op == "BatchNormalization" and call.opset >= 9
    nodes += _channel_shape() if is_by_channel else []
    for count, i in enumerate(float_inputs, 1):
        target = f"S{i}" if count < len(float_inputs) else output
        is_vector = is_by_channel and i > 0
        nodes += [
            *round_scaled(call, f"X{i}", ROUNDING_FACTOR, f"W{i}"),
            *centred_mod(call, f"W{i}", f"C{i}" if is_vector else f"B{i}"),
        ]
        nodes += [helper.make_node("Reshape", [f"C{i}", "channels"], [f"B{i}"])] if is_vector else []
        nodes += [call.typed_constant(f"F{i}", float(count)), helper.make_node("Mul", [f"B{i}", f"F{i}"], [f"P{i}"])]
        op, inputs = ("Add", [previous, f"P{i}"]) if previous else ("Identity", [f"P{i}"])
        nodes.append(helper.make_node(op, inputs, [target]))
        previous = target
    return nodes


def _channel_shape() -> list[NodeProto]:
    """Return nodes that compute `channels`: the shape (-1, 1, …, 1), which aligns a vector with the channels of X0."""
    ones = helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])
    return [
        constant_node("minus", np.array([-1])),
        constant_node("two", np.array([2])),
        helper.make_node("Shape", ["X0"], ["sizes"]),
        helper.make_node("Shape", ["sizes"], ["rank"]),
        helper.make_node("Sub", ["rank", "two"], ["behind"]),
        helper.make_node("ConstantOfShape", ["behind"], ["ones"], value=ones),
        helper.make_node("Concat", ["minus", "ones"], ["channels"], axis=0),
    ]


def resample_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that apply a Resize or GridSample to inputs modulo 15, and compute round(64 · result).

    Interpolation gives fractions, but the exact check compares integers. The modulus is 3 in 16-bit types.
    """
    return [
        *centred_mod(call, "X0", "B0"),
        call.node(call.op, ["B0", *call.input_names[1:]], ["blend"]),
        *round_scaled(call, "blend", 64, "Y"),
    ]


def ones_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that compute ones of the output shape (zeros in integer types), in place of an excluded node.

    This function is used if the Add that `zeros_body` needs is not possible. Later layers are still checked, but a
    misplaced piece of the ones is not noticed, because all ones are equal.
    """
    return _filled_body(call, 1)


def position_values_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that replace the float outputs of an excluded operator, which no plan splits.

    Each element becomes an integer computed from its position, so a misplaced piece is noticed. The operator itself
    still computes its outputs of other types.
    """
    names = [f"T{i}" if dtype in _FLOAT_TYPES else output_name(i) for i, (dtype, _) in enumerate(call.outputs)]
    nodes = [
        call.node(call.op, _given_inputs(call), names),
        _double_constant("prime", DIGEST_PRIME),
        _double_constant("share", 1 / DIGEST_PRIME),
    ]
    nodes += [_double_constant("half", 0.5), _double_constant("one", 1.0)]
    for i, (dtype, _) in enumerate(call.outputs):
        if dtype in _FLOAT_TYPES:
            nodes += _position_values(i, dtype)
    return nodes


def zeros_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that compute zeros of the output shape, in place of a node that is excluded from the check.

    This function replaces an excluded node if plans may split it and an Add can follow it. The module `excluded_layers`
    inserts this Add, which adds integers that differ by position. A misplaced piece is therefore noticed.
    """
    return _filled_body(call, 0)


def _filled_body(call: StandInCall, number: int) -> list[NodeProto]:
    nodes = [call.node(call.op, _given_inputs(call), [f"T{i}" for i in range(len(call.outputs))])]
    for i, (dtype, _) in enumerate(call.outputs):
        element = np.full(1, number if dtype in _FLOAT_TYPES else 0).astype(helper.tensor_dtype_to_np_dtype(dtype))
        value = numpy_helper.from_array(element)
        nodes.append(helper.make_node("Shape", [f"T{i}"], [f"shape{i}"]))
        nodes.append(helper.make_node("ConstantOfShape", [f"shape{i}"], [output_name(i)], value=value))
    return nodes


def rounded_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that compute round(64 · result) modulo 15, for an operator that no plan splits.

    Such an operator has the same inputs in the whole and in the split model, so its rounded results are equal. The
    modulus is 3 in 16-bit types. It is odd, as the module docstring explains.
    """
    names = [f"T{i}" if dtype in _FLOAT_TYPES else output_name(i) for i, (dtype, _) in enumerate(call.outputs)]
    nodes = [call.node(call.op, _given_inputs(call), names)]
    for i, (dtype, _) in enumerate(call.outputs):
        if dtype in _FLOAT_TYPES:
            nodes += [*round_scaled(call, f"T{i}", 64, f"W{i}"), *centred_mod(call, f"W{i}", output_name(i))]
    return nodes


def digest_body(call: StandInCall) -> list[NodeProto]:
    """Return nodes that compute outputs from a digest of all inputs, for an operator that no plan splits.

    The digest is an integer that depends on the value and the position of every input element. All nodes compute in
    double precision, so that every intermediate integer is exact.
    """
    nodes = [
        _double_constant("prime", DIGEST_PRIME),
        _double_constant("share", 1 / DIGEST_PRIME),
        _double_constant("half", 0.5),
        _double_constant("zero", 0.0),
    ]
    previous = "zero"
    for i, dtype in enumerate(call.input_types):
        if dtype and dtype != TensorProto.STRING:
            nodes += [*_position_weighted_sum(i), helper.make_node("Add", [previous, f"h{i}"], [f"sum{i}"])]
            nodes += _mod(f"sum{i}", "prime", "share", f"H{i}")
            previous = f"H{i}"
    for i, (dtype, shape) in enumerate(call.outputs):
        assert shape is not None
        limit = call.output_limits[i] if i < len(call.output_limits) else None
        nodes += _spread_digest(previous, i, dtype, shape, limit)
    return nodes


def output_name(index: int) -> str:
    return f"Y{index or ''}"


def _position_values(i: int, dtype: int) -> list[NodeProto]:
    """Return nodes that compute output i: the element at position j is j · (j² + 1) modulo DIGEST_PRIME.

    The values are then reduced to a small range that the ONNX type `dtype` represents exactly.
    """
    modulus = 15.0 if dtype in _FLOAT_TYPES[:2] else 3.0
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
        helper.make_node("Cast", [f"left{i}"], [f"typed{i}"], to=dtype),
        helper.make_node("Shape", [f"T{i}"], [f"shape{i}"]),
        helper.make_node("Reshape", [f"typed{i}", f"shape{i}"], [output_name(i)]),
    ]


def _positions(i: int) -> list[NodeProto]:
    """Return nodes that compute the tensor `step{i}`: 0, 1, 2, … modulo DIGEST_PRIME, for each element of `row{i}`.

    `row{i}` is input or output i, flattened.
    """
    ones = numpy_helper.from_array(np.ones(1, np.int64))
    return [
        helper.make_node("Shape", [f"row{i}"], [f"count{i}"]),
        helper.make_node("ConstantOfShape", [f"count{i}"], [f"ones{i}"], value=ones),
        helper.make_node("NonZero", [f"ones{i}"], [f"places{i}"]),
        helper.make_node("Cast", [f"places{i}"], [f"ramp{i}"], to=TensorProto.DOUBLE),
        *_mod(f"ramp{i}", "prime", "share", f"step{i}"),
    ]


def _given_inputs(call: StandInCall) -> list[str]:
    return [name if dtype else "" for name, dtype in zip(call.input_names, call.input_types, strict=True)]


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
    """Return nodes that compute the scalar `h{i}`: a weighted sum of the elements of input i.

    The element at position j has the weight j³ + j + 1 modulo DIGEST_PRIME.
    """
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
        # The weights grow with the cube of the position. With linear weights, some rearrangements of elements would not
        # change the sum.
        helper.make_node("Mul", [f"step{i}", f"step{i}"], [f"square{i}"]),
        *_mod(f"square{i}", "prime", "share", f"second{i}"),
        _double_constant(f"raise{i}", 1.0),
        helper.make_node("Add", [f"second{i}", f"raise{i}"], [f"raised{i}"]),
        helper.make_node("Mul", [f"raised{i}", f"step{i}"], [f"cube{i}"]),
        helper.make_node("Add", [f"cube{i}", f"raise{i}"], [f"weight{i}"]),
        *_mod(f"weight{i}", "prime", "share", f"weights{i}"),
        helper.make_node("Mul", [f"small{i}", f"weights{i}"], [f"products{i}"]),
        helper.make_node("ReduceSum", [f"products{i}"], [f"h{i}"]),
    ]


def _spread_digest(tensor: str, i: int, dtype: int, shape: Shape, limit: ValueLimit | None) -> list[NodeProto]:
    """Return nodes that compute output i from a hash of all inputs, which is the scalar `tensor`.

    The element at position j is (tensor + j) · (1 + j modulo 61) modulo DIGEST_PRIME. It is then reduced to a small
    range that `dtype` represents exactly. `limit` has the valid values of an integer output.
    """
    if isinstance(limit, tuple):
        return [constant_node(output_name(i), np.array(limit, helper.tensor_dtype_to_np_dtype(dtype)).reshape(shape))]
    positions = np.arange(math.prod(shape), dtype=np.float64)
    value_count = 2 if dtype == TensorProto.BOOL else min(limit or MAX_INTEGER_VALUES, MAX_INTEGER_VALUES)
    modulus = 15.0 if dtype in _FLOAT_TYPES[:2] else 3.0 if dtype in _FLOAT_TYPES else float(value_count)
    nodes = [
        constant_node(f"place{i}", positions),
        constant_node(f"times{i}", 1 + positions % 61),
        constant_node(f"shape{i}", np.array(shape, np.int64)),
        _double_constant(f"m{i}", modulus),
        _double_constant(f"s{i}", 1 / modulus),
        helper.make_node("Add", [tensor, f"place{i}"], [f"moved{i}"]),
        helper.make_node("Mul", [f"moved{i}", f"times{i}"], [f"large{i}"]),
        *_mod(f"large{i}", "prime", "share", f"stirred{i}"),
        *_mod(f"stirred{i}", f"m{i}", f"s{i}", f"left{i}"),
    ]
    if dtype not in _FLOAT_TYPES:
        nodes.append(helper.make_node("Abs", [f"left{i}"], [f"whole{i}"]))
    result = f"left{i}" if dtype in _FLOAT_TYPES else f"whole{i}"
    nodes.append(helper.make_node("Cast", [result], [f"typed{i}"], to=dtype))
    return [*nodes, helper.make_node("Reshape", [f"typed{i}", f"shape{i}"], [output_name(i)])]


BODIES = {
    "bounded_input": bounded_body,
    "digest": digest_body,
    "indexed": indexed_body,
    "ones": ones_body,
    "position_values": position_values_body,
    "recurrent": recurrent_body,
    "remainder": remainder_body,
    "resize": resample_body,
    "rounded": rounded_body,
    "running_sum": cumulative_body,
    "same_operator": same_operator_body,
    "weighted_sum": weighted_sum_body,
    "zeros": zeros_body,
}
"""Builders of functions that replace operators, by the name that operator rules use.

`position_values`, `ones` and `zeros` replace excluded nodes only.
"""
