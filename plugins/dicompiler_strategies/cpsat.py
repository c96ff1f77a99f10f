"""The joint problem over the whole layer graph, solved exactly where it can be: elimination, Lagrange, CP-SAT."""

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
"""Layers times devices for which gradient's descent takes some seconds."""


@dataclass(frozen=True)
class CpSat(Strategy):
    """One choice for each layer, all at once, with a proven bound: tiles, grids, LOP, LIP and fusing on m devices.

    Problem → Plan, and a line on the log with its value, the bound, and what the bound holds for: the barrier model
    (see tables.cost_tables) over this choice set. Memory of the hosts is a hard limit. Equal options give equal plans.
    """

    name: ClassVar[str] = "cpsat"
    time: float = field(default=10.0, metadata={"help": "how long CP-SAT works, in its deterministic seconds"})
    workers: int = field(default=2, metadata={"help": "search workers of CP-SAT"})
    seed: int = field(default=0, metadata={"help": "random seed of CP-SAT"})
    kinds: tuple[str, ...] = field(default=SPLIT_KINDS, metadata={"help": "kinds of splits"})
    device_counts: tuple[int, ...] = field(default=(), metadata={"help": "numbers of devices; by default 2 and up"})
    extra_rows: int = field(default=4, metadata={"help": "most extra rows that a tile computes on each side"})
    shares: tuple[str, ...] = field(default=SHARE_KINDS, metadata={"help": "equal shares, by rate, by memory"})
    row_cuts: tuple[str, ...] = field(default=ROW_CUTS, metadata={"help": "where rows are cut"})
    merges: tuple[str, ...] = field(default=MERGE_KINDS, metadata={"help": "how partial sums are merged"})
    simulate: bool = field(default=True, metadata={"help": "let the simulator choose among optima, see candidates.py"})
    tries: int = field(
        default=DEFAULT_TRIES, metadata={"help": "plans to try around the best one and gradient's; 0: neither"}
    )
    budget: float = field(
        default=DEFAULT_BUDGET_S, metadata={"help": "seconds of a common computer that its work may come to"}
    )

    def __post_init__(self) -> None:
        if not self.time > 0:
            raise UsageError(f"cpsat: time is {self.time:g}: give it more than 0 deterministic seconds")
        if self.workers < 1:
            raise UsageError(f"cpsat: workers is {self.workers}: give it at least 1")
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"cpsat: seed is {self.seed}: give it 0 to 2147483647")
        if self.tries < 0:
            raise UsageError(f"cpsat: tries must not be below 0, and is {self.tries}")
        if not self.budget > 0:
            raise UsageError(f"cpsat: budget is {self.budget:g}: give it more than 0 s")
        self.choice_set()

    def choice_set(self) -> ChoiceSet:
        """The choice set that is asked for."""
        return ChoiceSet(self.kinds, self.device_counts, self.extra_rows, self.shares, self.row_cuts, self.merges)

    def plan(self, problem: Problem) -> Plan:
        """The best plan found. Raises DicompilerError where none fits into memory.

        With `rank`, for latency: of the proven optimum, those with cheaper sending, what gradient finds in the same
        tables, and plans around the best of them, the one that the simulator, in which sending goes on beside
        computing, finds best; without what nobody reads of it.
        """
        return self.plan_within(problem, WorkBudget(self.budget))

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        """The same with what is allowed in the place of the budget."""
        return self.plan_over_tables(self.build_tables(problem, budget), budget).plan

    def plan_over_tables(self, cost_tables: CostTables, allowance: WorkBudget | None = None) -> EvaluatedPlan:
        """The same with its metrics, over tables that are there already; nothing more is tried once the allowance is
        over. An interrupt gives the best plan so far."""
        problem, allowance = cost_tables.problem, allowance or WorkBudget(self.budget)
        solution = self.solve(cost_tables, allowance)
        search = CandidateSearch(problem, self.name, allowance)
        interrupted = solution.interrupted
        try:
            search.try_plans([(solution.plan, self.name)])
            if self.simulate and problem.objective == "latency" and problem.model is not None and not interrupted:
                search.try_optima(cost_tables)
                if self.tries and not allowance.is_exceeded():
                    selections = find_gradient_selections(cost_tables, allowance)
                    search.try_plans((cost_tables.plan(selection), "gradient") for selection in selections)
                search.try_neighbours(cost_tables, self.tries, self.seed)
                search.trim()
        except KeyboardInterrupt:
            log.warning("cpsat: interrupted: this is the best plan so far (Ctrl-C again ends the command)")
            interrupted = True
        best = search.best or EvaluatedPlan(solution.plan, problem.estimate(solution.plan), self.name)
        note = INTERRUPTED_NOTE if interrupted else allowance.note()
        return replace(best, plan=replace(best.plan, note=note), origin=self.name)

    def solve(self, cost_tables: CostTables, allowance: WorkBudget | None = None) -> JointSolution:
        """The best plan found over the tables, with its bound; the solver stops where the allowance is over."""
        from dicompiler_strategies.joint.cpsat_solver import SolverEffort
        from dicompiler_strategies.joint.solve import solve_jointly

        solution = solve_jointly(
            cost_tables, SolverEffort(self.time, self.workers, self.seed, allowance or WorkBudget())
        )
        log.info("cpsat: %s", solution.text())
        return solution

    def build_tables(
        self, problem: Problem, allowance: WorkBudget | None = None, among: ChoiceSet | None = None
    ) -> CostTables:
        """The tables of the choices that are asked for, or of fewer where those are too many, or would take more than
        about half of what is allowed; `among`: of these. DicompilerError where the allowance is over before."""
        allowance = allowance or WorkBudget()
        return build_cost_tables(problem, among or self.affordable_choices(problem, allowance.limit_s), allowance)

    def requested_choices(self, problem: Problem) -> ChoiceSet:
        """The choice set that is asked for, as the objective has use for it: extra rows save messages, not work; where
        that is no matter there are no more than needed, for the solver's sake."""
        options = self.choice_set()
        if problem.objective in ("latency", "communication"):
            return options
        return replace(options, extra_rows=min(self.extra_rows, 1), row_cuts=self.row_cuts[:2][-1:])

    def affordable_choices(self, problem: Problem, seconds: float) -> ChoiceSet:
        """That set, or the richest of some smaller ones for whose tables half of so many seconds do."""
        from dicompiler_strategies.joint.choice_budget import affordable_choices

        return affordable_choices(problem, self.requested_choices(problem), seconds / 2)


def find_gradient_selections(cost_tables: CostTables, allowance: WorkBudget) -> list[tuple[int, ...]]:
    """The selections that gradient finds best in the tables; none where it would take too long."""
    from dicompiler_strategies.gradient.strategy import Gradient

    if len(cost_tables.choices) * len(cost_tables.problem.platform.devices) > MAX_GRADIENT_SIZE:
        return []
    best = Gradient().search_tables(cost_tables, allowance=allowance)
    if best.interrupted:
        raise KeyboardInterrupt
    return [best.selection, *best.others]
