"""A Program as the simulator plays it: per device the segments in order, with their seconds, and what passes between.

Program + Routing + Platform + CostModel → Workload.   The steps are the Program's own; only the times are predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from dicompiler.cost.cost_model import CostModel
from dicompiler.cost.op_counts import count_flops
from dicompiler.cost.runtime_overhead import FREE_RUNTIME, NO_RUNTIMES, RuntimeCosts
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.operator_rule import TABLE_LOOKUP_NODE_COUNT
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import DeviceProgram, Program
from dicompiler.ir.regions import Region, region_shape
from dicompiler.ir.routing import Assembly, AssemblyLeaf, Box, Routing, assembly_leaves
from dicompiler.ir.tasks import ShareTask, Task, TaskId, TensorKey, task_id
from dicompiler.ir.wire_dtype import effective_wire_dtypes


@dataclass(frozen=True)
class Message:
    """One transfer: device indices of sender and receiver, bytes, and the name of its tensor. joined: it leaves
    together with an earlier one for the same receiver, which costs the runtimes less."""

    sender: int
    receiver: int
    nbytes: int
    name: str
    is_coalesced: bool = False


@dataclass(frozen=True)
class Job:
    """One segment: seconds of computing, the messages that it waits for and those that it sends once it is done.

    outputs: how many of the network's outputs it delivers. after: the device's jobs that must be done in the frame
    before, because they make a state that this one reads.
    """

    name: str
    seconds: float
    waits_for: tuple[int, ...]
    sends: tuple[int, ...]
    outputs: int
    state_makers: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceWork:
    """What a device does in a frame: `first` are the messages that it sends at once (inputs), then its jobs follow in
    order. runtime: what its messages cost it. cores: with more than one, messages that come while it computes are taken
    beside."""

    device: str
    host: str
    initial_sends: tuple[int, ...]
    jobs: tuple[Job, ...]
    runtime: RuntimeCosts = FREE_RUNTIME
    cores: int = 1


@dataclass(frozen=True)
class Workload:
    """What one frame comes to on every device. `messages` are numbered as the program's transfers.

    seconds: of each task (in one made by hand of none). others: of a plan with replicas the workloads of its further
    turns, for the same devices in the same order. ends_s: until the inputs have come from whoever gives the frames,
    beside the first device, and the outputs have gone there, both beside the frame.
    """

    devices: tuple[DeviceWork, ...]
    messages: tuple[Message, ...]
    other_roles: tuple[Workload, ...] = ()
    task_seconds: Mapping[TaskId, float] = field(default_factory=dict, repr=False)
    ends_s: float = 0.0

    @property
    def roles(self) -> tuple[Workload, ...]:
        """The workload of each role: frame i is entry i mod n."""
        return (replace(self, other_roles=()), *self.other_roles)


def build_workload(
    program: Program,
    routing: Routing,
    platform: Platform,
    cost: CostModel,
    runtime: Mapping[str, RuntimeCosts] = NO_RUNTIMES,
) -> Workload:
    """The program with predicted seconds, role by role while nothing is lost. What a task takes, with what slices,
    joins and casts for it copy, is counted in the segment that holds its layer's anchor. runtime: what that costs on a
    device (default: nothing)."""
    roles = zip(program.replica_roles, routing.replica_roles, strict=True)
    first, *others = (_role_workload(role, routes, platform, cost, runtime) for role, routes in roles)
    return replace(first, other_roles=tuple(others))


def _role_workload(
    program: Program, routing: Routing, platform: Platform, cost: CostModel, runtime: Mapping[str, RuntimeCosts]
) -> Workload:
    seconds = {task_id(task): task_seconds(routing, platform, cost, task) for task in routing.tasks}
    if runtime:
        copied = count_copies(routing)
        for task in routing.tasks:
            if task_id(task) in copied:
                seconds[task_id(task)] += runtime.get(task.device, FREE_RUNTIME).copy_seconds(*copied[task_id(task)])
    by_segment = _segment_seconds(program, routing, seconds)
    place = {device.device: i for i, device in enumerate(program.devices)}
    devices = tuple(
        _device_work(
            program, device, by_segment, runtime.get(device.device, FREE_RUNTIME), platform.device(device.device).cores
        )
        for device in program.devices
    )
    leaving = (sent for device in devices for sent in (device.initial_sends, *(job.sends for job in device.jobs)))
    pairs = (pair for sent in leaving for pair in pairwise(sent))
    joined = {after for one, after in pairs if program.transfers[one].receiver == program.transfers[after].receiver}
    messages = tuple(
        Message(place[t.sender], place[t.receiver], t.value.nbytes, t.value.name, t.index in joined)
        for t in program.transfers
    )
    return Workload(devices, messages, task_seconds=seconds, ends_s=_ends_s(program, platform, runtime))


def _ends_s(program: Program, platform: Platform, runtime: Mapping[str, RuntimeCosts]) -> float:
    """One message to each source with all of its inputs, and one from each sink with all of its outputs."""
    sizes = {value.name: value.nbytes for value in (*program.inputs, *program.outputs) if value.is_fixed_size}
    first = program.devices[0].device

    def seconds(device: str, names: Iterable[str]) -> float:
        nbytes = [sizes.get(name, 0) for name in names]
        if not nbytes or device not in runtime:
            return 0.0
        costs, link = runtime[device], platform.link(first, device)
        own = costs.send + costs.latency + costs.receive + costs.per_io_byte * sum(nbytes)
        return own + (0.0 if link is None else link.latency + costs.link_seconds(link, sum(nbytes), 0.0))

    there = max([seconds(one.device, one.sources) for one in program.devices])
    return there + max([seconds(one.device, one.sinks.values()) for one in program.devices])


def _device_work(
    program: Program, device: DeviceProgram, seconds: Mapping[str, float], runtime: RuntimeCosts, cores: int
) -> DeviceWork:
    """The device's steps, sorted by the segment that they follow."""
    sends: dict[int, list[int]] = {}
    received: dict[str, int] = {}
    latest = -1
    for step in device.steps:
        if step.kind == "run":
            latest = step.index
        elif step.kind == "send":
            sends.setdefault(latest, []).append(step.index)
        else:
            received[program.transfers[step.index].value.name] = step.index
    calling = runtime.call_seconds(len(device.segments)) / max(1, len(device.segments))
    maker = {name: i for i, segment in enumerate(device.segments) for name in segment.outputs}
    delivering = [maker[name] for name in device.sinks]
    jobs = tuple(
        Job(
            segment.name,
            seconds.get(segment.name, 0.0) + calling,
            tuple(received[name] for name in segment.inputs if name in received),
            tuple(sends.get(i, ())),
            delivering.count(i),
            tuple(dict.fromkeys(maker[s.written_name] for s in device.states if s.value.name in segment.inputs)),
        )
        for i, segment in enumerate(device.segments)
    )
    return DeviceWork(device.device, device.host, tuple(sends.get(-1, ())), jobs, runtime, cores)


