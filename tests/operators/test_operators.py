"""The operator rules: any region of a node's output, computed as its rule says, is the same region of the whole.

Each test draws a single-node model over its operator's attributes and forms, and a region; the region and what is left
of the output around it become parts on different devices, and partition makes the nodes of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_graphs import rules
from support.operator_cases import (
    OPSETS,
    Array,
    Case,
    Draw,
    broadcastable,
    check_cut,
    check_stand_in,
    drawn_computed,
    integers,
    run,
    run_split,
)

from dicompiler.ir.plan import Part
from dicompiler.operators.elementwise import BROADCASTING, UNARY
from dicompiler.verify.exact import DOMAIN, check_model
from dicompiler_passes.form_layers import form_layers

# --- windows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sliding:
    """What convolutions and pools share."""

    extents: tuple[int, ...]
    kernel: tuple[int, ...]
    attributes: Mapping[str, Any]


@st.composite
def sliding(draw: Draw, wide_pads: bool, dilated: bool) -> Sliding:
    """Extents, kernel, strides, dilations, and pads or auto_pad in one to three dimensions. `wide_pads`: a window may
    lie in the pads alone."""
    rank = draw(st.sampled_from((1, 2, 2, 2, 3)))
    most = (14, 9, 5)[rank - 1]

    def each(low: int, high: int, count: int = rank) -> list[int]:
        found: list[int] = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        return found

    kernel, strides = each(1, 4), each(1, 3)
    attributes: dict[str, Any] = {"strides": strides} if draw(st.booleans()) else {}
    dilations = each(1, 3) if dilated and draw(st.booleans()) else [1] * rank
    if dilations != [1] * rank:
        attributes["dilations"] = dilations
    mode = draw(st.sampled_from(("pads", "pads", "pads", "none", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")))
    pads = [0] * (2 * rank)
    if mode in ("pads", "NOTSET"):
        pads = [draw(st.integers(0, size + 2 if wide_pads else size - 1)) for size in (*kernel, *kernel)]
        attributes["pads"] = pads
    if mode not in ("pads", "none"):
        attributes["auto_pad"] = mode
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    least = [1 if mode.startswith("SAME") else max(1, s - pads[i] - pads[rank + i]) for i, s in enumerate(spans)]
    return Sliding(tuple(draw(st.integers(low, low + most)) for low in least), tuple(kernel), attributes)


@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    """With groups, depthwise and with a channel multiplier, with and without bias."""
    window = draw(sliding(wide_pads=True, dilated=True))
    groups = draw(st.sampled_from((1, 1, 2, 3, 4)))
    per_group, filters = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    x = integers(draw, draw(st.integers(1, 2)), groups * per_group, *window.extents)
    weight = integers(draw, groups * filters, per_group, *window.kernel)
    bias = integers(draw, groups * filters) if draw(st.booleans()) else None
    attributes = dict(window.attributes)
    if groups > 1 or draw(st.booleans()):
        attributes["group"] = groups
    if draw(st.booleans()):
        attributes["kernel_shape"] = list(window.kernel)
    values = (x, weight) if bias is None else (x, weight, bias)
    computed = (0, 1) if draw(st.integers(0, 9)) == 0 else (0,)
    return Case("Conv", values, attributes, draw(st.sampled_from(OPSETS)), computed)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_convolution(data: st.DataObject) -> None:
    check_cut(data.draw(convolutions()), data.draw)


@st.composite
def pools(draw: Draw, op: str) -> Case:
    """In the form of each opset: rounding up since 10 (LpPool 18), dilations since 10 (AveragePool 19, LpPool 18)."""
    opset = draw(st.sampled_from(OPSETS))
    since = {"MaxPool": (10, 10), "AveragePool": (10, 19), "LpPool": (18, 18)}[op]
    window = draw(sliding(wide_pads=False, dilated=opset >= since[1]))
    attributes = {**window.attributes, "kernel_shape": list(window.kernel)}
    if opset >= since[0] and draw(st.booleans()):
        attributes["ceil_mode"] = draw(st.sampled_from((0, 1)))
    if op == "AveragePool" and draw(st.booleans()):
        attributes["count_include_pad"] = draw(st.sampled_from((0, 1)))
    if op == "LpPool":
        attributes["p"] = draw(st.sampled_from((1, 2)))
    x = integers(draw, draw(st.integers(1, 2)), draw(st.integers(1, 3)), *window.extents, most=50)
    return Case(op, (x,), attributes, opset, close=op != "MaxPool")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_a_region_of_a_pool(op: str, data: st.DataObject) -> None:
    check_cut(data.draw(pools(op)), data.draw)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")))
def test_a_region_of_a_global_pool(op: str, data: st.DataObject) -> None:
    extents = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    x = integers(data.draw, 2, data.draw(st.integers(1, 5)), *extents)
    opset = data.draw(st.sampled_from(OPSETS))
    check_cut(Case(op, (x,), {}, opset, close=op != "GlobalMaxPool"), data.draw)


# --- sums ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_gemm(data: st.DataObject) -> None:
    draw = data.draw
    rows, k, columns = (draw(st.integers(1, 6)) for _ in range(3))
    turn_a, turn_b = draw(st.booleans()), draw(st.booleans())
    opset = draw(st.sampled_from(OPSETS))
    a = integers(draw, *((k, rows) if turn_a else (rows, k)))
    b = integers(draw, *((columns, k) if turn_b else (k, columns)))
    values = [a, b]
    if opset < 11 or draw(st.booleans()):  # before opset 11 it has to be there
        values.append(integers(draw, *broadcastable(draw, (rows, columns))))
    attributes: dict[str, Any] = {"transA": int(turn_a), "transB": int(turn_b)}
    if draw(st.booleans()):
        attributes |= {"alpha": 2.0, "beta": -3.0}
    check_cut(Case("Gemm", tuple(values), attributes, opset, drawn_computed(draw, len(values))), draw)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_matrix_product(data: st.DataObject) -> None:
    draw = data.draw
    k = draw(st.integers(1, 6))
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    a = integers(draw, *broadcastable(draw, batch), draw(st.integers(1, 5)), k)
    b = integers(draw, *broadcastable(draw, batch), k, draw(st.integers(1, 5)))
    if draw(st.integers(0, 4)) == 0:
        a = a.reshape(-1, k)[0]
    elif draw(st.integers(0, 4)) == 0:
        b = b.reshape(-1, k, b.shape[-1])[0, :, 0]
    check_cut(Case("MatMul", (a, b), {}, draw(st.sampled_from(OPSETS)), drawn_computed(draw, 2)), draw)


# --- along an axis ------------------------------------------------------------------------------------------------


@st.composite
def lrns(draw: st.DrawFn) -> Case:
    x = integers(draw, draw(st.integers(1, 2)), draw(st.integers(1, 9)), *draw(st.sampled_from(((3, 4), (1, 5)))))
    attributes = {
        "size": draw(st.sampled_from((1, 3, 5, 7))),
        "alpha": draw(st.sampled_from((0.5, 1e-4))),
        "beta": 0.75,
    }
    return Case("LRN", (x,), attributes, draw(st.sampled_from(OPSETS)), close=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=lrns(), data=st.data())
def test_a_region_of_an_lrn(case: Case, data: st.DataObject) -> None:
    check_cut(case, data.draw)


@st.composite
def softmaxes(draw: Draw, op: str) -> Case:
    """Along one axis since opset 13, before that along all from one on."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    opset = draw(st.sampled_from(OPSETS))
    low = -len(shape) if opset >= 11 else 0
    attributes = {"axis": draw(st.integers(low, len(shape) - 1))} if len(shape) == 1 or draw(st.booleans()) else {}
    return Case(op, (integers(draw, *shape),), attributes, opset, close=op != "Hardmax")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("Softmax", "LogSoftmax", "Hardmax")))
