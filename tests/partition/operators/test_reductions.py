"""Regions of reductions and normalizations equal those of the whole operator, in every opset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.layer_graphs import rules
from support.operator_cases import OPSETS, Draw, RuleCase, check_cut, check_stand_in, integers
from support.operator_draws import pools, shapes

from dicompiler.partition.bounds_inference import reduction_length
from dicompiler.partition.operators.reductions import MERGE_OPERATORS, UNMERGEABLE_REDUCTIONS
from dicompiler_passes.form_layers import form_layers


@st.composite
def lrns(draw: st.DrawFn) -> RuleCase:
    x = integers(draw, draw(st.integers(1, 2)), draw(st.integers(1, 9)), *draw(st.sampled_from(((3, 4), (1, 5)))))
    attributes = {
        "size": draw(st.sampled_from((1, 3, 5, 7))),
        "alpha": draw(st.sampled_from((0.5, 1e-4))),
        "beta": 0.75,
    }
    return RuleCase("LRN", (x,), attributes, draw(st.sampled_from(OPSETS)), is_inexact=True)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(case=lrns(), data=st.data())
def test_computes_regions_of_lrn(case: RuleCase, data: st.DataObject) -> None:
    check_cut(case, data.draw)


@st.composite
def softmaxes(draw: Draw, op: str) -> RuleCase:
    """Draw softmaxes along one axis since opset 13, and before that along all axes from one on."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    opset = draw(st.sampled_from(OPSETS))
    low = -len(shape) if opset >= 11 else 0
    attributes = {"axis": draw(st.integers(low, len(shape) - 1))} if len(shape) == 1 or draw(st.booleans()) else {}
    return RuleCase(op, (integers(draw, *shape),), attributes, opset, is_inexact=op != "Hardmax")


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("Softmax", "LogSoftmax", "Hardmax")))
def test_computes_regions_of_softmax(op: str, data: st.DataObject) -> None:
    check_cut(data.draw(softmaxes(op)), data.draw)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "LRN", "Softmax", "LogSoftmax"])
def test_computes_regions_of_stand_ins(op: str, data: st.DataObject) -> None:
    """A piece may have attributes that are defaults in the whole (pads instead of auto_pad)."""
    drawn = pools(op) if op.endswith("Pool") else lrns() if op == "LRN" else softmaxes(op)
    check_stand_in(data.draw(drawn), data.draw)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_instance_normalization(data: st.DataObject) -> None:
    draw = data.draw
    channels = draw(st.integers(1, 4))
    x = integers(draw, 2, channels, *draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    values = (x, integers(draw, channels), integers(draw, channels))
    check_cut(RuleCase("InstanceNormalization", values, {}, draw(st.sampled_from((9, 13, 22))), is_inexact=True), draw)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_group_normalization(data: st.DataObject) -> None:
    """Scale and shift are per group in opset 18, and per channel since 21."""
    draw = data.draw
    groups, each, opset = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from((18, 21)))
    x = integers(draw, draw(st.integers(1, 2)), groups * each, draw(st.integers(1, 4)), 3)
    length = groups if opset == 18 else groups * each
    values = (x, integers(draw, length), integers(draw, length))
    check_cut(
        RuleCase("GroupNormalization", values, {"num_groups": groups}, opset, is_inexact=True, shape=x.shape), draw
    )


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("LayerNormalization", "RMSNormalization")))
def test_computes_regions_of_layer_normalization(op: str, data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw, 2)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    attributes = {"axis": axis} if draw(st.booleans()) else {}
    inner = shape[axis:] if attributes else shape[-1:]
    count = draw(st.integers(1, 2)) if op == "LayerNormalization" else 1
    values = (integers(draw, *shape), *(integers(draw, *inner) for _ in range(count)))
    check_cut(RuleCase(op, values, attributes, 17 if op == "LayerNormalization" else 23, is_inexact=True), draw)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), simple=st.booleans())
def test_computes_regions_of_skip_normalization(simple: bool, data: st.DataObject) -> None:
    """onnxruntime's operators: scale, shift (not of the simplified one), and a bias that is added."""
    draw = data.draw
    batch, rows, width = (draw(st.integers(1, 3)) for _ in range(3))
    other = draw(st.sampled_from([(batch, rows, width), (1, rows, width), (rows, width)]))
    vectors = [integers(draw, width) for _ in range(draw(st.integers(1, 2 if simple else 3)))]
    values = (integers(draw, batch, rows, width), integers(draw, *other), *vectors)
    op = "SkipSimplifiedLayerNormalization" if simple else "SkipLayerNormalization"
    check_cut(RuleCase(op, values, {}, 1, (0, 1), is_inexact=True, domain="com.microsoft"), draw)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("MeanVarianceNormalization", "LpNormalization")))
