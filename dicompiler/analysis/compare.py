"""Comparison of strategies: their plans for the same problem, evaluated by the same simulator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dicompiler.base.errors import DicompilerError
from dicompiler.base.objectives import objective_terms
from dicompiler.base.option_specs import parse_pipeline, spec_of
from dicompiler.base.units import format_bytes, format_seconds
from dicompiler.cost.cost_model import CostModel
from dicompiler.driver.compile_options import (
    DEFAULT_COST_MODEL,
    DEFAULT_TARGET,
    ModelSource,
    Shapes,
    format_shapes,
)
from dicompiler.driver.compile_result import find_bottleneck
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.metrics import FailureMetrics, Metrics
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.plugin.registry import registry
from dicompiler.search.failover_planning import add_failover_plans
from dicompiler.search.failure_cases import FailureSelection, failure_metrics
from dicompiler.search.lower_bounds import objective_bound, unrefuted_bound
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.target.target_base import Target

COMPARISON_FORMAT = "dicompiler.comparison/2"
DEFAULT_STRATEGIES = "single,pipeline,modnn,dp,gradient,genetic,cpsat,auto"
"""The strategies that are compared by default. None of them needs a file or an option."""

PROVEN_RATIO = 1 + 1e-6
"""A plan counts as optimal if its objective exceeds the lower bound by at most this factor."""


@dataclass(frozen=True)
class StrategyResult:
    """The plan that one strategy found for a problem, or the reason why it found none.

    Attributes:
        strategy: The strategy with its options.
        search_s: Seconds of the search.
        plan: The plan; None if the strategy has no valid plan.
        metrics: Simulated metrics of the plan.
        error: Reason why there is no valid plan; empty if there is one.
        failures: Metrics without failures, then those after each failure for which the plan has another plan; empty if
            it has none.
    """

    strategy: str
    search_s: float
    plan: Plan | None = None
    metrics: Metrics | None = None
    error: str = ""
    failures: tuple[FailureMetrics, ...] = ()

    @property
    def worst_failure(self) -> FailureMetrics | None:
        """The failure after which the latency is longest; None if there are no plans for failures."""
        return max(self.failures[1:], key=lambda failure: failure.metrics.latency_s, default=None)

    @property
    def note(self) -> str:
        """The plan's note, for example that the budget or Ctrl-C ended its search; empty if there is none."""
        return "" if self.plan is None else self.plan.note

    def document(self) -> dict[str, Any]:
        """Return the entry of this result in a comparison file.

        Returns:
            The entry, as a JSON object.
        """
        document = {
            "strategy": self.strategy,
            "search_s": self.search_s,
            "error": self.error or None,
            "note": self.note or None,
            "metrics": None if self.metrics is None else asdict(self.metrics),
        }
        return document | ({"failures": [asdict(failure) for failure in self.failures]} if self.failures else {})


@dataclass(frozen=True)
class Comparison:
    """Results of several strategies for the same problem.

    Attributes:
        problem: The problem that all strategies solved: layers, platform, cost model and objective.
        results: One result for each strategy, in the order in which the strategies were given.
        single_device: Simulated metrics of the best plan on one device.
        lower_bound: Value of the objective that no plan can beat; None if no such bound is known.
    """

    problem: Problem
    results: tuple[StrategyResult, ...]
    single_device: Metrics
    lower_bound: float | None

    @property
    def best(self) -> StrategyResult | None:
        """The result whose plan is best in the objective, such as the latency; None without plans."""
        valid = [result for result in self.results if result.metrics is not None]
        return min(valid, key=self.objective_value, default=None)

    def objective_value(self, result: StrategyResult) -> float:
        """Return the value of the objective for a result with a plan.

        Args:
            result: A result whose metrics are not None.

        Returns:
            The value in the units of the objective (seconds, joules or bytes).
        """
        assert result.metrics is not None
        return result.metrics.objective_value(self.problem.objective)

    def document(self) -> dict[str, Any]:
        """Return the content of a comparison file, as `dicompiler compare --json` prints it (schema `comparison`).

        Returns:
            The content, as a JSON object.
        """
        problem, best = self.problem, self.best
        assert problem.model is not None
        document = {
            "format": COMPARISON_FORMAT,
            "model_digest": problem.model.digest(),
            "platform": problem.platform.name,
            "objective": problem.objective,
            "results": [result.document() for result in self.results],
            "best": None if best is None else best.strategy,
            **({"engines": dict(problem.platform.engines)} if problem.platform.engines else {}),
            "lower_bound": self.lower_bound,
            "limit_reason": self.limit_reason,
            "single_device": asdict(self.single_device),
        }
        # JSON turns tuples into lists, so that the document equals one that is read from a file.
        plain: dict[str, Any] = json.loads(json.dumps(document))
        return plain

    @property
    def bottleneck(self) -> str:
        """Description of the bottleneck of the best plan; empty if no strategy has a plan."""
        best, problem = self.best, self.problem
        if best is None or best.metrics is None:
            return ""
        return find_bottleneck(best.metrics, problem.objective)[1]

    @property
    def limit_reason(self) -> str:
        """Text that says why no better plan exists or was found; empty if no strategy has a plan."""
        best, bound = self.best, self.lower_bound
        if best is None or best.metrics is None:
            return ""
        value = self.objective_value(best)
        if value <= PROVEN_RATIO * (bound or 0.0):
            return "the best plan reaches the bound, so that no plan is better"
        terms = tuple(objective_terms(self.problem.objective))
        if len(terms) > 1:
            return "the bound is the sum of the bounds of all terms, and one plan rarely reaches all of them"
        return _describe_gap(terms[0], best.metrics)


