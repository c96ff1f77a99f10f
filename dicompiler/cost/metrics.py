"""Metrics of a plan before anything is compiled or run: operations, bytes, memory, energy and times.

Bytes are exact. Times come from a simple estimate (`estimate_metrics`) or from the simulator (`metrics_of_simulation`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dicompiler.cost.cost_model import CostModel
from dicompiler.cost.memory import LiveRange, peak_nbytes
from dicompiler.cost.op_counts import weight_regions
from dicompiler.cost.runtime_overhead import FREE_RUNTIME, NO_RUNTIMES, RuntimeCosts
from dicompiler.cost.simulation_result import SimulationResult
from dicompiler.cost.simulator import simulate
from dicompiler.cost.workload import Workload, task_flops, task_seconds
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.metrics import DeviceMetrics, Method, Metrics
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import Region
from dicompiler.ir.routing import Assembly, Box, Routing, assembly_leaves
from dicompiler.ir.tasks import Task, task_id
from dicompiler.partition.routing import route_on_platform

LayerStep = tuple[str, bool]
"""(name of a layer, or "" for the network's inputs; whether the step computes the layer's partial sums)."""


@dataclass(frozen=True)
class _SentBox:
    """A box (a region of a tensor) that is sent to another device, and the step that computes the box.

    Attributes:
        sender: Device that sends the box.
        receiver: Device that receives the box.
        nbytes: Bytes of the box.
        step: Name of the layer that computes the box, and whether the box is a partial sum; ("", False) for a graph
            input.
    """

    sender: str
    receiver: str
    nbytes: int
    step: LayerStep


@dataclass(frozen=True)
class _RoleCosts:
    """The routing of one role (the plan or a replica of it), the seconds of its tasks, and its messages.

    A task computes one device's part of a layer. Each message is a box (a region of a tensor) that is sent to another
    device.
    """

    routing: Routing
    seconds: Mapping[tuple[str, int], float]
    sent: Sequence[_SentBox]


def estimate_metrics(
    layers: LayerGraph,
    platform: Platform,
    cost: CostModel,
    plan: Plan,
    runtime_by_device: Mapping[str, RuntimeCosts] = NO_RUNTIMES,
) -> Metrics:
    """Estimate the metrics of a plan without simulating it, by a barrier model.

    In the barrier model, each layer begins when all devices have finished the previous one:

    * A layer takes as long as its slowest device.
    * Then all regions that the layer computed are sent. On a shared medium or a gateway they are sent one after
      another. On a switch all links are used at the same time, and the slowest link counts.
    * Processors also spend time on each message. The time of the busiest sender is added before the sending. The time
      of the busiest receiver is added after the sending, and includes the call of the segment that needs the messages.

    The simulator overlaps these periods. Its times are 6 to 54 % lower for VGG16, so the two can rank plans
    differently. Bytes are exact. Memory excludes the copies that are made when regions are joined, and the memory that
    the target adds.

    `runtime_by_device` has the costs of messages and calls; by default they are free.

    Raises:
        DicompilerError: The plan does not fit the layers, or names an unknown device.
    """
    routing = route_on_platform(platform, layers, plan)
    roles = []
    for role in routing.replica_roles:
        seconds = {task_id(task): task_seconds(role, platform, cost, task) for task in role.tasks}
        roles.append(_RoleCosts(role, seconds, _sent_boxes(role)))
    latency = sum(_barrier_latency(role, platform, runtime_by_device) for role in roles) / len(roles)
    devices = _device_metrics(roles, routing, platform, plan)
    metrics = _build_metrics(roles, devices, platform, {}, latency, "estimate")
    sent = (box for role in roles for box in role.sent)
    network_s = _network_seconds(platform, runtime_by_device, sent, len(roles))
    return replace(metrics, period_s=max(metrics.period_s, network_s))


def metrics_of_simulation(
    simulation: SimulationResult, workload: Workload, routing: Routing, platform: Platform, plan: Plan
) -> Metrics:
    """Return the metrics of a plan from a simulation in which each replica computes one frame, one after another.

    A replica is the plan on other devices; the frames of a stream use the replicas in turn. The seconds between frames
    are the time for which the busiest device or link works for a frame, averaged over the replicas. A stream reaches
    this rate with enough frames in flight.

    A network can have states: outputs that are inputs of the next frame, which must wait for them. The seconds between
    frames are then at least those of a short simulated stream.
    """
    role_workloads = workload.roles
    roles = [
        _RoleCosts(role, role_workload.task_seconds, _sent_boxes(role))
        for role, role_workload in zip(routing.replica_roles, role_workloads, strict=True)
    ]
    frames = len(simulation.frames)
    call_s: dict[str, float] = defaultdict(float)
    for work in (work for role_workload in role_workloads for work in role_workload.devices):
        call_s[work.device] += work.runtime.call_seconds(len(work.jobs))
    devices = tuple(
        replace(
            entry,
            compute_s=entry.compute_s + call_s[entry.device] / frames,
            runtime_s=simulation.total_seconds("handle", entry.device) / frames,
            send_link_s=simulation.total_seconds("message", entry.device) / frames,
            receive_link_s=simulation.total_seconds("message", entry.device, as_receiver=True) / frames,
            waits={peer: seconds / frames for peer, seconds in simulation.waits.get(entry.device, {}).items()},
            occupied_s=simulation.total_seconds("occupied", entry.device) / frames,
        )
        for entry in _device_metrics(roles, routing, platform, plan)
    )
    latency = sum(end - start for start, end in simulation.frames) / frames
    link_loads = {name: seconds / frames for name, seconds in simulation.link_s.items()}
    metrics = _build_metrics(roles, devices, platform, link_loads, latency, "simulation")
    # A frame may wait for the states (outputs) of the previous frame. The busy times of devices and links do not
    # contain this waiting, so a short stream is simulated.
    if any(job.state_makers for device_work in workload.devices for job in device_work.jobs):
        stream = simulate(workload, platform, frames=8, in_flight=4, keep_spans=False)
        metrics = replace(metrics, period_s=max(metrics.period_s, stream.period_s))
    return replace(metrics, input_output_s=simulation.input_output_s, active_s=simulation.end_s / frames)


def _build_metrics(
    roles: Sequence[_RoleCosts],
    devices: tuple[DeviceMetrics, ...],
    platform: Platform,
    link_loads: Mapping[str, float],
    latency: float,
    method: Method,
) -> Metrics:
    host_memory: dict[str, int] = {}
    energy = 0.0
    for entry in devices:
        device = platform.device(entry.device)
        host_memory[device.host] = host_memory.get(device.host, 0) + entry.memory
        idle = max(0.0, latency - entry.busy_s)
        energy += device.power_active * entry.busy_s + device.power_idle * idle + device.power_network * entry.link_s
    period = max((0.0, *link_loads.values(), *(entry.busy_s for entry in devices)))
    total = _mean_rounded_up(sum(box.nbytes for role in roles for box in role.sent), roles)
    memory = max(host_memory.values(), default=0)
    return Metrics(devices, latency, period, energy, memory, total, method, link_loads=link_loads)


def _layer_step(task: Task) -> LayerStep:
    return task.layer, task.kind == "partial"


def _sent_boxes(routing: Routing) -> list[_SentBox]:
    steps = {task_id(task): _layer_step(task) for task in routing.tasks}
    sent = []
    for box in routing.received_boxes:
        assert box.origin is not None
        step = ("", False) if box.origin.task is None else steps[box.origin.task]
        sent.append(_SentBox(box.origin.device, box.device, routing.nbytes(box), step))
    return sent


def _barrier_latency(role: _RoleCosts, platform: Platform, runtime: Mapping[str, RuntimeCosts]) -> float:
    """Return the seconds of a frame if each layer begins when all devices have finished the previous layer."""
    routing, seconds = role.routing, role.seconds
    compute: dict[LayerStep, dict[str, float]] = {("", False): {}}
    for task in sorted(routing.tasks, key=lambda task: (routing.layers.position[task.layer], task.kind != "partial")):
        seconds_by_device = compute.setdefault(_layer_step(task), {})
        seconds_by_device[task.device] = seconds_by_device.get(task.device, 0.0) + seconds[task_id(task)]
    sent: dict[LayerStep, list[_SentBox]] = {}
    for box in role.sent:
        sent.setdefault(box.step, []).append(box)
    return sum(
        max(devices.values(), default=0.0)
        + _network_seconds(platform, runtime, sent.get(step, ()))
        + _handling_seconds(sent.get(step, ()), runtime)
        for step, devices in compute.items()
    )


def _handling_seconds(boxes: Sequence[_SentBox], runtime: Mapping[str, RuntimeCosts]) -> float:
    """Return the processor time for sending `boxes` (regions of tensors).

    It is the time of the busiest sender plus that of the busiest receiver.
    """
    sending, receiving = dict[str, float](), dict[str, float]()
    for box in boxes if runtime else ():
        sender, receiver = runtime.get(box.sender, FREE_RUNTIME), runtime.get(box.receiver, FREE_RUNTIME)
        sending[box.sender] = sending.get(box.sender, 0.0) + sender.send_seconds(box.nbytes)
        first = receiver.latency + receiver.segment_call_s
        receiving[box.receiver] = receiving.get(box.receiver, first) + receiver.receive_seconds(box.nbytes)
    return max(sending.values(), default=0.0) + max(receiving.values(), default=0.0)


def _network_seconds(
    platform: Platform, runtime: Mapping[str, RuntimeCosts], boxes: Iterable[_SentBox], frames: int = 1
) -> float:
    """Return the seconds that the busiest link needs for all boxes, divided by `frames`, plus the largest latency.

    A box is a region of a tensor that is sent as a message, and `frames` is the number of frames to which the boxes
    belong. A message occupies the links of both hosts for as long as the slower one needs.
    """
    busy_s: dict[tuple[str, str], float] = {}
    longest = 0.0
    for box in boxes:
        link = platform.link(box.sender, box.receiver)
        if link is None:
            continue
        longest = max(longest, link.latency)
        link_s = runtime.get(box.sender, FREE_RUNTIME).link_seconds(
            link, box.nbytes, platform.network.message_overhead_s
        )
        ends = (("out", platform.host_of[box.sender]), ("in", platform.host_of[box.receiver]))
        for end in ends if platform.network.kind == "switch" else (("all", ""),):
            busy_s[end] = busy_s.get(end, 0.0) + link_s
    return max(busy_s.values(), default=0.0) / frames + longest


def _device_metrics(
    roles: Sequence[_RoleCosts], routing: Routing, platform: Platform, plan: Plan
) -> tuple[DeviceMetrics, ...]:
    """Return the metrics of each device. Work and sent bytes are averaged over `roles`.

    `roles` has the costs of each replica of the plan, or of the plan itself. The memory includes the memory for failure
    plans, because devices store the weights of all plans.
    """
    activations = [_peak_activations(role) for role in routing.roles]
    weights: dict[str, dict[tuple[str, Region], int]] = {name: {} for name in plan.devices}
    for task in (task for role in routing.roles for task in role.tasks):
        weights[task.device] |= weight_regions(routing.layers, task)
    sent, received = Counter[str](), Counter[str]()
    for box in (box for role in roles for box in role.sent):
        sent[box.sender] += box.nbytes
        received[box.receiver] += box.nbytes
    work: dict[str, list[tuple[_RoleCosts, Task]]] = {name: [] for name in plan.devices}
    for role in roles:
        for task in role.routing.tasks:
            work[task.device].append((role, task))
    return tuple(
        DeviceMetrics(
            name,
            _mean_rounded_up(sum(task_flops(role.routing, task) for role, task in work[name]), roles),
            sum(role.seconds[task_id(task)] for role, task in work[name]) / len(roles),
            sum(weights[name].values()),
            max(activation_bytes.get(name, 0) for activation_bytes in activations),
            _mean_rounded_up(sent[name], roles),
            _mean_rounded_up(received[name], roles),
        )
        for name in (device.name for device in platform.devices if device.name in work)
    )


def _mean_rounded_up(total: int, roles: Sequence[_RoleCosts]) -> int:
    return -(-total // len(roles))


def _peak_activations(routing: Routing) -> dict[str, int]:
    """Return the largest number of bytes of boxes that each device stores at once, by device name.

    A task computes one device's part of a layer. A box (a region of a tensor) that a task computes is stored from this
    task to its last reader on the device. A received box or a graph input is stored from the start of the frame to its
    last reader. Boxes of graph outputs, and of states (outputs that are inputs of the next frame), are stored to the
    end of the frame.
    """
    first: dict[Box, int] = {}
    last: dict[Box, int] = {}

    def hold(tree: Assembly, step: int) -> None:
        last.update((leaf.box, step) for leaf in assembly_leaves(tree))

    for step, task in enumerate(routing.tasks):
        for key, region in task.outputs.items():
            box = Box(key, region, task.device, task.lane, task_id(task))
            first[box] = last[box] = step
        for tree in routing.reads.get(task_id(task), {}).values():
            hold(tree, step)
    for box in routing.received_boxes:
        if box.origin is not None:  # A source (device with the inputs) also stores inputs that it only sends.
            last.setdefault(box.origin, 0)
    for delivery in routing.deliveries:
        if delivery.assembly is not None:
            hold(delivery.assembly, len(routing.tasks))
    for retention in routing.state_retentions:
        hold(retention.assembly, len(routing.tasks))
    live_ranges: dict[str, list[LiveRange]] = {}
    for box, step in last.items():
        if box.region is not None:
            live_ranges.setdefault(box.device, []).append((first.get(box, 0), step, routing.nbytes(box)))
    return {device: peak_nbytes(ranges) for device, ranges in live_ranges.items()}
