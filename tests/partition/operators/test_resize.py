"""Regions of resized tensors equal those of the whole operator, in every opset."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.layer_graphs import rules
from support.operator_cases import Draw, RuleCase, check_cut, check_stand_in, integers

from dicompiler.partition.bounds_inference import cuttable_axes
from dicompiler_passes.form_layers import form_layers


def allowed(case: RuleCase) -> tuple[int, ...]:
    """Return the axes of the case's output that a plan may cut."""
    layers = form_layers(case.model(), rules())
    return cuttable_axes(layers, layers.layers[0])


def resampling(draw: Draw, opset: int, linear: bool, sized: bool) -> RuleCase:
    """Return a Resize (an Upsample in opsets 7 and 9) by scales or sizes."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    choices = (1.0, 2.0, 3.0, 4.0, 0.5, 0.25, 1.5) if opset >= 10 else (1.0, 2.0, 3.0, 1.5)
    scales = [1.0, 1.0, *(draw(st.sampled_from([c for c in choices if c * e >= 1])) for e in shape[2:])]
    if not linear and draw(st.integers(0, 4)) == 0:
        scales[1] = 2.0
    x = integers(draw, *shape)
    attributes: dict[str, Any] = {"mode": "linear" if linear else "nearest"}
    factors = np.array(scales, np.float32)
    if opset == 7:
        return RuleCase("Upsample", (x,), {**attributes, "scales": scales}, opset)
    if opset < 11:
        return RuleCase("Upsample" if opset == 9 else "Resize", (x, factors), attributes, opset)
    modes = ["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"]
    attributes["coordinate_transformation_mode"] = draw(
        st.sampled_from([*modes, "half_pixel_symmetric"][: 4 + (opset >= 19)])
    )
    if not linear:
        rounding = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
        attributes["nearest_mode"] = draw(st.sampled_from(rounding))
    if linear and draw(st.integers(0, 3)) == 0:
        attributes["mode"] = "cubic"
    if linear and opset >= 18 and draw(st.integers(0, 4)) == 0:
        attributes["antialias"] = 1
    sizes = np.array([math.floor(e * s) for e, s in zip(shape, scales, strict=True)], np.int64)
    if opset >= 18 and draw(st.booleans()):
        attributes["axes"] = [2, 3]
        sizes, factors = sizes[2:], factors[2:]
        assume(scales[1] == 1)
        if sized and draw(st.booleans()):
            attributes["keep_aspect_ratio_policy"] = draw(st.sampled_from(("stretch", "not_larger", "not_smaller")))
    roi = np.zeros(0, np.float32) if draw(st.booleans()) or opset < 13 else None
    if not sized:
        return RuleCase("Resize", (x, roi, factors), attributes, opset)
    return RuleCase("Resize", (x, roi, np.zeros(0, np.float32) if opset < 13 else None, sizes), attributes, opset)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("linear", [False, True], ids=["nearest", "linear"])
@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 18, 19])
def test_computes_regions_of_resize(opset: int, linear: bool, data: st.DataObject) -> None:
    """Integers blended at powers of two stay exact; cubic weights and other factors round."""
    case = resampling(data.draw, opset, linear, sized=data.draw(st.booleans()))
    check_cut(RuleCase(case.op, case.values, case.attributes, case.opset, is_inexact=linear), data.draw)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "pytorch_half_pixel"])
@pytest.mark.parametrize("scale", [2.0, 4.0, 0.5])
def test_resized_images_can_be_split_by_rows_and_columns(mode: str, coordinates: str, scale: float) -> None:
    x = np.zeros((1, 2, 16, 16), np.float32)
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    scales = np.array([1, 1, scale, scale], np.float32)
    assert allowed(RuleCase("Resize", (x, np.zeros(0, np.float32), scales), attributes, 13)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("scale", "attributes"),
    [
        (2.5, {"mode": "nearest"}),
        (3.0, {"mode": "linear"}),
        (2.0, {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
        (0.5, {"mode": "linear", "antialias": 1}),
    ],
)
def test_axes_with_inexact_tiles_are_not_cut(scale: float, attributes: dict[str, Any]) -> None:
    x = np.zeros((1, 2, 16, 16), np.float32)
    scales = np.array([1, 1, scale, scale], np.float32)
    assert allowed(RuleCase("Resize", (x, None, scales), attributes, 18)) == (1,)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_computes_regions_of_grid_sample(data: st.DataObject) -> None:
    draw = data.draw
    batch, channels, *extents = (draw(st.integers(1, 4)) for _ in range(6))
    grid = integers(draw, batch, *extents[2:], 2, most=9) / np.float32(8)
    attributes = {"mode": draw(st.sampled_from(("bilinear", "nearest"))), "align_corners": draw(st.integers(0, 1))}
    case = RuleCase(
        "GridSample", (integers(draw, batch, channels, *extents[:2]), grid), attributes, 16, (0, 1), is_inexact=True
    )
    check_cut(case, draw)
    check_stand_in(case, draw)
