"""The strategy `genetic`: the front that the exploration finds, and of it the best plan for the problem's objective."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

from dicompiler.plugin_api import Front, Plan, Problem, Strategy, Tell, memory_lacking, objective_terms
from dicompiler_strategies.genetic.exploring import Options, explore

log = logging.getLogger("dicompiler")


@dataclass(frozen=True)
class Genetic(Options, Strategy):
    """AutoDiCE's exploration: NSGA-II over runs of whole layers, stage by stage on 2, 4, 8, … devices.

    conv1 conv2 | conv3 | conv4 fc5     on pi03, pi01, pi02, for instance; with encoding=tiles every layer may be split

    It searches for the front of throughput, memory per device and energy per device, or of other objectives; as a
    strategy it gives the plan of the front that is best for the objective of the problem.
    """

    name: ClassVar[str] = "genetic"

    def front(self, problem: Problem, tell: Tell | None = None) -> Front:
        """The whole front in the objectives of this strategy."""
        return explore(problem, self, tell=tell)

    def plan(self, problem: Problem) -> Plan:
        """The plan with the least of the problem's objective, whose terms join the others where they are not among
        them; of those that fit, if any does."""
        wanted = objective_terms(problem.objective)
        names = (*wanted, *(name for name in self.objectives if name not in wanted))
        front = explore(problem, replace(self, objectives=names), tell=log.info)
        plans = [point.plan for point in front.ranked(problem.objective)]
        return next((plan for plan in plans if not memory_lacking(problem, plan)), plans[0])