class CopyCounts(NamedTuple):
    """Slices, joins, casts and what stands around a look-up: how many, and the bytes that they copy."""

    copies: int
    nbytes: int


def count_copies(routing: Routing) -> dict[TaskId, CopyCounts]:
    """Task → what slices and joins for it copy in a frame of the first role: what it reads in another shape than
    it is held in, and what is cut out of what it makes for other devices. What travels in a narrower type is copied
    once more at each end, as many bytes as it has in its own type: a cast to float16 and back, or to int8, was measured
    to take what a slice takes (a cast to bfloat16 up to four times that).
    Beside that what stands around look-ups in some rows of a table."""
    copied: dict[TaskId, CopyCounts] = dict.fromkeys(routing.reads, CopyCounts(0, 0))
    copied |= {
        task_id(task): own for task in routing.tasks if (own := count_lookup_copies(routing.layers, task)).copies
    }
    narrow, widened = effective_wire_dtypes(routing.layers), set[tuple[Box, int]]()
    lanes = {task_id(task): task.lane for task in routing.tasks}

    def note(
        task: TaskId, key: TensorKey, regions: Sequence[Region], joins: int = 0, joined: Sequence[Region] = ()
    ) -> None:
        times, nbytes = copied.get(task, (0, 0))
        more = _nbytes(routing, key, (*regions, *joined))
        copied[task] = CopyCounts(times + len(regions) + joins, nbytes + more)

    for key, reads in routing.reads.items():
        for source, tree in reads.items():
            taken = assembly_leaves(tree)
            regions = [leaf.region for leaf in taken if leaf.region != leaf.box.region]
            if source.tensor in narrow:  # all readers in a lane share what was widened
                boxes = {(leaf.box, lanes[key]) for leaf in taken if leaf.box.origin is not None} - widened
                regions += [box.region for box, _ in boxes if box.region is not None]
                widened |= boxes
            joins = _count_joins(tree)
            note(key, source, regions, joins, [leaf.region for leaf in taken] if joins else [])
    for origin, region in dict.fromkeys((box.origin, box.region) for box in routing.received_boxes):
        if origin is not None and origin.task is not None and region is not None:
            note(origin.task, origin.key, [region] * ((region != origin.region) + (origin.key.tensor in narrow)))
    return copied


