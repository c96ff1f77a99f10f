"""Rules whose tiles have a halo, beside convolutions and pools: ConvTranspose, Resize, Upsample, Pad, Slice, and the
operators that move elements between channels and space.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.layer_graphs import rules
from support.operator_cases import Case, Draw, check_cut, integers

from dicompiler.partition.bounds_inference import cuttable
from dicompiler_passes.form_layers import form_layers

SLICE_OPSETS = (9, 10, 11, 13, 21)


def allowed(case: Case) -> tuple[int, ...]:
    """The axes of the case's output that a plan may cut."""
    layers = form_layers(case.model(), rules())
    return cuttable(layers, layers.layers[0])


@st.composite
def transposed(draw: st.DrawFn) -> Case:
    """ConvTranspose with every way to say what is cut away; groups, dilations, with and without bias."""
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
    return Case("ConvTranspose", tuple(values), attributes, draw(st.sampled_from((9, 11, 13, 22))))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_transposed_convolution(data: st.DataObject) -> None:
    check_cut(data.draw(transposed()), data.draw)


# --- Resize, Upsample ---------------------------------------------------------------------------------------------


def resampling(draw: Draw, opset: int, linear: bool, sized: bool) -> Case:
    """A Resize (an Upsample in opsets 7 and 9), by scales or, where it can, by sizes."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    choices = (1.0, 2.0, 3.0, 4.0, 0.5, 0.25, 1.5) if opset >= 10 else (1.0, 2.0, 3.0, 1.5)
    scales = [1.0, 1.0, *(draw(st.sampled_from([c for c in choices if c * e >= 1])) for e in shape[2:])]
    if not linear and draw(st.integers(0, 4)) == 0:
        scales[1] = 2.0
    x = integers(draw, *shape)
    attributes: dict[str, Any] = {"mode": "linear" if linear else "nearest"}
    factors = np.array(scales, np.float32)
    if opset == 7:
        return Case("Upsample", (x,), {**attributes, "scales": scales}, opset)
    if opset < 11:
        return Case("Upsample" if opset == 9 else "Resize", (x, factors), attributes, opset)
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
        return Case("Resize", (x, roi, factors), attributes, opset)
    return Case("Resize", (x, roi, np.zeros(0, np.float32) if opset < 13 else None, sizes), attributes, opset)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("linear", [False, True], ids=["nearest", "linear"])
@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 18, 19])
def test_a_region_of_a_resampled_tensor(opset: int, linear: bool, data: st.DataObject) -> None:
    """Integers blended at powers of two stay exact; cubic weights and other factors round."""
    case = resampling(data.draw, opset, linear, sized=data.draw(st.booleans()))
    check_cut(Case(case.op, case.values, case.attributes, case.opset, close=linear), data.draw)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "pytorch_half_pixel"])
@pytest.mark.parametrize("scale", [2.0, 4.0, 0.5])
def test_an_image_that_grows_or_shrinks_is_cut_by_rows_and_columns(mode: str, coordinates: str, scale: float) -> None:
    x = np.zeros((1, 2, 16, 16), np.float32)
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    scales = np.array([1, 1, scale, scale], np.float32)
    assert allowed(Case("Resize", (x, np.zeros(0, np.float32), scales), attributes, 13)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("scale", "attributes"),
    [
        (2.5, {"mode": "nearest"}),
        (3.0, {"mode": "linear"}),
        (2.0, {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
        (0.5, {"mode": "linear", "antialias": 1}),
    ],
)
def test_an_axis_whose_tiles_would_be_resampled_otherwise_is_not_cut(scale: float, attributes: dict[str, Any]) -> None:
    x = np.zeros((1, 2, 16, 16), np.float32)
    scales = np.array([1, 1, scale, scale], np.float32)
    assert allowed(Case("Resize", (x, None, scales), attributes, 18)) == (1,)


# --- Pad, Slice ---------------------------------------------------------------------------------------------------


@st.composite
def pads(draw: st.DrawFn) -> Case:
    """Every mode, pads of less than nothing too; an attribute before opset 11, for some axes alone since 18."""
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
        return Case("Pad", (x,), {"mode": mode, "pads": both, "value": float(value)}, opset)
    values: list[Any] = [x, np.array(both, np.int64)]
    if axes != list(range(len(shape))):
        values += [np.array(value, np.float32) if draw(st.booleans()) else None, np.array(axes, np.int64)]
    elif draw(st.booleans()):
        values.append(np.array(value, np.float32))
    return Case("Pad", tuple(values), {"mode": mode}, opset)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_padded_tensor(data: st.DataObject) -> None:
    check_cut(data.draw(pads()), data.draw)


@st.composite
def slices(draw: st.DrawFn) -> Case:
    """Some axes, from either end, in steps of either sign; attributes before opset 10."""
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
        return Case("Slice", (x,), {"starts": starts, "ends": ends} | ({"axes": axes} if named else {}), opset)
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
    return Case("Slice", tuple(values), {}, opset)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_slice(data: st.DataObject) -> None:
    check_cut(data.draw(slices()), data.draw)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_region_of_a_triangle(data: st.DataObject) -> None:
    draw = data.draw
    x = integers(draw, *draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)))
    values = (x, np.array(draw(st.integers(-4, 4)), np.int64)) if draw(st.booleans()) else (x,)
    check_cut(Case("Trilu", values, {"upper": draw(st.sampled_from((0, 1)))}, draw(st.sampled_from((14, 21)))), draw)


# --- between channels and space -----------------------------------------------------------------------------------


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
