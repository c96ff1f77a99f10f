"""The genetic algorithm NSGA-II over chromosomes (encoded plans).

Method: Deb, Pratap, Agarwal and Meyarivan, "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II" (2002),
sections III and VI-A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler_strategies.genetic.encoding import Encoding, Genes

Array = NDArray[np.float64]
Evaluate = Callable[[Genes], tuple[Array, Array]]
"""A function from plans to their objectives and their violations of a limit.

Plans have the shape (plans, layers), objectives (plans, objectives), and violations (plans,). A violation of 0 or less
means that the plan keeps the limit.
"""

MAX_MATING_ROUNDS = 8
"""Number of attempts in a generation to create enough plans that were not evaluated before."""


@dataclass(frozen=True)
class EvolutionSettings:
    """Settings of the genetic algorithm.

    Attributes:
        population: Number of plans of a generation.
        generations: Number of generations, including the first.
        mutation: Probability that a child is mutated.
        crossover: Probability that a child has two parents.
    """

    population: int
    generations: int
    mutation: float
    crossover: float


@dataclass(frozen=True)
class ParetoRows:
    """Plans that no other plan dominates. If all exceed the memory limit: the plan that exceeds it least.

    Attributes:
        rows: The plans, of shape (plans, layers).
        objectives: Their objectives, of shape (plans, objectives).
        violations: How much each plan exceeds the limit, shape (plans,); 0 or less if it keeps the limit.
        evaluations: Number of plans that were evaluated.
        interrupted: True if Ctrl-C stopped the search.
    """

    rows: Genes
    objectives: Array
    violations: Array
    evaluations: int
    interrupted: bool = False


def evolve(
    encoding: Encoding,
    evaluate: Evaluate,
    settings: EvolutionSettings,
    seeds: Genes,
    rng: np.random.Generator,
    progress: Callable[[int, int], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> ParetoRows:
    """Return the Pareto front that a genetic search finds.

    Ctrl-C ends the search with the result of the last complete generation. In the first generation, it raises
    KeyboardInterrupt.

    Args:
        encoding: Encoding of plans as chromosomes.
        evaluate: Function that returns the objectives and the violations of plans.
        settings: Settings of the genetic algorithm.
        seeds: Plans of the first generation, shape (plans, layers). Random plans are added.
        rng: Source of the random numbers.
        progress: Called after each generation with its number and the number of plans in the front.
        is_stopped: Called after each generation; the search ends if it returns True.
    """
    genes = _first_population(encoding, settings.population, seeds, rng)
    population = _survive(_Population.of(genes, *evaluate(encoding.decode(genes))), settings.population)
    mating, evaluations = _Mating(encoding, settings, rng), len(genes)
    best = _best_rows(encoding, population, evaluations)
    try:
        progress(1, len(best.rows))
        for generation in range(2, settings.generations + 1):
            if is_stopped() or not len(genes := mating.make_children(population)):
                break
            children = _Population.of(genes, *evaluate(encoding.decode(genes)))
            evaluations += len(genes)
            population = _survive(population.joined_with(children), settings.population)
            best = _best_rows(encoding, population, evaluations)
            progress(generation, len(best.rows))
    except KeyboardInterrupt:
        return replace(best, interrupted=True)
    return best


def _first_population(encoding: Encoding, count: int, seeds: Genes, rng: np.random.Generator) -> Genes:
    """Return `count` different chromosomes: of the plans `seeds`, and of random plans."""
    genes = encoding.sample(rng, count)
    if len(seeds):
        genes = np.concatenate((encoding.encode(seeds), genes))
    return genes[_take_new(encoding.decode(genes), set())][:count]


def _take_new(rows: NDArray[Any], known: set[bytes]) -> list[int]:
    """Return the positions of the rows that are not in `known` (bytes of rows), and add these rows to `known`."""
    positions = []
    for i, row in enumerate(np.ascontiguousarray(rows)):
        key = row.tobytes()
        if key not in known:
            known.add(key)
            positions.append(i)
    return positions


@dataclass(frozen=True)
class _Population:
    """Chromosomes with the values of their plans.

    Attributes:
        genes: The chromosomes, shape (plans, genes).
        objectives: Objectives of the plans, shape (plans, objectives).
        violations: How much each plan exceeds the limit, shape (plans,); 0 if it keeps the limit.
        crowding: Distance of each plan to its neighbours in the front (crowding distance), shape (plans,).
    """

    genes: Genes
    objectives: Array
    violations: Array
    crowding: Array

    @staticmethod
    def of(genes: Genes, objectives: Array, violations: Array) -> _Population:
        # Adding 0.0 turns −0.0 into 0.0, which has other bytes.
        return _Population(genes, objectives + 0.0, np.maximum(violations, 0.0), np.zeros(len(genes)))

    def __getitem__(self, positions: list[int] | NDArray[np.intp]) -> _Population:
        return _Population(*(getattr(self, item.name)[positions] for item in fields(self)))

    def joined_with(self, other: _Population) -> _Population:
        return _Population(
            *(np.concatenate((getattr(self, item.name), getattr(other, item.name))) for item in fields(self))
        )


def _survive(population: _Population, count: int) -> _Population:
    """Return at most `count` plans for the next generation.

    Plans that keep the limit come first: all of the first front, then all of the second, and so on. From the last front
    for which there is place, those with the largest crowding distance are taken. Plans that exceed the limit follow in
    the order of their violations. Of plans with equal objectives, only the first is kept, because many of them would
    displace others.
    """
    population = population[_take_new(population.objectives, set())]
    is_allowed = population.violations == 0
    exceeding = np.argsort(population.violations, kind="stable")[np.count_nonzero(is_allowed) :]
    crowding, survivors = np.zeros(len(is_allowed)), np.empty(0, np.intp)
    for front in _find_fronts(population.objectives, np.flatnonzero(is_allowed), count):
        crowding[front] = _crowding_distances(population.objectives[front])
        survivors = np.concatenate((survivors, front[np.argsort(-crowding[front], kind="stable")]))
    survivors = np.concatenate((survivors, exceeding))[:count]
    return replace(population, crowding=crowding)[survivors]


def _has_better_objective(plans: Array, others: Array) -> NDArray[np.bool_]:
    """Return True for each plan that is better than the other one in at least one objective.

    The last axis of both arrays are the objectives.
    """
    return np.asarray((plans < others).any(axis=-1))


def _find_fronts(objectives: Array, positions: NDArray[np.intp], count: int) -> Iterator[NDArray[np.intp]]:
    """Yield the fronts of plans until they have at least `count` plans together.

    No plan of a front dominates another one of the same or of an earlier front.

    Args:
        objectives: Objectives of all plans, shape (plans, objectives).
        positions: Positions of the plans to sort into fronts.
        count: Number of plans that are needed.
    """
    values = objectives[positions]
    is_better = _has_better_objective(values[:, None], values)
    dominates = is_better & ~is_better.T
    dominators: NDArray[np.intp] = dominates.sum(axis=0)
    while len(positions) and count > 0:
        is_front = np.asarray(dominators == 0)
        yield positions[is_front]
        count -= int(is_front.sum())
        dominators = (dominators - dominates[is_front].sum(axis=0))[~is_front]
        positions, dominates = positions[~is_front], dominates[~is_front][:, ~is_front]


def _crowding_distances(objectives: Array) -> Array:
    """Return the crowding distance of each plan of a front, shape (plans,); infinite for the ends of the front.

    The distance is the sum over the objectives of the difference between the next larger and the next smaller value in
    the front, divided by the range of the objective.
    """
    order = np.argsort(objectives, axis=0, kind="stable")
    ordered = np.take_along_axis(objectives, order, axis=0)
    gaps = np.full(objectives.shape, np.inf)
    gaps[1:-1] = ordered[2:] - ordered[:-2]
    distances = np.empty_like(gaps)
    np.put_along_axis(distances, order, gaps / np.maximum(ordered[-1] - ordered[0], np.finfo(float).tiny), axis=0)
    total: Array = distances.sum(axis=1)
    return total


def _best_rows(encoding: Encoding, population: _Population, evaluations: int) -> ParetoRows:
    """Return the first front of a population, sorted by objectives.

    If all plans exceed the limit, the plan with the smallest violation is returned.
    """
    allowed = np.flatnonzero(population.violations == 0)
    front = next(_find_fronts(population.objectives, allowed, 1), np.argsort(population.violations, kind="stable")[:1])
    best = population[front[np.lexsort(population.objectives[front].T[::-1])]]
    return ParetoRows(encoding.decode(best.genes), best.objectives, best.violations, evaluations)


class _Mating:
    """Tournaments select parents; crossover and mutation create new plans."""

    def __init__(self, encoding: Encoding, settings: EvolutionSettings, rng: np.random.Generator) -> None:
        self.encoding, self.settings, self.rng = encoding, settings, rng
        self.known: set[bytes] = set()

    def make_children(self, population: _Population) -> Genes:
        """Return as many new chromosomes as a generation has, or fewer if not enough new plans are found."""
        _take_new(self.encoding.decode(population.genes), self.known)
        children = population.genes[:0]
        for _ in range(MAX_MATING_ROUNDS):
            missing = self.settings.population - len(children)
            if not missing:
                break
            mothers, fathers = (population.genes[self._select_parents(population, missing)] for _ in range(2))
            offspring = self._make_children(mothers, fathers)
            offspring = offspring[_take_new(self.encoding.decode(offspring), self.known)]
            children = np.concatenate((children, offspring))
        return children

    def _select_parents(self, population: _Population, count: int) -> NDArray[np.intp]:
        """Return the positions of the winners of `count` tournaments between two random plans.

        If a plan exceeds the limit, the smaller violation wins. Otherwise a plan wins that dominates the other, or if
        none does, the plan with the larger crowding distance. Equally good plans draw lots.
        """
        pairs = self.rng.integers(0, len(population.genes), (count, 2))
        objectives, violations = population.objectives[pairs], population.violations[pairs]
        is_better = _has_better_objective(objectives, objectives[:, ::-1])
        is_undecided = is_better[:, :1] == is_better[:, 1:]
        scores = np.where(is_undecided, population.crowding[pairs], is_better)
        scores = np.where(violations.any(axis=1, keepdims=True), -violations, scores)
        # The order within a pair is random, so the first plan may win if the scores are equal.
        winners: NDArray[np.intp] = pairs[np.arange(count), scores.argmax(axis=1)]
        return winners

    def _make_children(self, mothers: Genes, fathers: Genes) -> Genes:
        """Return one child of each pair of parents. A child that equals its mother is mutated."""
        crossed = self.rng.random(len(mothers)) < self.settings.crossover
        children = np.where(crossed[:, None], self.encoding.cross(self.rng, mothers, fathers), mothers)
        mutated = (self.rng.random(len(mothers)) < self.settings.mutation) | (children == mothers).all(axis=1)
        if self.settings.mutation > 0:
            children = np.where(mutated[:, None], self.encoding.mutate(self.rng, children), children)
        return children


def select_spread(objectives: Array, count: int) -> list[int]:
    """Return the positions of `count` points with very different objectives, in ascending order.

    After the best point in each objective, the point farthest from all selected points is added repeatedly.
    `objectives` has the shape (points, objectives).
    """
    if len(objectives) <= count:
        return list(range(len(objectives)))
    low, high = objectives.min(axis=0), objectives.max(axis=0)
    # Distances are relative to the range of each objective.
    scaled = (objectives - low) / np.where(high > low, high - low, 1.0)
    chosen = list(dict.fromkeys(int(i) for i in scaled.argmin(axis=0)))[:count]
    distance = np.min([np.linalg.norm(scaled - scaled[i], axis=1) for i in chosen], axis=0)
    while len(chosen) < count:
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(scaled - scaled[chosen[-1]], axis=1))
    return sorted(chosen)
