"""Reordering of a plan in waves, so that sending overlaps with computing.

Example: one device of an attention layer. Other devices wait for its keys and values, but not for its queries.

    before: keys and values of rows 0:50, and queries
    after:  keys and values of rows 0:35 (first wave), then of rows 35:50 (second wave), then queries

The rows of the first wave are sent while the device computes the second wave. In the plan, each wave is a lane: a group
of parts of a device. The lanes of a device run one after another.

After Galaxy (Ye et al., arXiv 2405.17245), which sends results while it computes the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dicompiler.plugin_api import LayerShare, Part, Plan, Problem, Region
from dicompiler.plugin_api.regions import (
    Box,
    Routing,
    Task,
    TaskId,
    align_region,
    assembly_leaves,
    full_region,
    make_share_task,
    output_shape,
    route_on_platform,
    with_interval,
)

FIRST_WAVE_SHARES = (1.0, 0.7, 0.6, 0.8, 0.5)
"""Fractions of the rows in the first wave, in the order in which they are tried.

With 1.0 there is no second wave, but parts that no other device waits for are still computed last. No fraction is below
one half, because the rows of the first wave are sent while the second wave is computed.
"""
SHARE_STEPS = (0.05, 0.025)
"""Distances from the best fraction of FIRST_WAVE_SHARES at which further fractions are tried.

Smaller distances are useless, because only whole rows can be moved.
"""
LATE_LANE, FIRST_WAVE_LANE, SECOND_WAVE_LANE = range(3)
"""Numbers of the lanes, in the order in which a device computes them.

