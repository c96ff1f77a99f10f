"""The strategy `genetic`: the front that the exploration finds, and of it the best plan for the problem's objective."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

from dicompiler.plugin_api import Plan, Problem, Strategy
from dicompiler.plugin_api.search import ParetoFront, ProgressCallback, missing_memory, objective_terms
from dicompiler_strategies.genetic.exploration import ExplorationOptions, explore

log = logging.getLogger("dicompiler")


@dataclass(frozen=True)
class Genetic(ExplorationOptions, Strategy):
    """AutoDiCE's exploration: NSGA-II over runs of whole layers, stage by stage on 2, 4, 8, … devices.

    conv1 conv2 | conv3 | conv4 fc5     on pi03, pi01, pi02, for instance; with encoding=tiles every layer may be split

    It searches for the front of throughput, memory per device and energy per device, or of other objectives; as a
    strategy it gives the plan of the front that is best for the objective of the problem.
    """

    name: ClassVar[str] = "genetic"

    def front(self, problem: Problem, progress: ProgressCallback | None = None) -> ParetoFront:
        """The whole front in the objectives of this strategy."""
        return explore(problem, self, progress=progress)

    def plan(self, problem: Problem) -> Plan:
        """The plan with the least of the problem's objective, whose terms join the others where they are not among
        them; of those that fit, if any does."""
        wanted = objective_terms(problem.objective)
        names = (*wanted, *(name for name in self.objectives if name not in wanted))
        front = explore(problem, replace(self, objectives=names), progress=log.info)
        plans = [point.plan for point in front.ranked_points(problem.objective)]
        return next((plan for plan in plans if not missing_memory(problem, plan)), plans[0])
