"""Pareto fronts: sets of plans of which none is better than another plan of the set in every objective."""

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
    "latency": ("s", "time of a frame from its inputs to its outputs"),
    "throughput": ("s", "time between one frame and the next of a stream"),
    "energy": ("J", "energy of all devices over a frame"),
    "memory": ("bytes", "memory use of the fullest host"),
    "communication": ("bytes", "bytes sent between devices for a frame"),
    "device-memory": ("bytes", "memory use of the fullest device"),
    "device-energy": ("J", "energy of the device that uses the most energy, per frame of a stream"),
}
"""(unit, meaning) by name of the objective. All objectives are minimised."""

AUTODICE_OBJECTIVES = ("throughput", "device-memory", "device-energy")
"""The three objectives of AutoDiCE (Guo et al., 2022), section IV-A."""


@dataclass(frozen=True)
class MeasuredMetrics(Metrics):
    """Metrics of a run on devices, in contrast to a simulation.

    Attributes:
        device_energy_j: Energy in J that a device uses for one frame of a stream, by device name. Devices without
            measured power are omitted.
    """

    device_energy_j: Mapping[str, float] = field(default_factory=dict)


ProgressCallback = Callable[[str], None]
"""Function that receives short progress messages for users."""


@dataclass(frozen=True)
class ParetoPoint:
    """A plan of a Pareto front and the values of its objectives.

    Attributes:
        plan: The plan.
        objectives: Value by objective name, in the units of FRONT_OBJECTIVES.
    """

    plan: Plan
    objectives: Mapping[str, float]

    def dominates(self, other: ParetoPoint, names: Sequence[str]) -> bool:
        """Return True if no value of this point is larger than the other point's value, and at least one is smaller.

        Args:
            other: The other point.
            names: The objectives to compare.

        Returns:
            True if this point dominates the other one.
        """
        pairs = [(self.objectives[name], other.objectives[name]) for name in names]
        return all(own <= value for own, value in pairs) and any(own < value for own, value in pairs)


@dataclass(frozen=True)
class ParetoFront:
    """Plans of which none is better than another in every objective.

    Attributes:
        objectives: Names of the objectives.
        points: The plans, at least one, sorted by their values in the order of `objectives`.
        metrics_source: "analytic" if a fast model inside the search computed the values; "measured" if a full
            simulation or a run of each plan did.
        evaluations: Number of plans that the search evaluated.
        interrupted: True if the search was stopped before its end.
    """

    objectives: tuple[str, ...]
    points: tuple[ParetoPoint, ...]
    metrics_source: str = "measured"
    evaluations: int = 1
    interrupted: bool = False

    def best_point(self, objective: str) -> ParetoPoint:
        """Return the point with the smallest value of an objective.

        Args:
            objective: One of `objectives`, or a weighted sum of them such as "latency+0.5*energy".

        Returns:
            The first point of `ranked_points`.
        """
        return self.ranked_points(objective)[0]

    def ranked_points(self, objective: str) -> list[ParetoPoint]:
        """Return all points (plans with their values), sorted by their values of an objective.

        Args:
            objective: One of `objectives`, or a weighted sum of them such as "latency+0.5*energy".

        Returns:
            All points, the point with the smallest value first.
        """
        if objective in self.objectives:
            return sorted(self.points, key=lambda point: point.objectives[objective])
        terms = objective_terms(objective).items()
        return sorted(self.points, key=lambda point: sum(weight * point.objectives[name] for name, weight in terms))


def check_objectives(names: Sequence[str]) -> None:
    """Raise UsageError if a list of objectives is empty, or if a name is unknown or occurs twice.

    Args:
        names: Names of objectives.

    Raises:
        UsageError: The list is not valid.
    """
    if not names:
        raise UsageError(f"no objective is given: use at least one of {', '.join(FRONT_OBJECTIVES)}")
    for i, name in enumerate(names):
        if name not in FRONT_OBJECTIVES:
            raise UsageError(f"unknown objective {name!r}{did_you_mean(name, FRONT_OBJECTIVES)}")
        if name in names[:i]:
            raise UsageError(f"objective {name!r} is given twice: remove one")


def objective_values(platform: Platform, metrics: Metrics, names: Iterable[str]) -> dict[str, float]:
    """Return the values of the named objectives for a plan.

    Args:
        platform: The platform on which the plan runs.
        metrics: Metrics of the plan.
        names: Names of objectives.

    Returns:
        Value by objective name, in the units of FRONT_OBJECTIVES.
    """

    def value(name: str) -> float:
        if name == "device-memory":
            return max((device.memory for device in metrics.devices), default=0)
        if name == "device-energy":
            return max((_stream_energy_j(platform, metrics, i) for i in range(len(metrics.devices))), default=0.0)
        return metrics.objective_value(name)

    return {name: value(name) for name in names}


def _stream_energy_j(platform: Platform, metrics: Metrics, device_index: int) -> float:
    """Return the energy in J that one device uses for one frame of a stream: measured, or predicted.

    The prediction is the energy E_i of AutoDiCE (Guo et al., 2022) plus the energy of waiting. `device_index` is an
    index into `metrics.devices`.
    """
    entry = metrics.devices[device_index]
    if isinstance(metrics, MeasuredMetrics) and entry.device in metrics.device_energy_j:
        return metrics.device_energy_j[entry.device]
    device = platform.device(entry.device)
    waiting = max(0.0, metrics.period_s - entry.busy_s)
    computing = device.power_active * entry.busy_s + device.power_idle * waiting
    return computing + device.power_network * entry.link_s


def build_single_point_front(problem: Problem, plan: Plan) -> ParetoFront:
    names = tuple(FRONT_OBJECTIVES)
    return ParetoFront(names, (ParetoPoint(plan, objective_values(problem.platform, problem.evaluate(plan), names)),))
