"""Regions of data movement operators equal those of the whole operator, in every opset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.operator_cases import OPSETS, Draw, RuleCase, broadcastable, check_cut, drawn_computed, integers
from support.operator_draws import shapes


def reshaped(draw: Draw, shape: Sequence[int]) -> list[int]:
    """Draw another shape with as many elements: factors regrouped, ones inserted."""
    left, found = math.prod(shape), []
    while left > 1:
        found.append(draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
        left //= found[-1]
    for _ in range(draw(st.integers(0, 2))):
        found.insert(draw(st.integers(0, len(found))), 1)
    return found or [1]


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_reshape(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4))
    target = reshaped(draw, shape)
    if draw(st.booleans()):
        target[draw(st.integers(0, len(target) - 1))] = -1
    opset = draw(st.sampled_from(OPSETS))
    attributes = {"allowzero": draw(st.sampled_from((0, 1)))} if opset >= 14 and draw(st.booleans()) else {}
    check_cut(RuleCase("Reshape", (integers(draw, *shape), np.array(target, np.int64)), attributes, opset), draw)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_flatten(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    opset = draw(st.sampled_from(OPSETS))
    attributes = (
        {"axis": draw(st.integers(-len(shape) if opset >= 11 else 0, len(shape)))} if draw(st.booleans()) else {}
    )
    check_cut(RuleCase("Flatten", (integers(draw, *shape),), attributes, opset), draw)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("Squeeze", "Unsqueeze")))
def test_computes_regions_of_squeeze(op: str, data: st.DataObject) -> None:
    """The axes are an attribute before opset 13, and an input since."""
    draw = data.draw
    shape = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    axes = sorted(draw(st.sets(st.integers(0, len(shape)), min_size=1, max_size=2)))
    longer = list(shape)
    for axis in axes:
        longer.insert(axis, 1)
    x = integers(draw, *(shape if op == "Unsqueeze" else longer))
    opset = draw(st.sampled_from(OPSETS))
    if op == "Squeeze" and draw(st.booleans()):
        case = RuleCase(op, (x,), {}, opset)
    elif opset < 13:
        case = RuleCase(op, (x,), {"axes": axes}, opset)
    else:
        case = RuleCase(op, (x, np.array(axes, np.int64)), {}, opset)
    check_cut(case, draw)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_transpose(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    attributes = {"perm": draw(st.permutations(range(len(shape))))} if draw(st.booleans()) else {}
    check_cut(RuleCase("Transpose", (integers(draw, *shape),), attributes, draw(st.sampled_from(OPSETS))), draw)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_concat(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axis, count = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    shapes = [[*shape[:axis], draw(st.integers(1, 4)), *shape[axis + 1 :]] for _ in range(count)]
    attributes = {"axis": axis - len(shape) if draw(st.booleans()) else axis}
    opset = draw(st.sampled_from(OPSETS))
    values = tuple(integers(draw, *own) for own in shapes)
    check_cut(RuleCase("Concat", values, attributes, opset if opset >= 11 else 11, drawn_computed(draw, count)), draw)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_expand(data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw)
    wanted = [draw(st.sampled_from((extent, 1))) for extent in shape]
    x = integers(draw, *broadcastable(draw, shape))
    full = np.broadcast_shapes(x.shape, tuple(wanted))
    assume(len(full) == len(shape))
    check_cut(RuleCase("Expand", (x, np.array(wanted, np.int64)), {}, draw(st.sampled_from((9, 13)))), draw)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_tile(data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw)
    repeats = np.array([draw(st.integers(1, 3)) for _ in shape], np.int64)
    check_cut(RuleCase("Tile", (integers(draw, *shape), repeats), {}, draw(st.sampled_from((9, 13)))), draw)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("Gather", "GatherElements")))
def test_computes_regions_of_gather(op: str, data: st.DataObject) -> None:
    """Constant indices (few and many) and computed ones."""
    draw = data.draw
    shape, opset = shapes(draw), draw(st.sampled_from((9, 11, 13)))
    assume(op == "Gather" or opset >= 11)
    axis = draw(st.integers(0, len(shape) - 1))
    if op == "Gather":
        count = draw(st.lists(st.integers(1, 4), max_size=2)) if draw(st.integers(0, 4)) else [70]
    else:
        count = [draw(st.integers(1, 6)) if i == axis else draw(st.integers(1, e)) for i, e in enumerate(shape)]
    low = -shape[axis] if opset >= 11 else 0
    random = np.random.default_rng(draw(st.integers(0, 99)))
    indices = random.integers(low, shape[axis], count).astype(draw(st.sampled_from((np.int32, np.int64))))
    computed = draw(st.sampled_from(((0,), (0, 1), (1,))))
    attributes = {"axis": axis - len(shape) if opset >= 11 and draw(st.booleans()) else axis}
    check_cut(RuleCase(op, (integers(draw, *shape), np.asarray(indices)), attributes, opset, computed), draw)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("ScatterND", "ScatterElements")))
def test_computes_regions_of_scatter(op: str, data: st.DataObject) -> None:
    """Indices of one or more axes; along one axis, with indices for all or some of the other axes."""
    draw = data.draw
    shape = shapes(draw, 2)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    if op == "ScatterND":
        count, depth = draw(st.integers(1, 3)), draw(st.integers(1, len(shape)))
        indices = np.stack([random.integers(0, shape[axis], count) for axis in range(depth)], axis=-1)
        updates, attributes = integers(draw, count, *shape[depth:]), {}
    else:
        axis = draw(st.integers(0, len(shape) - 1))
        some = draw(st.booleans())
        extents = [draw(st.integers(1, n)) if some or i == axis else n for i, n in enumerate(shape)]
        indices, updates = random.integers(0, shape[axis], extents), integers(draw, *extents)
        attributes = {"axis": axis - len(shape) if draw(st.booleans()) else axis}
    values = (integers(draw, *shape), indices, updates)
    check_cut(RuleCase(op, values, attributes, draw(st.sampled_from((11, 16, 18))), (0, 1, 2)), draw)


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("DepthToSpace", "SpaceToDepth")))
def test_computes_regions_of_depth_to_space_and_back(op: str, data: st.DataObject) -> None:
    draw = data.draw
    size, channels, height, width = (draw(st.integers(1, 3)) for _ in range(4))
    opset = draw(st.sampled_from((9, 11, 13, 21)))
    attributes: dict[str, Any] = {"blocksize": size}
    if op == "DepthToSpace":
        x = integers(draw, 2, channels * size * size, height, width)
        if opset >= 11 and draw(st.booleans()):
            attributes["mode"] = draw(st.sampled_from(("DCR", "CRD")))
    else:
        x = integers(draw, 2, channels, height * size, width * size)
    check_cut(RuleCase(op, (x,), attributes, opset), draw)