def test_a_region_of_a_softmax(op: str, data: st.DataObject) -> None:
    check_cut(data.draw(softmaxes(op)), data.draw)


# --- elements that move -------------------------------------------------------------------------------------------


def reshaped(draw: Draw, shape: Sequence[int]) -> list[int]:
    """Another shape of as many elements: factors regrouped, ones put in."""
    left, found = math.prod(shape), []
    while left > 1:
        found.append(draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
        left //= found[-1]
    for _ in range(draw(st.integers(0, 2))):
        found.insert(draw(st.integers(0, len(found))), 1)
    return found or [1]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_reshape(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4))
    target = reshaped(draw, shape)
    if draw(st.booleans()):
        target[draw(st.integers(0, len(target) - 1))] = -1
    opset = draw(st.sampled_from(OPSETS))
    attributes = {"allowzero": draw(st.sampled_from((0, 1)))} if opset >= 14 and draw(st.booleans()) else {}
    check_cut(Case("Reshape", (integers(draw, *shape), np.array(target, np.int64)), attributes, opset), draw)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_flatten(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    opset = draw(st.sampled_from(OPSETS))
    attributes = (
        {"axis": draw(st.integers(-len(shape) if opset >= 11 else 0, len(shape)))} if draw(st.booleans()) else {}
    )
    check_cut(Case("Flatten", (integers(draw, *shape),), attributes, opset), draw)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("Squeeze", "Unsqueeze")))
