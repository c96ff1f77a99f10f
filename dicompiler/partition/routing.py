"""Routing: which tasks (computations of parts of layers) run, and which regions of tensors the devices exchange.

A needed region is assembled from existing boxes (regions on devices). The nearest box is preferred: same lane (group of
the device's parts), same device, same host, other hosts. No element is sent to a device twice.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.ir.layers import Layer, LayerGraph, TensorKey
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.random_ops import random_layers
from dicompiler.ir.regions import (
    Interval,
    Region,
    bounding_region,
    contains,
    full_region,
    intersect,
    is_empty,
    volume,
    with_interval,
)
from dicompiler.ir.routing import (
    Assembly,
    AssemblyConcat,
    AssemblyLeaf,
    Box,
    OutputDelivery,
    Routing,
    StateRetention,
    Task,
    TaskId,
    assembly_leaves,
    task_id,
)
from dicompiler.ir.wire_dtype import with_wire_dtypes
from dicompiler.partition.bounds_inference import (
    align_region,
    cuttable_axes,
    make_tasks,
    output_shape,
    reduction_length,
)

if TYPE_CHECKING:
    from dicompiler.ir.platform import Platform


def check_plan(layers: LayerGraph, plan: Plan) -> None:
    """Raise DicompilerError if a plan is not valid for the model's layers; the message names the first fault.

    It is not checked here that each region that is read is also computed; `route` does that.
    """
    if not plan.source or not plan.sink:
        raise DicompilerError("plan: source and sink must each name at least one device")
    _check_replicas(plan)
    if layers.states and (plan.replicas or plan.failures):
        key, option = ("replicas", "strategy") if plan.replicas else ("failures", "tolerate-failures")
        raise DicompilerError(
            f"plan: {key}: state {layers.states[0][0]!r} is kept on its device, and other devices do not have "
            f"it: remove '{key}' (--{option}), or use no states (--state none)"
        )
    for name in plan.layers:
        if name not in layers.layer_by_name:
            raise DicompilerError(
                f"plan: layers.{name}: the model has no such layer{did_you_mean(name, layers.layer_by_name)}: "
                "use a plan of this model"
            )
    random = random_layers(layers)
    for layer in layers.layers:
        parts = plan.layers.get(layer.name)
        if not parts:
            raise DicompilerError(f"plan: layers.{layer.name}: missing: give every layer at least one part")
        if len(parts) > 1 and layer.name in random:
            fault = f"{random[layer.name].op} draws different random numbers in each of its {len(parts)} parts"
            raise DicompilerError(f"plan: layers.{layer.name}: {fault}: give the layer to one device")
        for i, part in enumerate(parts):
            _check_part(layers, layer, part, f"plan: layers.{layer.name}[{i}]")
        _check_merge(layers, layer, parts)
    for i, failure in enumerate(plan.failures):
        with failure_plan_in_errors(plan, failure.failed):
            if frozenset(failure.failed) in [frozenset(other.failed) for other in plan.failures[:i]]:
                raise DicompilerError("plan: two entries of the key 'failed' name the same devices: remove one")
            if failed_devices := [name for name in failure.plan.devices if name in failure.failed]:
                device = failed_devices[0]
                fault = f"the plan uses {device!r}, which is one of the failed devices"
                raise DicompilerError(f"plan: {fault}: give the parts of {device!r} to other devices")
            check_plan(layers, failure.plan)


@contextmanager
def failure_plan_in_errors(plan: Plan, failed: tuple[str, ...]) -> Iterator[None]:
    """Add the place of a failure plan, such as "failures[0]", to each DicompilerError raised in the `with` block.

    `failed` are the devices for whose failure the failure plan is made; (): errors are not changed.
    """
    try:
        yield
    except DicompilerError as error:
        if not failed:
            raise
        place = f"plan: failures[{[failure.failed for failure in plan.failures].index(failed)}]: "
        raise type(error)(place + str(error).removeprefix("plan: ")) from None


def _check_replicas(plan: Plan) -> None:
    """Raise DicompilerError unless replicas replace only devices of the plan, and no two devices by the same one.

    A replica is the plan with some devices replaced by others.
    """
    devices = dict.fromkeys(part.device for parts in plan.layers.values() for part in parts)
    names = [*plan.source, *devices, *plan.sink]
    for i, renaming in enumerate(plan.replicas):
        for name in renaming:
            if name not in names:
                fault = f"the plan uses no device {name!r}{did_you_mean(name, names)}"
                raise DicompilerError(f"plan: replicas[{i}]: {fault}: a replica can replace only devices of the plan")
        old_names: dict[str, str] = {}
        for name in dict.fromkeys([*devices, *renaming]):
            new = renaming.get(name, name)
            if new in old_names:
                fault = f"{old_names[new]!r} and {name!r} both become {new!r}"
                raise DicompilerError(f"plan: replicas[{i}]: {fault}: map each device of the plan to another device")
            old_names[new] = name


def _check_part(layers: LayerGraph, layer: Layer, part: Part, place: str) -> None:
    if layer.whole_reason:
        shape = layers.tensors[layer.output].shape
        is_whole = part.region is None or (shape is not None and part.region == full_region(shape))
        if part.reduce is not None or not is_whole:
            raise DicompilerError(
                f"{place}: this layer cannot be split ({layer.whole_reason}): set its region to 'all', omit 'reduce'"
            )
        return
    shape = output_shape(layers, layer)
    region = full_region(shape) if part.region is None else part.region
    if len(region) != len(shape):
        fault = f"{len(region)} intervals for an output of rank {len(shape)} {shape}"
        raise DicompilerError(f"{place}.region: {fault}: give one interval for each axis")
    if is_empty(region) or not contains(full_region(shape), region):
        fault = f"{_format_intervals(region)} is empty or outside the layer's output {shape}"
        raise DicompilerError(f"{place}.region: {fault}: give intervals within the output")
    allowed = cuttable_axes(layers, layer)
    for axis, interval in enumerate(region):
        if interval != (0, shape[axis]) and axis not in allowed:
            axes = f"only the axes {', '.join(map(str, allowed))}" if allowed else "none of its axes"
            raise DicompilerError(f"{place}.region: axis {axis} of this layer cannot be cut: cut {axes}")
    if part.reduce is None:
        return
    extent = reduction_length(layers, layer)
    if extent is None:
        op = layer.nodes[layer.anchor].op
        fault = f"this {op} has no input channels to sum over (it has groups, or no weights)"
        raise DicompilerError(f"{place}.reduce: {fault}: remove 'reduce'")
    if not 0 <= part.reduce[0] < part.reduce[1] <= extent:
        fault = f"{list(part.reduce)} is empty or outside 0..{extent}"
        raise DicompilerError(f"{place}.reduce: {fault}: give a range of input channels")


def _check_merge(layers: LayerGraph, layer: Layer, parts: Sequence[Part]) -> None:
    """Raise DicompilerError unless the ranges of a layer's partial sums cover its reduction axis exactly once."""
    partials = [part for part in parts if part.reduce is not None]
    if not partials:
        return
    whole = full_region(output_shape(layers, layer))
    mergers = [align_region(layers, layer, part.region or whole) for part in parts if part.reduce is None]
    if not mergers:
        raise DicompilerError(
            f"plan: layers.{layer.name}: all parts are partial sums, and no part merges them: append a part "
            'without \'reduce\' (for instance {"device": …, "region": "all"})'
        )
    extent = reduction_length(layers, layer)
    for region in mergers:
        covered, requirement = 0, f"they must cover 0..{extent} for the region {_format_intervals(region)}"
        aligned = ((part.reduce, align_region(layers, layer, part.region or whole)) for part in partials)
        for start, stop in sorted({reduce for reduce, of in aligned if reduce and intersect(of, region) is not None}):
            if start != covered:
                fault = f"{'overlap' if start < covered else 'leave a gap'} at {min(covered, start)}"
                raise DicompilerError(
                    f"plan: layers.{layer.name}: reduce ranges {fault}, but {requirement} exactly once"
                )
            covered = stop
        if covered != extent:
            raise DicompilerError(f"plan: layers.{layer.name}: reduce ranges end at {covered}, but {requirement}")


