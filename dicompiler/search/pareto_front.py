"""A Front: plans of which none is better than another in every objective. What an exploration returns.

Problem + plans + their metrics → Front.   How it becomes files is in `driver.explore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dicompiler.base.errors import UsageError, did_you_mean
from dicompiler.base.objectives import objective_terms
from dicompiler.ir.metrics import Metrics

if TYPE_CHECKING:
    from dicompiler.ir.plan import Plan
    from dicompiler.ir.platform import Platform
    from dicompiler.search.problem import Problem

FRONT_OBJECTIVES: Mapping[str, tuple[str, str]] = {
    "latency": ("s", "a frame from its inputs to its outputs"),
    "throughput": ("s", "between one frame and the next of a stream"),
    "energy": ("J", "of all devices together over a frame"),
    "memory": ("bytes", "on the fullest host"),
    "communication": ("bytes", "that travel between devices for a frame"),
    "device-memory": ("bytes", "on the fullest device"),
    "device-energy": ("J", "of the hungriest device between one frame and the next of a stream"),
}
"""Objective → (unit, what it measures). All are made small: throughput is the time between frames."""

AUTODICE_OBJECTIVES = ("throughput", "device-memory", "device-energy")
"""The three objectives of AutoDiCE (Guo et al., 2022), section IV-A."""


@dataclass(frozen=True)
class MeasuredMetrics(Metrics):
    """Metrics of a real run. device_energy_j: device → Joule for a frame of a stream, where its power was read."""

    device_energy_j: Mapping[str, float] = field(default_factory=dict)


ProgressCallback = Callable[[str], None]
"""Takes what is being done, in a few words, for people to read."""


@dataclass(frozen=True)
class ParetoPoint:
    """A plan and what it comes to: objective → number, in the units of FRONT_OBJECTIVES."""

    plan: Plan
    objectives: Mapping[str, float]


@dataclass(frozen=True)
class ParetoFront:
    """points: none dominates another; sorted by their numbers in the order of `objectives`, at least one.

    level: what the numbers come from: "analytic" (the search's own fast model) or "measured" (each plan evaluated by
    itself). evaluations: how many plans were looked at. interrupted: the search was stopped before its end.
    """

    objectives: tuple[str, ...]
    points: tuple[ParetoPoint, ...]
    metrics_source: str = "measured"
    evaluations: int = 1
    interrupted: bool = False

    def best_point(self, objective: str) -> ParetoPoint:
        """The first of `ranked`."""
        return self.ranked_points(objective)[0]

    def ranked_points(self, objective: str) -> list[ParetoPoint]:
        """The points by one of `objectives`, or by a weighted sum of them (see `objectives.terms`), the least first."""
        if objective in self.objectives:
            return sorted(self.points, key=lambda point: point.objectives[objective])
        wanted = objective_terms(objective).items()
        return sorted(self.points, key=lambda point: sum(weight * point.objectives[name] for name, weight in wanted))


def check_objectives(names: Sequence[str]) -> None:
    """UsageError where a name is unknown or stands twice, or where there is none."""
    if not names:
        raise UsageError(f"no objective is given: name at least one of {', '.join(FRONT_OBJECTIVES)}")
    for i, name in enumerate(names):
        if name not in FRONT_OBJECTIVES:
            raise UsageError(f"unknown objective {name!r}{did_you_mean(name, FRONT_OBJECTIVES)}")
        if name in names[:i]:
            raise UsageError(f"objective {name!r} stands twice: name it once")


def objective_values(platform: Platform, metrics: Metrics, names: Iterable[str]) -> dict[str, float]:
    """Objective → what `metrics` say of it, in the units of FRONT_OBJECTIVES."""

    def value(name: str) -> float:
        if name == "device-memory":
            return max((device.memory for device in metrics.devices), default=0)
        if name == "device-energy":
            return max((_stream_energy_j(platform, metrics, i) for i in range(len(metrics.devices))), default=0.0)
        return metrics.objective_value(name)

    return {name: value(name) for name in names}


def _stream_energy_j(platform: Platform, metrics: Metrics, index: int) -> float:
    """J of one device from one frame of a stream to the next (AutoDiCE's E_i, and what waiting takes)."""
    entry = metrics.devices[index]
    if isinstance(metrics, MeasuredMetrics) and entry.device in metrics.device_energy_j:
        return metrics.device_energy_j[entry.device]
    device = platform.device(entry.device)
    waiting = max(0.0, metrics.period_s - entry.busy_s)
    computing = device.power_active * entry.busy_s + device.power_idle * waiting
    return computing + device.power_network * entry.link_s


def build_single_point_front(problem: Problem, plan: Plan) -> ParetoFront:
    """The front of one plan, with the numbers of all objectives."""
    names = tuple(FRONT_OBJECTIVES)
    return ParetoFront(names, (ParetoPoint(plan, objective_values(problem.platform, problem.evaluate(plan), names)),))
