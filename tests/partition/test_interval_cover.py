"""The iterative interval cover equals the recursive one."""

from __future__ import annotations

import random

from dicompiler.ir.regions import Interval
from dicompiler.partition.routing import cover_interval

Pieces = list[tuple[Interval, int, int]]


def recursive(need: Interval, pieces: Pieces) -> list[tuple[Interval, int | None]]:
    parts = []
    for i, ((start, stop), distance, order) in enumerate(pieces):
        low, high = max(start, need[0]), min(stop, need[1])
        if low < high:
            parts.append((distance, low - high, order, i, low, high))
    if not parts:
        return [(need, None)]
    *_, i, low, high = min(parts)
    left = recursive((need[0], low), pieces) if need[0] < low else []
    right = recursive((high, need[1]), pieces) if high < need[1] else []
    return [*left, ((low, high), i), *right]


def test_covers_an_interval_like_the_recursive_algorithm() -> None:
    draw = random.Random(1)
    for _ in range(3000):
        extent, pieces = draw.randint(1, 30), Pieces()
        for _ in range(draw.randint(0, 9)):
            start = draw.randint(-3, extent)
            pieces.append(((start, start + draw.randint(1, 12)), draw.randint(0, 3), draw.randint(0, 3)))
        assert cover_interval((0, extent), pieces) == recursive((0, extent), pieces)
