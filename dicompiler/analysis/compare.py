"""Strategies side by side: each one's plan for the same problem, evaluated by the same simulator.

Problem + strategies → Comparison: metrics, search times, the bound, and what holds the best plan back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dicompiler.base.errors import DicompilerError
from dicompiler.driver.compile_summary import find_bottleneck
from dicompiler.ir.metrics import FailureMetrics, Metrics
from dicompiler.ir.plan import Plan
from dicompiler.plugin.registry import registry
from dicompiler.search.failover_planning import add_failover_plans
from dicompiler.search.failure_cases import FailureSelection, failure_metrics
from dicompiler.search.lower_bounds import objective_bound
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy


@dataclass(frozen=True)
class StrategyResult:
    """What one strategy came to. seconds: of its search. error: why it has no plan that can be carried out ('' where it
    has). losses: what its plans for losses come to, see `search.losses.loss_metrics`."""

    strategy: str
    search_s: float
    plan: Plan | None = None
    metrics: Metrics | None = None
    error: str = ""
    failures: tuple[FailureMetrics, ...] = ()

    @property
    def worst_failure(self) -> FailureMetrics | None:
        """The loss with which a frame takes longest; None where none is covered."""
        return max(self.failures[1:], key=lambda loss: loss.metrics.latency_s, default=None)


@dataclass(frozen=True)
class Comparison:
    """rows: in the order in which the strategies were given. single: the best single device. bound: what no plan can
    beat, None where the objective has no bound."""

    problem: Problem
    results: tuple[StrategyResult, ...]
    single_device: Metrics
    lower_bound: float | None

    @property
    def best(self) -> StrategyResult | None:
        """The row with the least value of the objective, the first of equals; None where no strategy has a plan."""
        planned = [row for row in self.results if row.metrics is not None]
        return min(planned, key=lambda row: self.objective_value(row), default=None)

    def objective_value(self, row: StrategyResult) -> float:
        """The row's value of the objective."""
        assert row.metrics is not None
        return row.metrics.objective_value(self.problem.objective)

    @property
    def bottleneck(self) -> str:
        """What holds the best plan back, in words: a device, a line, or waiting."""
        best, problem = self.best, self.problem
        if best is None or best.metrics is None:
            return ""
        return find_bottleneck(problem.platform, best.metrics, problem.objective)[1]


def compare(
    problem: Problem,
    strategies: Mapping[str, Strategy],
    progress: Callable[[str], None] | None = None,
    tolerate_failures: int | str | FailureSelection = 0,
) -> Comparison:
    """Every strategy's plan, simulated; `tell` is told whose turn it is. One that fails is a row with an error.
    survive: the losses that each is to have plans for, see `driver.compiler.compile`."""
    wanted = FailureSelection.parse(tolerate_failures)
    wanted.check_platform(problem.platform)
    rows = []
    for name, strategy in strategies.items():
        if progress is not None:
            progress(name)
        rows.append(_evaluate_strategy(problem, name, registry().resolve("strategies", strategy), wanted))
    return Comparison(problem, tuple(rows), problem.best_single_device[1], objective_bound(problem))


def _evaluate_strategy(problem: Problem, name: str, strategy: Strategy, survive: FailureSelection) -> StrategyResult:
    start = time.perf_counter()
    try:
        plan = strategy.plan(problem)
        seconds = time.perf_counter() - start
        strategy.check_feasible(problem, plan)
        if survive:
            plan = add_failover_plans(problem, strategy, plan, survive)
            seconds = time.perf_counter() - start
        return StrategyResult(name, seconds, plan, problem.evaluate(plan), failures=failure_metrics(problem, plan))
    except DicompilerError as error:
        return StrategyResult(name, time.perf_counter() - start, error=str(error))
