"""Regions of what repeats or picks elements: each is what the whole has there, in every opset."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.operator_cases import Case, broadcastable, check_cut, integers
from support.operator_draws import shapes


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_an_expanded_tensor(data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw)
    wanted = [draw(st.sampled_from((extent, 1))) for extent in shape]
    x = integers(draw, *broadcastable(draw, shape))
    full = np.broadcast_shapes(x.shape, tuple(wanted))
    assume(len(full) == len(shape))
    check_cut(Case("Expand", (x, np.array(wanted, np.int64)), {}, draw(st.sampled_from((9, 13)))), draw)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_tiled_tensor(data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw)
    repeats = np.array([draw(st.integers(1, 3)) for _ in shape], np.int64)
    check_cut(Case("Tile", (integers(draw, *shape), repeats), {}, draw(st.sampled_from((9, 13)))), draw)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("Gather", "GatherElements")))
def test_a_region_of_gathered_elements(op: str, data: st.DataObject) -> None:
    """Constant indices and computed ones; many constant ones too."""
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
    check_cut(Case(op, (integers(draw, *shape), np.asarray(indices)), attributes, opset, computed), draw)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("DepthToSpace", "SpaceToDepth")))
def test_a_region_of_channels_moved_into_space_or_back(op: str, data: st.DataObject) -> None:
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
    check_cut(Case(op, (x,), attributes, opset), draw)
