"""The parts of NSGA-II: fronts, crowding distances, survivors, and tournaments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moocore import pareto_rank
from support.budget import examples

from dicompiler_strategies.genetic.encoding import Genes, NaiveEncoding
from dicompiler_strategies.genetic.nsga2 import (
    Array,
    EvolutionSettings,
    _crowding_distances,
    _find_fronts,
    _Population,
    _run_tournaments,
    _survive,
    evolve,
)


def population(objectives: Array, violations: Array | None = None) -> _Population:
    """Return a population whose plan i has the gene i."""
    count = len(objectives)
    limits = np.zeros(count) if violations is None else violations
    return _Population.of(np.arange(count)[:, None], np.asarray(objectives, float), np.asarray(limits, float))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_fronts_are_the_pareto_ranks(count: int, objectives: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 6, (count, objectives)).astype(float)
    fronts = list(_find_fronts(values, count))
    ranks = pareto_rank(values)
    assert [front.tolist() for front in fronts] == [np.flatnonzero(ranks == k).tolist() for k in range(ranks.max() + 1)]


def test_fronts_end_when_there_are_enough_plans() -> None:
    values = np.array([[3.0], [1.0], [2.0], [0.0]])
    assert [front.tolist() for front in _find_fronts(values, 2)] == [[3], [1]]


def test_crowding_distance_is_the_distance_between_the_neighbours() -> None:
    values = np.array([[0.0, 10.0], [4.0, 0.0], [1.0, 6.0], [3.0, 1.0]])
    infinite = float("inf")
    assert _crowding_distances(values).tolist() == [infinite, infinite, 3 / 4 + 9 / 10, 3 / 4 + 6 / 10]
    # An objective without differences is ignored.
    constant = np.concatenate((values, np.ones((4, 1))), axis=1)
    assert _crowding_distances(constant).tolist() == _crowding_distances(values).tolist()
    assert _crowding_distances(values[:1]).tolist() == [0.0]


def survivors(plans: _Population, count: int) -> list[int]:
    return [int(gene) for (gene,) in _survive(plans, count).genes]


def test_survivors_are_fronts_then_spread_plans_then_small_violations() -> None:
    front = [[0.0, 10.0], [1.0, 9.0], [1.5, 8.5], [5.0, 5.0], [10.0, 0.0]]
    dominated, exceeding = [[11.0, 11.0]], [[-1.0, -1.0], [-2.0, -2.0]]
    plans = population(np.array(front + dominated + exceeding), np.array([0.0] * 6 + [3.0, 2.0]))
    for count in range(1, 9):
        assert survivors(plans, count) == [0, 4, 3, 2, 1, 5, 7, 6][:count]


def test_one_of_several_plans_with_equal_objectives_survives_and_keeps_the_limit() -> None:
    plans = population(np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]), np.array([1.0, 0.0, 0.0]))
    assert survivors(plans, 3) == [1]


def test_search_finds_the_front_and_keeps_the_limit() -> None:
    """With seven layers on two devices, the front has one plan for each number of layers on device 1."""

    def evaluate(plans: Genes) -> tuple[Array, Array]:
        on_second = plans.sum(axis=1).astype(float)
        # At most five layers fit into the memory of device 1.
        return np.stack((on_second, 7.0 - on_second), axis=1), on_second - 5.0

    settings, seen = EvolutionSettings(20, 12, 0.2, 0.5), list[int]()
    found = evolve(
        NaiveEncoding(7, (0, 1)), evaluate, settings, np.empty((0, 7), np.intp), np.random.default_rng(0),
        lambda generation, _: seen.append(generation),
    )  # fmt: skip
    assert found.objectives.tolist() == [[float(k), 7.0 - k] for k in range(6)]
    assert found.violations.tolist() == [0.0] * 6
    assert found.evaluations <= 2**7 and seen == list(range(1, len(seen) + 1))


def test_better_plans_win_more_tournaments() -> None:
    """Plan i of n is the better one of two random plans with the probability (2 (n − i) − 1) / n²."""
    winners = _run_tournaments(np.random.default_rng(0), 4, (4000,))
    assert np.bincount(winners) / 4000 == pytest.approx([7 / 16, 5 / 16, 3 / 16, 1 / 16], abs=0.03)
