"""The default: runs the other strategies, lets the simulator rank their plans, and polishes the best one."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterable
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
from dicompiler_strategies.joint.fitting import fitting

log = logging.getLogger("dicompiler")

AT_ONCE = 4
"""Plans around the best one that are weighed before going on."""
SLOW = {"dp": 2_000, "gradient": 2_000, "modnn": 20_000}
"""Strategies that are left out where layers times devices are more than that: they would take the whole budget."""
STRATEGIES = ("single", "pipeline", "modnn", "dp", "gradient", "cpsat", "replicate")


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
        """Raises what a strategy raised where none has a plan that can be carried out. An interrupt gives the
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
            raise search.error() or DicompilerError("auto: no strategy has a plan: raise the budget")
        if search.late:
            note = note or f"the search ended after its budget of {self.budget:g} s"
        if note:
            log.warning("auto: %s: this is the best plan so far", note)
        log.info("auto: the best of %d plans is of %s", len(search.seen), search.best.origin)
        return replace(search.best.plan, note=note)


class _Search:
    """The best plan so far, and what is left to try. Plans are weighed a few at a time, the same ones whether there is
    somebody to weigh them at once or not."""

    def __init__(self, problem: Problem, options: Auto, deadline: float) -> None:
        self.problem, self.options, self.deadline = problem, options, deadline
        self.best: Weighed | None = None
        self.errors: dict[str, DicompilerError] = {}
        self.late = False
        self.seen: list[Plan] = []

    def run(self) -> None:
        for name, strategy in [(name, registry().make("strategies", name)) for name in self.options.strategies]:
            if self._is_late() and self.best is not None:
                return
            if len(self.problem.layers.layers) * len(self.problem.platform.devices) > SLOW.get(name, math.inf):
                continue
            self._strategy(name, strategy)
        made = tables(self.problem, fitting(self.problem, ChoiceSet()))
        if not self._is_late():
            self._weigh((made.plan(selection), "the tables' optimum") for selection in family(made))
        self._polish(made)

    def error(self) -> DicompilerError | None:
        """Why there is no plan: cpsat tells most, else the first who told."""
        return self.errors.get("cpsat", next(iter(self.errors.values()), None))

    def _is_late(self) -> bool:
        self.late = self.late or time.monotonic() > self.deadline
        return self.late

    def _strategy(self, name: str, strategy: Strategy) -> None:
        log.info("auto: %s decides", name)
        try:
            plan = strategy.plan(self.problem)
            if not self._weigh([(plan, name)]) and self.best is None:
                check(self.problem, plan)
        except DicompilerError as error:
            self.errors[name] = error
            log.info("auto: %s has no plan: %s", name, error)

    def _weigh(self, plans: Iterable[tuple[Plan, str]]) -> bool:
        """Whether one of the plans is better than the best so far, which it then is."""
        new = []
        for plan, origin in plans:
            if plan not in self.seen:
                self.seen.append(plan)
                new.append((plan, origin))
        before = self.best
        self.best = best(self.problem, [*([before] if before is not None else []), *weigh(self.problem, new)])
        if self.best is None or self.best is before:
            return False
        log.info("auto: %s: %s %.4g", self.best.origin, self.problem.objective, self.best.value(self.problem))
        return True

    def _polish(self, made: Tables) -> None:
        """Tries plans around the best one, if it is one of the tables', and goes on from any that is better."""
        selection = None if self.best is None else made.selection(self.best.plan)
        for step in range(0, self.options.tries, AT_ONCE):
            if self.best is None or selection is None or self._is_late():
                return
            moves = itertools.islice(neighbours(made, selection, self.options.seed + step), AT_ONCE)
            if self._weigh((made.plan(move), "local search") for move in moves):
                selection = made.selection(self.best.plan)
