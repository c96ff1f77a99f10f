"""Routing: which tasks run, and which box each device sends to which other device.

LayerGraph + Plan ⇒ Routing. A needed region is assembled from boxes that exist: first of the same lane, then of the
same device, then of the same host, then those with the largest overlap. No element is sent to a device twice.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as changed
from operator import itemgetter
from typing import TYPE_CHECKING

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.plan import Plan
from dicompiler.ir.regions import Interval, Region, bounding_region, full_region, intersect, volume, with_interval
from dicompiler.ir.routing import (
    Assembly,
    AssemblyConcat,
    AssemblyLeaf,
    Box,
    OutputDelivery,
    Routing,
    StateRetention,
    assembly_leaves,
)
from dicompiler.ir.tasks import Task, TaskId, TensorKey, task_id
from dicompiler.ir.wire_dtype import with_wire_dtypes
from dicompiler.partition.bounds_inference import make_tasks
from dicompiler.partition.plan_validation import check_plan, failure_plan_in_errors

if TYPE_CHECKING:
    from dicompiler.ir.platform import Platform

TaskOrder = tuple[int, int, int]
DeviceLane = tuple[str, int]  # device, lane
StateOnDevice = tuple[str, str]  # graph input, device
MIN_PIECES_FOR_ONE_CONCAT = (
    64  # pieces from which on an assembly is one Join: a Join in a Join for each would be too deep
)


def route(layers: LayerGraph, plan: Plan, hosts: Mapping[str, str] | None = None) -> Routing:
    """Return the routing of a plan, for all of its roles.

    Args:
        layers: The layers.
        plan: The plan.
        hosts: Host by device; default: each device is its own host.

    Returns:
        The routing.

    Raises:
        DicompilerError: The plan does not match the layers, or a region that is read is not computed.
    """
    layers = with_wire_dtypes(layers, plan.wire_format.dtypes)
    check_plan(layers, plan)
    roles: list[Routing] = []
    for role in plan.roles_by_failure:
        with failure_plan_in_errors(plan, role.failed):
            roles.append(changed(_route_role(layers, role.plan, hosts or {}), failed=role.failed))
    return changed(roles[0], other_roles=tuple(roles[1:]))


def route_on_platform(platform: Platform, layers: LayerGraph, plan: Plan) -> Routing:
    """Return the routing of a plan on a platform.

    Args:
        platform: The cluster.
        layers: The layers.
        plan: The plan.

    Returns:
        The routing.

    Raises:
        DicompilerError: As for `route`, or the plan names a device that the platform does not have.
    """
    for role in plan.roles_by_failure:
        with failure_plan_in_errors(plan, role.failed):
            for name in (*role.plan.devices, *role.failed):
                platform.device(name)
    return route(layers, plan, platform.host_of)


def _route_role(layers: LayerGraph, plan: Plan, hosts: Mapping[str, str]) -> Routing:
    """Return the routing of one role.

    Which regions of states are kept depends on their readers, which depend on the kept regions: iterate from no regions
    until nothing changes.
    """
    wanted: Mapping[StateOnDevice, Region] = {}
    while True:
        router = _Router(layers, plan, hosts, wanted)
        routing = router.run()
        if router.state_regions == wanted:
            return routing
        wanted = router.state_regions


class _Router:
    """Walks the layers backwards, readers first, so that only tasks that are read become live."""

    def __init__(
        self, layers: LayerGraph, plan: Plan, hosts: Mapping[str, str], wanted: Mapping[StateOnDevice, Region]
    ) -> None:
        self.layers, self.plan, self.hosts = layers, plan, hosts
        self.wanted_state_regions, self.state_regions = wanted, dict[StateOnDevice, Region]()
        self.state_input_of = {present: past for past, present in layers.states}
        self.state_retentions: list[StateRetention] = []
        self.device_rank = {device: i for i, device in enumerate(plan.devices)}
        self.output_rank = {name: i for i, name in enumerate(layers.outputs)}
        self.live_tasks: set[TaskId | None] = set()  # None stands for graph inputs
        self.readers: dict[TensorKey, list[tuple[TaskOrder, Task, Region]]] = {}
        self.reads: dict[TaskId, dict[TensorKey, Assembly]] = {}
        self.received: list[Box] = []

    def run(self) -> Routing:
        deliveries, backwards = list[OutputDelivery](), list[list[Task]]()
        for layer in reversed(self.layers.layers):
            tasks = make_tasks(self.layers, layer, self.plan.layers[layer.name])
            finals = [task for task in tasks if task.kind != "partial"]
            for output in layer.outputs:
                deliveries.extend(self._serve_readers(TensorKey(output), _boxes_of_tasks(finals, TensorKey(output))))
            self._add_merge_reads(self._only_live(finals), [task for task in tasks if task.kind == "partial"])
            for task in self._only_live(tasks):
                self._add_reads(task, (*task.needs.items(), *task.state_needs.items()))
                for key, region in task.state_needs.items():
                    state = key.tensor, task.device
                    self.state_regions[state] = bounding_region((self.state_regions.get(state), region)) or region
            backwards.append(tasks)
        for name in self.layers.inputs:
            region = full_region(self.layers.tensors[name].shape or ())
            boxes = [Box(TensorKey(name), region, device, 0) for device in self.plan.source]
            deliveries.extend(self._serve_readers(TensorKey(name), boxes))
        for name, _ in self.layers.states:
            kept = [(device, region) for (past, device), region in self.state_regions.items() if past == name]
            self._serve_readers(TensorKey(name), [Box(TensorKey(name), region, device, 0) for device, region in kept])
        return self._build_routing([task for tasks in reversed(backwards) for task in tasks], deliveries)

    def _only_live(self, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if task_id(task) in self.live_tasks]

    def _add_reads(self, task: Task, needs: Iterable[tuple[TensorKey, Region]]) -> None:
        """Record the task's reads. They are assembled when all readers of a tensor are known."""
        order = self._task_order(task)
        for key, need in needs:
            self.readers.setdefault(key, []).append((order, task, need))

    def _serve_readers(self, key: TensorKey, boxes: Sequence[Box]) -> list[OutputDelivery]:
        """Assemble a tensor for all of its readers in layer order, then for the sinks if it is a model output."""
        received_by_device: dict[str, list[Box]] = {}
        for _, task, need in sorted(self.readers.pop(key, []), key=itemgetter(0)):
            assembly = self._assemble(
                need, (task.device, task.lane), boxes, received_by_device, f"{task.layer!r} on {task.device}"
            )
            self.reads.setdefault(task_id(task), {})[key] = assembly
        if key.reduce is None and (past := self.state_input_of.get(key.tensor)):
            for device in [device for name, device in self.wanted_state_regions if name == past]:
                region = self.wanted_state_regions[past, device]
                assembly = self._assemble(
                    region, (device, 0), boxes, received_by_device, f"the state {past!r} on {device}"
                )
                self.state_retentions.append(StateRetention(device, past, key.tensor, region, assembly))
            return []
        if key.reduce is not None or key.tensor not in self.output_rank:
            return []
        shape = self.layers.tensors[key.tensor].shape
        if shape is None:
            box = next((box for box in boxes if box.device in self.plan.sink), boxes[0])
            self.live_tasks.add(box.task)
            return [OutputDelivery(key.tensor, box.device, None)]
        return [
            OutputDelivery(
                key.tensor,
                sink,
                self._assemble(full_region(shape), (sink, 0), boxes, received_by_device, f"the sink {sink}"),
            )
            for sink in self.plan.sink
        ]

    def _add_merge_reads(self, mergers: Sequence[Task], partials: Sequence[Task]) -> None:
        """Record the partial sums that each live merger reads, range by range."""
        sums = {key: _boxes_of_tasks(partials, key) for task in partials for key in task.outputs}
        for merger in mergers if partials else ():
            (region,) = merger.outputs.values()
            assert region is not None
            for key in sorted(sums, key=lambda key: key.reduce or (0, 0)):
                if any(box.region is not None and intersect(box.region, region) is not None for box in sums[key]):
                    self._add_reads(merger, [(key, region)])
        for key, boxes in sums.items():
            self._serve_readers(key, boxes)

    def _assemble(
        self, need: Region, at: DeviceLane, boxes: Sequence[Box], received_by_device: dict[str, list[Box]], reader: str
    ) -> Assembly:
        """Assemble a needed region from boxes.

        Take the best box, split the rest around it along one axis, and repeat.
        """
        device, lane = at
        overlaps: list[tuple[int, Box, Region]] = []
        for i, box in enumerate((*boxes, *received_by_device.get(device, ()))):
            assert box.region is not None
            overlap = need if need == box.region else intersect(need, box.region)  # an empty tensor overlaps itself
            if overlap is not None:
                overlaps.append((i, box, overlap))
                if box.device == device and box.lane == lane and overlap == need:  # no other box can be better
                    overlaps = overlaps[-1:]
                    break
        if not overlaps:
            raise DicompilerError(
                f"plan: no part computes {format_region(need)} of {boxes[0].key.tensor!r}, which {reader} reads: "
                "extend the region of one of its parts"
            )
        if len(overlaps) > MIN_PIECES_FOR_ONE_CONCAT:
            ranked = [(overlap, *self._piece_rank(at, i, box, overlap)) for i, box, overlap in overlaps]
            if cover := _cover_along_axis(need, ranked):
                first_received = len(self.received)
                sources = [boxes[:1] if number is None else [overlaps[number][1]] for _, number in cover[1]]
                cuts = [cut for cut, _ in cover[1]]
                children = [self._assemble(cut, at, s, {}, reader) for cut, s in zip(cuts, sources, strict=True)]
                received_by_device.setdefault(device, []).extend(self.received[first_received:])
                return AssemblyConcat(cover[0], tuple(children))
        best = overlaps[0] if len(overlaps) == 1 else min(overlaps, key=lambda entry: self._piece_rank(at, *entry))
        _, box, overlap = best
        # Boxes that do not overlap the needed region do not overlap parts of it either.
        candidates = [candidate for _, candidate, _ in overlaps if candidate.origin is None] or boxes[:1]
        for axis, ((start, stop), (low, high)) in enumerate(zip(need, overlap, strict=True)):
            if (low, high) != (start, stop):
                cuts = [with_interval(need, axis, c) for c in ((start, low), (low, high), (high, stop)) if c[0] < c[1]]
                parts = [self._assemble(cut, at, candidates, received_by_device, reader) for cut in cuts]
                return AssemblyConcat(axis, tuple(parts))
        if box.origin is None:
            self.live_tasks.add(box.task)
        if box.device != device:
            box = Box(box.key, overlap, device, lane, origin=box)
            received_by_device.setdefault(device, []).append(box)
            self.received.append(box)
        return AssemblyLeaf(box, overlap)

    def _piece_rank(self, at: DeviceLane, index: int, box: Box, overlap: Region) -> tuple[int, int, int, int]:
        """Return the sort key of a box for a reader; the smallest is the best."""
        device, lane = at
        same_host = self.hosts.get(box.device, box.device) == self.hosts.get(device, device)
        distance = int(box.lane != lane) if box.device == device else 2 if same_host else 3
        return distance, -volume(overlap), self.device_rank[box.device], index

    def _task_order(self, task: Task) -> TaskOrder:
        """Return the sort key of a task: layer order, and partial sums first within a layer."""
        return self.layers.position[task.layer], 0 if task.kind == "partial" else 1, task.index

    def _build_routing(self, tasks: Sequence[Task], deliveries: Sequence[OutputDelivery]) -> Routing:
        live = sorted(self._only_live(tasks), key=self._task_order)
        runs = number_lane_runs(live, self.reads)
        live.sort(key=lambda task: (runs[task_id(task)], task.lane))
        delivered = tuple(sorted(deliveries, key=lambda delivery: self.output_rank[delivery.output]))
        dropped = tuple(task_id(task) for task in tasks if task_id(task) not in self.live_tasks)
        retentions = tuple(
            sorted(self.state_retentions, key=lambda retention: (self.device_rank[retention.device], retention.past))
        )
        received = tuple(self.received)
        return Routing(
            self.layers, tuple(live), self.reads, delivered, received, dropped, runs, state_retentions=retentions
        )


