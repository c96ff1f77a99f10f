"""Regions: hyper-rectangles of a tensor, in coordinates of the whole tensor.

A region has one half-open interval [start, stop) per axis. The region of a tensor of rank 0 is `()`, which is falsy, so
test regions with `is None`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
Region = tuple[Interval, ...]
Shape = tuple[int, ...]


def full_region(shape: Sequence[int]) -> Region:
    """Return the region of a whole tensor: (2, 3) ⇒ ((0, 2), (0, 3)).

    Args:
        shape: Shape of the tensor.

    Returns:
        One interval per axis, from 0 to the extent of the axis.
    """
    return tuple([(0, extent) for extent in shape])


def region_shape(region: Region) -> Shape:
    """Return the shape of a region: ((1, 4), (0, 2)) ⇒ (3, 2).

    Args:
        region: One half-open interval per axis.

    Returns:
        Number of elements along each axis.
    """
    return tuple([stop - start for start, stop in region])


def volume(region: Region) -> int:
    """Return the number of elements of a region: 1 for rank 0, 0 for an empty region.

    Args:
        region: One half-open interval per axis.

    Returns:
        The number of elements.
    """
    return math.prod([stop - start if stop > start else 0 for start, stop in region])


def is_empty(region: Region) -> bool:
    """Return True if a region has no elements. A region of rank 0 has one element.

    Args:
        region: One half-open interval per axis.

    Returns:
        True if the interval of at least one axis is empty.
    """
    for start, stop in region:  # noqa: SIM110  a generator takes three times as long
        if stop <= start:
            return True
    return False


def contains(outer: Region, inner: Region) -> bool:
    """Return True if all elements of `inner` are in `outer`. An empty region is contained in every region.

    Args:
        outer: Region with one half-open interval per axis.
        inner: Region of the same tensor.

    Returns:
        True if `outer` contains `inner`.
    """
    return is_empty(inner) or all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def intersect(a: Region, b: Region) -> Region | None:
    """Return the intersection of two regions of a tensor, or None if they have no common element.

    Args:
        a: Region with one half-open interval per axis.
        b: Another region of the same tensor.

    Returns:
        The region of the common elements.
    """
    both = []
    for (low, high), (start, stop) in zip(a, b, strict=True):
        low, high = low if low > start else start, high if high < stop else stop
        if low >= high:  # Most pairs of regions are disjoint, so an early return saves time.
            return None
        both.append((low, high))
    return tuple(both)


def bounding_region(regions: Iterable[Region | None]) -> Region | None:
    """Return the smallest region that contains all given regions of a tensor.

    Args:
        regions: Regions of the same tensor. None and empty regions are ignored.

    Returns:
        The bounding box; None if all regions are None or empty.
    """
    present = [region for region in regions if region is not None and not is_empty(region)]
    if len(present) < 2:
        return present[0] if present else None
    return tuple((min(i[0] for i in axis), max(i[1] for i in axis)) for axis in zip(*present, strict=True))


def relative_to(region: Region, origin: Region) -> Region:
    """Return a region in coordinates relative to the start of `origin`: ((5, 7),), ((4, 9),) ⇒ ((1, 3),)."""
    return tuple((start - o[0], stop - o[0]) for (start, stop), o in zip(region, origin, strict=True))


def to_slices(region: Region) -> tuple[slice, ...]:
    """Return the slices that select a region of a NumPy array: `array[to_slices(region)]`."""
    return tuple(slice(start, stop) for start, stop in region)


def with_interval(region: Region, axis: int, interval: Interval) -> Region:
    """Return a region with the interval of one axis replaced.

    Args:
        region: One half-open interval per axis.
        axis: Index of the axis whose interval is replaced.
        interval: New interval of this axis.

    Returns:
        The new region.
    """
    return (*region[:axis], interval, *region[axis + 1 :])


def block_interval(interval: Interval, size: int) -> Interval:
    """Return the range of blocks of `size` elements that an interval overlaps: (5, 9), 4 ⇒ (1, 3)."""
    return interval[0] // size, -(-interval[1] // size)


def split_proportionally(extent: int, weights: Sequence[float]) -> tuple[Interval, ...]:
    """Split the range from 0 to `extent` into consecutive intervals proportional to `weights`.

    Example: `split_proportionally(10, (1, 1, 1))` is ((0, 4), (4, 7), (7, 10)).

    Args:
        extent: Number of elements to distribute.
        weights: Relative length of each interval.

    Returns:
        One interval per weight. Intervals can be empty.
    """
    total = sum(weights)
    # Largest-remainder method: of equal remainders, the earlier interval gets the additional element.
    exact = [extent * weight / total for weight in weights]
    counts = [math.floor(value) for value in exact]
    order = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: extent - sum(counts)]:
        counts[i] += 1
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
