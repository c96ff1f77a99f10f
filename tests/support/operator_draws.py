"""Operators drawn by hypothesis, shared by several test files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.operator_cases import (
    OPSETS,
    Array,
    Draw,
    RuleCase,
    integers,
)


@dataclass(frozen=True)
class Sliding:
    """Attributes that convolutions and pools share."""

    extents: tuple[int, ...]
    kernel: tuple[int, ...]
    attributes: Mapping[str, Any]


@st.composite
def sliding(draw: Draw, wide_pads: bool, dilated: bool) -> Sliding:
    """Draw extents, kernel, strides, dilations, and pads or auto_pad in one to three dimensions.

    With `wide_pads`, a window may lie completely in the pads.
    """
    rank = draw(st.sampled_from((1, 2, 2, 2, 3)))
    most = (14, 9, 5)[rank - 1]

    def each(low: int, high: int, count: int = rank) -> list[int]:
        found: list[int] = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        return found

    kernel, strides = each(1, 4), each(1, 3)
    attributes: dict[str, Any] = {"strides": strides} if draw(st.booleans()) else {}
    dilations = each(1, 3) if dilated and draw(st.booleans()) else [1] * rank
    if dilations != [1] * rank:
        attributes["dilations"] = dilations
    mode = draw(st.sampled_from(("pads", "pads", "pads", "none", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")))
    pads = [0] * (2 * rank)
    if mode in ("pads", "NOTSET"):
        pads = [draw(st.integers(0, size + 2 if wide_pads else size - 1)) for size in (*kernel, *kernel)]
        attributes["pads"] = pads
    if mode not in ("pads", "none"):
        attributes["auto_pad"] = mode
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    least = [1 if mode.startswith("SAME") else max(1, s - pads[i] - pads[rank + i]) for i, s in enumerate(spans)]
    return Sliding(tuple(draw(st.integers(low, low + most)) for low in least), tuple(kernel), attributes)


@st.composite
def pools(draw: Draw, op: str) -> RuleCase:
    """Draw a pool of the opset: ceil_mode since 10 (LpPool 18), dilations since 10 (others since 18, 19)."""
    opset = draw(st.sampled_from(OPSETS))
    since = {"MaxPool": (10, 10), "AveragePool": (10, 19), "LpPool": (18, 18)}[op]
    window = draw(sliding(wide_pads=False, dilated=opset >= since[1]))
    attributes = {**window.attributes, "kernel_shape": list(window.kernel)}
    if opset >= since[0] and draw(st.booleans()):
        attributes["ceil_mode"] = draw(st.sampled_from((0, 1)))
    if op == "AveragePool" and draw(st.booleans()):
        attributes["count_include_pad"] = draw(st.sampled_from((0, 1)))
    if op == "LpPool":
        attributes["p"] = draw(st.sampled_from((1, 2)))
    x = integers(draw, draw(st.integers(1, 2)), draw(st.integers(1, 3)), *window.extents, most=50)
    return RuleCase(op, (x,), attributes, opset, is_inexact=op != "MaxPool")


def shapes(draw: Draw, least: int = 1, most: int = 4) -> list[int]:
    found: list[int] = draw(st.lists(st.integers(1, 5), min_size=least, max_size=most))
    return found


def scales(draw: Draw, *shape: int) -> Array:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return np.asarray(random.uniform(0.01, 0.3, shape)).astype(np.float32)
