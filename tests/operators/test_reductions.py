"""Regions of reductions: each is what the whole has there, in every opset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_graphs import rules
from support.operator_cases import Case, Draw, check_cut, integers
from support.operator_draws import shapes

from dicompiler.operators.reductions import MERGED, OTHERS
from dicompiler.partition.bounds_inference import reduction
from dicompiler_passes.form_layers import form_layers

EXACT = ("ReduceL1", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare")


def with_axes(draw: Draw, op: str, x: Any, axes: list[int], opset: int) -> Case:
    """A reduction in the form of the opset: the axes are an input since 13 (ReduceSum) or 18."""
    attributes: dict[str, Any] = {"keepdims": draw(st.sampled_from((0, 1)))} if draw(st.booleans()) else {}
    as_input = opset >= (13 if op == "ReduceSum" else 18)
    if len(axes) == x.ndim and draw(st.booleans()):
        if as_input and draw(st.booleans()):
            attributes["noop_with_empty_axes"] = draw(st.sampled_from((0, 1)))
        return Case(op, (x,), attributes, opset, close=op not in EXACT)
    axes = [axis - x.ndim if opset >= 11 and draw(st.booleans()) else axis for axis in axes]
    if as_input:
        return Case(op, (x, np.array(axes, np.int64)), attributes, opset, close=op not in EXACT)
    return Case(op, (x,), {**attributes, "axes": axes}, opset, close=op not in EXACT)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("op", [*MERGED, *OTHERS])
def test_a_region_of_a_reduction(op: str, data: st.DataObject) -> None:
    draw = data.draw
    x = integers(draw, *shapes(draw), most=2)
    x = np.abs(x) + 1 if op == "ReduceLogSum" else x
    if op in MERGED and draw(st.integers(0, 4)) == 0:
        x = x.astype(np.int32)
    axes = sorted(draw(st.sets(st.integers(0, x.ndim - 1), min_size=1)))
    check_cut(with_axes(draw, op, x, axes, draw(st.sampled_from((9, 11, 13, 18, 20)))), draw)


@pytest.mark.parametrize(("op", "extent"), [("ReduceSum", 7), ("ReduceMax", 7), ("ReduceMean", None)])
def test_the_first_reduced_axis_is_cut_where_parts_can_be_put_together(op: str, extent: int | None) -> None:
    case = Case(op, (np.zeros((1, 3, 7, 5), np.float32), np.array([2, 3], np.int64)), {}, 18)
    layers = form_layers(case.model(), rules())
    assert reduction(layers, layers.layers[0]) == extent


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("ArgMax", "ArgMin")))
def test_a_region_of_the_place_of_an_extreme(op: str, data: st.DataObject) -> None:
    draw = data.draw
    shape, opset = shapes(draw), draw(st.sampled_from((9, 11, 12, 13)))
    attributes: dict[str, Any] = {}
    if draw(st.booleans()):
        attributes["axis"] = draw(st.integers(-len(shape) if opset >= 11 else 0, len(shape) - 1))
    if draw(st.booleans()):
        attributes["keepdims"] = draw(st.sampled_from((0, 1)))
    if opset >= 12 and draw(st.booleans()):
        attributes["select_last_index"] = 1
    check_cut(Case(op, (integers(draw, *shape),), attributes, opset), draw)
