"""How far models that rest on a profile are off what it measured: relative errors over its pieces.

Profile → errors of interpolating between measured sizes, of `linear` fitted to it, and of `roofline` at its best.
Pieces that take less than an empty call do not count: beside the call nobody notices them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dicompiler.cost.linear_model import fit_by_kind
from dicompiler.cost.piecewise_linear import TimeCurve
from dicompiler.cost.profile import LayerProfile, Profile

QUANTILES = np.linspace(0, 1, 41)
"""Shares of the samples: what rates and bandwidths are tried for `roofline`."""


@dataclass(frozen=True)
class ErrorSummary:
    """|said / measured - 1| over `count` pieces: the median and the worst."""

    count: int
    median: float
    worst: float


def summarize_errors(pairs: Iterable[tuple[float, float]], min_seconds: float) -> ErrorSummary | None:
    """pairs: (said, measured) in seconds. None where none is of more than `least`."""
    off = [abs(said / measured - 1) for said, measured in pairs if measured > min_seconds]
    return ErrorSummary(len(off), float(np.median(off)), max(off)) if off else None


def interpolation_error(profile: Profile) -> ErrorSummary | None:
    """Of interpolating: each piece whose size lies between two others against what the curve says that did not see it.
    None where no layer was cut into three sizes."""
    pairs = (pair for layer in profile.layers.values() for pair in _held_out_pairs(layer, profile.call_s))
    return summarize_errors(pairs, profile.call_s)


def _held_out_pairs(layer: LayerProfile, call_s: float) -> Iterable[tuple[float, float]]:
    for cut in dict.fromkeys(one.cut for one in layer.measurements):
        points = {one.size: max(0.0, one.median_s - call_s) for one in layer.measurements if one.cut == cut}
        for size in sorted(points)[1:-1]:
            others = {other: seconds for other, seconds in points.items() if other != size}
            yield TimeCurve.fit(others).seconds_at(size), points[size]


def linear_fit_error(profile: Profile) -> ErrorSummary | None:
    """Of the cost model `linear`, fitted to the profile, on the pieces that it was fitted to."""
    known = fit_by_kind(profile.samples())
    pairs = ((known[kind].predict(flops, moved), seconds) for kind, flops, moved, seconds in profile.samples())
    return summarize_errors(pairs, profile.call_s)


@dataclass(frozen=True)
class RooflineFit:
    """Of the device: FLOP/s and bytes/s with which `roofline` errs least, and how much."""

    rate: float
    memory_bandwidth: float
    error: ErrorSummary


def fit_roofline(profile: Profile) -> RooflineFit | None:
    """The rate and the memory bandwidth, of those that pieces reached, with the least median error. None where no piece
    that computes counts."""
    counted = [row[1:] for row in profile.samples() if min(row[1:]) > 0 and row[3] > profile.call_s]
    rows = np.array(counted, np.float64).reshape(-1, 3)
    if not len(rows):
        return None
    flops, moved, seconds = rows.T
    rates, widths = np.quantile(flops / seconds, QUANTILES), np.quantile(moved / seconds, QUANTILES)
    said = np.maximum(flops / rates[:, None, None], moved / widths[:, None])  # (rates, widths, pieces)
    medians = np.median(np.abs(said / seconds - 1), axis=2)
    i, j = np.unravel_index(np.argmin(medians), medians.shape)
    off = summarize_errors(zip(said[i, j].tolist(), seconds.tolist(), strict=True), profile.call_s)
    assert off is not None
    return RooflineFit(float(rates[i]), float(widths[j]), off)
