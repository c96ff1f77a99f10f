"""Routes: works out who computes what, and who sends which box to whom.

LayerGraph + Plan → Routing
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as changed
from operator import itemgetter
from typing import TYPE_CHECKING

from dicompiler.base.errors import DicompilerError
from dicompiler.base.gaps import in_a_row
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.plan import Plan
from dicompiler.ir.regions import Region, bounding, full, intersect, volume, with_interval
from dicompiler.ir.routing import Box, Delivery, Join, Keeping, Routing, Take, Tree, leaves
from dicompiler.ir.tasks import Key, Task, TaskId, task_id
from dicompiler.ir.wire import on_wire
from dicompiler.partition.bounds_inference import make_tasks
from dicompiler.partition.plan_rules import check, in_loss

if TYPE_CHECKING:
    from dicompiler.ir.platform import Platform

Order = tuple[int, int, int]
Place = tuple[str, int]  # device, lane
State = tuple[str, str]  # graph input, device
MANY = 64  # pieces from which on an assembly is one Join: a Join in a Join for each would be too deep


def route(layers: LayerGraph, plan: Plan, hosts: Mapping[str, str] | None = None) -> Routing:
    """Who computes what and who sends which box to whom. `hosts`: device → host (default: each its own).

    Raises DicompilerError where the plan does not fit the layers or leaves a live reader's need uncovered.
    """
    layers = on_wire(layers, plan.wire.types)
    check(layers, plan)
    roles: list[Routing] = []
    for way in plan.ways:
        with in_loss(plan, way.lost):
            roles.append(changed(_routing(layers, way.plan, hosts or {}), lost=way.lost))
    return changed(roles[0], others=tuple(roles[1:]))


def route_on(platform: Platform, layers: LayerGraph, plan: Plan) -> Routing:
    """`route` on a platform. DicompilerError for a device that it has not."""
    for way in plan.ways:
        with in_loss(plan, way.lost):
            for name in (*way.plan.devices, *way.lost):
                platform.device(name)
    return route(layers, plan, platform.host_of)


def _routing(layers: LayerGraph, plan: Plan, hosts: Mapping[str, str]) -> Routing:
    """Which boxes of states are wanted is known once it is known who reads them, and the other way round: from none on
    they grow until nothing changes."""
    wanted: Mapping[State, Region] = {}
    while True:
        router = _Router(layers, plan, hosts, wanted)
        routing = router.run()
        if router.kept == wanted:
            return routing
        wanted = router.kept


class _Router:
    """Walks the layers backwards: readers first, so that only what is read becomes live."""

    def __init__(
        self, layers: LayerGraph, plan: Plan, hosts: Mapping[str, str], wanted: Mapping[State, Region]
    ) -> None:
        self.layers, self.plan, self.hosts = layers, plan, hosts
        self.wanted, self.kept = wanted, dict[State, Region]()
        self.past = {present: past for past, present in layers.states}
        self.keepings: list[Keeping] = []
        self.rank = {device: i for i, device in enumerate(plan.devices)}
        self.outputs = {name: i for i, name in enumerate(layers.outputs)}
        self.live: set[TaskId | None] = set()  # None: a graph input is no task's
        self.readers: dict[Key, list[tuple[Order, Task, Region]]] = {}
        self.reads: dict[TaskId, dict[Key, Tree]] = {}
        self.received: list[Box] = []

    def run(self) -> Routing:
        deliveries, backwards = list[Delivery](), list[list[Task]]()
        for layer in reversed(self.layers.layers):
            tasks = make_tasks(self.layers, layer, self.plan.layers[layer.name])
            finals = [task for task in tasks if task.kind != "partial"]
            for output in layer.outputs:
                deliveries.extend(self._serve(Key(output), _boxes(finals, Key(output))))
            self._merge(self._live(finals), [task for task in tasks if task.kind == "partial"])
            for task in self._live(tasks):
                self._read(task, (*task.needs.items(), *task.kept.items()))
                for key, region in task.kept.items():
                    at = key.tensor, task.device
                    self.kept[at] = bounding((self.kept.get(at), region)) or region
            backwards.append(tasks)
        for name in self.layers.inputs:
            region = full(self.layers.tensors[name].shape or ())
            boxes = [Box(Key(name), region, device, 0) for device in self.plan.source]
            deliveries.extend(self._serve(Key(name), boxes))
        for name, _ in self.layers.states:
            kept = [(device, region) for (past, device), region in self.kept.items() if past == name]
            self._serve(Key(name), [Box(Key(name), region, device, 0) for device, region in kept])
        return self._finish([task for tasks in reversed(backwards) for task in tasks], deliveries)

    def _live(self, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if task_id(task) in self.live]

    def _read(self, task: Task, needs: Iterable[tuple[Key, Region]]) -> None:
        """Notes what the task reads, which is assembled once all its other readers are known."""
        order = self._order(task)
        for key, need in needs:
            self.readers.setdefault(key, []).append((order, task, need))

    def _serve(self, key: Key, boxes: Sequence[Box]) -> list[Delivery]:
        """Assembles `key` for all who read it, in layer order; the sinks of a graph output come last."""
        held: dict[str, list[Box]] = {}
        for _, task, need in sorted(self.readers.pop(key, []), key=itemgetter(0)):
            tree = self._assemble(need, (task.device, task.lane), boxes, held, f"{task.layer!r} on {task.device}")
            self.reads.setdefault(task_id(task), {})[key] = tree
        if key.reduce is None and (past := self.past.get(key.tensor)):
            for device in [device for name, device in self.wanted if name == past]:
                region = self.wanted[past, device]
                tree = self._assemble(region, (device, 0), boxes, held, f"the state {past!r} on {device}")
                self.keepings.append(Keeping(device, past, key.tensor, region, tree))
            return []
        if key.reduce is not None or key.tensor not in self.outputs:
            return []
        shape = self.layers.tensors[key.tensor].shape
        if shape is None:
            box = next((box for box in boxes if box.device in self.plan.sink), boxes[0])
            self.live.add(box.task)
            return [Delivery(key.tensor, box.device, None)]
        return [
            Delivery(key.tensor, sink, self._assemble(full(shape), (sink, 0), boxes, held, f"the sink {sink}"))
            for sink in self.plan.sink
        ]

    def _merge(self, mergers: Sequence[Task], partials: Sequence[Task]) -> None:
        """Every live merger reads, range by range, the partial sums that touch its region."""
        sums = {key: _boxes(partials, key) for task in partials for key in task.outputs}
        for merger in mergers if partials else ():
            (region,) = merger.outputs.values()
            assert region is not None
            for key in sorted(sums, key=lambda key: key.reduce or (0, 0)):
                if any(box.region is not None and intersect(box.region, region) is not None for box in sums[key]):
                    self._read(merger, [(key, region)])
        for key, boxes in sums.items():
            self._serve(key, boxes)

    def _assemble(self, need: Region, at: Place, boxes: Sequence[Box], held: dict[str, list[Box]], reader: str) -> Tree:
        """The need as a tree of pieces: the best one first, what is left is cut around it along one axis.

        Best: own lane, own device (what was received is local), own host; then largest overlap; then device order.
        """
        device, lane = at
        overlaps: list[tuple[int, Box, Region]] = []
        for i, box in enumerate((*boxes, *held.get(device, ()))):
            assert box.region is not None
            overlap = need if need == box.region else intersect(need, box.region)  # an empty tensor is its own part
            if overlap is not None:
                overlaps.append((i, box, overlap))
                if box.device == device and box.lane == lane and overlap == need:  # nothing is better
                    overlaps = overlaps[-1:]
                    break
        if not overlaps:
            raise DicompilerError(
                f"plan: nobody computes {show(need)} of {boxes[0].key.tensor!r}, which {reader} reads: "
                "let the region of one of its parts cover it"
            )
        ranked = [(one, *self._rank(at, i, box, one)) for i, box, one in overlaps] if len(overlaps) > MANY else ()
        if ranked and (row := in_a_row(need, ranked)):
            pieces, before = (
                [(cut, boxes[:1] if i is None else [overlaps[i][1]]) for cut, i in row[1]],
                len(self.received),
            )
            children = tuple([self._assemble(cut, at, one, {}, reader) for cut, one in pieces])
            held.setdefault(device, []).extend(self.received[before:])
            return Join(row[0], children)
        _, box, overlap = overlaps[0] if len(overlaps) == 1 else min(overlaps, key=lambda one: self._rank(at, *one))
        # What has nothing in common with the need has nothing in common with a part of it.
        near = [one for _, one, _ in overlaps if one.origin is None] or boxes[:1]
        for axis, ((start, stop), (low, high)) in enumerate(zip(need, overlap, strict=True)):
            if (low, high) != (start, stop):
                cuts = [with_interval(need, axis, c) for c in ((start, low), (low, high), (high, stop)) if c[0] < c[1]]
                return Join(axis, tuple(self._assemble(cut, at, near, held, reader) for cut in cuts))
        if box.origin is None:
            self.live.add(box.task)
        if box.device != device:
            box = Box(box.key, overlap, device, lane, origin=box)
            held.setdefault(device, []).append(box)
            self.received.append(box)
        return Take(box, overlap)

    def _rank(self, at: Place, index: int, box: Box, overlap: Region) -> tuple[int, int, int, int]:
        """The smaller the better a piece."""
        device, lane = at
        near = self.hosts.get(box.device, box.device) == self.hosts.get(device, device)
        distance = int(box.lane != lane) if box.device == device else 2 if near else 3
        return distance, -volume(overlap), self.rank[box.device], index

    def _order(self, task: Task) -> Order:
        """Layer order; within a layer partial sums first."""
        return self.layers.position[task.layer], 0 if task.kind == "partial" else 1, task.index

    def _finish(self, tasks: Sequence[Task], deliveries: Sequence[Delivery]) -> Routing:
        live = sorted(self._live(tasks), key=self._order)
        runs = lane_runs(live, self.reads)
        live.sort(key=lambda task: (runs[task_id(task)], task.lane))
        delivered = tuple(sorted(deliveries, key=lambda delivery: self.outputs[delivery.output]))
        dropped = tuple(task_id(task) for task in tasks if task_id(task) not in self.live)
        keepings = tuple(sorted(self.keepings, key=lambda one: (self.rank[one.device], one.past)))
        received = tuple(self.received)
        return Routing(self.layers, tuple(live), self.reads, delivered, received, dropped, runs, keepings=keepings)


def _boxes(tasks: Sequence[Task], key: Key) -> list[Box]:
    return [Box(key, t.outputs[key], t.device, t.lane, task_id(t)) for t in tasks if key in t.outputs]


def lane_runs(tasks: Sequence[Task], reads: Mapping[TaskId, Mapping[Key, Tree]]) -> dict[TaskId, int]:
    """Numbers the maximal runs of steps in which no lane reads what another lane or device makes in the same run:
    inside a run the lanes of a device go one after another. `tasks` in layer order."""
    runs, current = dict[TaskId, int](), 0
    for _, group in itertools.groupby(tasks, key=lambda task: (task.layer, task.kind == "partial")):
        step = list(group)
        for task in step:
            for tree in reads.get(task_id(task), {}).values():
                for leaf in leaves(tree):
                    maker = (leaf.box.origin or leaf.box).task
                    crossing = leaf.box.origin is not None or leaf.box.lane != task.lane
                    if crossing and maker is not None and runs[maker] == current:
                        current += 1
        runs.update((task_id(task), current) for task in step)
    return runs


def show(region: Region) -> str:
    """((0, 1), (4, 8)) → "[0:1, 4:8]"."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in region) + "]"
