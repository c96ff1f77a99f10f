"""Covering an interval by the best of many pieces, each of the rest again by the best: no deeper and hardly slower for
thousands of them. In: an interval (or a box, of which pieces are slices), pieces with ranks. Out: what is taken of
which piece, from left to right."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence

Interval = tuple[int, int]
Region = tuple[Interval, ...]


def cover_along_axis(
    need: Region, pieces: Sequence[tuple[Region, int, int, int, int]]
) -> tuple[int, list[tuple[Region, int | None]]] | None:
    """(the one axis along which pieces of `need` lie, what is taken of which, as `covered`); None: there is no such
    axis. pieces: (region within `need`, distance, minus its size, order, number)."""
    axes = {axis for piece in pieces for axis, interval in enumerate(piece[0]) if interval != need[axis]}
    if len(axes) != 1:
        return None
    (axis,) = axes
    row = cover_interval(need[axis], [(region[axis], distance, order) for region, distance, _, order, _ in pieces])
    return axis, [((*need[:axis], cut, *need[axis + 1 :]), i) for cut, i in row]


def cover_interval(need: Interval, pieces: Sequence[tuple[Interval, int, int]]) -> list[tuple[Interval, int | None]]:
    """What is taken of which piece (its number), in order; None: what no piece has.

    pieces: (interval, distance, order): the nearest is taken first, then the one with the largest part of what is still
    missing, then the first in order, then the first. What it leaves on its left and right is covered likewise.
    """
    starts, stops = [need[0]], [need[1]]  # of the gaps, in order
    taken: list[tuple[Interval, int | None]] = []
    most = need[0] - need[1]  # minus the length of the largest part that a piece can have
    heap = [(distance, most, order, i) for i, (_, distance, order) in enumerate(pieces)]
    heapq.heapify(heap)
    while heap:
        distance, claimed, order, i = heapq.heappop(heap)
        part = _largest_overlap(starts, stops, pieces[i][0])
        if part is None:
            continue
        low, high, at = part
        if low - high != claimed:  # it has become smaller since: others may be better now
            heapq.heappush(heap, (distance, low - high, order, i))
            continue
        taken.append(((low, high), i))
        left, right = (starts[at], low), (high, stops[at])
        rest = [gap for gap in (left, right) if gap[0] < gap[1]]
        starts[at : at + 1], stops[at : at + 1] = [gap[0] for gap in rest], [gap[1] for gap in rest]
        heapq.heappush(heap, (distance, low - high, order, i))  # a nearer piece may have parted what is left for it
    return sorted([*taken, *(((start, stop), None) for start, stop in zip(starts, stops, strict=True))])


def _largest_overlap(starts: Sequence[int], stops: Sequence[int], piece: Interval) -> tuple[int, int, int] | None:
    """(start, stop, number of the gap) of the largest part of a piece that lies in a gap, of equals the first."""
    best, at = None, max(0, bisect_right(starts, piece[0]) - 1)
    while at < len(starts) and starts[at] < piece[1]:
        low, high = max(starts[at], piece[0]), min(stops[at], piece[1])
        if low < high and (best is None or high - low > best[1] - best[0]):
            best = (low, high, at)
        at += 1
    return best
