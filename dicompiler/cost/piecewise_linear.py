"""Piecewise linear interpolation of measured times between the measured sizes of a layer's pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TimeCurve:
    """The time of a layer's piece as a piecewise linear function of its size, never negative and never decreasing.

    The first and the last line segment are extended beyond the measured sizes.

    Attributes:
        sizes: Sizes at which the line segments meet, increasing from 0.
        seconds: Seconds at these sizes.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def fit(cls, points: Mapping[int, float]) -> TimeCurve:
        """Return the non-decreasing curve that is nearest to `points`, the measured seconds by size.

        The fit is an isotonic regression by the pool-adjacent-violators algorithm.
        """
        sizes = sorted(points)
        # A block is a group of adjacent points that are replaced by their mean: (mean seconds, number of points).
        blocks: list[tuple[float, int]] = []
        for size in sizes:
            blocks.append((max(0.0, points[size]), 1))
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (a, m), (b, n) = blocks.pop(-2), blocks.pop()
                blocks.append(((a * m + b * n) / (m + n), m + n))
        seconds = [mean for mean, number in blocks for _ in range(number)]
        slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]) if len(sizes) > 1 else seconds[0] / sizes[0]
        start = max(0.0, seconds[0] - slope * sizes[0])
        return cls((0.0, *map(float, sizes)), (start, *seconds))

    def seconds_at(self, size: float) -> float:
        if size <= self.sizes[-1]:
            return float(np.interp(size, self.sizes, self.seconds))
        (x, y), (u, v) = list(zip(self.sizes, self.seconds, strict=True))[-2:]
        return v + (v - y) / (u - x) * (size - u)
