"""The genetic algorithm NSGA-II over chromosomes (encoded plans).

Method: Deb, Pratap, Agarwal and Meyarivan, "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II" (2002),
sections III and VI-A. In addition, only one of several plans with equal objectives is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
        mutation: Probability that a child is mutated. If it is not 0, children that equal their mother always are.
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
        violations: How much each plan exceeds the limit, shape (plans,); 0 if it keeps the limit.
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
    mating, evaluations, interrupted = _Mating(encoding, settings, rng, genes), len(genes), False
    try:
        progress(1, population.front_size)
        for generation in range(2, settings.generations + 1):
            if is_stopped() or not len(genes := mating.make_children(population)):
                break
            children = _Population.of(genes, *evaluate(encoding.decode(genes)))
            population = _survive(population.joined_with(children), settings.population)
            evaluations += len(genes)
            progress(generation, population.front_size)
    except KeyboardInterrupt:
        interrupted = True
    front = population[: population.front_size]
    front = front[np.lexsort(front.objectives.T[::-1])]
    return ParetoRows(encoding.decode(front.genes), front.objectives, front.violations, evaluations, interrupted)


def _first_population(encoding: Encoding, count: int, seeds: Genes, rng: np.random.Generator) -> Genes:
    """Return up to `count` chromosomes of different plans: first those of `seeds`, then random ones."""
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
        front_size: Number of plans at the beginning that are the Pareto front; 1 if all plans exceed the limit. It is
            0 until `_survive` has sorted the plans.
    """

    genes: Genes
    objectives: Array
    violations: Array
    front_size: int = 0

    @staticmethod
    def of(genes: Genes, objectives: Array, violations: Array) -> _Population:
        # Objectives are compared by their bytes, and those of −0.0 and 0.0 differ.
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

    Plans that keep the limit come first: those of the first front, then those of the second, and so on, and within a
    front those with the largest crowding distances. Plans that exceed the limit follow in the order of their
    violations. Only one of several plans with equal objectives is kept, because copies would displace other plans.
    """
    population = population[np.argsort(population.violations, kind="stable")]
    population = population[_take_new(population.objectives, set())]
    allowed = int(np.count_nonzero(population.violations == 0))
    fronts = _find_fronts(population.objectives[:allowed], count)
    ordered = [front[np.argsort(-_crowding_distances(population.objectives[front]), kind="stable")] for front in fronts]
    survivors = population[np.concatenate((*ordered, np.arange(allowed, len(population))))[:count]]
    return replace(survivors, front_size=min(count, len(ordered[0])) if ordered else 1)


def _find_fronts(objectives: Array, count: int) -> Iterator[NDArray[np.intp]]:
    """Yield the fronts, as positions of plans, until they have at least `count` plans together.

    No plan of a front dominates another one of the same or of an earlier front. A plan dominates another one if it is
    better in an objective and worse in none.

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
    """Return the crowding distance of each plan of a front, shape (plans,); infinite for the ends of the front.

    The distance is the sum over the objectives of the difference between the next larger and the next smaller value in
    the front, divided by the range of the objective. Objectives with equal values do not count.
    """
    objectives = objectives[:, np.ptp(objectives, axis=0) > 0]
    order = np.argsort(objectives, axis=0, kind="stable")
    ordered = np.take_along_axis(objectives, order, axis=0)
    gaps = np.full(objectives.shape, np.inf)
    gaps[1:-1] = (ordered[2:] - ordered[:-2]) / (ordered[-1] - ordered[0])
    distances = np.empty_like(gaps)
    np.put_along_axis(distances, order, gaps, axis=0)
    return np.asarray(distances.sum(axis=1))


def _run_tournaments(rng: np.random.Generator, plans: int, shape: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the winners of tournaments, as an array of this shape: each is the better one of two random plans.

    `plans` is the number of plans. They are numbered from the best one (0) to the worst.
    """
    return np.asarray(rng.integers(0, plans, (*shape, 2), np.intp).min(axis=-1))


class _Mating:
    """Tournaments select parents; crossover and mutation create new plans.

    Args:
        encoding: Encoding of plans as chromosomes.
        settings: Settings of the genetic algorithm.
        rng: Source of the random numbers.
        first: Chromosomes of the first generation, which are not created again.
    """

    def __init__(self, encoding: Encoding, settings: EvolutionSettings, rng: np.random.Generator, first: Genes) -> None:
        self.encoding, self.settings, self.rng = encoding, settings, rng
        self.known: set[bytes] = set()
        _take_new(encoding.decode(first), self.known)

    def make_children(self, population: _Population) -> Genes:
        """Return as many new chromosomes as a generation has, or fewer if not enough new plans are found.

        `population` has the best plans first.
        """
        children = population.genes[:0]
        for _ in range(MAX_MATING_ROUNDS):
            missing = self.settings.population - len(children)
            if not missing:
                break
            mothers, fathers = population.genes[_run_tournaments(self.rng, len(population), (2, missing))]
            offspring = self._make_children(mothers, fathers)
            offspring = offspring[_take_new(self.encoding.decode(offspring), self.known)]
            children = np.concatenate((children, offspring))
        return children

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