def _cover_along_axis(
    need: Region, pieces: Sequence[tuple[Region, int, int, int, int]]
) -> tuple[int, list[tuple[Region, int | None]]] | None:
    """Cover a region by pieces that lie side by side along one axis.

    Args:
        need: The region.
        pieces: (region within `need`, distance, minus its volume, order, index), as `_Router._piece_rank` ranks them.

    Returns:
        The axis, and (region, number of the piece or None) from left to right; None if there is no such axis.
    """
    axes = {axis for piece in pieces for axis, interval in enumerate(piece[0]) if interval != need[axis]}
    if len(axes) != 1:
        return None
    (axis,) = axes
    row = cover_interval(need[axis], [(region[axis], distance, order) for region, distance, _, order, _ in pieces])
    return axis, [(with_interval(need, axis, cut), number) for cut, number in row]


def cover_interval(need: Interval, pieces: Sequence[tuple[Interval, int, int]]) -> list[tuple[Interval, int | None]]:
    """Cover an interval greedily by the best pieces.

    What is left on both sides of a piece is covered by the next best ones. The nearest piece comes first, then the
    piece with the largest missing part, then the first one in order. Thousands of pieces need neither recursion nor
    much more time per piece.

    Args:
        need: The interval.
        pieces: (interval, distance, order) of each piece.

    Returns:
        (interval, number of the piece, or None for a gap that no piece covers) from left to right.
    """
    starts, stops = [need[0]], [need[1]]  # of the gaps, in order
    taken: list[tuple[Interval, int | None]] = []
    longest = need[0] - need[1]  # minus the length of the largest part that a piece can have
    heap = [(distance, longest, order, number) for number, (_, distance, order) in enumerate(pieces)]
    heapq.heapify(heap)
    while heap:
        distance, claimed, order, number = heapq.heappop(heap)
        part = _largest_overlap(starts, stops, pieces[number][0])
        if part is None:
            continue
        low, high, gap = part
        if low - high != claimed:  # The overlap has shrunk since it was ranked, so other pieces may be better now.
            heapq.heappush(heap, (distance, low - high, order, number))
            continue
        taken.append(((low, high), number))
        rest = [side for side in ((starts[gap], low), (high, stops[gap])) if side[0] < side[1]]
        starts[gap : gap + 1], stops[gap : gap + 1] = [side[0] for side in rest], [side[1] for side in rest]
        # Nearer pieces may have split the rest for this piece into several gaps.
        heapq.heappush(heap, (distance, low - high, order, number))
    return sorted([*taken, *(((start, stop), None) for start, stop in zip(starts, stops, strict=True))])


