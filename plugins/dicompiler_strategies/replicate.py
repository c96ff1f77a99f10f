"""The strategy `replicate`: give whole frames in turn to devices, or to groups of devices that work as pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dicompiler.plugin_api import Device, Part, Plan, Problem, Strategy, UsageError
from dicompiler.plugin_api.search import fits_constraints
from dicompiler_strategies.balanced_runs import balance_runs, index_devices, whole_layer_seconds
from dicompiler_strategies.stages.turns import MAX_ROUND_FRAMES, deal_frames


@dataclass(frozen=True)
class Replicate(Strategy):
    """Whole frames for each group of devices in turn, for the objective throughput.

    A group of one device computes the whole network; a larger group computes it as a pipeline.

        frame 0 → pi01 pi02 | frame 1 → pi03 pi04 | frame 2 → pi01 pi02 | …

    If each group is one device, faster devices get more frames. Larger groups get equally many frames; the devices are
    distributed such that all groups are about equally fast.
    """

    name: ClassVar[str] = "replicate"
    group_size: int = field(
        default=0,
        metadata={"help": "number of devices in a group; by default, the number with the most frames per second"},
    )

    def __post_init__(self) -> None:
        if self.group_size < 0:
            raise ValueError(f"group_size must be 0 or more, not {self.group_size}")

    def plan(self, problem: Problem) -> Plan:
        """Return the plan with the least time between frames.

        If no plan fits into memory, the best of all plans is returned.

        Raises:
            UsageError: The objective is not throughput, or a group is larger than the cluster.
        """
        if problem.objective != "throughput":
            raise UsageError(f"replicate: objective {problem.objective!r} is not supported: use throughput")
        count = len(problem.platform.computing_devices)
        if self.group_size > count:
            raise UsageError(
                f"replicate: groups of {self.group_size}, but only {count} devices compute: use smaller groups"
            )
        sizes = (
            (self.group_size,) if self.group_size else dict.fromkeys(count // groups for groups in range(count, 0, -1))
        )
        plans = [plan for size in sizes for plan in candidate_plans(problem, size)]
        if not self.group_size:
            plans.append(problem.best_single_device[0])
        estimated = [(plan, problem.estimate(plan)) for plan in plans]
        fitting = [entry for entry in estimated if fits_constraints(problem, *entry)]
        return min(fitting or estimated, key=lambda entry: entry[1].period_s)[0]


def candidate_plans(problem: Problem, size: int) -> Iterator[Plan]:
    """Yield a plan in which all groups of `size` devices get equally many frames.

    If each group is a single device, it also yields a plan in which faster devices get more frames.
    """
    seconds = {device.name: whole_layer_seconds(problem, device) for device in problem.platform.computing_devices}
    devices = sorted(problem.platform.computing_devices, key=lambda device: sum(seconds[device.name]))
    # Other groups would lack the states (caches) of the previous frame.
    groups = 1 if problem.layers.states else min(MAX_ROUND_FRAMES, len(devices) // size)
    # Devices with the same position in their groups get the same layers, so devices of similar speed are put at the
    # same position.
    teams = [[devices[place * groups + group] for place in range(size)] for group in range(groups)]
    yield _replicated_plan(problem, teams, range(groups), seconds)
    if size == 1 and groups > 1:
        single_seconds = [sum(seconds[team[0].name]) for team in teams]
        order = deal_frames(single_seconds, range(1, MAX_ROUND_FRAMES + 1))
        if len(order) != groups or set(order) != set(range(groups)):
            yield _replicated_plan(problem, teams, order, seconds)


def _replicated_plan(
    problem: Problem, teams: Sequence[Sequence[Device]], order: Sequence[int], seconds: Mapping[str, Sequence[float]]
) -> Plan:
    """Return a plan in which groups of devices compute frames in turn, each as a pipeline with the same stages.

    Args:
        problem: The problem.
        teams: Devices of each group, in the order of their stages.
        order: Index of the group that computes frame 0, 1, …, repeated from the start for further frames.
        seconds: Seconds of each layer on each device, by device name.
    """
    slowest = [
        [max(at_place) for at_place in zip(*(seconds[d.name] for d in place), strict=True)]
        for place in zip(*teams, strict=True)
    ]
    stage = index_devices(balance_runs(slowest))
    first = teams[0]
    plan = problem.build_plan({x.name: (Part(first[stage[i]].name),) for i, x in enumerate(problem.layers.layers)})
    used = sorted(set(stage))
    renamings = [
        {first[place].name: team[place].name for place in used if team is not first}
        for team in (teams[i] for i in order)
    ]
    return plan if renamings == [{}] else replace(plan, replicas=tuple(renamings))
