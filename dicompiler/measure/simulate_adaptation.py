"""Simulation of an adaptive session, which changes its plan when boards and links change speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dicompiler.cost.simulator import SimulationResult
from dicompiler.cost.speed_changes import (
    ALL_LINKS,
    SpeedChange,
    Speeds,
    list_host_speeds,
    list_link_speeds,
    list_speeds,
)
from dicompiler.driver.compile_result import CompileResult
from dicompiler.driver.swap import Swap
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.measure.adapt import Adaptation, AdaptOptions, SpeedTrial
from dicompiler.measure.adapt_search import choose_best
from dicompiler.measure.calibrate import scale_rates
from dicompiler.measure.connection_speeds import name_connection

SWAP_S = 7.0
"""Seconds from the start of a search (4 s, see docs/reference/results.md) until its plan computes frames."""


def simulate_adaptation(
    first: CompileResult,
    plan_for: Callable[[Platform, Plan | None], CompileResult],
    changes: Sequence[SpeedChange],
    frames: int,
    in_flight: int,
    adapt: AdaptOptions,
) -> SpeedTrial:
    """Simulate a stream of frames in an adaptive session, which changes its plan if boards or links change their speed.

    Unlike a real session, which measures the changed speeds, the simulated one knows them exactly.

    Args:
        first: The plan with which the session begins, on the platform without changes.
        plan_for: Function (platform, plan) → compilation with predicted metrics. If the plan is None, a strategy makes
            it.
        changes: The changes of speed during the stream.
        frames: Number of frames of the stream.
        in_flight: Number of frames in flight.
        adapt: When to search and to swap.

    Raises:
        UsageError: A change names an unknown device or host.
    """
    stated, current, plan_count = first.platform, first, 1
    # This call raises UsageError if a device is unknown; its result is not needed.
    list_speeds(changes, [device.name for device in stated.devices])
    finished, found = list[float](), list[Adaptation]()
    assumed, start_s, seen_s = stated, 0.0, -math.inf
    simulation = _simulate(current, changes, start_s, frames, in_flight)
    while True:
        ends = sorted(start_s + end for _, end in simulation.frames)
        seen_s = _find_search(ends, changes, seen_s, adapt)
        if seen_s == math.inf:
            return SpeedTrial(_in_order((*finished, *ends)), tuple(found))
        changed = change_platform(stated, changes, seen_s)
        ratios = _find_ratios(assumed, changed, adapt)
        if not ratios:
            continue
        assumed, objective = changed, first.decision.objective
        candidates = {"current": plan_for(changed, current.plan)}
        candidates["first"] = candidates["current"] if current is first else plan_for(changed, first.plan)
        candidates["new"] = plan_for(changed, None)
        values = {name: candidate.metrics.objective_value(objective) for name, candidate in candidates.items()}
        best = choose_best(values, "first")
        adaptation = Adaptation(seen_s, ratios, values["current"], values[best], objective, min_gain=adapt.min_gain)
        if candidates[best].plan == current.plan or 1 - values[best] / values["current"] <= adapt.min_gain:
            found.append(adaptation)
            continue
        swap_s = seen_s + SWAP_S
        finished += sorted(start_s + end for start, end in simulation.frames if start_s + start < swap_s)
        plan_count += 1
        swap = Swap(Path(f"plan {plan_count - 1}"), Path(f"plan {plan_count}"), len(finished), SWAP_S)
        found.append(replace(adaptation, swap=swap))
        if len(finished) >= frames:
            return SpeedTrial(_in_order(finished), tuple(found))
        current = first if best == "first" else plan_for(stated, candidates[best].plan)
        start_s = swap_s
        simulation = _simulate(current, changes, start_s, frames - len(finished), in_flight)


def _in_order(finished: Sequence[float]) -> tuple[float, ...]:
    """Return the times at which a session delivers frames, given the times at which they are finished."""
    # The session delivers all frames of an old plan before those of the next plan, even if these are finished earlier.
    return tuple(itertools.accumulate(finished, max))


def _simulate(
    result: CompileResult, changes: Sequence[SpeedChange], start_s: float, frames: int, in_flight: int
) -> SimulationResult:
    """Simulate the frames that a plan computes in a part of the stream.

    Args:
        result: The compiled plan.
        changes: The changes of speed during the stream.
        start_s: Seconds from the start of the stream to the first frame.
        frames: Number of frames.
        in_flight: Number of frames in flight.
    """
    devices = [device.device for device in result.program.devices]
    return result.problem.simulate_compilation(
        result,
        frames,
        in_flight,
        False,
        list_speeds([change for change in changes if change.name in devices], devices, -start_s),
        list_link_speeds(changes, result.platform, -start_s),
    )


def _find_search(ends: Sequence[float], changes: Sequence[SpeedChange], seen_s: float, adapt: AdaptOptions) -> float:
    """Return the time of the next search in seconds; infinity if no further change of speed is noticed.

    Args:
        ends: Times at which frames were finished.
        changes: The changes of speed during the stream.
        seen_s: Time of the last search.
        adapt: After how many frames and seconds the session searches.
    """
    times = [time_s for change in changes for time_s in (change.start_s, change.end_s) if seen_s < time_s < math.inf]
    if not times:
        return math.inf
    earliest = max(min(times), seen_s + adapt.min_interval_s)
    after = [end for end in ends if end > min(times)]
    return next((end for end in after[adapt.frames - 1 :] if end >= earliest), math.inf)


def change_platform(stated: Platform, changes: Sequence[SpeedChange], at_s: float) -> Platform:
    """Return the platform with the compute rates and bandwidths that it has at a certain time.

    Args:
        stated: The platform without changes.
        changes: The changes of speed during the stream.
        at_s: Seconds from the start of the stream.
    """
    names = [device.name for device in stated.devices]
    speeds = {name: _speed_at(found, at_s) for name, found in list_speeds(changes, names).items()}
    links = {name: _speed_at(found, at_s) for name, found in list_host_speeds(changes, stated).items()}
    platform, network = scale_rates(stated, speeds), stated.network
    if ALL_LINKS in links:
        return replace(platform, network=replace(network, bandwidth=links[ALL_LINKS] * network.bandwidth))
    hosts = tuple(
        replace(host, bandwidth=links[host.name] * (host.bandwidth or network.bandwidth))
        if links.get(host.name, 1.0) != 1.0
        else host
        for host in stated.hosts
    )
    return replace(platform, hosts=hosts)


def _speed_at(speeds: Speeds, at_s: float) -> float:
    return next((speed for time_s, speed in reversed(speeds) if time_s <= at_s), 1.0)


def _find_ratios(assumed: Platform, changed: Platform, adapt: AdaptOptions) -> Mapping[str, float]:
    """Return how many times longer devices compute and hosts send than assumed, if it is more than `adapt` allows.

    Args:
        assumed: The platform of the last search.
        changed: The platform as it is now.
        adapt: The allowed deviations.

    Returns:
        The ratios by name of device or connection.
    """
    ratios = {
        before.name: before.rate / after.rate
        for before, after in zip(assumed.devices, changed.devices, strict=True)
        if after.rate
    }
    links = {
        name_connection(before.name, "others"): (before.bandwidth or assumed.network.bandwidth)
        / (after.bandwidth or changed.network.bandwidth)
        for before, after in zip(assumed.hosts, changed.hosts, strict=True)
    }
    limits = {**dict.fromkeys(ratios, 1 + adapt.deviation), **dict.fromkeys(links, 1 + adapt.link_deviation)}
    return {name: ratio for name, ratio in {**ratios, **links}.items() if not 1 / limits[name] <= ratio <= limits[name]}
