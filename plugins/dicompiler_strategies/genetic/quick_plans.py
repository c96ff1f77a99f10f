"""Plans of the quick strategies, as further points of a Pareto front.

    ParetoFront of the genetic search, Problem ⇒ ParetoFront that no plan of a quick strategy dominates

The genetic search represents a plan by one device or one split for each layer. It therefore cannot find replicas
(copies of the plan that compute other frames), or height slices in proportion to the devices' rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dicompiler.plugin_api import DicompilerError, Plan, Problem, Strategy, registry
from dicompiler.plugin_api.search import OBJECTIVES, ParetoFront, ParetoPoint, fits_constraints, objective_values

FRONT_STRATEGIES = ("single", "pipeline", "replicate", "modnn")
"""Quick strategies, the plans of which, with default options, are added to the Pareto front of a search.

`auto` asks the same strategies in another order. The order matters in both: of equally good plans, the first is kept.
"""


def add_quick_plans(front: ParetoFront, problem: Problem) -> ParetoFront:
    """Add the plans of the quick strategies to a Pareto front, and drop the plans that are then dominated.

    The front is returned unchanged if its values are not from the simulator, because they cannot be compared then.

    Args:
        front: Pareto front that the genetic search has found.
        problem: The problem that the search solved.

    Returns:
        The front, whose `evaluations` include the additional plans.
    """
    if front.metrics_source != "measured" or front.interrupted or problem.model is None:
        return front
    points, count = list(front.points), 0
    for plan in _quick_plans(problem):
        metrics = problem.evaluate(plan)
        count += 1
        if fits_constraints(problem, plan, metrics):
            points.append(ParetoPoint(plan, objective_values(problem.platform, metrics, front.objectives)))
    kept = _drop_dominated(points, front.objectives)
    return replace(front, points=kept, evaluations=front.evaluations + count)


def _quick_plans(problem: Problem) -> Iterator[Plan]:
    """Yield the different plans of the strategies in FRONT_STRATEGIES, for each objective that they support."""
    seen: list[Plan] = []
    for objective in OBJECTIVES:
        for name in FRONT_STRATEGIES:
            strategy: Strategy = registry().make("strategies", name)
            try:
                plan = strategy.plan(replace(problem, objective=objective))
            except DicompilerError:  # A strategy that does not support the objective, or finds no plan, is skipped.
                continue
            if plan not in seen:
                seen.append(plan)
                yield plan


def _drop_dominated(points: Sequence[ParetoPoint], names: Sequence[str]) -> tuple[ParetoPoint, ...]:
    """Return the points (plans with objectives) that no other point beats or equals in all objectives, sorted by value.

    Of points with equal values, the first one is kept.
    """
    kept: list[ParetoPoint] = []
    by_value: dict[tuple[float, ...], ParetoPoint] = {}
    for point in points:
        by_value.setdefault(tuple(point.objectives[name] for name in names), point)
    # A point that dominates another one comes before it in this order, so that each point is only compared with the
    # points that were kept before.
    for values, point in sorted(by_value.items(), key=lambda entry: entry[0]):
        others = (tuple(other.objectives[name] for name in names) for other in kept)
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other in others):
            kept.append(point)
    return tuple(kept)
