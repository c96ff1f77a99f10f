"""The strategy `cpsat`: choose how to split each layer, for all layers at once, exactly if possible."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from dicompiler.plugin_api import Plan, Problem, Strategy, UsageError
from dicompiler.plugin_api.search import DEFAULT_BUDGET_S, INTERRUPTED_NOTE, WorkBudget
from dicompiler_strategies.candidate_search import CandidateSearch, EvaluatedPlan
from dicompiler_strategies.tables.choices import MERGE_KINDS, ROW_CUTS, SHARE_KINDS, SPLIT_KINDS, ChoiceSet
from dicompiler_strategies.tables.cost_tables import CostTables, build_cost_tables

if TYPE_CHECKING:
    from dicompiler_strategies.joint.solve import JointSolution

log = logging.getLogger("dicompiler")
DEFAULT_TRIES = 200
MAX_GRADIENT_SIZE = 2_000
"""Largest problem (number of layers · number of devices) for which `cpsat` also tries the plans of `gradient`.

Up to this size, `gradient` takes only a few seconds.
"""
GRADIENT_SHARE = 0.3
"""Fraction of the remaining budget that `cpsat` may use for the plans of `gradient`."""


@dataclass(frozen=True)
class CpSat(Strategy):
    """One choice of split for each layer, optimised over all layers at once, with a proven lower bound.

    A layer can be split into height tiles or a grid of tiles, by output channels (LOP) or by input channels (LIP, which
    gives partial sums), or together with other layers (fused tiles), in each case over several numbers of devices.

    The log states the value of the plan and the lower bound. The bound is valid for all plans of these choices, in a
    model in which a layer begins when all devices have finished the layer before. The memory of the hosts is a hard
    limit. Equal options give equal plans.
    """

    name: ClassVar[str] = "cpsat"
    time: float = field(
        default=10.0, metadata={"help": "limit of the work of the solver CP-SAT, in its deterministic seconds"}
    )
    workers: int = field(default=2, metadata={"help": "search workers of CP-SAT"})
    seed: int = field(default=0, metadata={"help": "random seed of CP-SAT"})
    kinds: tuple[str, ...] = field(default=SPLIT_KINDS, metadata={"help": "kinds of splits"})
    device_counts: tuple[int, ...] = field(
        default=(), metadata={"help": "numbers of devices to split over; by default 2 and up"}
    )
    extra_rows: int = field(default=4, metadata={"help": "largest number of extra rows on each side of a tile"})
    shares: tuple[str, ...] = field(
        default=SHARE_KINDS, metadata={"help": "how much each device computes: equal shares, by rate, by memory"}
    )
    row_cuts: tuple[str, ...] = field(
        default=ROW_CUTS, metadata={"help": "where borders between the rows of devices are placed"}
    )
    merges: tuple[str, ...] = field(
        default=MERGE_KINDS,
        metadata={"help": "how partial sums are added up: on one device, by channels, by rows, on all"},
    )
    simulate: bool = field(
        default=True, metadata={"help": "for latency, let the simulator choose among several more plans"}
    )
    tries: int = field(
        default=DEFAULT_TRIES, metadata={"help": "plans to try around the best one; 0: none, and no plans of gradient"}
    )
    budget: float = field(
        default=DEFAULT_BUDGET_S, metadata={"help": "limit of the search's work, in seconds of a reference computer"}
    )

    def __post_init__(self) -> None:
        if not self.time > 0:
            raise UsageError(f"cpsat: time is {self.time:g}: use more than 0 deterministic seconds")
        if self.workers < 1:
            raise UsageError(f"cpsat: workers is {self.workers}: use at least 1")
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"cpsat: seed is {self.seed}: use 0 to 2147483647")
        if self.tries < 0:
            raise UsageError(f"cpsat: tries is {self.tries}: use 0 or more")
        if not self.budget > 0:
            raise UsageError(f"cpsat: budget is {self.budget:g}: use more than 0 s")
        self.choice_set()  # Raises an error for invalid options.

    def choice_set(self) -> ChoiceSet:
        return ChoiceSet(self.kinds, self.device_counts, self.extra_rows, self.shares, self.row_cuts, self.merges)

    def plan(self, problem: Problem) -> Plan:
        """Return the best plan found.

        In the solver's cost tables, sending and computing never overlap. With `simulate` and the objective latency, the
        simulator therefore selects the best of these plans:

        - the solver's plan, and the plan on the best single device,
        - the optima of the tables with shorter sending times,
        - the plans that `gradient` finds in the tables,
        - small changes of these plans.

        Raises:
            DicompilerError: No plan fits into memory.
        """
        return self.plan_within(problem, WorkBudget(self.budget))

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        return self.plan_over_tables(self.build_tables(problem, budget), budget).plan

    def plan_over_tables(self, cost_tables: CostTables, budget: WorkBudget | None = None) -> EvaluatedPlan:
        """Return the best plan whose splits are in the cost tables. Ctrl-C returns the best plan so far."""
        problem, budget = cost_tables.problem, budget or WorkBudget(self.budget)
        solution = self.solve(cost_tables, budget)
        search = CandidateSearch(problem, self.name, budget)
        interrupted = solution.interrupted
        try:
            # The simulator may find the plan of the best single device better than the optimum of the less exact
            # tables.
            single = problem.best_single_device[0]
            search.try_plans([(solution.plan, self.name), (single, self.name)], ignores_budget=True)
            if self.simulate and problem.objective == "latency" and problem.model is not None and not interrupted:
                search.try_optima(cost_tables)
                if self.tries and not budget.is_exceeded():
                    selections = find_gradient_selections(cost_tables, budget)
                    search.try_plans((cost_tables.plan(selection), "gradient") for selection in selections)
                search.try_neighbours(cost_tables, self.tries, self.seed)
                search.trim()
        except KeyboardInterrupt:
            log.warning("cpsat: interrupted: this is the best plan so far (press Ctrl-C again to end the command)")
            interrupted = True
        best = search.best or EvaluatedPlan(solution.plan, problem.estimate(solution.plan), self.name)
        note = INTERRUPTED_NOTE if interrupted else budget.note()
        return replace(best, plan=replace(best.plan, note=note), found_by=self.name)

    def solve(self, cost_tables: CostTables, budget: WorkBudget | None = None) -> JointSolution:
        """Return the best plan by the cost tables, with a lower bound on the objective of all plans in the tables."""
        from dicompiler_strategies.joint.cpsat_solver import SolverEffort
        from dicompiler_strategies.joint.solve import solve_jointly

        solution = solve_jointly(cost_tables, SolverEffort(self.time, self.workers, self.seed, budget or WorkBudget()))
        log.info("cpsat: %s", solution.text())
        return solution

    def build_tables(self, problem: Problem, budget: WorkBudget | None = None) -> CostTables:
        """Return the cost tables of the requested ways to split layers, or of fewer ways.

        Args:
            problem: The problem.
            budget: Budget of the search; filling the tables may take about half of it.
        """
        budget = budget or WorkBudget()
        return build_cost_tables(problem, self.affordable_choices(problem, budget.limit_s), budget)

    def requested_choices(self, problem: Problem) -> ChoiceSet:
        """Return the ways to split layers that the options allow and that are useful for the objective.

        Extra rows, and several positions for the borders between rows, save time and messages only. For other
        objectives, at most one extra row and one kind of borders are tried.
        """
        options = self.choice_set()
        if problem.objective in ("latency", "communication"):
            return options
        return replace(options, extra_rows=min(self.extra_rows, 1), row_cuts=self.row_cuts[:2][-1:])

    def affordable_choices(self, problem: Problem, seconds: float) -> ChoiceSet:
        """Return the requested ways to split layers, or fewer if their tables need more than half of `seconds`."""
        from dicompiler_strategies.joint.choice_budget import affordable_choices

        return affordable_choices(problem, self.requested_choices(problem), seconds / 2)


def find_gradient_selections(cost_tables: CostTables, budget: WorkBudget) -> list[tuple[int, ...]]:
    """Return the best selections (one way to split each layer) that the strategy `gradient` finds in the tables.

    The result is [] if the problem is larger than MAX_GRADIENT_SIZE.
    """
    from dicompiler_strategies.gradient.strategy import Gradient

    if len(cost_tables.choices) * len(cost_tables.problem.platform.devices) > MAX_GRADIENT_SIZE:
        return []
    with budget.share(GRADIENT_SHARE) as step_budget:
        best = Gradient().search_tables(cost_tables, budget=step_budget)
    if best.interrupted:
        raise KeyboardInterrupt
    return [best.selection, *best.others]
