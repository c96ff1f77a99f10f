"""Waves: what other devices wait for is computed first, and the rest of a device's work while it travels.

Plan: keys and values of rows 0:50, queries  ⇒  keys and values of rows 0:35 | of rows 35:50 | queries, lane by lane

After Galaxy (Ye et al., arXiv 2405.17245), which sends what is computed while it computes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dicompiler.plugin_api import (
    Box,
    Part,
    Plan,
    Problem,
    Region,
    Routing,
    Share,
    Task,
    TaskId,
    align,
    full,
    leaves,
    output_shape,
    route_on,
    share_task,
    with_interval,
)

SHARES = (1.0, 0.7, 0.6, 0.8, 0.5)
"""Of the rows that the first wave has. 1: there is but one, and what nobody waits for comes behind it. What it sends
travels while the second one computes, so it is the larger one."""
NEARER = (0.05, 0.025)
"""How far from the best of these shares others may be better, in turn: rows are whole ones."""
BEHIND, FIRST, SECOND = range(3)
"""Lanes. What comes behind the waves is read by the next run of layers, and comes before all else of it."""


def waves(problem: Problem, plan: Plan, shares: Sequence[float] = SHARES) -> Iterator[tuple[float, Plan]]:
    """The plan with its parts in waves, for each of the shares, which it stands beside; nothing where no device has
    work that can be put off, and for plans that have lanes, replicas or losses. Raises DicompilerError where the plan
    does not fit the layers."""
    if plan.replicas or plan.losses or any(part.lane for parts in plan.layers.values() for part in parts):
        return
    flow = _Flow.of(route_on(problem.platform, problem.layers, plan))
    tried = [plan]
    for share in shares:
        waved = flow.waved(plan, share)
        if waved not in tried:
            tried.append(waved)
            yield share, waved


@dataclass(frozen=True)
class _Flow:
    """What follows from a routing. sent: tasks of which something travels. local: task → those on its device that it
    reads since it last waited for another device. behind: tasks that nothing leads from to what their device sends
    before it waits again. waiting: tasks that read what has travelled."""

    routing: Routing
    sent: frozenset[TaskId]
    local: dict[TaskId, list[TaskId]]
    behind: frozenset[TaskId]
    waiting: frozenset[TaskId]

    @classmethod
    def of(cls, routing: Routing) -> _Flow:
        read = {_id(task): list(_boxes(routing, task)) for task in routing.tasks}
        waiting = frozenset(one for one, boxes in read.items() if any(box.origin is not None for box in boxes))
        stage, local = dict[TaskId, int](), dict[TaskId, list[TaskId]]()  # stage: the most waits that lead to a task
        for task in routing.tasks:
            boxes = read[_id(task)]
            makers = [made for box in boxes if (made := (box.origin or box).task)]
            at = stage[_id(task)] = max((stage[one] for one in makers), default=0) + (_id(task) in waiting)
            made_here = [box.task for box in boxes if box.task is not None]
            local[_id(task)] = [one for one in dict.fromkeys(made_here) if stage[one] == at]
        sent = frozenset(box.origin.task for box in routing.received if box.origin and box.origin.task)
        urgent = set(sent)
        for task in reversed(routing.tasks):
            if _id(task) in urgent:
                urgent.update(local[_id(task)])
        busy = {(task.device, stage[_id(task)]) for task in routing.tasks if _id(task) in urgent}
        late = (task for task in routing.tasks if _id(task) not in urgent)
        behind = frozenset(_id(task) for task in late if (task.device, stage[_id(task)]) in busy)
        return cls(routing, sent, local, behind, waiting)

    def waved(self, plan: Plan, share: float) -> Plan:
        """The plan with that share of the rows in the first wave; as it is where that changes nothing."""
        cuts = self._cuts(plan, share) if share < 1 else {}
        if not cuts and not self.behind:
            return plan

        def parts(name: str, index: int, part: Part) -> tuple[Part, ...]:
            if (name, index) in cuts:
                first, second = cuts[name, index]
                return replace(part, region=first, lane=FIRST), replace(part, region=second, lane=SECOND)
            return (replace(part, lane=BEHIND if (name, index) in self.behind else FIRST),)

        layers = {
            name: tuple(new for index, part in enumerate(own) for new in parts(name, index, part))
            for name, own in plan.layers.items()
        }
        return replace(plan, layers=layers)

    def _cuts(self, plan: Plan, share: float) -> dict[TaskId, tuple[Region, Region]]:
        """The tasks that go in two waves, with what each computes: from what is sent back to what waits, or needs all
        of something for each of its rows."""
        wanted, cuts = set(self.sent), dict[TaskId, tuple[Region, Region]]()
        for task in reversed(self.routing.tasks):
            one = _id(task)
            if one in wanted and one not in self.waiting and (found := self._halves(task, plan, share)):
                cuts[one] = found
                wanted.update(self.local[one])
        return cuts

    def _halves(self, task: Task, plan: Plan, share: float) -> tuple[Region, Region] | None:
        """The two regions of a task whose part cuts one axis; None where one of them needs as much as both."""
        layers, region = self.routing.layers, plan.layers[task.layer][task.index].region
        if task.kind != "plain" or region is None or layers.by_name[task.layer].reason:
            return None
        layer = layers.by_name[task.layer]
        whole = full(output_shape(layers, layer))
        along = [axis for axis, interval in enumerate(region) if interval != whole[axis]]
        if len(along) != 1:
            return None
        (axis,), (start, stop) = along, region[along[0]]
        middle = start + round(share * (stop - start))
        if not start < middle < stop:
            return None
        halves = tuple(with_interval(region, axis, rows) for rows in ((start, middle), (middle, stop)))
        tasks = [share_task(layers, layer, Share(half)) for half in halves]
        exact = all(align(layers, layer, half) == half for half in halves)
        less = all(one.needs.get(key) != need for one in tasks for key, need in task.needs.items())
        return (halves[0], halves[1]) if exact and less else None


def _id(task: Task) -> TaskId:
    return task.layer, task.index


def _boxes(routing: Routing, task: Task) -> Iterator[Box]:
    """What the task reads."""
    for tree in routing.reads.get(_id(task), {}).values():
        for leaf in leaves(tree):
            yield leaf.box