def _describe_gap(objective: str, metrics: Metrics) -> str:
    """Return a text that explains why a plan does not reach the objective's lower bound, which no plan can beat."""
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
    return (
        "the bound counts computing alone, spread evenly over all devices; "
        f"here the busiest device works for {format_seconds(metrics.busiest_device.working_s)} of a frame, and "
        "messages take time"
    )


def compare(
    model: ModelSource,
    platform: str | Path | Platform | None = None,
    strategies: str | Sequence[str | Strategy] = DEFAULT_STRATEGIES,
    *,
    objective: str = "latency",
    cost: str | CostModel = DEFAULT_COST_MODEL,
    target: str | Target | None = DEFAULT_TARGET,
    shape: Shapes = (),
    state: str | Sequence[str] = "auto",
    wire_dtype: str | Mapping[str, str] | WireFormat | None = None,
    engine: str | None = None,
    precision: str | None = None,
    tolerate_failures: int | str = 0,
    executor: Executor | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare the plans of several strategies for a model, without compiling it.

    If a strategy finds no plan, its result has the reason.

    Args:
        model: The path of an ONNX file, its bytes, a ModelProto or a Model.
        platform: The cluster: a TOML file, the name of a built-in platform, or a Platform.
        strategies: The strategies, as text ("single,dp,cpsat{time=10}") or as a sequence of texts and objects.
        objective: Quantity to minimize: latency, throughput, energy, memory, communication, or a weighted sum.
        cost: The cost model.
        target: The target, whose runtime adds time to each message and each call of an ONNX submodel; None to omit this
            time.
        shape: Shapes of inputs with dynamic dimensions: {"input": (1, 3, 224, 224)} or "input=1x3x224x224".
        state: Graph inputs and outputs that devices keep between frames: `past*=present*`, "auto" (inputs and outputs
            with common names) or "none".
        wire_dtype: Element type in which tensors are sent, for all layers ("float16") or by layer. Default: the
            tensors' own types.
        engine: The engine that computes on devices with CPU cores, such as "ncnn", or "auto" (the fastest one of each
            device). Default: the engines in the platform.
        precision: The precision of engines that can compute with it: "fp32", "fp16" or "bf16". Default: the precisions
            in the platform, otherwise "fp32".
        tolerate_failures: Device failures for which each strategy also makes plans: the maximum number of failed
            devices, "hosts" (all devices of one host), or names of devices ("pi02,pi03").
        executor: Executor, opened by `open_executor`, that evaluates the plans of a search in parallel. Default: this
            process evaluates them.
        progress: Function that is called with the name of each strategy before its search.

    Returns:
        The results in the order of the strategies, and the best single device.

    Raises:
        DicompilerError: The model or the platform is not valid.
        UsageError: A strategy or an option is not valid.
    """
    candidates = parse_strategies(strategies)
    problem = load_problem(
        model, platform, format_shapes(shape), objective, cost, wire_dtype, target, state, engine, precision
    )
    return compare_strategies(replace(problem, executor=executor), candidates, progress, tolerate_failures)


def compare_without_powers(
    model: ModelSource,
    platform: str | Path | Platform | None,
    strategies: str | Sequence[str | Strategy],
    error: str,
    *,
    objective: str,
    **options: Any,
) -> Comparison:
    """Return a comparison in which each result has an error, for a platform that states no powers of devices.

    Args:
        model: The model, as for `compare`.
        platform: The platform.
        strategies: The strategies.
        error: The error of each result.
        objective: The objective with energy, which cannot be computed for the platform.
        **options: Other options of `compare`.
    """
    results = tuple(StrategyResult(name, 0.0, error=error) for name in parse_strategies(strategies))
    comparison = compare(model, platform, (), **options)
    problem = replace(comparison.problem, objective=objective)
    return replace(comparison, problem=problem, results=results, lower_bound=None)


def parse_strategies(strategies: str | Sequence[str | Strategy]) -> dict[str, Strategy]:
    """Return strategies by their text, such as "cpsat{time=10}".

    Args:
        strategies: One text with commas, or a sequence of texts and objects.

    Raises:
        UsageError: A name is unknown.
    """
    if isinstance(strategies, str):
        specs = parse_pipeline(strategies, "strategies", "strategy")
        return {str(spec): registry().make("strategies", spec) for spec in specs}
    resolved = [registry().resolve("strategies", strategy) for strategy in strategies]
    return {str(spec_of(strategy)): strategy for strategy in resolved}


def compare_strategies(
    problem: Problem,
    strategies: Mapping[str, Strategy],
    progress: Callable[[str], None] | None = None,
    tolerate_failures: int | str = 0,
) -> Comparison:
    """Return the results of all strategies. If a strategy fails, its result contains the error.

    Args:
        problem: Problem that every strategy solves.
        strategies: The strategies by name.
        progress: Function that is called with the name of each strategy before its search.
        tolerate_failures: Failures for which each strategy also makes plans: the maximum number of failed devices,
            "hosts" (all devices of one host), or names of devices ("pi02,pi03").
    """
    failures = FailureSelection.parse(tolerate_failures)
    failures.check_platform(problem.platform)
    results = []
    for name, strategy in strategies.items():
        if progress is not None:
            progress(name)
        results.append(_evaluate_strategy(problem, name, registry().resolve("strategies", strategy), failures))
    single = problem.best_single_device[1]
    plans = [single, *(result.metrics for result in results if result.metrics is not None)]
    values = (metrics.objective_value(problem.objective) for metrics in plans)
    return Comparison(problem, tuple(results), single, unrefuted_bound(objective_bound(problem), *values))


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
