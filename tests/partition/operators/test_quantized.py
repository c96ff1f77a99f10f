"""Regions of quantized operators, with scales and zero points in every form that onnxruntime accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.operator_cases import Array, Draw, RuleCase, broadcastable, check_cut
from support.operator_draws import scales

SIGNED = st.sampled_from((np.int8, np.uint8))


def bytes_(draw: Draw, dtype: Any, *shape: int) -> Array:
    """Return random numbers of the type."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    info = np.iinfo(dtype)
    return np.asarray(random.integers(info.min, info.max + 1, shape)).astype(dtype)


def factors(draw: Draw, dtype: Any, *shape: int) -> Array:
    """Return numbers to multiply with bytes; signed ones are at most ±64.

    On x86 processors without VNNI, onnxruntime adds two products in 16 bits. Larger sums would saturate, and depend on
    how numbers are paired.
    """
    values = bytes_(draw, dtype, *shape)
    return values if dtype == np.uint8 else values // np.int8(2)


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("QuantizeLinear", "DequantizeLinear")))
def test_computes_regions_of_quantized_tensors(op: str, data: st.DataObject) -> None:
    """Scales are one number, one for each index of an axis (since opset 13), or one for each block (since 21).

    A layer with blocks stays whole.
    """
    draw = data.draw
    opset = draw(st.sampled_from((10, 13, 19, 21)))
    shape = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    form = draw(st.sampled_from(("one", "axis", "blocks")[: 1 + (opset >= 13) + (opset >= 21)]))
    axis, dtype = draw(st.integers(0, len(shape) - 1)), draw(SIGNED)
    attributes: dict[str, Any] = {}
    own: tuple[int, ...] = ()
    if form == "axis":
        own, attributes = (shape[axis],), {"axis": axis - len(shape) if draw(st.booleans()) else axis}
    elif form == "blocks":
        size = draw(st.integers(2, 3))
        own = tuple(-(-extent // size) if i == axis else extent for i, extent in enumerate(shape))
        attributes = {"axis": axis, "block_size": size}
    x = bytes_(draw, dtype, *shape) if op == "DequantizeLinear" else scales(draw, *shape) * 100
    values = [x, scales(draw, *own)]
    if (op == "QuantizeLinear" and dtype == np.int8) or draw(st.booleans()):
        values.append(bytes_(draw, dtype if op == "DequantizeLinear" or draw(st.booleans()) else np.uint8, *own))
    check_cut(RuleCase(op, tuple(values), attributes, opset), draw)


def convolution(draw: Draw, x_type: Any, w_type: Any) -> tuple[Array, Array, dict[str, Any]]:
    """Return x, w and the attributes of a small convolution."""
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    channels, filters = draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 3)) for _ in range(2)]
    x = bytes_(draw, x_type, draw(st.integers(1, 2)), groups * channels, *(k + draw(st.integers(0, 5)) for k in kernel))
    attributes: dict[str, Any] = {"strides": [draw(st.integers(1, 2)) for _ in range(2)]}
    if draw(st.booleans()):
        attributes["pads"] = [draw(st.integers(0, k - 1)) for k in kernel * 2]
    elif draw(st.booleans()):
        attributes["auto_pad"] = draw(st.sampled_from(("VALID", "SAME_UPPER", "SAME_LOWER")))
    if groups > 1:
        attributes["group"] = groups
    return x, factors(draw, w_type, filters, channels, *kernel), attributes


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_integer_convolutions(data: st.DataObject) -> None:
    draw = data.draw
    x, w, attributes = convolution(draw, np.uint8, draw(SIGNED))
    values: list[Array | None] = [x, w]
    if draw(st.booleans()):
        values.append(bytes_(draw, x.dtype))
        if draw(st.booleans()):
            values.append(bytes_(draw, w.dtype, *draw(st.sampled_from(((), (w.shape[0],))))))
    check_cut(RuleCase("ConvInteger", tuple(values), attributes, draw(st.sampled_from((10, 21)))), draw)


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_quantized_convolutions(data: st.DataObject) -> None:
    draw = data.draw
    x, w, attributes = convolution(draw, draw(SIGNED), np.int8)
    each = draw(st.sampled_from(((), (w.shape[0],))))
    zeros = np.zeros(each, np.int8)
    values = [x, scales(draw), bytes_(draw, x.dtype), w, scales(draw, *each), zeros]
    values += [np.float32(20.0 * x[0].size ** 0.5) * scales(draw), bytes_(draw, x.dtype)]
    if draw(st.booleans()):
        values.append(bytes_(draw, np.int8, w.shape[0]).astype(np.int32) * 50)
    check_cut(RuleCase("QLinearConv", tuple(values), attributes, draw(st.sampled_from((10, 21)))), draw)


def matrices(draw: Draw, a_type: Any, b_type: Any) -> tuple[Array, Array]:
    k, batch = draw(st.integers(1, 6)), draw(st.lists(st.integers(1, 3), max_size=2))
    a = bytes_(draw, a_type, *broadcastable(draw, batch), draw(st.integers(1, 5)), k)
    return a, factors(draw, b_type, *broadcastable(draw, batch), k, draw(st.integers(1, 5)))


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_integer_matmul(data: st.DataObject) -> None:
    draw = data.draw
    a, b = matrices(draw, draw(SIGNED), draw(SIGNED))
    values: list[Array | None] = [a, b]
    if draw(st.booleans()):
        values.append(bytes_(draw, a.dtype))
        if draw(st.booleans()):
            values.append(bytes_(draw, b.dtype, *draw(st.sampled_from(((), (b.shape[-1],))))))
    check_cut(RuleCase("MatMulInteger", tuple(values), {}, draw(st.sampled_from((10, 21)))), draw)


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_quantized_matmul(data: st.DataObject) -> None:
    draw = data.draw
    a, b = matrices(draw, np.uint8, np.uint8)
    columns = draw(st.sampled_from(((), (b.shape[-1],)))) if b.ndim == 2 else ()
    values = (
        *(a, scales(draw), bytes_(draw, np.uint8)),
        *(b, scales(draw, *columns), bytes_(draw, np.uint8, *columns)),
        *(np.float32(100) * scales(draw), bytes_(draw, np.uint8)),
    )
    check_cut(RuleCase("QLinearMatMul", values, {}, draw(st.sampled_from((10, 21)))), draw)