def _largest_overlap(starts: Sequence[int], stops: Sequence[int], piece: Interval) -> tuple[int, int, int] | None:
    """Return (start, stop, number of the gap) of the largest overlap of a piece with a gap."""
    best, gap = None, max(0, bisect_right(starts, piece[0]) - 1)
    while gap < len(starts) and starts[gap] < piece[1]:
        low, high = max(starts[gap], piece[0]), min(stops[gap], piece[1])
        if low < high and (best is None or high - low > best[1] - best[0]):
            best = (low, high, gap)
        gap += 1
    return best


def _boxes_of_tasks(tasks: Sequence[Task], key: TensorKey) -> list[Box]:
    return [Box(key, t.outputs[key], t.device, t.lane, task_id(t)) for t in tasks if key in t.outputs]


def number_lane_runs(tasks: Sequence[Task], reads: Mapping[TaskId, Mapping[TensorKey, Assembly]]) -> dict[TaskId, int]:
    """Return the number of the run of each task.

    Within a run, no lane reads tensors that another lane or device computes in the same run, so the lanes of a device
    can run one after another. `tasks` must be in layer order.
    """
    runs, current = dict[TaskId, int](), 0
    for _, group in itertools.groupby(tasks, key=lambda task: (task.layer, task.kind == "partial")):
        step = list(group)
        for task in step:
            for tree in reads.get(task_id(task), {}).values():
                for leaf in assembly_leaves(tree):
                    maker = (leaf.box.origin or leaf.box).task
                    crossing = leaf.box.origin is not None or leaf.box.lane != task.lane
                    if crossing and maker is not None and runs[maker] == current:
                        current += 1
        runs.update((task_id(task), current) for task in step)
    return runs


def format_region(region: Region) -> str:
    """Return a region as text: ((0, 1), (4, 8)) ⇒ "[0:1, 4:8]"."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in region) + "]"
