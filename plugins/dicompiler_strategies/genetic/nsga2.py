"""The genetic algorithm NSGA-II over chromosomes (encoded plans).

Method: Deb, Pratap, Agarwal and Meyarivan, "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II" (2002),
sections III and VI-A. In addition, no plan is created twice, and only one of several plans with equal objectives is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler_strategies.genetic.encoding import Encoding, Genes, PlanRows

Array = NDArray[np.float64]
Evaluate = Callable[[PlanRows], tuple[Array, Array]]
"""A function that takes plans, and returns their objectives and their violations of the memory limit.

Plans have the shape (plans, layers), objectives (plans, objectives), and violations (plans,). Objectives are finite,
and smaller ones are better. A violation of 0 or less means that the plan stays within the memory limit.
"""

MAX_MATING_ROUNDS = 8
"""Largest number of mating rounds in a generation. Each round tries to create the plans that are still missing."""


@dataclass(frozen=True)
class EvolutionSettings:
    """Settings of the genetic algorithm.

    Attributes:
        population: Largest number of plans of a generation.
        generations: Number of generations, including the first.
        mutation: Probability that a child is mutated. Children that equal their mother are always mutated, unless the
            probability is 0.
        crossover: Probability that a child has two parents. Otherwise it is a copy of its mother.
    """

    population: int
    generations: int
    mutation: float
    crossover: float


@dataclass(frozen=True)
class EvolvedFront:
    """The plans of the last generation that no other plan dominates.

    Plans that exceed the memory limit do not count. If all exceed it, the result is the plan that exceeds it least.

    Attributes:
        plans: The plans, shape (plans, layers), in ascending order of their objectives (the first objective first).
        objectives: Their objectives, shape (plans, objectives).
        violations: How much each plan exceeds the memory limit, shape (plans,); 0 if it does not.
        evaluations: Number of plans that were evaluated in complete generations.
        interrupted: True if Ctrl-C ended the search. False if `should_stop` ended it.
    """

    plans: PlanRows
    objectives: Array
    violations: Array
    evaluations: int
    interrupted: bool = False


def evolve(
    encoding: Encoding,
    evaluate: Evaluate,
    settings: EvolutionSettings,
    seeds: PlanRows,
    rng: np.random.Generator,
    progress: Callable[[int, int], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> EvolvedFront:
    """Return the Pareto front that a genetic search finds.

    The search ends early if it finds no new plans. Ctrl-C ends it with the result of the last complete generation.
    Before the first generation is complete, Ctrl-C raises KeyboardInterrupt.

    Args:
        encoding: Encoding of plans as chromosomes.
        evaluate: Function that returns the objectives and the violations of plans.
        settings: Settings of the genetic algorithm.
        seeds: Plans of the first generation, shape (plans, layers). Random plans are added if they are too few; if
            they are too many, the last ones are left out.
        rng: Source of the random numbers.
        progress: Called after each generation with its number and the number of plans in the front.
        should_stop: Called before each generation except the first; the search ends if it returns True.
    """
    genes = _first_population(encoding, settings.population, seeds, rng)
    population = _survive(_Population.of(genes, *evaluate(encoding.decode(genes))), settings.population)
    mating, evaluations, interrupted = _Mating(encoding, settings, rng, genes), len(genes), False
    try:
        progress(1, population.front_size)
        for generation in range(2, settings.generations + 1):
            if should_stop() or not len(genes := mating.make_children(population)):
                break
            children = _Population.of(genes, *evaluate(encoding.decode(genes)))
            evaluations += len(genes)
            population = _survive(population.joined_with(children), settings.population)
            progress(generation, population.front_size)
    except KeyboardInterrupt:
        interrupted = True
    front = population[: population.front_size]
    front = front[np.lexsort(front.objectives.T[::-1])]
    return EvolvedFront(encoding.decode(front.genes), front.objectives, front.violations, evaluations, interrupted)


def _first_population(encoding: Encoding, count: int, seeds: PlanRows, rng: np.random.Generator) -> Genes:
    """Return up to `count` chromosomes of different plans: first those of `seeds`, then random ones."""
    genes = encoding.sample(rng, count)
    if len(seeds):
        genes = np.concatenate((encoding.encode(seeds), genes))
    return genes[_take_new(encoding.decode(genes), set())][:count]


def _take_new(rows: NDArray[Any], known: set[bytes]) -> list[int]:
    """Return the positions of the rows that are neither in `known` nor equal to an earlier row.

    `known` contains the bytes of rows; those of the returned rows are added.
    """
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
        violations: How much each plan exceeds the memory limit, shape (plans,); 0 if it does not.
        front_size: The first `front_size` plans are the Pareto front or, if all plans exceed the memory limit, the plan
            that exceeds it least. It is 0 until `_survive` has sorted the plans.
    """

    genes: Genes
    objectives: Array
    violations: Array
    front_size: int = 0

    @staticmethod
    def of(genes: Genes, objectives: Array, violations: Array) -> _Population:
        # Adding 0.0 turns −0.0 into 0.0: `_take_new` compares bytes, which differ between the two.
        return _Population(genes, objectives + 0.0, np.maximum(violations, 0.0))

    def __len__(self) -> int:
        return len(self.genes)

    def __getitem__(self, positions: list[int] | slice | NDArray[np.intp]) -> _Population:
        return _Population(self.genes[positions], self.objectives[positions], self.violations[positions])

    def joined_with(self, other: _Population) -> _Population:
        return _Population(
            np.concatenate((self.genes, other.genes)),
            np.concatenate((self.objectives, other.objectives)),
            np.concatenate((self.violations, other.violations)),
        )