def count_lookup_copies(layers: LayerGraph, task: ShareTask) -> CopyCounts:
    """What stands around the look-ups of a task in some rows of a table, as of slices: each node but the last makes as
    many numbers as are looked up, the last what comes of them."""
    times = nbytes = 0
    for work in task.nodes:
        if work.piece is not None and work.piece.table_rows is not None:
            numbers, found = work.piece.needs[1], layers.cut_output(work.node)
            each = raw_nbytes(layers.tensors[work.node.inputs[1]].dtype, region_shape(numbers or ()))
            times += TABLE_LOOKUP_NODE_COUNT
            nbytes += (TABLE_LOOKUP_NODE_COUNT - 1) * each + raw_nbytes(
                layers.tensors[found].dtype, region_shape(work.piece.out)
            )
    return CopyCounts(times, nbytes)


def _count_joins(tree: Assembly) -> int:
    return 0 if isinstance(tree, AssemblyLeaf) else 1 + sum(map(_count_joins, tree.children))


def _nbytes(routing: Routing, key: TensorKey, regions: Iterable[Region]) -> int:
    """Bytes of these regions of a tensor in its own type."""
    dtype = routing.layers.tensors[key.tensor].dtype
    return sum(raw_nbytes(dtype, region_shape(region)) for region in regions)


def _segment_seconds(program: Program, routing: Routing, seconds: Mapping[TaskId, float]) -> dict[str, float]:
    """Segment name → seconds of the tasks whose anchors it holds. seconds: of each task."""
    mergers = {task_id(task) for task in routing.tasks if task.kind == "merger"}
    home: dict[TaskId, str] = {}
    for device in program.devices:
        for segment in device.segments:
            for key, origin in segment.node_marks:
                layer = routing.layers.layer_by_name[key[0]]
                # A merger has no anchor: then its last node counts.
                if key not in home or origin == layer.nodes[layer.anchor].name or key in mergers:
                    home[key] = segment.name
    by_segment: dict[str, float] = {}
    for key, name in home.items():
        by_segment[name] = by_segment.get(name, 0.0) + seconds[key]
    return by_segment


def task_seconds(routing: Routing, platform: Platform, cost: CostModel, task: Task) -> float:
    """Seconds that a task computes on its device."""
    about = (routing.layers, *_task_share(routing, task), platform.device(task.device))
    return cost.seconds_in_frame(*about, _local_input_nbytes(routing, task))


def _local_input_nbytes(routing: Routing, task: Task) -> int:
    """Bytes that the task reads as they were computed on its device, neither cut nor joined."""
    found = 0
    for source, tree in routing.reads.get(task_id(task), {}).items():
        if isinstance(tree, AssemblyLeaf) and tree.box.task is not None and tree.region == tree.box.region:
            found += _nbytes(routing, source, [tree.region])
    return found


def task_flops(routing: Routing, task: Task) -> int:
    """Floating-point operations of a task."""
    layer, share = _task_share(routing, task)
    return count_flops(routing.layers, layer, *share)


def _task_share(routing: Routing, task: Task) -> tuple[Layer, LayerShare]:
    """A task's layer and its share of it; it adds up the partial sums that it reads, if any."""
    layer = routing.layers.layer_by_name[task.layer]
    (key, region), *_ = task.outputs.items()
    merge = sum(read.reduce is not None for read in routing.reads.get(task_id(task), ()))
    return layer, LayerShare(None if layer.whole_reason else region, key.reduce, merge)