def test_a_region_of_a_squeeze(op: str, data: st.DataObject) -> None:
    """The axes are an attribute before opset 13 and an input since."""
    draw = data.draw
    shape = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    axes = sorted(draw(st.sets(st.integers(0, len(shape)), min_size=1, max_size=2)))
    longer = list(shape)
    for axis in axes:
        longer.insert(axis, 1)
    x = integers(draw, *(shape if op == "Unsqueeze" else longer))
    opset = draw(st.sampled_from(OPSETS))
    if op == "Squeeze" and draw(st.booleans()):
        case = Case(op, (x,), {}, opset)
    elif opset < 13:
        case = Case(op, (x,), {"axes": axes}, opset)
    else:
        case = Case(op, (x, np.array(axes, np.int64)), {}, opset)
    check_cut(case, draw)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_transpose(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    attributes = {"perm": draw(st.permutations(range(len(shape))))} if draw(st.booleans()) else {}
    check_cut(Case("Transpose", (integers(draw, *shape),), attributes, draw(st.sampled_from(OPSETS))), draw)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_concat(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axis, count = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    shapes = [[*shape[:axis], draw(st.integers(1, 4)), *shape[axis + 1 :]] for _ in range(count)]
    attributes = {"axis": axis - len(shape) if draw(st.booleans()) else axis}
    opset = draw(st.sampled_from(OPSETS))
    values = tuple(integers(draw, *own) for own in shapes)
    check_cut(Case("Concat", values, attributes, opset if opset >= 11 else 11, drawn_computed(draw, count)), draw)


# --- in the exact check -------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "LRN", "Softmax", "LogSoftmax"])
def test_a_region_of_what_stands_in_for_an_operator_that_rounds(op: str, data: st.DataObject) -> None:
    """A piece may have attributes that the whole leaves to their defaults (pads where it has auto_pad)."""
    drawn = pools(op) if op.endswith("Pool") else lrns() if op == "LRN" else softmaxes(op)
    check_stand_in(data.draw(drawn), data.draw)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_a_stand_in_that_had_auto_pad_is_cut_by_rows(mode: str) -> None:
    x = np.zeros((1, 2, 7, 5), np.float32)
    case = Case("AveragePool", (x,), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": mode})
    model, feed = check_model(case.model(), 0)
    assert model.proto.graph.node[0].domain == DOMAIN
    layers = form_layers(model, rules())
    parts = [Part("abc"[i], ((0, 1), (0, 2), rows, (0, 3))) for i, rows in enumerate(((0, 1), (1, 3), (3, 4)))]
    np.testing.assert_array_equal(run_split(model, layers, parts, feed), run(model, feed))


# --- element by element -------------------------------------------------------------------------------------------

ELEMENTWISE_OPSETS = (9, 11, 13, 17, 21, 24)
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "BitShift": {"direction": "LEFT"},
    "Cast": {"to": onnx.TensorProto.INT32},
    "Mod": {"fmod": 1},
}
#: What gives the same bits wherever an element stands in its tensor; other functions are computed several at a time.
BIT_EQUAL = (
    "Abs BitwiseNot Cast Ceil Clip Dropout Floor Identity IsInf IsNaN LeakyRelu Neg Not Reciprocal Relu Round Shrink "
    "Sign Sqrt ThresholdedRelu"
).split()
TYPES: dict[str, Any] = {
    **dict.fromkeys(("And", "Not", "Or", "Xor"), np.bool_),
    **dict.fromkeys(("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"), np.int32),
    "BitShift": np.uint8,
    "Equal": np.int32,  # in opset 9 onnxruntime has it for integers alone
}
MOST_INPUTS = {"Max": 4, "Mean": 4, "Min": 4, "Sum": 4, "Where": 3}


def random_values(draw: Draw, op: str, shape: Sequence[int]) -> Array:
    """Numbers that differ, where most functions are defined; truth values or small integers where it takes those."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = TYPES.get(op, np.float32)
    if dtype != np.float32:
        return random.integers(0, 2 if dtype == np.bool_ else 7, shape).astype(dtype)
    return np.asarray(random.uniform(0.1, 0.9, shape) + (op == "Acosh"), np.float32)


def elementwise_case(draw: Draw, op: str, opset: int) -> Case:
    """Operands of any shapes that broadcast to one; some of them constants."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    count = MOST_INPUTS.get(op, 1 if op in UNARY else 2)
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
    return Case(op, tuple(values), attributes, opset, computed, close=op in UNARY and op not in BIT_EQUAL)


def exists(op: str, opset: int) -> bool:
    """Whether the standard has the operator in this opset."""
    return bool(onnx.defs.has(op)) and any(
        schema.name == op and schema.since_version <= opset
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == ""
    )


@pytest.mark.parametrize("opset", ELEMENTWISE_OPSETS)
@pytest.mark.parametrize("op", [*UNARY, *BROADCASTING])
def test_a_region_of_an_elementwise_operator_in_every_opset_that_has_it(op: str, opset: int) -> None:
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
    assert len({*UNARY, *BROADCASTING}) == len(UNARY) + len(BROADCASTING)
    assert all(exists(op, ELEMENTWISE_OPSETS[-1]) for op in (*UNARY, *BROADCASTING))