def _format_intervals(region: Region) -> str:
    return str([list(interval) for interval in region])


TaskSortKey = tuple[int, int, int]
DeviceLane = tuple[str, int]
"""Name of a device, and number of one of its lanes (groups of its parts)."""
StateOnDevice = tuple[str, str]
"""Model input that is a state (an output of the previous frame), and a device that keeps a region of it."""
MIN_PIECES_FOR_ONE_CONCAT = 64
"""Number of pieces above which a region is assembled by one Concat, because nested Concats would be too deep."""


def route(layers: LayerGraph, plan: Plan, hosts: Mapping[str, str] | None = None) -> Routing:
    """Return the routing of a plan, with the routings of its replicas and failure plans.

    A routing has the tasks (computations of parts of layers), and the regions that devices exchange for them.

    Args:
        layers: The model's layers.
        plan: Plan of these layers.
        hosts: Host of each device, by device name; without an entry, a device has its own host.

    Raises:
        DicompilerError: The plan does not match the layers, or a part reads a region that no part computes.
    """
    layers = with_wire_dtypes(layers, plan.wire_format.dtypes)
    check_plan(layers, plan)
    roles: list[Routing] = []
    for role_plan, failed in zip(plan.roles, plan.role_failures, strict=True):
        with failure_plan_in_errors(plan, failed):
            roles.append(replace(_route_role(layers, role_plan, hosts or {}), failed=failed))
    return replace(roles[0], other_roles=tuple(roles[1:]))


