"""The joint problem over the whole layer graph, solved exactly where it can be: elimination, Lagrange, CP-SAT."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from dicompiler.plugin_api import BUDGET, INTERRUPTED, Allowance, Plan, Problem, Strategy, UsageError
from dicompiler_strategies.candidates import CandidateSearch, Evaluated
from dicompiler_strategies.tables.choices import BASES, FINISHES, KINDS, SHARES, ChoiceSet
from dicompiler_strategies.tables.cost_tables import Tables, tables

if TYPE_CHECKING:
    from dicompiler_strategies.joint.search import JointSolution

log = logging.getLogger("dicompiler")
TRIES = 200
MOST = 2_000
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
    kinds: tuple[str, ...] = field(default=KINDS, metadata={"help": "kinds of splits"})
    counts: tuple[int, ...] = field(default=(), metadata={"help": "numbers of devices; by default 2 and up"})
    extra: int = field(default=4, metadata={"help": "most extra rows that a tile computes on each side"})
    shares: tuple[str, ...] = field(default=SHARES, metadata={"help": "equal shares, by rate, by memory"})
    bases: tuple[str, ...] = field(default=BASES, metadata={"help": "where rows are cut"})
    finishes: tuple[str, ...] = field(default=FINISHES, metadata={"help": "how partial sums are merged"})
    rank: bool = field(default=True, metadata={"help": "let the simulator choose among optima, see candidates.py"})
    tries: int = field(default=TRIES, metadata={"help": "plans to try around the best one and gradient's; 0: neither"})
    budget: float = field(default=BUDGET, metadata={"help": "seconds of a common computer that its work may come to"})

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
        self.options()

    def options(self) -> ChoiceSet:
        """The choice set that is asked for."""
        return ChoiceSet(self.kinds, self.counts, self.extra, self.shares, self.bases, self.finishes)

    def plan(self, problem: Problem) -> Plan:
        """The best plan found. Raises DicompilerError where none fits into memory.

        With `rank`, for latency: of the proven optimum, those with cheaper sending, what gradient finds in the same
        tables, and plans around the best of them, the one that the simulator, in which sending goes on beside
        computing, finds best; without what nobody reads of it.
        """
        return self.plan_within(problem, Allowance(self.budget))

    def plan_within(self, problem: Problem, allowance: Allowance) -> Plan:
        """The same with what is allowed in the place of the budget."""
        return self.evaluated(self.tables(problem, allowance), allowance).plan

    def evaluated(self, cost_tables: Tables, allowance: Allowance | None = None) -> Evaluated:
        """The same with its metrics, over tables that are there already; nothing more is tried once the allowance is
        over. An interrupt gives the best plan so far."""
        problem, allowance = cost_tables.problem, allowance or Allowance(self.budget)
        solution = self.solve(cost_tables, allowance)
        search = CandidateSearch(problem, self.name, allowance)
        interrupted = solution.interrupted
        try:
            search.evaluate([(solution.plan, self.name)])
            if self.rank and problem.objective == "latency" and problem.model is not None and not interrupted:
                search.evaluate_optima(cost_tables)
                if self.tries and not allowance.over():
                    selections = gradient_selections(cost_tables, allowance)
                    search.evaluate((cost_tables.plan(selection), "gradient") for selection in selections)
                search.polish(cost_tables, self.tries, self.seed)
                search.trim()
        except KeyboardInterrupt:
            log.warning("cpsat: interrupted: this is the best plan so far (Ctrl-C again ends the command)")
            interrupted = True
        best = search.best or Evaluated(solution.plan, problem.estimate(solution.plan), self.name)
        note = INTERRUPTED if interrupted else allowance.note()
        return replace(best, plan=replace(best.plan, note=note), origin=self.name)

    def solve(self, cost_tables: Tables, allowance: Allowance | None = None) -> JointSolution:
        """The best plan found over the tables, with its bound; the solver stops where the allowance is over."""
        from dicompiler_strategies.joint.search import solve
        from dicompiler_strategies.joint.solving import Effort

        solution = solve(cost_tables, Effort(self.time, self.workers, self.seed, allowance or Allowance()))
        log.info("cpsat: %s", solution.text())
        return solution

    def tables(self, problem: Problem, allowance: Allowance | None = None, among: ChoiceSet | None = None) -> Tables:
        """The tables of the choices that are asked for, or of fewer where those are too many, or would take more than
        about half of what is allowed; `among`: of these. DicompilerError where the allowance is over before."""
        allowance = allowance or Allowance()
        return tables(problem, among or self.affordable(problem, allowance.seconds), allowance)

    def asked(self, problem: Problem) -> ChoiceSet:
        """The choice set that is asked for, as the objective has use for it: extra rows save messages, not work; where
        that is no matter there are no more than needed, for the solver's sake."""
        options = self.options()
        if problem.objective in ("latency", "communication"):
            return options
        return replace(options, extra=min(self.extra, 1), bases=self.bases[:2][-1:])

    def affordable(self, problem: Problem, seconds: float) -> ChoiceSet:
        """That set, or the richest of some smaller ones for whose tables half of so many seconds do."""
        from dicompiler_strategies.joint.fitting import fitting

        return fitting(problem, self.asked(problem), seconds / 2)


def gradient_selections(cost_tables: Tables, allowance: Allowance) -> list[tuple[int, ...]]:
    """The selections that gradient finds best in the tables; none where it would take too long."""
    from dicompiler_strategies.gradient.strategy import Gradient

    if len(cost_tables.choices) * len(cost_tables.problem.platform.devices) > MOST:
        return []
    best = Gradient().search(cost_tables, allowance=allowance)
    if best.interrupted:
        raise KeyboardInterrupt
    return [best.selection, *best.others]
