"""Plans of quick strategies as further points of a Pareto front.

    ParetoFront of the genetic search, Problem ⇒ ParetoFront of these plans and those of quick strategies

The genetic search cannot find replicas (copies of the plan for other frames), or height tiles in proportion to the
devices' rates, or fused tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dicompiler.plugin_api import DicompilerError, Plan, Problem, Strategy, registry
from dicompiler.plugin_api.search import (
    INTERRUPTED_NOTE,
    OBJECTIVES,
    ParetoFront,
    ParetoPoint,
    ProgressCallback,
    WorkBudget,
    fits_constraints,
    objective_values,
)

FRONT_STRATEGIES = ("single", "pipeline", "replicate", "modnn", "dp")
"""Quick strategies that add their plans to a Pareto front. Of equal points, the first one is kept."""

LATENCY_ONLY_STRATEGIES = ("dp",)
"""Strategies of FRONT_STRATEGIES that this module runs for latency only.

They take seconds for each objective. For energy and communication, their best plan is mostly that of `single`.
"""

STRATEGY_BUDGET_S = 6.0
"""Work budget of each strategy, in seconds of the reference computer."""


def add_quick_plans(front: ParetoFront, problem: Problem, progress: ProgressCallback | None = None) -> ParetoFront:
    """Add the plans of quick strategies to a Pareto front, and drop dominated plans.

    If Ctrl-C ends the search, the front has the plans that were found before.

    Args:
        front: Pareto front of the genetic search. It is returned unchanged if its values are estimates
            (`metrics_source` is "analytic"), if its search was interrupted, or if the problem has no model.
        problem: The problem that the search solved.
        progress: Called with a text before the quick strategies make plans.

    Returns:
        The front, whose `evaluations` include the additional plans.
    """
    if front.metrics_source != "measured" or front.interrupted or problem.model is None:
        return front
    if progress is not None:
        progress(f"plans of other strategies: {', '.join(FRONT_STRATEGIES)}")
    points, count, interrupted = list(front.points), 0, False
    try:
        for plan in _quick_plans(problem):
            metrics = problem.evaluate(plan)
            count += 1
            interrupted |= INTERRUPTED_NOTE in plan.note
            if fits_constraints(problem, plan, metrics):
                points.append(ParetoPoint(plan, objective_values(problem.platform, metrics, front.objectives)))
    except KeyboardInterrupt:
        interrupted = True
    kept = _drop_dominated(points, front.objectives)
    return replace(front, points=kept, evaluations=front.evaluations + count, interrupted=interrupted)


def _quick_plans(problem: Problem) -> Iterator[Plan]:
    """Yield the different plans of FRONT_STRATEGIES for all objectives."""
    seen: list[Plan] = []
    for objective in OBJECTIVES:
        for name in FRONT_STRATEGIES:
            if name in LATENCY_ONLY_STRATEGIES and objective != "latency":
                continue
            strategy: Strategy = registry().make("strategies", name)
            try:
                plan = strategy.plan_within(replace(problem, objective=objective), WorkBudget(STRATEGY_BUDGET_S))
            except DicompilerError:  # The strategy does not support the objective, or finds no plan.
                continue
            if plan not in seen:
                seen.append(plan)
                yield plan


def _drop_dominated(points: Sequence[ParetoPoint], names: Sequence[str]) -> tuple[ParetoPoint, ...]:
    """Return the points that no other point beats or equals in all objectives, sorted by value.

    Of equal points, the first one is kept.
    """
    kept: list[ParetoPoint] = []
    by_value: dict[tuple[float, ...], ParetoPoint] = {}
    for point in points:
        by_value.setdefault(tuple(point.objectives[name] for name in names), point)
    # In this order, a point is dominated only by earlier points.
    for _, point in sorted(by_value.items(), key=lambda entry: entry[0]):
        if not any(other.dominates(point, names) for other in kept):
            kept.append(point)
    return tuple(kept)