def route_on_platform(platform: Platform, layers: LayerGraph, plan: Plan) -> Routing:
    """Return the routing of a plan on a platform: the tasks, and the tensor regions that the devices exchange.

    Args:
        platform: The cluster.
        layers: The model's layers.
        plan: Plan of these layers on devices of the platform.

    Returns:
        The routing.

    Raises:
        DicompilerError: The plan does not match the layers, names an unknown device, or a part reads a region that no
            part computes.
    """
    for role_plan, failed in zip(plan.roles, plan.role_failures, strict=True):
        with failure_plan_in_errors(plan, failed):
            for name in (*role_plan.devices, *failed):
                platform.device(name)
    return route(layers, plan, platform.host_of)


def _route_role(layers: LayerGraph, plan: Plan, hosts: Mapping[str, str]) -> Routing:
    # The tasks that run determine which regions of states (outputs for the next frame) devices keep, and the kept
    # regions determine which tasks run. The routing is therefore repeated until the regions no longer change.
    wanted: Mapping[StateOnDevice, Region] = {}
    while True:
        router = _Router(layers, plan, hosts, wanted)
        routing = router.make_routing()
        if router.state_regions == wanted:
            return routing
        wanted = router.state_regions


class _Router:
    """Search for the tasks of a plan with results that are read, from the model's outputs back to its inputs.

    A task computes one part of a layer. A box is a region of a tensor on a device.

    Attributes:
        wanted_state_regions: Regions of states (outputs that are inputs of the next frame) that devices keep, by state
            and device, as the previous search found them.
        state_regions: The same regions, as this search finds them.
        live_tasks: Tasks with results that are read; also None if model inputs are read, which no task computes.
        readers: Tasks that read a tensor, with the region that each needs, by tensor.
        reads: By task and tensor, the tree that builds the needed region by concatenation of stored boxes.
        received: Boxes that devices send to each other.
    """

    def __init__(
        self, layers: LayerGraph, plan: Plan, hosts: Mapping[str, str], wanted: Mapping[StateOnDevice, Region]
    ) -> None:
        self.layers, self.plan, self.hosts = layers, plan, hosts
        self.wanted_state_regions, self.state_regions = wanted, dict[StateOnDevice, Region]()
        self.state_input_of = {present: past for past, present in layers.states}
        self.state_retentions: list[StateRetention] = []
        self.device_rank = {device: i for i, device in enumerate(plan.devices)}
        self.output_rank = {name: i for i, name in enumerate(layers.outputs)}
        self.live_tasks: set[TaskId | None] = set()
        self.readers: dict[TensorKey, list[tuple[TaskSortKey, Task, Region]]] = {}
        self.reads: dict[TaskId, dict[TensorKey, Assembly]] = {}
        self.received: list[Box] = []

    def make_routing(self) -> Routing:
        deliveries, backwards = list[OutputDelivery](), list[list[Task]]()
        for layer in reversed(self.layers.layers):
            tasks = make_tasks(self.layers, layer, self.plan.layers[layer.name])
            finals = [task for task in tasks if task.kind != "partial"]
            for output in layer.outputs:
                key = TensorKey(output)
                deliveries.extend(self._assemble_for_readers(key, _boxes_of_tasks(finals, key)))
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
            deliveries.extend(self._assemble_for_readers(TensorKey(name), boxes))
        for name, _ in self.layers.states:
            kept = [(device, region) for (past, device), region in self.state_regions.items() if past == name]
            boxes = [Box(TensorKey(name), region, device, 0) for device, region in kept]
            self._assemble_for_readers(TensorKey(name), boxes)
        return self._build_routing([task for tasks in reversed(backwards) for task in tasks], deliveries)

    def _only_live(self, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if task_id(task) in self.live_tasks]

    def _add_reads(self, task: Task, needs: Iterable[tuple[TensorKey, Region]]) -> None:
        """Record the regions that a task reads. They are assembled later, when all readers of each tensor are known."""
        order = self._task_sort_key(task)
        for key, need in needs:
            self.readers.setdefault(key, []).append((order, task, need))

    def _assemble_for_readers(self, key: TensorKey, boxes: Sequence[Box]) -> list[OutputDelivery]:
        """Assemble a tensor for the tasks that read it, for devices that keep it for the next frame, and for the sinks.

        Sinks are the devices that receive the model's outputs.

        Returns:
            The deliveries to the sinks; [] if the tensor is not a model output.
        """
        received_by_device: dict[str, list[Box]] = {}
        for _, task, need in sorted(self.readers.pop(key, []), key=itemgetter(0)):
            reader = f"{task.layer!r} on {task.device}"
            assembly = self._assemble(need, (task.device, task.lane), boxes, received_by_device, reader)
            self.reads.setdefault(task_id(task), {})[key] = assembly
        if key.reduce is None and (past := self.state_input_of.get(key.tensor)):
            for device in [device for name, device in self.wanted_state_regions if name == past]:
                region = self.wanted_state_regions[past, device]
                reader = f"the state {past!r} on {device}"
                assembly = self._assemble(region, (device, 0), boxes, received_by_device, reader)
                self.state_retentions.append(StateRetention(device, past, key.tensor, region, assembly))
            return []
        if key.reduce is not None or key.tensor not in self.output_rank:
            return []
        shape = self.layers.tensors[key.tensor].shape
        if shape is None:
            box = next((box for box in boxes if box.device in self.plan.sink), boxes[0])
            self.live_tasks.add(box.task)
            return [OutputDelivery(key.tensor, box.device, None)]
        deliveries = []
        for sink in self.plan.sink:
            assembly = self._assemble(full_region(shape), (sink, 0), boxes, received_by_device, f"the sink {sink}")
            deliveries.append(OutputDelivery(key.tensor, sink, assembly))
        return deliveries

    def _add_merge_reads(self, mergers: Sequence[Task], partials: Sequence[Task]) -> None:
        """Record the partial sums that each merger (a task that adds partial sums) reads."""
        sums = {key: _boxes_of_tasks(partials, key) for task in partials for key in task.outputs}
        for merger in mergers if partials else ():
            (region,) = merger.outputs.values()
            assert region is not None
            for key in sorted(sums, key=lambda key: key.reduce or (0, 0)):
                if any(box.region is not None and intersect(box.region, region) is not None for box in sums[key]):
                    self._add_reads(merger, [(key, region)])
        for key, boxes in sums.items():
            self._assemble_for_readers(key, boxes)

    def _assemble(
        self, need: Region, at: DeviceLane, boxes: Sequence[Box], received_by_device: dict[str, list[Box]], reader: str
    ) -> Assembly:
        """Assemble region `need` of a tensor from `boxes`, and from boxes that the device has received before.

        Args:
            need: The region.
            at: Device of the reader, and its lane (group of the device's parts).
            boxes: Regions of the tensor on the devices that compute it.
            received_by_device: Received boxes by device. New ones are added.
            reader: Text for the reader in errors.
        """
        device, lane = at
        overlaps: list[tuple[int, Box, Region]] = []
        for i, box in enumerate((*boxes, *received_by_device.get(device, ()))):
            assert box.region is not None
            # Equal regions are compared first, because `intersect` returns None for the region of an empty tensor.
            overlap = need if need == box.region else intersect(need, box.region)
            if overlap is not None:
                overlaps.append((i, box, overlap))
                # No other box can be nearer than one of the same lane, or have a larger overlap than the whole region.
                if box.device == device and box.lane == lane and overlap == need:
                    overlaps = overlaps[-1:]
                    break
        if not overlaps:
            raise DicompilerError(
                f"plan: no part computes the region {format_region(need)} of {boxes[0].key.tensor!r}, which {reader} "
                "reads: extend the region of a part that computes this tensor"
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
        # The region is cut at the ends of the overlap with the best box, and each piece is assembled from `candidates`:
        # the boxes that overlap with the region. Received boxes are omitted, because `received_by_device` has them. At
        # least one box is kept, because error messages need the tensor's name.
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
        """Return the sort key of box number `index` for the reader `at` (device and lane); the best box is the first.

        The nearest box is the best one: own lane (group of the device's parts), own device, own host, then other hosts.
        Among equally near boxes, it is the one with the largest `overlap` with the region that is read.
        """
        device, lane = at
        same_host = self.hosts.get(box.device, box.device) == self.hosts.get(device, device)
        distance = int(box.lane != lane) if box.device == device else 2 if same_host else 3
        return distance, -volume(overlap), self.device_rank[box.device], index

    def _task_sort_key(self, task: Task) -> TaskSortKey:
        return self.layers.position[task.layer], 0 if task.kind == "partial" else 1, task.index

    def _build_routing(self, tasks: Sequence[Task], deliveries: Sequence[OutputDelivery]) -> Routing:
        live = sorted(self._only_live(tasks), key=self._task_sort_key)
        periods = number_lane_periods(live, self.reads)
        live.sort(key=lambda task: (periods[task_id(task)], task.lane))
        delivered = tuple(sorted(deliveries, key=lambda delivery: self.output_rank[delivery.output]))
        dropped = tuple(task_id(task) for task in tasks if task_id(task) not in self.live_tasks)
        retentions = sorted(self.state_retentions, key=lambda kept: (self.device_rank[kept.device], kept.past))
        received = tuple(self.received)
        return Routing(
            self.layers,
            tuple(live),
            self.reads,
            delivered,
            received,
            dropped,
            periods,
            state_retentions=tuple(retentions),
        )


def _cover_along_axis(
    need: Region, pieces: Sequence[tuple[Region, int, int, int, int]]
) -> tuple[int, list[tuple[Region, int | None]]] | None:
    """Cover the region `need` by pieces that span it on all axes except one, which is the same for all pieces.

    Args:
        need: The region.
        pieces: For each piece, its region within `need`, and the four numbers by which `_Router._piece_rank` sorts
            pieces: distance between the devices, minus the volume, position of the device, index of the piece.

    Returns:
        The axis, and regions that together are `need`, in ascending order. Each region has the index of the piece that
        covers it, or None if no piece does. The result is None if there is no such axis.
    """
    axes = {axis for piece in pieces for axis, interval in enumerate(piece[0]) if interval != need[axis]}
    if len(axes) != 1:
        return None
    (axis,) = axes
    row = cover_interval(need[axis], [(region[axis], distance, order) for region, distance, _, order, _ in pieces])
    return axis, [(with_interval(need, axis, cut), number) for cut, number in row]


def cover_interval(need: Interval, pieces: Sequence[tuple[Interval, int, int]]) -> list[tuple[Interval, int | None]]:
    """Cover the interval `need` by pieces (interval, distance, order), the best piece first.

    The best piece has the smallest distance (from the device that reads `need`), then the largest overlap with an
    uncovered gap, then the smallest order.

    Returns:
        Intervals that together are `need`, from left to right. Each has the index of the piece that covers it, or None
        if no piece does.
    """
    # Starts and stops of the gaps (intervals that no piece covers yet), from left to right. A loop is used, because a
    # recursion would be too deep for thousands of pieces.
    starts, stops = [need[0]], [need[1]]
    covered: list[tuple[Interval, int | None]] = []
    # The second number of a heap entry is minus an upper bound of the length that the piece covers, so that the longest
    # piece is the first. The initial bound is the length of the whole interval.
    negative_length = need[0] - need[1]
    heap = [(distance, negative_length, order, number) for number, (_, distance, order) in enumerate(pieces)]
    heapq.heapify(heap)
    while heap:
        distance, negative_length, order, number = heapq.heappop(heap)
        overlap = _largest_overlap(starts, stops, pieces[number][0])
        if overlap is None:
            continue
        low, high, gap = overlap
        # If the piece covers less than its upper bound, other pieces may be better. It is then ranked again by the
        # length that it covers now.
        if low - high == negative_length:
            covered.append(((low, high), number))
            rest = [side for side in ((starts[gap], low), (high, stops[gap])) if side[0] < side[1]]
            starts[gap : gap + 1], stops[gap : gap + 1] = [side[0] for side in rest], [side[1] for side in rest]
        # The piece stays in the heap, because it may overlap with other gaps.
        heapq.heappush(heap, (distance, low - high, order, number))
    return sorted([*covered, *(((start, stop), None) for start, stop in zip(starts, stops, strict=True))])


def _largest_overlap(starts: Sequence[int], stops: Sequence[int], piece: Interval) -> tuple[int, int, int] | None:
    """Return the largest overlap of the interval `piece` with a gap, an interval that is not covered yet.

    Gap i is the interval from starts[i] to stops[i].

    Returns:
        Start and stop of the overlap, and index of the gap; None if there is no overlap.
    """
    best, gap = None, max(0, bisect_right(starts, piece[0]) - 1)
    while gap < len(starts) and starts[gap] < piece[1]:
        low, high = max(starts[gap], piece[0]), min(stops[gap], piece[1])
        if low < high and (best is None or high - low > best[1] - best[0]):
            best = (low, high, gap)
        gap += 1
    return best


def _boxes_of_tasks(tasks: Sequence[Task], key: TensorKey) -> list[Box]:
    return [Box(key, t.outputs[key], t.device, t.lane, task_id(t)) for t in tasks if key in t.outputs]


def number_lane_periods(
    tasks: Sequence[Task], reads: Mapping[TaskId, Mapping[TensorKey, Assembly]]
) -> dict[TaskId, int]:
    """Return the number of the period in which each task (computation of a part of a layer) is computed.

    A lane is a group of a device's parts. No lane reads a tensor that another lane or device computes in the same
    period, so in each period, a device can compute its lanes one after another. `tasks` must be in layer order.
    """
    periods, current = dict[TaskId, int](), 0
    for _, group in itertools.groupby(tasks, key=lambda task: (task.layer, task.kind == "partial")):
        step = list(group)
        for task in step:
            for tree in reads.get(task_id(task), {}).values():
                for leaf in assembly_leaves(tree):
                    maker = (leaf.box.origin or leaf.box).task
                    crossing = leaf.box.origin is not None or leaf.box.lane != task.lane
                    if crossing and maker is not None and periods[maker] == current:
                        current += 1
        periods.update((task_id(task), current) for task in step)
    return periods


def format_region(region: Region) -> str:
    """Return a region as text: ((0, 1), (4, 8)) ⇒ "[0:1, 4:8]"."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in region) + "]"