A lane is a group of parts of a device. Late parts, such as the queries of the example, read data of another lane. These
data are available only after the next exchange, so that late parts are computed after both waves. Their lane has the
lowest number, so that the device computes late parts first after the exchange.
"""


def overlap_orders(
    problem: Problem, plan: Plan, shares: Sequence[float] = FIRST_WAVE_SHARES
) -> Iterator[tuple[float, Plan]]:
    """Yield pairs (share of rows in the first wave, plan in waves) for each share that changes the plan.

    In waves, a device first computes the rows that other devices wait for. Nothing is yielded if no device has work
    that can be deferred. Plans that already have lanes (several groups of parts per device), replicas or failure plans
    are not reordered either.
    """
    if plan.replicas or plan.failures or any(part.lane for parts in plan.layers.values() for part in parts):
        return
    order = _TaskOrder.from_routing(route_on_platform(problem.platform, problem.layers, plan))
    known = [plan]
    for share in shares:
        ordered = order.order_in_waves(plan, share)
        if ordered not in known:
            known.append(ordered)
            yield share, ordered


@dataclass(frozen=True)
class _TaskOrder:
    """Facts about the order of tasks, derived from a routing. A task computes one part of a layer on its device.

    Tasks that read data from other devices wait. The stage of a task is the largest number of tasks that wait on any
    path of tasks that ends with it.

    Attributes:
        routing: The routing.
        sending_tasks: Tasks with an output that is sent to another device.
        local_inputs: For each task, the tasks of the same device and the same stage that it reads.
        late_tasks: Tasks that can be deferred, because their device needs them for nothing that it sends in the same
            stage.
        waiting_tasks: Tasks that read data from other devices.
    """

    routing: Routing
    sending_tasks: frozenset[TaskId]
    local_inputs: dict[TaskId, list[TaskId]]
    late_tasks: frozenset[TaskId]
    waiting_tasks: frozenset[TaskId]

    @classmethod
    def from_routing(cls, routing: Routing) -> _TaskOrder:
        read = {_task_id(task): list(_read_boxes(routing, task)) for task in routing.tasks}
        waiting = frozenset(key for key, boxes in read.items() if any(box.origin is not None for box in boxes))
        # The stage of a task is the largest number of tasks that wait for other devices, on any path of tasks that ends
        # with it.
        stage, local = dict[TaskId, int](), dict[TaskId, list[TaskId]]()
        for task in routing.tasks:
            boxes = read[_task_id(task)]
            producers = [producer for box in boxes if (producer := (box.origin or box).task)]
            task_stage = max((stage[key] for key in producers), default=0) + (_task_id(task) in waiting)
            stage[_task_id(task)] = task_stage
            local_tasks = [box.task for box in boxes if box.task is not None]
            local[_task_id(task)] = [key for key in dict.fromkeys(local_tasks) if stage[key] == task_stage]
        sent = frozenset(box.origin.task for box in routing.received_boxes if box.origin and box.origin.task)
        urgent = set(sent)
        for task in reversed(routing.tasks):
            if _task_id(task) in urgent:
                urgent.update(local[_task_id(task)])
        busy = {(task.device, stage[_task_id(task)]) for task in routing.tasks if _task_id(task) in urgent}
        late = (task for task in routing.tasks if _task_id(task) not in urgent)
        behind = frozenset(_task_id(task) for task in late if (task.device, stage[_task_id(task)]) in busy)
        return cls(routing, sent, local, behind, waiting)

    def order_in_waves(self, plan: Plan, share: float) -> Plan:
        """Return the plan reordered in waves, with the fraction `share` of the rows in the first wave.

        In waves, rows that other devices wait for are computed first. If nothing changes, the same plan is returned.
        """
        cuts = self._wave_cuts(plan, share) if share < 1 else {}
        if not cuts and not self.late_tasks:
            return plan

        def parts(name: str, index: int, part: Part) -> tuple[Part, ...]:
            if (name, index) in cuts:
                first, second = cuts[name, index]
                return replace(part, region=first, lane=FIRST_WAVE_LANE), replace(
                    part, region=second, lane=SECOND_WAVE_LANE
                )
            return (replace(part, lane=LATE_LANE if (name, index) in self.late_tasks else FIRST_WAVE_LANE),)

        layers = {
            name: tuple(new for index, part in enumerate(layer_parts) for new in parts(name, index, part))
            for name, layer_parts in plan.layers.items()
        }
        return replace(plan, layers=layers)

    def _wave_cuts(self, plan: Plan, share: float) -> dict[TaskId, tuple[Region, Region]]:
        """Return the tasks that are split into two waves, with the region of each wave.

        The rows of the first wave are sent while the device computes the second wave. `share` is the fraction of the
        rows in the first wave. Tasks whose results are sent are split, and the tasks before them on the same device, up
        to a task that waits for other devices. Tasks that read a whole tensor for each row are not split.
        """
        chosen, cuts = set(self.sending_tasks), dict[TaskId, tuple[Region, Region]]()
        for task in reversed(self.routing.tasks):
            task_id = _task_id(task)
            if (
                task_id in chosen
                and task_id not in self.waiting_tasks
                and (found := self._split_task(task, plan, share))
            ):
                cuts[task_id] = found
                chosen.update(self.local_inputs[task_id])
        return cuts

    def _split_task(self, task: Task, plan: Plan, share: float) -> tuple[Region, Region] | None:
        """Split the region of a task along its only cut axis; the first part gets the fraction `share` of the rows.

        The result is None if the region is not cut along exactly one axis. It is also None if one of the two parts
        alone reads as much of an input as the whole task.
        """
        layers, region = self.routing.layers, plan.layers[task.layer][task.index].region
        if task.kind != "plain" or region is None or layers.layer_by_name[task.layer].whole_reason:
            return None
        layer = layers.layer_by_name[task.layer]
        whole = full_region(output_shape(layers, layer))
        along = [axis for axis, interval in enumerate(region) if interval != whole[axis]]
        if len(along) != 1:
            return None
        (axis,), (start, stop) = along, region[along[0]]
        middle = start + round(share * (stop - start))
        if not start < middle < stop:
            return None
        halves = tuple(with_interval(region, axis, rows) for rows in ((start, middle), (middle, stop)))
        tasks = [make_share_task(layers, layer, LayerShare(half)) for half in halves]
        exact = all(align_region(layers, layer, half) == half for half in halves)
        less = all(half_task.needs.get(key) != need for half_task in tasks for key, need in task.needs.items())
        return (halves[0], halves[1]) if exact and less else None


def _task_id(task: Task) -> TaskId:
    return task.layer, task.index


def _read_boxes(routing: Routing, task: Task) -> Iterator[Box]:
    """Yield the boxes (regions of tensors on a device) that the task reads."""
    for tree in routing.reads.get(_task_id(task), {}).values():
        for leaf in assembly_leaves(tree):
            yield leaf.box