def test_computes_regions_of_normalization_without_weights(op: str, data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw, 4, 4)
    attributes: dict[str, Any] = {}
    if op == "LpNormalization":
        attributes = {"axis": draw(st.integers(-4, 3)), "p": draw(st.sampled_from((1, 2)))}
    elif draw(st.booleans()):
        attributes = {"axes": sorted(draw(st.sets(st.integers(0, 3), min_size=1)))}
    x = np.abs(integers(draw, *shape)) + 1
    check_cut(RuleCase(op, (x,), attributes, draw(st.sampled_from((9, 13, 22))), is_inexact=True, shape=x.shape), draw)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_cumulative_operators(data: st.DataObject) -> None:
    draw = data.draw
    shape = shapes(draw)
    axis = np.array(draw(st.integers(-len(shape), len(shape) - 1)), draw(st.sampled_from((np.int32, np.int64))))
    attributes = {name: 1 for name in ("exclusive", "reverse") if draw(st.booleans())}
    op, opset = draw(st.sampled_from((("CumSum", 11), ("CumSum", 14), ("CumProd", 26))))
    check_cut(RuleCase(op, (integers(draw, *shape), axis), attributes, opset), draw)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_top_k(data: st.DataObject) -> None:
    draw = data.draw
    shape, opset = shapes(draw), draw(st.sampled_from((9, 10, 11, 24)))
    axis = draw(st.integers(0, len(shape) - 1))
    k = draw(st.integers(1, shape[axis]))
    attributes: dict[str, Any] = {"axis": axis}
    if opset >= 11 and draw(st.booleans()):
        attributes["largest"] = 0
    x = integers(draw, *shape)
    case = RuleCase(
        "TopK", (x, np.array([k], np.int64)) if opset > 9 else (x,), attributes, opset, extra_outputs=("places",)
    )
    check_cut(
        RuleCase(case.op, case.values, {**attributes, "k": k}, 9, extra_outputs=case.extra_outputs)
        if opset == 9
        else case,
        draw,
    )


EXACT = ("ReduceL1", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare")


def with_axes(draw: Draw, op: str, x: Any, axes: list[int], opset: int) -> RuleCase:
    """Return a reduction whose axes are an input since opset 13 (ReduceSum) or 18."""
    attributes: dict[str, Any] = {"keepdims": draw(st.sampled_from((0, 1)))} if draw(st.booleans()) else {}
    as_input = opset >= (13 if op == "ReduceSum" else 18)
    if len(axes) == x.ndim and draw(st.booleans()):
        if as_input and draw(st.booleans()):
            attributes["noop_with_empty_axes"] = draw(st.sampled_from((0, 1)))
        return RuleCase(op, (x,), attributes, opset, is_inexact=op not in EXACT)
    axes = [axis - x.ndim if opset >= 11 and draw(st.booleans()) else axis for axis in axes]
    if as_input:
        return RuleCase(op, (x, np.array(axes, np.int64)), attributes, opset, is_inexact=op not in EXACT)
    return RuleCase(op, (x,), {**attributes, "axes": axes}, opset, is_inexact=op not in EXACT)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("op", [*MERGE_OPERATORS, *UNMERGEABLE_REDUCTIONS])
def test_computes_regions_of_reductions(op: str, data: st.DataObject) -> None:
    draw = data.draw
    x = integers(draw, *shapes(draw), most=2)
    x = np.abs(x) + 1 if op == "ReduceLogSum" else x
    if op in MERGE_OPERATORS and draw(st.integers(0, 4)) == 0:
        x = x.astype(np.int32)
    axes = sorted(draw(st.sets(st.integers(0, x.ndim - 1), min_size=1)))
    check_cut(with_axes(draw, op, x, axes, draw(st.sampled_from((9, 11, 13, 18, 20)))), draw)


@pytest.mark.parametrize(("op", "extent"), [("ReduceSum", 7), ("ReduceMax", 7), ("ReduceMean", None)])
def test_lip_cuts_the_first_reduced_axis_if_parts_can_be_merged(op: str, extent: int | None) -> None:
    case = RuleCase(op, (np.zeros((1, 3, 7, 5), np.float32), np.array([2, 3], np.int64)), {}, 18)
    layers = form_layers(case.model(), rules())
    assert reduction_length(layers, layers.layers[0]) == extent


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("ArgMax", "ArgMin")))
def test_computes_regions_of_arg_reductions(op: str, data: st.DataObject) -> None:
    draw = data.draw
    shape, opset = shapes(draw), draw(st.sampled_from((9, 11, 12, 13)))
    attributes: dict[str, Any] = {}
    if draw(st.booleans()):
        attributes["axis"] = draw(st.integers(-len(shape) if opset >= 11 else 0, len(shape) - 1))
    if draw(st.booleans()):
        attributes["keepdims"] = draw(st.sampled_from((0, 1)))
    if opset >= 12 and draw(st.booleans()):
        attributes["select_last_index"] = 1
    check_cut(RuleCase(op, (integers(draw, *shape),), attributes, opset), draw)
