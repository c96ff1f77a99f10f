"""The strategy `genetic`: a genetic search for the Pareto front, and the front's best plan for the objective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from dicompiler.plugin_api import DicompilerError, Plan, Problem, Strategy
from dicompiler.plugin_api.search import ParetoFront, ProgressCallback, WorkBudget, missing_memory, objective_terms
from dicompiler_strategies.genetic.exploration import ExplorationOptions, explore
from dicompiler_strategies.genetic.quick_plans import add_quick_plans

log = logging.getLogger("dicompiler")
GENERATION_S_PER_PLAN = 1e-4
"""Seconds of the reference computer to create and evaluate a plan of a generation (measured: 5e-6 to 1.6e-4)."""
MIN_GENERATIONS = 20
"""Smallest number of generations of a search; with fewer, its plans are not worth the time."""


@dataclass(frozen=True)
class Genetic(ExplorationOptions, Strategy):
    """AutoDiCE's exploration: NSGA-II over sequences of whole layers.

        conv1 conv2 | conv3 | conv4 fc5     for example on pi03, pi01, pi02

    The genetic algorithm NSGA-II searches in stages, on 2, 4, 8, … devices. It searches for the Pareto front of
    throughput, memory per device and energy per device, or of other objectives. As a strategy, it returns the plan of
    the front that is best for the problem's objective. With encoding=tiles, every layer may be split. The strategy
    `autodice` is the method of the paper without these extensions.
    """

    name: ClassVar[str] = "genetic"

    def front(self, problem: Problem, progress: ProgressCallback | None = None) -> ParetoFront:
        front = explore(problem, self, progress=progress)
        return front if self.as_printed else add_quick_plans(front, problem, progress)

    def plan(self, problem: Problem) -> Plan:
        """Return the best plan for the problem's objective from a Pareto front.

        The front has the terms of this objective as additional axes. Plans that exceed a host's memory are skipped,
        unless all of them do.

        Raises:
            DicompilerError: The search found no plan that fits the hosts' memory.
        """
        return self._search(problem, lambda: False)

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        seconds = GENERATION_S_PER_PLAN * self.population
        generations = min(self.total_generations, int(budget.remaining_s / seconds))
        if generations < min(MIN_GENERATIONS, self.total_generations):
            raise DicompilerError("genetic: the budget is too small for a search: use a larger budget")
        budget.spend(generations * seconds)
        plan = replace(self, generations=generations)._search(problem, lambda: budget.seconds_to_deadline() < 0)
        return replace(plan, note=plan.note or budget.note())

    def _search(self, problem: Problem, should_stop: Callable[[], bool]) -> Plan:
        terms = objective_terms(problem.objective)
        names = (*terms, *(name for name in self.objectives if name not in terms))
        front = explore(problem, replace(self, objectives=names), progress=log.info, should_stop=should_stop)
        plans = [point.plan for point in front.ranked_points(problem.objective)]
        return next((plan for plan in plans if not missing_memory(problem, plan)), plans[0])
