"""Regions of transposed convolutions: each is what the whole has there, in every opset."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.operator_cases import Case, check_cut, integers


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
