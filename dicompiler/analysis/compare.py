"""Comparison of strategies: their plans for the same problem, evaluated by the same simulator.

Problem + strategies ⇒ Comparison
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dicompiler.base.errors import DicompilerError
from dicompiler.base.objectives import objective_terms
from dicompiler.base.units import format_bytes, format_seconds
from dicompiler.driver.compile_summary import find_bottleneck
from dicompiler.ir.metrics import FailureMetrics, Metrics
from dicompiler.ir.plan import Plan
from dicompiler.plugin.registry import registry
from dicompiler.search.failover_planning import add_failover_plans
from dicompiler.search.failure_cases import FailureSelection, failure_metrics
from dicompiler.search.lower_bounds import objective_bound
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy

PROVEN_RATIO = 1 + 1e-6
"""A plan within this factor of the lower bound counts as optimal."""


@dataclass(frozen=True)
class StrategyResult:
    """The result of one strategy.

    Attributes:
        strategy: The strategy with its options.
        search_s: Seconds of the search.
        plan: The plan; None if the strategy has no valid plan.
        metrics: Simulated metrics of the plan.
        error: Reason why there is no valid plan; empty if there is one.
        failures: Metrics of the plan without failures and of each failure plan
            (`search.failure_cases.failure_metrics`); empty without failure plans.
    """

    strategy: str
    search_s: float
    plan: Plan | None = None
    metrics: Metrics | None = None
    error: str = ""
    failures: tuple[FailureMetrics, ...] = ()

    @property
    def worst_failure(self) -> FailureMetrics | None:
        """The failure after which the latency is longest; None if there is no failure plan."""
        return max(self.failures[1:], key=lambda failure: failure.metrics.latency_s, default=None)


@dataclass(frozen=True)
class Comparison:
    """Results of several strategies for the same problem.

    Attributes:
        problem: The problem.
        results: The results, in the order of the strategies.
        single_device: Metrics of the best single device.
        lower_bound: Value of the objective that no plan can beat; None if no such bound is known.
    """

    problem: Problem
    results: tuple[StrategyResult, ...]
    single_device: Metrics
    lower_bound: float | None

    @property
    def best(self) -> StrategyResult | None:
        """The first result with the least value of the objective; None if no strategy has a plan."""
        valid = [result for result in self.results if result.metrics is not None]
        return min(valid, key=self.objective_value, default=None)

    def objective_value(self, result: StrategyResult) -> float:
        """Return the value of the objective for a result with a plan."""
        assert result.metrics is not None
        return result.metrics.objective_value(self.problem.objective)

    @property
    def bottleneck(self) -> str:
        """Description of the bottleneck of the best plan; empty if no strategy has a plan."""
        best, problem = self.best, self.problem
        if best is None or best.metrics is None:
            return ""
        return find_bottleneck(best.metrics, problem.objective)[1]

    @property
    def limit_reason(self) -> str:
        """Reason why no better plan is possible, or was found; empty if no strategy has a plan."""
        best, bound = self.best, self.lower_bound
        if best is None or best.metrics is None:
            return ""
        value = self.objective_value(best)
        if value <= PROVEN_RATIO * (bound or 0.0):
            return "the best plan reaches the bound, so that no plan is better"
        terms = tuple(objective_terms(self.problem.objective))
        if len(terms) > 1:
            return "the bound adds the bounds of all terms, which rarely are reached by the same plan"
        return _describe_gap(terms[0], best.metrics)


def _describe_gap(objective: str, metrics: Metrics) -> str:
    """Return what the plan needs in addition to the bound on the objective."""
    if objective == "memory":
        fullest = max(metrics.devices, key=lambda entry: entry.memory)
        weights, tensors = format_bytes(fullest.weights), format_bytes(fullest.activations)
        return (
            "the bound is the weights, spread evenly over the hosts; "
            f"{fullest.device} stores {weights} of weights and {tensors} of tensors"
        )
    if objective == "energy":
        return "the bound counts computing alone; devices that wait for others draw idle power too"
    if objective == "communication":
        return f"{format_bytes(metrics.total_bytes)} are sent" if metrics.total_bytes else "nothing is sent"
    load_s = max(entry.busy_s for entry in metrics.devices)
    return (
        "the bound counts computing alone, spread evenly over all devices; "
        f"here the busiest device works for {format_seconds(load_s)} of a frame, and messages take time"
    )


def compare(
    problem: Problem,
    strategies: Mapping[str, Strategy],
    progress: Callable[[str], None] | None = None,
    tolerate_failures: int | str | FailureSelection = 0,
) -> Comparison:
    """Return the results of all strategies. If a strategy fails, its result contains the error.

    Args:
        problem: Problem that every strategy solves.
        strategies: The strategies by name.
        progress: Function that is called with the name of each strategy before its search.
        tolerate_failures: Failures of devices for which each strategy also makes plans, as in `compile`.
    """
    failures = FailureSelection.parse(tolerate_failures)
    failures.check_platform(problem.platform)
    results = []
    for name, strategy in strategies.items():
        if progress is not None:
            progress(name)
        results.append(_evaluate_strategy(problem, name, registry().resolve("strategies", strategy), failures))
    return Comparison(problem, tuple(results), problem.best_single_device[1], objective_bound(problem))


def _evaluate_strategy(problem: Problem, name: str, strategy: Strategy, failures: FailureSelection) -> StrategyResult:
    start = time.perf_counter()
    try:
        plan = strategy.plan(problem)
        search_s = time.perf_counter() - start
        strategy.check_feasible(problem, plan)
        if failures:
            plan = add_failover_plans(problem, strategy, plan, failures)
            search_s = time.perf_counter() - start
        metrics = problem.evaluate(plan)
        return StrategyResult(name, search_s, plan, metrics, failures=failure_metrics(problem, plan))
    except DicompilerError as error:
        return StrategyResult(name, time.perf_counter() - start, error=str(error))
