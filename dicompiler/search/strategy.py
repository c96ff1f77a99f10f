"""The base class of all strategies: a strategy turns a Problem into a Plan or a Pareto front of plans."""

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
"""Note in the best plan that a search had found when the user stopped it with Ctrl-C."""


@dataclass(frozen=True)
class Strategy(ABC):
    """Base class of all strategies, which make plans for a Problem.

    A subclass is a frozen dataclass; its fields are the options of the strategy. The first line of its docstring is its
    summary in `dicompiler list strategies`.

    Attributes:
        name: Name of the strategy on the command line.
    """

    name: ClassVar[str]

    @abstractmethod
    def plan(self, problem: Problem) -> Plan:
        """Return a plan for every layer of the problem.

        Args:
            problem: The problem to solve.

        Returns:
            The plan, usually made by `Problem.build_plan`.

        Raises:
            DicompilerError: The strategy finds no plan.
        """

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:  # noqa: ARG002
        """Return a plan for a caller that runs several strategies and refines their best plan.

        Override this method if the strategy can count its work. Omit final refinements, because the caller makes them.
        The default calls `plan` and counts nothing.

        Args:
            problem: The problem to solve.
            budget: Work that the strategy may do. The strategy adds its work to the budget, and stops when the budget
                is exceeded.

        Returns:
            The plan.

        Raises:
            DicompilerError: The strategy finds no plan.
        """
        return self.plan(problem)

    def front(self, problem: Problem, progress: ProgressCallback | None = None) -> ParetoFront:
        """Return plans of which none is better than another in every objective.

        By default, they are only the result of `plan`.

        Args:
            problem: The problem to solve.
            progress: Function that receives progress messages.

        Returns:
            The Pareto front.

        Raises:
            DicompilerError: The strategy finds no plan.
        """
        if progress is not None:
            progress(self.name)
        return build_single_point_front(problem, self.plan(problem))

    def check_feasible(self, problem: Problem, plan: Plan) -> None:
        """Raise DicompilerError if a plan of this strategy cannot run on the problem's platform.

        Args:
            problem: Problem that the plan solves.
            plan: A plan of this strategy.

        Raises:
            DicompilerError: The plan computes on a device without compute, a host has too little memory, or a device
                reads a state (an output of the previous frame) that another device computes.
        """
        check_constraints(problem, plan)

    def own_platform(self) -> Platform | None:
        """Return the platform that the strategy's own input files describe, for use if no platform is named.

        Returns:
            The platform; None if the strategy has no such files.
        """
        return None
