"""Hyper-rectangles of a tensor, in the whole tensor's coordinates. Everything that is cut, held or sent is one.

A Region has one half-open interval per axis; a rank-0 tensor's region is `()` (falsy: always test `is None`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
Region = tuple[Interval, ...]
Shape = tuple[int, ...]


def full_region(shape: Sequence[int]) -> Region:
    """(2, 3) → ((0, 2), (0, 3))."""
    return tuple([(0, extent) for extent in shape])


def region_shape(region: Region) -> Shape:
    """((1, 4), (0, 2)) → (3, 2)."""
    return tuple([stop - start for start, stop in region])


def volume(region: Region) -> int:
    """Number of elements; 1 for rank 0, 0 for an empty region."""
    return math.prod([stop - start if stop > start else 0 for start, stop in region])


def is_empty(region: Region) -> bool:
    """Whether it has no element: an interval that ends where it starts. A region of rank 0 has one."""
    for start, stop in region:  # noqa: SIM110  a generator takes three times as long
        if stop <= start:
            return True
    return False


def contains(outer: Region, inner: Region) -> bool:
    """Whether every element of `inner` is in `outer`. An empty region is in every region."""
    return is_empty(inner) or all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def intersect(a: Region, b: Region) -> Region | None:
    """The common part, or None where there is none."""
    both = []
    for (low, high), (start, stop) in zip(a, b, strict=True):
        low, high = low if low > start else start, high if high < stop else stop
        if low >= high:  # most pairs have nothing in common: routing asks for very many
            return None
        both.append((low, high))
    return tuple(both)


def bounding_region(regions: Iterable[Region | None]) -> Region | None:
    """The smallest region that holds all of them (bounds inference's union); None where all are None or empty."""
    present = [region for region in regions if region is not None and not is_empty(region)]
    if len(present) < 2:
        return present[0] if present else None
    return tuple((min(i[0] for i in axis), max(i[1] for i in axis)) for axis in zip(*present, strict=True))


def relative_to(region: Region, origin: Region) -> Region:
    """`region` in the coordinates of a tensor that holds just `origin`: ((5, 7),), ((4, 9),) → ((1, 3),)."""
    return tuple((start - o[0], stop - o[0]) for (start, stop), o in zip(region, origin, strict=True))


def to_slices(region: Region) -> tuple[slice, ...]:
    """For numpy: `array[slices(region)]`."""
    return tuple(slice(start, stop) for start, stop in region)


def with_interval(region: Region, axis: int, interval: Interval) -> Region:
    """`region` with one axis's interval replaced."""
    return (*region[:axis], interval, *region[axis + 1 :])


def block_interval(interval: Interval, size: int) -> Interval:
    """The blocks of `size` elements that an interval touches: (5, 9), 4 → (1, 3)."""
    return interval[0] // size, -(-interval[1] // size)


def split_proportionally(extent: int, weights: Sequence[float]) -> tuple[Interval, ...]:
    """Cuts 0..extent in proportion to `weights`, whole numbers, largest remainder first (ties: the earlier).

    shares(10, (1, 1, 1)) → ((0, 4), (4, 7), (7, 10)). A share can be empty when there are more parts than rows.
    """
    total = sum(weights)
    exact = [extent * weight / total for weight in weights]
    counts = [math.floor(value) for value in exact]
    order = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: extent - sum(counts)]:
        counts[i] += 1
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
