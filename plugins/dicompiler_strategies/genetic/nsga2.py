"""The genetic algorithm NSGA-II over chromosomes (encoded plans). The library pymoo selects parents and survivors."""

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
    try:
        from pymoo.algorithms.moo.nsga2 import NSGA2
    except ImportError:
        raise DicompilerError("genetic: pymoo is not installed: pip install 'dicompiler[explore]'") from None
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
            # Crossover and mutation have found no new plan.
            if offspring is None or not len(offspring):
                break
            if generation > 1:
                objectives, limits = evaluate(encoding.decode(offspring.get("X")))
            Evaluator().eval(StaticProblem(problem, F=objectives, G=limits[:, None]), offspring)
            evaluations += len(offspring)
            known = algorithm.pop.get("F") if generation > 1 else np.empty((0, objectives.shape[1]))
            algorithm.tell(infills=offspring[_find_new_points(objectives, known)])
            best = _best_rows(encoding, algorithm.opt, evaluations)
            progress(generation, len(best.rows))
            if is_stopped():
                break
    except KeyboardInterrupt:
        return ParetoRows(best.rows, best.objectives, best.violations, best.evaluations, True)
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


def _find_new_points(objectives: Array, known: Array) -> list[int]:
    """Return the positions of rows (objectives of a plan) that are neither in `known` nor equal to an earlier row.

    Only these plans enter the population, because many plans with equal objectives would displace others.
    """
    return _take_new(objectives + 0.0, {row.tobytes() for row in np.ascontiguousarray(known, float)})


def _best_rows(encoding: Encoding, optimum: Any, evaluations: int) -> ParetoRows:
    """Return pymoo's population `optimum` as plans sorted by objectives, one for each point."""
    objectives, violations = np.asarray(optimum.get("F"), float), np.asarray(optimum.get("G"), float)[:, 0]
    _, positions = np.unique(objectives, axis=0, return_index=True)
    rows = encoding.decode(np.asarray(optimum.get("X"), np.intp)[positions])
    return ParetoRows(rows, objectives[positions], violations[positions], evaluations)


class _Mating:
    """Mating operator for pymoo: tournaments select parents; crossover and mutation create new plans."""

    def __init__(self, encoding: Encoding, settings: EvolutionSettings, rng: np.random.Generator) -> None:
        from pymoo.algorithms.moo.nsga2 import binary_tournament
        from pymoo.operators.selection.tournament import TournamentSelection

        self.encoding, self.settings, self.rng = encoding, settings, rng
        self.known: set[bytes] = set()
        self.selection = TournamentSelection(func_comp=binary_tournament)

    def do(self, problem: Any, population: Any, count: int, **options: Any) -> Any:
        """Return a pymoo population of `count` children, or fewer if not enough new plans are found."""
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
