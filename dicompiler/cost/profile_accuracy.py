"""Relative errors of the cost models `profile`, `linear` and `roofline`, against the measurements in a profile.

Pieces of layers that take less time than an empty call are ignored, because the call dominates their time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dicompiler.cost.linear_model import fit_by_kind
from dicompiler.cost.piecewise_linear import TimeCurve
from dicompiler.cost.profile import LayerProfile, Profile

RATE_QUANTILES = np.linspace(0, 1, 41)
"""Quantiles of the measured compute rates and memory bandwidths, at which `fit_roofline` tries values."""


@dataclass(frozen=True)
class ErrorSummary:
    """Relative errors |predicted / measured - 1| of the predicted times of measured pieces of layers.

    Attributes:
        count: Number of pieces.
        median: Median error, where 0.1 means 10 %.
        worst: Largest error.
    """

    count: int
    median: float
    worst: float


def summarize_errors(pairs: Iterable[tuple[float, float]], min_seconds: float) -> ErrorSummary | None:
    """Return the errors of pairs (predicted seconds, measured seconds) with more than `min_seconds` measured.

    The result is None without such pairs.
    """
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs if measured > min_seconds]
    return ErrorSummary(len(errors), float(np.median(errors)), max(errors)) if errors else None


def interpolation_error(profile: Profile) -> ErrorSummary | None:
    """Return the error of interpolating between the measured sizes of a layer's pieces.

    Each intermediate size is predicted from all other sizes. The result is None if no layer was cut into three or more
    sizes.
    """
    pairs = (pair for layer in profile.layers.values() for pair in _held_out_pairs(layer, profile.call_s))
    return summarize_errors(pairs, profile.call_s)


def _held_out_pairs(layer: LayerProfile, call_s: float) -> Iterable[tuple[float, float]]:
    """Yield (predicted seconds, measured seconds) of each piece of a layer that has an intermediate size.

    It is predicted from all other pieces that are cut in the same way. `call_s`, the seconds of an empty call, are
    subtracted.
    """
    for cut in dict.fromkeys(piece.cut for piece in layer.measurements):
        points = {piece.size: max(0.0, piece.median_s - call_s) for piece in layer.measurements if piece.cut == cut}
        for size in sorted(points)[1:-1]:
            others = {other: seconds for other, seconds in points.items() if other != size}
            yield TimeCurve.fit(others).seconds_at(size), points[size]


def linear_fit_error(profile: Profile) -> ErrorSummary | None:
    """Return the error of cost model `linear`, fitted to the profile, on the same measurements."""
    coefficients = fit_by_kind(profile.samples())
    pairs = ((coefficients[kind].predict(flops, nbytes), seconds) for kind, flops, nbytes, seconds in profile.samples())
    return summarize_errors(pairs, profile.call_s)


@dataclass(frozen=True)
class RooflineFit:
    """The compute rate and the memory bandwidth for which cost model `roofline` has the least error.

    Attributes:
        rate: Compute rate in FLOP/s.
        memory_bandwidth: Memory bandwidth in bytes/s.
        error: Relative errors with these two values.
    """

    rate: float
    memory_bandwidth: float
    error: ErrorSummary


def fit_roofline(profile: Profile) -> RooflineFit | None:
    """Return the compute rate and the memory bandwidth with which cost model `roofline` has the least median error.

    The result is None if no piece takes longer than an empty call.
    """
    samples = [row[1:] for row in profile.samples() if min(row[1:]) > 0 and row[3] > profile.call_s]
    rows = np.array(samples, np.float64).reshape(-1, 3)
    if not len(rows):
        return None
    flops, nbytes, seconds = rows.T
    rates, bandwidths = np.quantile(flops / seconds, RATE_QUANTILES), np.quantile(nbytes / seconds, RATE_QUANTILES)
    # `predicted` has the shape (number of candidate rates, number of candidate bandwidths, number of measured pieces).
    predicted = np.maximum(flops / rates[:, None, None], nbytes / bandwidths[:, None])
    medians = np.median(np.abs(predicted / seconds - 1), axis=2)
    i, j = np.unravel_index(np.argmin(medians), medians.shape)
    summary = summarize_errors(zip(predicted[i, j].tolist(), seconds.tolist(), strict=True), profile.call_s)
    assert summary is not None
    return RooflineFit(float(rates[i]), float(bandwidths[j]), summary)
