"""The base of all strategies: what decides, a Problem in, a Plan or a Pareto front of plans out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.search.constraints import check_constraints
from dicompiler.search.pareto_front import ParetoFront, ProgressCallback, build_single_point_front
from dicompiler.search.problem import Problem
from dicompiler.search.work_budget import WorkBudget

INTERRUPTED_NOTE = "the search was interrupted"
"""The note of a plan that is the best one that a strategy had found when Ctrl-C came."""


@dataclass(frozen=True)
class Strategy(ABC):
    """The base of all strategies. A subclass is a frozen dataclass too: its fields are its options.

    The first line of its docstring is its summary in `dicompiler list strategies`.
    """

    name: ClassVar[str]

    @abstractmethod
    def plan(self, problem: Problem) -> Plan:
        """A plan for every layer of the problem. DicompilerError where there is none."""

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:  # noqa: ARG002
        """A plan for who asks several strategies and goes on from the best of their plans: the work is counted in
        `allowance`, and ends where that is over; what may be done to any plan in the end (its parts in waves) is left
        to who asks. By default the plan of `plan`, whose work nobody counts."""
        return self.plan(problem)

    def front(self, problem: Problem, progress: ProgressCallback | None = None) -> ParetoFront:
        """Plans of which none is better than another in every objective; of a strategy that makes one plan, that one.
        `tell` is told what is being done."""
        if progress is not None:
            progress(self.name)
        return build_single_point_front(problem, self.plan(problem))

    def check_feasible(self, problem: Problem, plan: Plan) -> None:
        """DicompilerError where `plan`, one of this strategy, cannot be carried out (see `check_constraints`); the
        errors of a third party's strategy name it."""
        check_constraints(problem, plan)

    def own_platform(self) -> Platform | None:
        """The platform that the strategy's own input describes, where it does; used if none is given."""
        return None
