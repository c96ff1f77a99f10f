"""The default: runs the other strategies, lets the simulator rank their plans, and polishes the best one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dicompiler.choices import ChoiceSet
from dicompiler.errors import DicompilerError
from dicompiler.limits import check
from dicompiler.plan import Plan
from dicompiler.plugins import registry
from dicompiler.problem import Problem, Strategy
from dicompiler.tables import Tables, tables
from dicompiler_strategies.candidates import Weighed, best, family, neighbours, weigh
from dicompiler_strategies.joint.search import fitting

log = logging.getLogger("dicompiler")

STRATEGIES = ("single", "pipeline", "modnn", "dp", "gradient", "cpsat")


@dataclass(frozen=True)
class Auto(Strategy):
    """The best of all strategies' plans by simulation, polished by local search.

    single, pipeline, modnn, dp, gradient, cpsat → simulator → best → other choices for a layer, disturbed optima → …

    The work is the same on every run. Only where the budget runs out before it is done does the plan depend on the
    machine's speed; then its note says so.
    """

    name: ClassVar[str] = "auto"
    budget: float = field(default=30.0, metadata={"help": "seconds after which it takes what it has"})
    tries: int = field(default=40, metadata={"help": "plans to try around the best one"})
    seed: int = field(default=0, metadata={"help": "of the plans that are tried"})
    strategies: tuple[str, ...] = field(default=STRATEGIES, metadata={"help": "whose plans to begin with"})

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"budget must be more than 0 s, not {self.budget:g}")
        if self.tries < 0:
            raise ValueError(f"tries must not be below 0, and is {self.tries}")

    def plan(self, problem: Problem) -> Plan:
        """Raises what the first strategy raised where none has a plan that can be carried out. An interrupt gives the
        best plan so far."""
        search = _Search(problem, self, time.monotonic() + self.budget)
        note = ""
        try:
            search.run()
        except KeyboardInterrupt:
            if search.best is None:
                raise
            note = "the search was interrupted"
        if search.best is None:
            raise search.error or DicompilerError("auto: no strategy has a plan: raise the budget")
        if search.late:
            note = note or f"the search ended after its budget of {self.budget:g} s"
        if note:
            log.warning("auto: %s: this is the best plan so far", note)
        log.info("auto: the best of %d simulated plans is of %s", search.count, search.best.origin)
        return replace(search.best.plan, note=note)


class _Search:
    """The best plan so far, and what is left to try."""

    def __init__(self, problem: Problem, options: Auto, deadline: float) -> None:
        self.problem, self.options, self.deadline = problem, options, deadline
        self.best: Weighed | None = None
        self.error: DicompilerError | None = None
        self.late = False
        self.count = 0
        self.seen: list[Plan] = []

    def run(self) -> None:
        for name, strategy in [(name, registry().make("strategies", name)) for name in self.options.strategies]:
            if self._is_late() and self.best is not None:
                return
            self._strategy(name, strategy)
        made = tables(self.problem, fitting(self.problem, ChoiceSet()))
        for selection in family(made):
            if self._is_late():
                return
            self._weigh(made.plan(selection), "the tables' optimum")
        self._polish(made)

    def _is_late(self) -> bool:
        self.late = self.late or time.monotonic() > self.deadline
        return self.late

    def _strategy(self, name: str, strategy: Strategy) -> None:
        try:
            plan = strategy.plan(self.problem)
            check(self.problem, plan)
        except DicompilerError as error:
            self.error = self.error or error
            log.info("auto: %s has no plan: %s", name, error)
            return
        self._weigh(plan, name)

    def _weigh(self, plan: Plan, origin: str) -> None:
        if plan in self.seen:
            return
        self.seen.append(plan)
        self.count += 1
        before = self.best
        self.best = best(self.problem, (self.best, weigh(self.problem, plan, origin)))
        if self.best is not None and self.best is not before:
            log.info("auto: %s: %s %.4g", origin, self.problem.objective, self.best.value(self.problem))

    def _polish(self, made: Tables) -> None:
        """Tries plans around the best one, if it is one of the tables', and goes on from any that is better."""
        if self.best is None:
            return
        current = made.selection(self.best.plan)
        tried, moves = 0, self._moves(made, current, 0)
        while tried < self.options.tries and current is not None and not self._is_late():
            selection = next(moves, None)
            if selection is None:
                return
            tried += 1
            before = self.best
            self._weigh(made.plan(selection), "local search")
            if self.best is not before:
                current, moves = selection, self._moves(made, selection, tried)

    def _moves(self, made: Tables, selection: tuple[int, ...] | None, step: int) -> Iterator[tuple[int, ...]]:
        return iter(()) if selection is None else neighbours(made, selection, self.options.seed + step)
