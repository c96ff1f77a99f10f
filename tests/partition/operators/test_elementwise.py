"""Regions of element-wise operators equal those of the whole operator, in every opset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.operator_cases import (
    OPSETS,
    Array,
    Draw,
    RuleCase,
    broadcastable,
    check_cut,
    drawn_computed,
    integers,
)
from support.operator_draws import scales

from dicompiler.partition.operators.elementwise import BROADCASTING_OPERATORS, UNARY_OPERATORS

ELEMENTWISE_OPSETS = (9, 11, 13, 17, 21, 24)


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "BitShift": {"direction": "LEFT"},
    "Cast": {"to": onnx.TensorProto.INT32},
    "Mod": {"fmod": 1},
}


#: Operators for which the bits of an element do not depend on its position in the tensor. For other operators, vector
#: code and scalar code may round differently.
BIT_EQUAL = (
    "Abs BitwiseNot Cast Ceil Clip Dropout Floor Identity IsInf IsNaN LeakyRelu Neg Not Reciprocal Relu Round Shrink "
    "Sign Sqrt ThresholdedRelu"
).split()


TYPES: dict[str, Any] = {
    **dict.fromkeys(("And", "Not", "Or", "Xor"), np.bool_),
    **dict.fromkeys(("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"), np.int32),
    "BitShift": np.uint8,
    "Equal": np.int32,  # In opset 9, onnxruntime supports Equal only for integers.
}


MOST_INPUTS = {"Max": 4, "Mean": 4, "Min": 4, "Sum": 4, "Where": 3}


def random_values(draw: Draw, op: str, shape: Sequence[int]) -> Array:
    """Return different numbers for which most functions are defined, or truth values, or small integers."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = TYPES.get(op, np.float32)
    if dtype != np.float32:
        return random.integers(0, 2 if dtype == np.bool_ else 7, shape).astype(dtype)
    return np.asarray(random.uniform(0.1, 0.9, shape) + (op == "Acosh"), np.float32)


def elementwise_case(draw: Draw, op: str, opset: int) -> RuleCase:
    """Draw operands of all shapes that broadcast to one shape; some of them are constants."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    count = MOST_INPUTS.get(op, 1 if op in UNARY_OPERATORS else 2)
    if op in ("Max", "Mean", "Min", "Sum"):
        count = draw(st.integers(1, count))
    full_size = draw(st.integers(0, count - 1)) if op != "PRelu" else 0
    shapes = [shape if i == full_size else broadcastable(draw, shape) for i in range(count)]
    values = [random_values(draw, op, own) for own in shapes]
    if op == "Where":
        values[0] = values[0] > 0.5
    attributes = dict(ATTRIBUTES.get(op, {}))
    if op == "Clip":
        bounds = [np.float32(0.3), np.float32(0.6)]
        if opset < 11:
            attributes = {"min": 0.3, "max": 0.6}
        else:
            values += [np.asarray(bound) for bound in bounds]
    computed = drawn_computed(draw, count)
    return RuleCase(
        op, tuple(values), attributes, opset, computed, is_inexact=op in UNARY_OPERATORS and op not in BIT_EQUAL
    )


def exists(op: str, opset: int) -> bool:
    """Return True if the standard has the operator in this opset."""
    return onnx.defs.has(op, max_inclusive_version=opset)


@pytest.mark.parametrize("opset", ELEMENTWISE_OPSETS)
@pytest.mark.parametrize("op", [*UNARY_OPERATORS, *BROADCASTING_OPERATORS])
def test_computes_regions_of_elementwise_operators_in_every_opset(op: str, opset: int) -> None:
    ran = 0

    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        nonlocal ran
        case = elementwise_case(data.draw, op, opset)
        check_cut(case, data.draw)
        ran += 1

    if exists(op, opset):
        check()
        assert ran


def test_every_elementwise_operator_exists() -> None:
    assert len({*UNARY_OPERATORS, *BROADCASTING_OPERATORS}) == len(UNARY_OPERATORS) + len(BROADCASTING_OPERATORS)
    assert all(exists(op, ELEMENTWISE_OPSETS[-1]) for op in (*UNARY_OPERATORS, *BROADCASTING_OPERATORS))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_batch_normalization(data: st.DataObject) -> None:
    draw = data.draw
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 5)), *draw(st.lists(st.integers(1, 4), max_size=3)))
    vectors = [integers(draw, shape[1]) for _ in range(3)]
    ones = np.ones(shape[1], np.float32)
    computed = (0,) if draw(st.integers(0, 3)) else (0, 1, 3)
    values = (integers(draw, *shape), *vectors, ones)
    check_cut(RuleCase("BatchNormalization", values, {"epsilon": 0.0}, draw(st.sampled_from(OPSETS)), computed), draw)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_cast_like(data: st.DataObject) -> None:
    draw = data.draw
    x = scales(draw, *draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))) * 100
    like = np.zeros(draw(st.sampled_from(((), (3,), (2, 7)))), draw(st.sampled_from((np.int32, np.float64, np.uint8))))
    computed = draw(st.sampled_from(((0,), (0, 1))))
    check_cut(RuleCase("CastLike", (x, like), {}, draw(st.sampled_from((15, 19, 21))), computed), draw)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_bit_cast(data: st.DataObject) -> None:
    x = scales(data.draw, *data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    check_cut(RuleCase("BitCast", (x,), {"to": onnx.TensorProto.INT32}, 26), data.draw)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_dropout(data: st.DataObject) -> None:
    """The rate is an attribute before opset 12. In training mode, it draws random numbers for the whole tensor."""
    draw = data.draw
    x = scales(draw, *draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    opset = draw(st.sampled_from((9, 11, 12, 13, 22)))
    if opset < 12:
        check_cut(RuleCase("Dropout", (x,), {"ratio": 0.5}, opset), draw)
        return
    mode = [np.array(draw(st.booleans()))] if draw(st.booleans()) else []
    check_cut(RuleCase("Dropout", (x, np.array(0.5, np.float32), *mode), {"seed": 3}, opset), draw)
