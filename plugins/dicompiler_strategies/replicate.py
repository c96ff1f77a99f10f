"""Whole frames dealt out in turn: to devices that each run the whole network, or to groups that each run a pipeline.

Problem → Plan with replicas. Among all sizes of groups the one that leaves the least time between frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dicompiler.plugin_api import Device, Part, Plan, Problem, Strategy, UsageError
from dicompiler.plugin_api.search import fits_constraints
from dicompiler_strategies.pipeline import balance_runs, run_numbers, whole_layer_seconds

MAX_REPLICAS = 16
"""Replicas: of more, compiling takes long and each is worth little."""


@dataclass(frozen=True)
class Replicate(Strategy):
    """Frames dealt out in turn to groups of devices; a group of one runs the whole network, others a pipeline.

    frame 0 → pi01 pi02 | frame 1 → pi03 pi04 | frame 2 → pi01 pi02 | …

    Single devices are dealt frames by their rates; groups, made of like devices, in turn. For objective throughput.
    """

    name: ClassVar[str] = "replicate"
    group_size: int = field(default=0, metadata={"help": "devices in a group; by default what gives the most frames"})

    def __post_init__(self) -> None:
        if self.group_size < 0:
            raise ValueError(f"size must be 0 or more, not {self.group_size}")

    def plan(self, problem: Problem) -> Plan:
        """Of plans that fit in memory the one with the least time between frames; of equals the one with the smallest
        groups. UsageError for another objective than throughput, and for groups larger than the cluster."""
        if problem.objective != "throughput":
            raise UsageError(f"replicate: objective {problem.objective!r} is not throughput, which is all it knows")
        count = len(problem.platform.computing_devices)
        if self.group_size > count:
            raise UsageError(
                f"replicate: groups of {self.group_size}, but only {count} devices compute: make them smaller"
            )
        sizes = (
            (self.group_size,) if self.group_size else dict.fromkeys(count // groups for groups in range(count, 0, -1))
        )
        estimated = [(plan, problem.estimate(plan)) for size in sizes for plan in candidate_plans(problem, size)]
        fitting = [entry for entry in estimated if fits_constraints(problem, *entry)]
        return min(fitting or estimated, key=lambda entry: entry[1].period_s)[0]


def candidate_plans(problem: Problem, size: int) -> Iterator[Plan]:
    """The plans for groups of `size` devices; for single ones also by their rates, where that deals otherwise."""
    seconds = {device.name: whole_layer_seconds(problem, device) for device in problem.platform.computing_devices}
    devices = sorted(problem.platform.computing_devices, key=lambda device: sum(seconds[device.name]))
    groups = 1 if problem.layers.states else min(MAX_REPLICAS, len(devices) // size)  # no other has a group's states
    # Place i of every group is taken by devices that are as fast as each other as can be.
    teams = [[devices[place * groups + group] for place in range(size)] for group in range(groups)]
    yield _replicated_plan(problem, teams, range(groups), seconds)
    if size == 1 and groups > 1:
        alone = [sum(seconds[team[0].name]) for team in teams]
        order = deal_frames(alone, MAX_REPLICAS)
        if len(order) != groups or set(order) != set(range(groups)):
            yield _replicated_plan(problem, teams, order, seconds)


def _replicated_plan(
    problem: Problem, teams: Sequence[Sequence[Device]], order: Sequence[int], seconds: Mapping[str, Sequence[float]]
) -> Plan:
    """The first team's pipeline, cut for the slowest device at each place; the others by renaming, in this order."""
    slowest = [
        [max(at_place) for at_place in zip(*(seconds[d.name] for d in place), strict=True)]
        for place in zip(*teams, strict=True)
    ]
    stage = run_numbers(balance_runs(slowest))
    first = teams[0]
    plan = problem.build_plan({x.name: (Part(first[stage[i]].name),) for i, x in enumerate(problem.layers.layers)})
    used = sorted(set(stage))
    renamings = [
        {first[place].name: team[place].name for place in used if team is not first}
        for team in (teams[i] for i in order)
    ]
    return plan if renamings == [{}] else replace(plan, replicas=tuple(renamings))


def deal_frames(seconds: Sequence[float], max_frames: int) -> tuple[int, ...]:
    """Who takes which frame of a round of at most `most` frames, so that the time between frames is least.

    seconds[d]: of a frame on device d. Each frame goes to whom it is done by first; of all lengths of the round the
    one with the least max_d seconds[d] · frames of d / frames, the shortest of equals.
    """
    taken = [0] * len(seconds)
    order: list[int] = []
    best, length = float("inf"), 0
    for _ in range(max_frames):
        order.append(min(range(len(seconds)), key=lambda d: (taken[d] + 1) * seconds[d]))
        taken[order[-1]] += 1
        period = max(t * each for t, each in zip(taken, seconds, strict=True)) / len(order)
        if period < best * (1 - 1e-9):
            best, length = period, len(order)
    return tuple(order[:length])
