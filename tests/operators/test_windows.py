"""Regions of convolutions and pools: each is what the whole has there, in every opset."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layer_graphs import rules
from support.operator_cases import (
    OPSETS,
    Case,
    check_cut,
    integers,
    run,
    run_split,
)
from support.operator_draws import pools, sliding

from dicompiler.ir.plan import Part
from dicompiler.verify.exact import DOMAIN, check_model
from dicompiler_passes.form_layers import form_layers


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


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_a_stand_in_that_had_auto_pad_is_cut_by_rows(mode: str) -> None:
    x = np.zeros((1, 2, 7, 5), np.float32)
    case = Case("AveragePool", (x,), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": mode})
    model, feed = check_model(case.model(), 0)
    assert model.proto.graph.node[0].domain == DOMAIN
    layers = form_layers(model, rules())
    parts = [Part("abc"[i], ((0, 1), (0, 2), rows, (0, 3))) for i, rows in enumerate(((0, 1), (1, 3), (3, 4)))]
    np.testing.assert_array_equal(run_split(model, layers, parts, feed), run(model, feed))
