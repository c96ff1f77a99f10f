"""The parts of NSGA-II: fronts, crowding distances, survivors, and tournaments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moocore import pareto_rank
from support.budget import examples

from dicompiler_strategies.genetic.encoding import NaiveEncoding
from dicompiler_strategies.genetic.nsga2 import (
    Array,
    EvolutionSettings,
    _crowding_distances,
    _find_fronts,
    _Mating,
    _Population,
    _survive,
)


def population(objectives: Array, violations: Array | None = None) -> _Population:
    """Return a population whose plan i has the gene i."""
    count = len(objectives)
    given = np.zeros(count) if violations is None else violations
    return _Population.of(np.arange(count)[:, None], np.asarray(objectives, float), np.asarray(given, float))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_fronts_are_the_pareto_ranks(count: int, objectives: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 6, (count, objectives)).astype(float)
    fronts = list(_find_fronts(values, np.arange(count), count))
    ranks = pareto_rank(values)
    assert [front.tolist() for front in fronts] == [np.flatnonzero(ranks == k).tolist() for k in range(ranks.max() + 1)]


def test_fronts_end_when_there_are_enough_plans() -> None:
    values = np.array([[3.0], [1.0], [2.0], [0.0]])
    assert [front.tolist() for front in _find_fronts(values, np.array([0, 1, 2]), 2)] == [[1], [2]]


def test_crowding_distance_is_the_range_of_the_neighbours() -> None:
    values = np.array([[0.0, 10.0], [4.0, 0.0], [1.0, 6.0], [3.0, 1.0]])
    infinite = float("inf")
    assert _crowding_distances(values).tolist() == [infinite, infinite, 3 / 4 + 9 / 10, 3 / 4 + 6 / 10]
    assert _crowding_distances(values[:1]).tolist() == [infinite]


def test_survivors_are_fronts_then_spread_plans_then_small_violations() -> None:
    line = [[0.0, 10.0], [1.0, 9.0], [1.5, 8.5], [5.0, 5.0], [10.0, 0.0]]
    dominated, exceeding = [[11.0, 11.0]], [[-1.0, -1.0], [-2.0, -2.0]]
    plans = population(np.array(line + dominated + exceeding + line), np.array([0.0] * 6 + [3.0, 2.0] + [0.0] * 5))

    def survivors(count: int) -> set[int]:
        return {int(gene) for (gene,) in _survive(plans, count).genes}

    assert survivors(2) == {0, 4}
    assert survivors(3) == {0, 3, 4}
    assert survivors(5) == {0, 1, 2, 3, 4}
    assert survivors(6) == {0, 1, 2, 3, 4, 5}
    assert survivors(7) == {0, 1, 2, 3, 4, 5, 7}
    # Plans with equal objectives are the same point.
    assert survivors(20) == set(range(8))


@pytest.mark.parametrize(
    ("objectives", "violations", "crowding", "winners"),
    [
        ([[1, 1], [2, 2]], [0, 0], [0, 9], {0}),
        ([[1, 2], [1, 1]], [0, 0], [9, 0], {1}),
        ([[1, 2], [2, 1]], [0, 0], [1, 2], {1}),
        ([[1, 2], [2, 1]], [0, 0], [1, 1], {0, 1}),
        ([[1, 1], [2, 2]], [1, 0], [9, 0], {1}),
        ([[1, 1], [2, 2]], [2, 1], [9, 0], {1}),
    ],
)
def test_tournament(objectives: list[list[int]], violations: list[int], crowding: list[int], winners: set[int]) -> None:
    """First the smaller violation decides, then domination, then the larger crowding distance, then the draw."""
    plans = population(np.array(objectives), np.array(violations))
    plans.crowding[:] = crowding
    mating = _Mating(NaiveEncoding(1, (0, 1)), EvolutionSettings(2, 1, 0.2, 0.5), np.random.default_rng(0))
    chosen = mating._select_parents(plans, 200)
    # In half of the tournaments, a plan meets itself and wins.
    shares = [0.5 if len(winners) == 2 else 0.75 if plan in winners else 0.25 for plan in range(2)]
    assert np.bincount(chosen, minlength=2) / 200 == pytest.approx(shares, abs=0.1)