def _survive(population: _Population, count: int) -> _Population:
    """Return at most `count` plans for the next generation, the best first.

    Plans within the memory limit come first, ordered by their front. Within a front, plans with larger crowding
    distances come first. Plans that exceed the limit follow, those with the smallest violation first. Of several plans
    with equal objectives, only the one with the smallest violation survives, because the others would displace plans
    with other objectives.
    """
    population = population[np.argsort(population.violations, kind="stable")]
    population = population[_take_new(population.objectives, set())]
    within_limit = int(np.count_nonzero(population.violations == 0))
    fronts = _find_fronts(population.objectives[:within_limit], count)
    ordered = [front[np.argsort(-_crowding_distances(population.objectives[front]), kind="stable")] for front in fronts]
    survivors = population[np.concatenate((*ordered, np.arange(within_limit, len(population))))[:count]]
    return replace(survivors, front_size=min(count, len(ordered[0])) if ordered else 1)


def _find_fronts(objectives: Array, count: int) -> Iterator[NDArray[np.intp]]:
    """Yield the fronts, as positions of plans, until they have at least `count` plans together or no plan is left.

    The first front consists of the plans that no other plan dominates. Each further front consists of the plans that
    only plans of earlier fronts dominate. A plan dominates another one if it is better in an objective and worse in
    none.

    Args:
        objectives: Objectives of the plans, shape (plans, objectives).
        count: Number of plans that are needed.
    """
    is_better = np.asarray((objectives[:, None] < objectives).any(axis=2))
    dominates = is_better & ~is_better.T
    dominator_counts = dominates.sum(axis=0)
    while count > 0 and len(front := np.flatnonzero(dominator_counts == 0)):
        yield front
        count -= len(front)
        dominator_counts -= dominates[front].sum(axis=0)
        dominator_counts[front] = -1


def _crowding_distances(objectives: Array) -> Array:
    """Return the crowding distance of each plan of a front, shape (plans,).

    The distance is the sum over the objectives of the difference between the next larger and the next smaller value in
    the front, divided by the range of the objective. It is infinite for plans with the smallest or largest value of an
    objective. An objective in which all plans are equal does not count.
    """
    objectives = objectives[:, np.ptp(objectives, axis=0) > 0]
    order = np.argsort(objectives, axis=0, kind="stable")
    ordered = np.take_along_axis(objectives, order, axis=0)
    gaps = np.full(objectives.shape, np.inf)
    gaps[1:-1] = (ordered[2:] - ordered[:-2]) / (ordered[-1] - ordered[0])
    distances = np.empty_like(gaps)
    np.put_along_axis(distances, order, gaps, axis=0)
    return np.asarray(distances.sum(axis=1))


def _run_tournaments(rng: np.random.Generator, plan_count: int, shape: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the winners of tournaments in an array of shape `shape`: each is the better one of two random plans.

    Plans are numbered from the best one (0) to the worst (plan_count - 1).
    """
    return np.asarray(rng.integers(0, plan_count, (*shape, 2), np.intp).min(axis=-1))


class _Mating:
    """Tournaments select parents; crossover and mutation create new plans. No plan is created twice.

    Args:
        encoding: Encoding of plans as chromosomes.
        settings: Settings of the genetic algorithm.
        rng: Source of the random numbers.
        first: Chromosomes of the first generation.
    """

    def __init__(self, encoding: Encoding, settings: EvolutionSettings, rng: np.random.Generator, first: Genes) -> None:
        self.encoding, self.settings, self.rng = encoding, settings, rng
        self.known: set[bytes] = set()
        _take_new(encoding.decode(first), self.known)

    def make_children(self, population: _Population) -> Genes:
        """Return a generation of chromosomes of new plans, or fewer if not enough are found.

        `population` has the best plans first.
        """
        children = population.genes[:0]
        for _ in range(MAX_MATING_ROUNDS):
            missing = self.settings.population - len(children)
            if not missing:
                break
            mothers, fathers = population.genes[_run_tournaments(self.rng, len(population), (2, missing))]
            offspring = self._cross_and_mutate(mothers, fathers)
            offspring = offspring[_take_new(self.encoding.decode(offspring), self.known)]
            children = np.concatenate((children, offspring))
        return children

    def _cross_and_mutate(self, mothers: Genes, fathers: Genes) -> Genes:
        """Return one child of each pair of parents, with the probabilities of the settings."""
        crossed = self.rng.random(len(mothers)) < self.settings.crossover
        children = np.where(crossed[:, None], self.encoding.cross(self.rng, mothers, fathers), mothers)
        is_mutated = (self.rng.random(len(mothers)) < self.settings.mutation) | (children == mothers).all(axis=1)
        if self.settings.mutation > 0:
            children = np.where(is_mutated[:, None], self.encoding.mutate(self.rng, children), children)
        return children


def select_spread(objectives: Array, count: int) -> list[int]:
    """Return the positions of `count` points that are far apart (all if there are fewer), in ascending order.

    The best point in each objective is selected first. Then the point with the largest distance to its nearest selected
    point is added repeatedly. `objectives` has the shape (points, objectives), and no two points are equal.
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
