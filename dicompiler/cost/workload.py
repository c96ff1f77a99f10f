"""The workload of a program: its segments (ONNX submodels) with predicted seconds, and its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from dicompiler.cost.cost_model import CostModel, LocalBytes
from dicompiler.cost.op_counts import count_flops
from dicompiler.cost.runtime_overhead import FREE_RUNTIME, NO_RUNTIMES, RuntimeCosts
from dicompiler.ir.cluster import Device, computes_layer, engine_layers
from dicompiler.ir.layers import Layer, LayerGraph, TensorKey
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.operator_rule import TABLE_LOOKUP_NODE_COUNT
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import DeviceProgram, Program
from dicompiler.ir.regions import Region, region_shape
from dicompiler.ir.routing import (
    Assembly,
    AssemblyLeaf,
    Box,
    Routing,
    ShareTask,
    Task,
    TaskId,
    assembly_leaves,
    find_uncut_producer,
    task_id,
)
from dicompiler.ir.wire_dtype import INT8_BLOCK, effective_wire_dtypes


@dataclass(frozen=True)
class Message:
    """The simulator's record of a tensor region that one device sends to another.

    Attributes:
        sender: Index of the sending device.
        receiver: Index of the receiving device.
        nbytes: Bytes of the region.
        name: Name of the tensor.
        is_coalesced: Whether it is sent together with an earlier message to the same device, which costs the processors
            less.
    """

    sender: int
    receiver: int
    nbytes: int
    name: str
    is_coalesced: bool = False


@dataclass(frozen=True)
class Job:
    """The simulator's record of a segment (an ONNX submodel that a device runs).

    Attributes:
        name: Name of the segment.
        seconds: Seconds of the segment, including its call.
        waits_for: Indices of messages that must have arrived before the segment starts.
        sends: Indices of messages that are sent when the segment is done.
        outputs: Number of the network's outputs that the segment computes.
        state_makers: Indices of the device's jobs that compute states (outputs of the previous frame) that this job
            reads.
        calls: Number of calls of engines that compute the segment.
    """

    name: str
    seconds: float
    waits_for: tuple[int, ...]
    sends: tuple[int, ...]
    outputs: int
    state_makers: tuple[int, ...] = ()
    calls: int = 1


@dataclass(frozen=True)
class DeviceWork:
    """The work of one device in a frame.

    Attributes:
        device: Name of the device.
        host: Name of its host.
        initial_sends: Indices of the messages with graph inputs, which are sent at the start of the frame.
        jobs: Segments (ONNX submodels) of the device, in the order of execution.
        runtime: Costs of messages and calls.
        cores: Number of cores. With more than one, messages are received while a segment computes.
    """

    device: str
    host: str
    initial_sends: tuple[int, ...]
    jobs: tuple[Job, ...]
    runtime: RuntimeCosts = FREE_RUNTIME
    cores: int = 1

    @property
    def calls_s(self) -> float:
        """Seconds of all calls of engines in a frame, without computing."""
        return self.runtime.call_seconds(sum(job.calls for job in self.jobs))


@dataclass(frozen=True)
class Workload:
    """The work of one frame on every device.

    Attributes:
        devices: Work of each device that the plan or one of its replicas uses.
        messages: Messages, in the order of the program's transfers.
        other_replicas: Workloads of the other replicas (copies of the plan on other devices). Their `devices` are for
            the same devices as those of this workload, also if a device has no work.
        task_seconds: Seconds of each task (one device's share of a layer); empty if the workload was written by hand.
        input_output_s: Seconds to bring the inputs to their devices and the outputs to the caller. A frame's latency
            excludes them.
    """

    devices: tuple[DeviceWork, ...]
    messages: tuple[Message, ...]
    other_replicas: tuple[Workload, ...] = ()
    task_seconds: Mapping[TaskId, float] = field(default_factory=dict, repr=False)
    input_output_s: float = 0.0

    @property
    def replicas(self) -> tuple[Workload, ...]:
        """The workload of each of the n replicas (copies of the plan on other devices). Frame i uses entry i mod n."""
        return (replace(self, other_replicas=()), *self.other_replicas)


def build_workload(
    program: Program,
    routing: Routing,
    platform: Platform,
    cost: CostModel,
    runtime_by_device: Mapping[str, RuntimeCosts] = NO_RUNTIMES,
) -> Workload:
    """Return the segments (ONNX submodels) of a program with their predicted seconds, and its messages.

    The seconds of a device's share of a layer, with its slices, joins and casts, are assigned to the segment that
    contains the layer's main operator. Replicas are included, but failure plans are not.

    Args:
        program: The program.
        routing: Routing of the plan (all tasks and exchanged regions).
        platform: The platform.
        cost: The cost model.
        runtime_by_device: Costs of messages and calls. Default: they are free.
    """
    replicas = zip(program.replica_roles, routing.replica_roles, strict=True)
    first, *others = (
        _replica_workload(replica, routes, platform, cost, runtime_by_device) for replica, routes in replicas
    )
    return replace(first, other_replicas=tuple(others))


def _replica_workload(
    program: Program, routing: Routing, platform: Platform, cost: CostModel, runtime: Mapping[str, RuntimeCosts]
) -> Workload:
    seconds = {task_id(task): task_seconds(routing, platform, cost, task) for task in routing.tasks}
    if runtime:
        copied = count_copies(routing)
        for task in routing.tasks:
            costs = runtime.get(task.device, FREE_RUNTIME)
            if task_id(task) in copied:
                seconds[task_id(task)] += costs.copy_seconds(*copied[task_id(task)])
            seconds[task_id(task)] += costs.copy_seconds(*_count_engine_copies(routing, platform, task))
    by_segment = _segment_seconds(program, routing, seconds)
    index = {device.device: i for i, device in enumerate(program.devices)}
    devices = []
    for device in program.devices:
        costs, cores = runtime.get(device.device, FREE_RUNTIME), platform.device(device.device).cores
        devices.append(_device_work(program, device, by_segment, costs, cores))
    sends = (sent for device in devices for sent in (device.initial_sends, *(job.sends for job in device.jobs)))
    pairs = (pair for sent in sends for pair in pairwise(sent))
    coalesced = {
        second for first, second in pairs if program.transfers[first].receiver == program.transfers[second].receiver
    }
    messages = tuple(
        Message(index[t.sender], index[t.receiver], t.value.nbytes, t.value.name, t.index in coalesced)
        for t in program.transfers
    )
    return Workload(
        tuple(devices), messages, task_seconds=seconds, input_output_s=_input_output_s(program, platform, runtime)
    )


def _input_output_s(program: Program, platform: Platform, runtime: Mapping[str, RuntimeCosts]) -> float:
    """Return the seconds to bring the inputs to their devices, plus those to bring the outputs to the caller.

    Each device is assumed to exchange one message with all of its inputs, and one with all of its outputs.
    """
    sizes = {value.name: value.nbytes for value in (*program.inputs, *program.outputs) if value.is_fixed_size}
    first = program.devices[0].device

    def seconds(device: str, names: Iterable[str]) -> float:
        nbytes = [sizes.get(name, 0) for name in names]
        if not nbytes or device not in runtime:
            return 0.0
        costs, link = runtime[device], platform.link(first, device)
        runtime_s = costs.send + costs.latency + costs.receive + costs.per_io_byte * sum(nbytes)
        return runtime_s + (0.0 if link is None else link.latency + costs.link_seconds(link, sum(nbytes), 0.0))

    input_s = max(seconds(device.device, device.model_inputs) for device in program.devices)
    return input_s + max(seconds(device.device, device.model_outputs.values()) for device in program.devices)


def _device_work(
    program: Program, device: DeviceProgram, seconds: Mapping[str, float], runtime: RuntimeCosts, cores: int
) -> DeviceWork:
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
    calls = sum(segment.calls for segment in device.segments)
    call_s = runtime.call_seconds(calls) / max(1, calls)
    maker = {name: i for i, segment in enumerate(device.segments) for name in segment.outputs}
    delivering = [maker[name] for name in device.model_outputs]
    jobs = tuple(
        Job(
            segment.name,
            seconds.get(segment.name, 0.0) + segment.calls * call_s,
            tuple(received[name] for name in segment.inputs if name in received),
            tuple(sends.get(i, ())),
            delivering.count(i),
            tuple(dict.fromkeys(maker[s.written_name] for s in device.states if s.value.name in segment.inputs)),
            segment.calls,
        )
        for i, segment in enumerate(device.segments)
    )
    return DeviceWork(device.device, device.host, tuple(sends.get(-1, ())), jobs, runtime, cores)


class ConversionCost(NamedTuple):
    """The time to convert a tensor to or from the type in which it is sent, as a number of equally long copies.

    Attributes:
        passes: Number of copies of the whole tensor; they dominate for a large tensor.
        extra_calls: Number of additional copies of 0 bytes; they dominate for a small tensor.
    """

    passes: int
    extra_calls: int


BLOCK_ENCODER, BLOCK_DECODER = ConversionCost(6, 12), ConversionCost(2, 7)
"""Cost of encoding and decoding int8-block: 8-bit integers with a scale for each block of values.

Measured in onnxruntime on an x86 server with cold caches: encoding and decoding 1024 values took 11.0 and 5.0 µs, and
100 000 values 204 and 70 µs. A copy takes 0.5 µs plus 0.08 ns per byte there.
"""


class CopyCounts(NamedTuple):
    """The copies (slices, joins and casts) in one device's share of a layer.

    Attributes:
        copies: Number of copies.
        nbytes: Bytes of all copies together.
    """

    copies: int
    nbytes: int


def count_copies(routing: Routing) -> dict[TaskId, CopyCounts]:
    """Return the copies that each task (one device's share of a layer) makes in a frame of the first replica.

    The following operations count as copies:

    - Slices and joins of the task's inputs.
    - Slices of the task's output, if only a region of it is sent.
    - Casts of the sender and of the receiver, if a tensor is sent in a smaller element type. Each is one copy of the
      bytes in the tensor's own type. For int8-block, `BLOCK_ENCODER` and `BLOCK_DECODER` state the copies.
    - The nodes that look up rows of a table of which the device stores only a part.
    """
    copied: dict[TaskId, CopyCounts] = dict.fromkeys(routing.reads, CopyCounts(0, 0))
    copied |= {
        task_id(task): counts for task in routing.tasks if (counts := count_lookup_copies(routing.layers, task)).copies
    }
    narrowed, widened = effective_wire_dtypes(routing.layers), set[tuple[Box, int]]()

    def count_conversion(tensor: str, block_cost: ConversionCost) -> ConversionCost:
        kind = narrowed.get(tensor)
        return block_cost if kind == INT8_BLOCK else ConversionCost(int(kind is not None), 0)

    lanes = {task_id(task): task.lane for task in routing.tasks}

    def add(
        task: TaskId, key: TensorKey, regions: Sequence[Region], joins: int = 0, joined: Sequence[Region] = ()
    ) -> None:
        count, nbytes = copied.get(task, (0, 0))
        new_bytes = _nbytes(routing, key, (*regions, *joined))
        copied[task] = CopyCounts(count + len(regions) + joins, nbytes + new_bytes)

    for key, reads in routing.reads.items():
        for source, tree in reads.items():
            leaves = assembly_leaves(tree)
            regions = [leaf.region for leaf in leaves if leaf.region != leaf.box.region]
            # The receiver casts back a region that was sent in a smaller type. There is one cast for each lane (one of
            # several tiles that a device computes in turn), because the lane's tasks share the result.
            if source.tensor in narrowed:
                boxes = {(leaf.box, lanes[key]) for leaf in leaves if leaf.box.origin is not None} - widened
                passes, extra_calls = count_conversion(source.tensor, BLOCK_DECODER)
                regions += [box.region for box, _ in boxes if box.region is not None] * passes
                add(key, source, [], extra_calls * len(boxes))
                widened |= boxes
            joins = _count_joins(tree)
            add(key, source, regions, joins, [leaf.region for leaf in leaves] if joins else [])
    for origin, region in dict.fromkeys((box.origin, box.region) for box in routing.received_boxes):
        if origin is not None and origin.task is not None and region is not None:
            passes, extra_calls = count_conversion(origin.key.tensor, BLOCK_ENCODER)
            add(origin.task, origin.key, [region] * ((region != origin.region) + passes), extra_calls)
    return copied


def count_lookup_copies(layers: LayerGraph, task: ShareTask) -> CopyCounts:
    """Count the nodes that look up rows of a table of which the device stores only a part, as if they were slices.

    Args:
        layers: The layers of the network.
        task: The task (one device's share of a layer).

    Returns:
        Number of copies and their bytes.
    """
    copies = nbytes = 0
    for task_node in task.nodes:
        node, piece = task_node.node, task_node.piece
        if piece is not None and piece.table_rows is not None:
            index_bytes = raw_nbytes(layers.tensors[node.inputs[1]].dtype, region_shape(piece.needs[1] or ()))
            result_bytes = raw_nbytes(layers.tensors[layers.cut_output(node)].dtype, region_shape(piece.out))
            copies += TABLE_LOOKUP_NODE_COUNT
            nbytes += (TABLE_LOOKUP_NODE_COUNT - 1) * index_bytes + result_bytes
    return CopyCounts(copies, nbytes)


def _count_joins(tree: Assembly) -> int:
    return 0 if isinstance(tree, AssemblyLeaf) else 1 + sum(map(_count_joins, tree.children))


def _nbytes(routing: Routing, key: TensorKey, regions: Iterable[Region]) -> int:
    dtype = routing.layers.tensors[key.tensor].dtype
    return sum(raw_nbytes(dtype, region_shape(region)) for region in regions)


def _segment_seconds(program: Program, routing: Routing, seconds: Mapping[TaskId, float]) -> dict[str, float]:
    """Return the seconds of each segment (ONNX submodel), by name.

    The seconds of a device's share of a layer are assigned to the segment with the layer's main operator.
    """
    mergers = {task_id(task) for task in routing.tasks if task.kind == "merger"}
    home: dict[TaskId, str] = {}
    for device in program.devices:
        for segment in device.segments:
            for key, origin in segment.node_marks:
                layer = routing.layers.layer_by_name[key[0]]
                # A task that adds partial sums does not contain the main operator of its layer. Its seconds are
                # therefore assigned to the segment with its last node.
                if key not in home or origin == layer.nodes[layer.anchor].name or key in mergers:
                    home[key] = segment.name
    by_segment: dict[str, float] = {}
    for key, name in home.items():
        by_segment[name] = by_segment.get(name, 0.0) + seconds[key]
    return by_segment


def task_seconds(routing: Routing, platform: Platform, cost: CostModel, task: Task) -> float:
    device = platform.device(task.device)
    return seconds_in_call(routing, cost, task, device, count_local_bytes(routing, task, device))


def seconds_in_call(routing: Routing, cost: CostModel, task: Task, device: Device, local: LocalBytes) -> float:
    """Return the seconds of a task on a device, if it exchanges the bytes `local` with other tasks in the same call."""
    return cost.seconds_in_frame(routing.layers, *_task_share(routing, task), device, local)


def count_local_bytes(routing: Routing, task: Task, device: Device) -> LocalBytes:
    """Return the bytes that a task exchanges with other tasks in the same call of an engine.

    Outputs count only if no task outside the call reads any of them.
    """
    inputs = outputs = 0
    for source, tree in routing.reads.get(task_id(task), {}).items():
        producer = find_uncut_producer(tree)
        if producer is None or task_id(task) not in routing.call_readers.get(producer, ()):
            continue
        if not _has_other_engine(device, producer, task.layer):
            inputs += _nbytes(routing, source, [leaf.region for leaf in assembly_leaves(tree)])
    readers = routing.call_readers.get(task_id(task), frozenset())
    is_inner = bool(readers) and task_id(task) not in routing.leaving_tasks
    if is_inner and not any(_has_other_engine(device, reader, task.layer) for reader in readers):
        regions = ((key, region) for key, region in task.outputs.items() if region is not None)
        outputs = sum(_nbytes(routing, key, [region]) for key, region in regions)
    return LocalBytes(inputs, outputs)


def _has_other_engine(device: Device, task: TaskId, layer: str) -> bool:
    """Return True if a device computes the layer of a task with another engine than the layer `layer`."""
    return computes_layer(device.engine, task[0]) != computes_layer(device.engine, layer)


def _count_engine_copies(routing: Routing, platform: Platform, task: Task) -> CopyCounts:
    """Return the copies of tensors that another engine of the device computed, into the form of the task's engine."""
    device = platform.device(task.device)
    if not engine_layers(device.engine):
        return CopyCounts(0, 0)
    return count_local_reads(routing, task, lambda before: _has_other_engine(device, before, task.layer))


def count_local_reads(routing: Routing, task: Task, is_counted: Callable[[TaskId], bool]) -> CopyCounts:
    """Count the regions that a task reads from tasks of its own device, and their bytes, as if they were copied.

    Args:
        routing: The routing of the plan.
        task: The task that reads (one device's share of a layer).
        is_counted: Returns True for the tasks whose results are counted.

    Returns:
        Number of regions and their bytes.
    """
    count = nbytes = 0
    for source, tree in routing.reads.get(task_id(task), {}).items():
        for leaf in assembly_leaves(tree):
            if leaf.box.task is not None and leaf.region is not None and is_counted(leaf.box.task):
                count, nbytes = count + 1, nbytes + _nbytes(routing, source, [leaf.region])
    return CopyCounts(count, nbytes)


def task_flops(routing: Routing, task: Task) -> int:
    layer, share = _task_share(routing, task)
    return count_flops(routing.layers, layer, *share)


def _task_share(routing: Routing, task: Task) -> tuple[Layer, LayerShare]:
    layer = routing.layers.layer_by_name[task.layer]
    (key, region), *_ = task.outputs.items()
    merge = sum(read.reduce is not None for read in routing.reads.get(task_id(task), ()))
    return layer, LayerShare(None if layer.whole_reason else region, key.reduce, merge)
