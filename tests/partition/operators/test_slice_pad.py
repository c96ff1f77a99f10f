"""Regions of slices, pads and triangles equal those of the whole operator, in every opset."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.operator_cases import RuleCase, check_cut, integers

SLICE_OPSETS = (9, 10, 11, 13, 21)


@st.composite
def pads(draw: st.DrawFn) -> RuleCase:
    """Draw pads of all modes, also negative ones; an attribute before opset 11, for some axes only since 18."""
    opset = draw(st.sampled_from((9, 11, 13, 18, 19, 21)))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    mode = draw(st.sampled_from(("constant", "constant", "reflect", "edge", "wrap")[: 5 if opset >= 19 else 4]))
    low = 0 if mode != "constant" or draw(st.booleans()) else -2
    axes = list(range(len(shape)))
    if opset >= 18 and draw(st.booleans()):
        axes = sorted(draw(st.sets(st.sampled_from(axes), min_size=1)))
    most = {axis: shape[axis] - 1 if mode in ("reflect", "wrap") else 4 for axis in axes}
    both = [draw(st.integers(max(low, 1 - shape[axis]), most[axis])) for axis in axes * 2]
    assume(all(shape[axis] + both[i] + both[len(axes) + i] > 0 for i, axis in enumerate(axes)))
    x = integers(draw, *shape)
    value = draw(st.integers(-3, 3))
    if opset < 11:
        return RuleCase("Pad", (x,), {"mode": mode, "pads": both, "value": float(value)}, opset)
    values: list[Any] = [x, np.array(both, np.int64)]
    if axes != list(range(len(shape))):
        values += [np.array(value, np.float32) if draw(st.booleans()) else None, np.array(axes, np.int64)]
    elif draw(st.booleans()):
        values.append(np.array(value, np.float32))
    return RuleCase("Pad", tuple(values), {"mode": mode}, opset)


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_pad(data: st.DataObject) -> None:
    check_cut(data.draw(pads()), data.draw)


@st.composite
def slices(draw: st.DrawFn) -> RuleCase:
    """Draw slices of some axes, from both ends, with steps of both signs; attributes before opset 10."""
    opset = draw(st.sampled_from(SLICE_OPSETS))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    axes = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    steps = [draw(st.sampled_from((1, 1, 2, 3, -1, -2) if opset >= 10 else (1,))) for _ in axes]
    starts, ends = [], []
    for axis, step in zip(axes, steps, strict=True):
        low = draw(st.integers(0, shape[axis] - 1))
        high = draw(st.integers(low, shape[axis] - 1))
        start, end = (low, high + 1) if step > 0 else (high, low - 1 if low else -shape[axis] - 1)
        starts.append(start - shape[axis] if draw(st.booleans()) else start)
        ends.append(2**31 if step > 0 and high == shape[axis] - 1 and draw(st.booleans()) else end)
    named = axes != list(range(len(axes))) or draw(st.booleans())
    x = integers(draw, *shape)
    if opset < 10:
        return RuleCase("Slice", (x,), {"starts": starts, "ends": ends} | ({"axes": axes} if named else {}), opset)
    dtype = np.int64
    numbers = [np.array(values, dtype) for values in (starts, ends)]
    values: list[Any] = [x, *numbers]
    if named or steps != [1] * len(steps):
        values.append(
            np.array([a - len(shape) for a in axes], dtype)
            if opset > 10 and draw(st.booleans())
            else np.array(axes, dtype)
        )
    if steps != [1] * len(steps):
        values.append(np.array(steps, dtype))
    return RuleCase("Slice", tuple(values), {}, opset)


@settings(max_examples=examples(250), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_slice(data: st.DataObject) -> None:
    check_cut(data.draw(slices()), data.draw)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_trilu(data: st.DataObject) -> None:
    draw = data.draw
    x = integers(draw, *draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)))
    values = (x, np.array(draw(st.integers(-4, 4)), np.int64)) if draw(st.booleans()) else (x,)
    check_cut(
        RuleCase("Trilu", values, {"upper": draw(st.sampled_from((0, 1)))}, draw(st.sampled_from((14, 21)))), draw
    )
