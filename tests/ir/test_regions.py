"""Regions: intersections and bounding boxes compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dicompiler.ir.regions import (
    Region,
    bounding_region,
    contains,
    full_region,
    intersect,
    is_empty,
    region_shape,
    relative_to,
    split_proportionally,
    to_slices,
    volume,
    with_interval,
)

SIDE = 7
INTERVALS = st.tuples(st.integers(0, SIDE), st.integers(0, SIDE)).map(lambda pair: (min(pair), max(pair)))


def regions(count: int) -> st.SearchStrategy[tuple[Region, ...]]:
    """A number of regions of one rank, including empty ones."""
    return st.integers(0, 3).flatmap(lambda rank: st.tuples(*[st.tuples(*[INTERVALS] * rank)] * count))


def elements(region: Region) -> set[tuple[int, ...]]:
    """Return the positions in a region, computed by numpy."""
    marked = np.zeros((SIDE,) * len(region), bool)
    marked[to_slices(region)] = True
    return {tuple(map(int, place)) for place in np.argwhere(marked)}


@given(regions(2))
def test_intersection_contains_exactly_the_common_elements(pair: tuple[Region, Region]) -> None:
    a, b = pair
    common = intersect(a, b)
    assert (set() if common is None else elements(common)) == elements(a) & elements(b)
    assert common == intersect(b, a)
    assert common is None or not is_empty(common)


@given(regions(2))
def test_contained_regions_are_subsets(pair: tuple[Region, Region]) -> None:
    outer, inner = pair
    assert contains(outer, inner) == (elements(inner) <= elements(outer))


@given(regions(3))
def test_bounding_region_is_minimal(three: tuple[Region, ...]) -> None:
    box = bounding_region((None, *three))
    if box is None:
        assert all(map(is_empty, three))
        return
    assert all(contains(box, region) for region in three)
    for axis, (start, stop) in enumerate(box):
        for less in ((start + 1, stop), (start, stop - 1)):
            assert not all(contains(with_interval(box, axis, less), region) for region in three)


@given(regions(3))
def test_bounding_region_is_associative_and_commutative(three: tuple[Region, ...]) -> None:
    a, b, c = three
    assert bounding_region((a, b, c)) == bounding_region((c, a, b)) == bounding_region((bounding_region((a, b)), c))
    assert bounding_region(()) is None


@given(regions(2))
def test_volume_and_shape_count_the_elements(pair: tuple[Region, Region]) -> None:
    region, _ = pair
    assert volume(region) == len(elements(region)) == np.prod(region_shape(region))
    assert is_empty(region) == (volume(region) == 0)
    assert elements(full_region(region_shape(region))) == {
        tuple(map(int, place)) for place in np.ndindex(region_shape(region))
    }


@given(regions(2))
def test_relative_regions_select_the_same_elements(pair: tuple[Region, Region]) -> None:
    origin, other = pair
    region = intersect(origin, other)
    if region is None:
        return
    whole = np.arange(SIDE ** len(origin)).reshape((SIDE,) * len(origin))
    moved = relative_to(region, origin)
    assert np.array_equal(whole[to_slices(origin)][to_slices(moved)], whole[to_slices(region)])
    assert region_shape(moved) == region_shape(region)
    assert relative_to(region, full_region(whole.shape)) == region


def test_rank_0_has_one_element_and_is_not_none() -> None:
    assert (volume(()), is_empty(()), full_region(()), region_shape(())) == (1, False, (), ())
    assert intersect((), ()) == bounding_region([()]) == ()
    assert contains((), ())


@pytest.mark.parametrize("function", [contains, intersect, relative_to])
def test_rejects_regions_of_different_ranks(function: object) -> None:
    with pytest.raises(ValueError, match="zip"):
        function(((0, 2),), ((0, 2), (0, 2)))  # type: ignore[operator]


@given(st.integers(0, 200), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_proportional_intervals_are_rounded_by_less_than_one(extent: int, weights: list[float]) -> None:
    cuts = split_proportionally(extent, weights)
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
    assert cuts[-1][1] == extent
    for (start, stop), weight in zip(cuts, weights, strict=True):
        assert abs(stop - start - extent * weight / sum(weights)) < 1 + 1e-9


def test_equal_weights_differ_by_at_most_one() -> None:
    assert split_proportionally(10, (1, 1, 1)) == ((0, 4), (4, 7), (7, 10))
    assert split_proportionally(2, (1, 1, 1)) == ((0, 1), (1, 2), (2, 2))
