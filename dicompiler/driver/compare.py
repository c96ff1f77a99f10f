"""Strategies side by side: each one's plan for the same problem, evaluated by the same simulator.

Problem + strategies → Comparison: metrics, search times, the bound, and what holds the best plan back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dicompiler.base.errors import DicompilerError
from dicompiler.driver.summary import bottleneck
from dicompiler.ir.metrics import LossMetrics, Metrics
from dicompiler.ir.plan import Plan
from dicompiler.plugin.registry import registry
from dicompiler.search.losses import Survive, loss_metrics
from dicompiler.search.lower_bounds import bound
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.search.survival import surviving


@dataclass(frozen=True)
class Row:
    """What one strategy came to. seconds: of its search. error: why it has no plan that can be carried out ('' where it
    has). losses: what its plans for losses come to, see `search.losses.loss_metrics`."""

    strategy: str
    seconds: float
    plan: Plan | None = None
    metrics: Metrics | None = None
    error: str = ""
    losses: tuple[LossMetrics, ...] = ()

    @property
    def worst(self) -> LossMetrics | None:
        """The loss with which a frame takes longest; None where none is covered."""
        return max(self.losses[1:], key=lambda loss: loss.metrics.latency_s, default=None)


@dataclass(frozen=True)
class Comparison:
    """rows: in the order in which the strategies were given. single: the best single device. bound: what no plan can
    beat, None where the objective has no bound."""

    problem: Problem
    rows: tuple[Row, ...]
    single: Metrics
    bound: float | None

    @property
    def best(self) -> Row | None:
        """The row with the least value of the objective, the first of equals; None where no strategy has a plan."""
        planned = [row for row in self.rows if row.metrics is not None]
        return min(planned, key=lambda row: self.value(row), default=None)

    def value(self, row: Row) -> float:
        """The row's value of the objective."""
        assert row.metrics is not None
        return row.metrics.value(self.problem.objective)

    @property
    def binding(self) -> str:
        """What holds the best plan back, in words: a device, a line, or waiting."""
        best, problem = self.best, self.problem
        if best is None or best.metrics is None:
            return ""
        return bottleneck(problem.platform, best.metrics, problem.objective)[1]


def compare(
    problem: Problem,
    strategies: Mapping[str, Strategy],
    tell: Callable[[str], None] | None = None,
    survive: int | str | Survive = 0,
) -> Comparison:
    """Every strategy's plan, simulated; `tell` is told whose turn it is. One that fails is a row with an error.
    survive: the losses that each is to have plans for, see `driver.compiler.compile`."""
    wanted = Survive.of(survive)
    wanted.check(problem.platform)
    rows = []
    for name, strategy in strategies.items():
        if tell is not None:
            tell(name)
        rows.append(_row(problem, name, registry().adopt("strategies", strategy), wanted))
    return Comparison(problem, tuple(rows), problem.alone[1], bound(problem))


def _row(problem: Problem, name: str, strategy: Strategy, survive: Survive) -> Row:
    start = time.perf_counter()
    try:
        plan = strategy.plan(problem)
        seconds = time.perf_counter() - start
        strategy.check_feasible(problem, plan)
        if survive:
            plan = surviving(problem, strategy, plan, survive)
            seconds = time.perf_counter() - start
        return Row(name, seconds, plan, problem.evaluate(plan), losses=loss_metrics(problem, plan))
    except DicompilerError as error:
        return Row(name, time.perf_counter() - start, error=str(error))
