"""Regions of convolutions and pools equal those of the whole operator, in every opset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.layer_graphs import rules
from support.operator_cases import OPSETS, RuleCase, check_cut, integers, run, run_split
from support.operator_draws import pools, sliding

from dicompiler.ir.plan import Part
from dicompiler.verify.exact import DOMAIN, check_model
from dicompiler_passes.form_layers import form_layers


@st.composite
def convolutions(draw: st.DrawFn) -> RuleCase:
    """Draw convolutions with groups, depthwise and with a channel multiplier, with and without bias."""
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
    return RuleCase("Conv", values, attributes, draw(st.sampled_from(OPSETS)), computed)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_convolutions(data: st.DataObject) -> None:
    check_cut(data.draw(convolutions()), data.draw)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_computes_regions_of_pools(op: str, data: st.DataObject) -> None:
    check_cut(data.draw(pools(op)), data.draw)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")))
def test_computes_regions_of_global_pools(op: str, data: st.DataObject) -> None:
    extents = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    x = integers(data.draw, 2, data.draw(st.integers(1, 5)), *extents)
    opset = data.draw(st.sampled_from(OPSETS))
    check_cut(RuleCase(op, (x,), {}, opset, is_inexact=op != "GlobalMaxPool"), data.draw)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_stand_ins_of_auto_pad_operators_can_be_split_by_rows(mode: str) -> None:
    x = np.zeros((1, 2, 7, 5), np.float32)
    case = RuleCase("AveragePool", (x,), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": mode})
    model, feed = check_model(case.model(), 0)
    assert model.proto.graph.node[0].domain == DOMAIN
    layers = form_layers(model, rules())
    parts = [Part("abc"[i], ((0, 1), (0, 2), rows, (0, 3))) for i, rows in enumerate(((0, 1), (1, 3), (3, 4)))]
    np.testing.assert_array_equal(run_split(model, layers, parts, feed), run(model, feed))


@st.composite
def transposed(draw: st.DrawFn) -> RuleCase:
    """Draw ConvTranspose with all ways to specify pads, groups and dilations, with and without bias."""
    rank = draw(st.sampled_from((1, 2, 2, 2, 3)))

    def each(low: int, high: int) -> list[int]:
        found: list[int] = draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))
        return found

    kernel, strides, extents = each(1, 4), each(1, 4), each(1, (8, 5, 3)[rank - 1])
    dilations = each(1, 3) if draw(st.booleans()) else [1] * rank
    attributes: dict[str, Any] = {"strides": strides}
    if dilations != [1] * rank:
        attributes["dilations"] = dilations
    added = [draw(st.integers(0, max(1, s) - 1)) for s in strides] if draw(st.booleans()) else [0] * rank
    if any(added):
        attributes["output_padding"] = added
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    natural = [(e - 1) * s + span + a for e, s, span, a in zip(extents, strides, spans, added, strict=True)]
    mode = draw(st.sampled_from(("pads", "pads", "pads", "none", "VALID", "SAME_UPPER", "SAME_LOWER", "shape")))
    pairs = list(zip(spans, natural, strict=True))
    if mode == "pads":
        attributes["pads"] = [draw(st.integers(0, min(span + 1, n - 1) // 2)) for span, n in pairs * 2]
    elif mode == "shape":
        attributes["output_shape"] = [draw(st.integers(max(1, n - 4), n)) for n in natural]
        if draw(st.booleans()):
            attributes["auto_pad"] = draw(st.sampled_from(("SAME_UPPER", "SAME_LOWER")))
    elif mode != "none":
        attributes["auto_pad"] = mode
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    channels, filters = groups * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if groups > 1:
        attributes["group"] = groups
    values = [integers(draw, draw(st.integers(1, 2)), channels, *extents), integers(draw, channels, filters, *kernel)]
    if draw(st.booleans()):
        values.append(integers(draw, groups * filters))
    return RuleCase("ConvTranspose", tuple(values), attributes, draw(st.sampled_from((9, 11, 13, 22))))


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_transposed_convolutions(data: st.DataObject) -> None:
    check_cut(data.draw(transposed()), data.draw)
