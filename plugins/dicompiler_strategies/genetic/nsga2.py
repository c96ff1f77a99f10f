"""NSGA-II over chromosomes, with selection and survival of pymoo.

Encoding + Evaluate + EvolutionSettings (+ seeds) → ParetoRows: the plans that no other plan dominates
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError
from dicompiler_strategies.genetic.encoding import Encoding, Genes

Array = NDArray[np.float64]
Evaluate = Callable[[Genes], tuple[Array, Array]]
"""Plans (P, L) → objectives (P, M), which are minimised, and violations (P,) of a limit, of which 0 or less is allowed.
"""

MAX_MATING_ROUNDS = 8
"""Number of attempts to find children that are not known yet."""


@dataclass(frozen=True)
class EvolutionSettings:
    """Settings of the evolution.

    Attributes:
        population: Plans of a generation.
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
    """Plans that no other plan dominates; if none keeps the limits, the one that is nearest to them.

    Attributes:
        rows: Plans (P, L).
        objectives: Values (P, M).
        violations: Violations (P,).
        evaluations: Number of evaluated plans.
        interrupted: The search was stopped with Ctrl-C.
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
) -> ParetoRows:
    """Search from the plans `seeds` (S, L) and random plans.

    Ctrl-C ends the search with the result of the last complete generation; in the first generation it is passed on.
    `progress` is called with the generation and the number of plans in the front.
    """
    try:
        from pymoo.algorithms.moo.nsga2 import NSGA2
    except ImportError:
        raise DicompilerError("genetic: pymoo is not installed: run pip install pymoo matplotlib") from None
    from pymoo.core.evaluator import Evaluator
    from pymoo.core.problem import Problem
    from pymoo.problems.static import StaticProblem

    first = _first_population(encoding, settings.population, seeds, rng)
    objectives, limits = evaluate(encoding.decode(first))
    problem = Problem(n_var=first.shape[1], n_obj=objectives.shape[1], n_ieq_constr=1)
    algorithm = NSGA2(
        pop_size=settings.population,
        sampling=first,
        mating=_Mating(encoding, settings, rng),
        eliminate_duplicates=False,
    )
    algorithm.setup(problem, termination=("n_gen", settings.generations + 1), seed=int(rng.integers(2**31)))
    evaluations, best = 0, ParetoRows(encoding.decode(first), objectives, limits, len(first))
    try:
        for generation in range(1, settings.generations + 1):
            offspring = algorithm.ask()
            if offspring is None or not len(offspring):  # All plans within reach are known.
                break
            if generation > 1:
                objectives, limits = evaluate(encoding.decode(offspring.get("X")))
            Evaluator().eval(StaticProblem(problem, F=objectives, G=limits[:, None]), offspring)
            evaluations += len(offspring)
            fresh = _fresh_points(
                objectives, algorithm.pop.get("F") if generation > 1 else np.empty((0, objectives.shape[1]))
            )
            algorithm.tell(infills=offspring[fresh])
            best = _best_rows(encoding, algorithm.opt, evaluations)
            progress(generation, len(best.rows))
    except KeyboardInterrupt:
        return ParetoRows(best.rows, best.objectives, best.violations, best.evaluations, True)
    return best


def _first_population(encoding: Encoding, count: int, seeds: Genes, rng: np.random.Generator) -> Genes:
    """Return the seeds and random chromosomes, without duplicate plans."""
    genes = encoding.sample(rng, count)
    if len(seeds):
        genes = np.concatenate((encoding.encode(seeds), genes))
    return genes[_take_new(encoding.decode(genes), set())][:count]


def _take_new(rows: NDArray[Any], known: set[bytes]) -> list[int]:
    """Return the positions of rows that are not known yet, and add these rows to the known ones."""
    places = []
    for i, row in enumerate(np.ascontiguousarray(rows)):
        key = row.tobytes()
        if key not in known:
            known.add(key)
            places.append(i)
    return places


def _fresh_points(objectives: Array, known: Array) -> list[int]:
    """Return the positions of new points (P, M); equal ones would crowd out others."""
    return _take_new(objectives + 0.0, {row.tobytes() for row in np.ascontiguousarray(known, float)})


def _best_rows(encoding: Encoding, optimum: Any, evaluations: int) -> ParetoRows:
    """Return the best of the population in the order of the objectives, without equal points."""
    objectives, violations = np.asarray(optimum.get("F"), float), np.asarray(optimum.get("G"), float)[:, 0]
    _, places = np.unique(objectives, axis=0, return_index=True)
    rows = encoding.decode(np.asarray(optimum.get("X"), np.intp)[places])
    return ParetoRows(rows, objectives[places], violations[places], evaluations)


class _Mating:
    """pymoo's mating operator: tournaments, crossover and mutation, without known plans."""

    def __init__(self, encoding: Encoding, settings: EvolutionSettings, rng: np.random.Generator) -> None:
        from pymoo.algorithms.moo.nsga2 import binary_tournament
        from pymoo.operators.selection.tournament import TournamentSelection

        self.encoding, self.settings, self.rng = encoding, settings, rng
        self.known: set[bytes] = set()
        self.selection = TournamentSelection(func_comp=binary_tournament)

    def do(self, problem: Any, population: Any, count: int, **options: Any) -> Any:
        """Return a pymoo population of up to `count` children; fewer, or none, if no new plan is found."""
        from pymoo.core.population import Population

        genes = np.asarray(population.get("X"), np.intp)
        _take_new(self.encoding.decode(genes), self.known)
        children: list[Genes] = []
        for _ in range(MAX_MATING_ROUNDS):
            missing = count - sum(map(len, children))
            if not missing:
                break
            parents = self.selection.do(problem, population, missing, n_parents=2, to_pop=False, **options)
            offspring = self._make_children(genes[parents[:, 0]], genes[parents[:, 1]])
            children.append(offspring[_take_new(self.encoding.decode(offspring), self.known)])
        return Population.new(X=np.concatenate(children))

    def _make_children(self, mothers: Genes, fathers: Genes) -> Genes:
        """Return one child of each pair; a child that equals its mother is mutated."""
        crossed = self.rng.random(len(mothers)) < self.settings.crossover
        children = np.where(crossed[:, None], self.encoding.cross(self.rng, mothers, fathers), mothers)
        mutated = (self.rng.random(len(mothers)) < self.settings.mutation) | (children == mothers).all(axis=1)
        if self.settings.mutation > 0:
            children = np.where(mutated[:, None], self.encoding.mutate(self.rng, children), children)
        return children


def select_spread(objectives: Array, count: int) -> list[int]:
    """Return the positions of `count` points (P, M) that are far apart, in ascending order.

    The best point in each objective comes first, then always the point that is farthest from those selected. Distances
    are relative to the range of each objective.
    """
    if len(objectives) <= count:
        return list(range(len(objectives)))
    low, high = objectives.min(axis=0), objectives.max(axis=0)
    scaled = (objectives - low) / np.where(high > low, high - low, 1.0)
    chosen = list(dict.fromkeys(int(i) for i in scaled.argmin(axis=0)))[:count]
    distance = np.min([np.linalg.norm(scaled - scaled[i], axis=1) for i in chosen], axis=0)
    while len(chosen) < count:
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(scaled - scaled[chosen[-1]], axis=1))
    return sorted(chosen)
