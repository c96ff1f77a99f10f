"""What a plan comes to before anything is compiled or run: operations, bytes, memory, energy and times.

LayerGraph + Platform + CostModel + Plan → Metrics.   Bytes are exact; times are an estimate (`measure`, which supposes
barriers between layers) or the simulator's (`simulated`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dicompiler.cost.model import CostModel, flops, weight_regions
from dicompiler.cost.workload import Workload, merged, task_seconds
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.metrics import DeviceMetrics, Metrics
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import Region
from dicompiler.ir.routing import Box, Routing, Tree, leaves
from dicompiler.ir.tasks import Task, task_id
from dicompiler.partition.routing import route_on

if TYPE_CHECKING:
    from dicompiler.cost.simulator import Simulation

Step = tuple[str, bool]  # (layer, or "" for the network's inputs; whether it is the layer's partial sums)


@dataclass(frozen=True)
class _Sent:
    """One box on its way: from and to device, bytes, and the step that made it."""

    sender: str
    receiver: str
    count: int
    step: Step


@dataclass(frozen=True)
class _Role:
    """The frames of one role: their routing, the seconds of each task, and what is sent."""

    routing: Routing
    seconds: Mapping[tuple[str, int], float]
    sent: Sequence[_Sent]


def _roles(routing: Routing, platform: Platform, cost: CostModel) -> tuple[_Role, ...]:
    return tuple(
        _Role(own, {task_id(task): task_seconds(own, platform, cost, task) for task in own.tasks}, _sent(own))
        for own in routing.roles
    )


def measure(layers: LayerGraph, platform: Platform, cost: CostModel, plan: Plan) -> Metrics:
    """An estimate of what `plan` comes to. Raises DicompilerError where it does not fit the layers or names an unknown
    device.

    Assumed of times: layers run one after another with a barrier between them; a layer takes as long as its slowest
    device; then all that it made is sent, one box after another on a shared medium or a gateway (which counts each byte
    once), or all lines at once on a switch; nothing overlaps. The simulator gives lower times, by 6 to 54 % for VGG16,
    and can turn a ranking round. Bytes follow from the routing and are exact. Memory counts what is read or sent later;
    the copies that joins make, and what a target adds, come on top.
    """
    roles = _roles(route_on(platform, layers, plan), platform, cost)
    latency = sum(_latency(role, platform) for role in roles) / len(roles)
    return _metrics(roles, _devices(roles, platform, plan), platform, latency, _lines(roles, platform))


def simulated(simulation: Simulation, work: Workload, routing: Routing, platform: Platform, plan: Plan) -> Metrics:
    """What `plan` comes to, given its routing, its workload and the simulation of one frame of each role, one after
    another. The time between frames is the load of the busiest device or line, in the mean over the roles: what a
    stream comes to with enough frames on their way at once."""
    roles = tuple(_Role(own, played.seconds, _sent(own)) for own, played in zip(routing.roles, work.roles, strict=True))
    frames = len(simulation.frames)
    devices = tuple(
        replace(
            entry,
            line_s=(
                simulation.seconds("message", entry.device) + simulation.seconds("message", entry.device, peer=True)
            )
            / frames,
            waits={peer: seconds / frames for peer, seconds in simulation.waits.get(entry.device, {}).items()},
        )
        for entry in _devices(roles, platform, plan)
    )
    latency = sum(end - start for start, end in simulation.frames) / frames
    found = _metrics(roles, devices, platform, latency, _lines(roles, platform, latency=False))
    return replace(found, method="simulation")


def _metrics(
    roles: Sequence[_Role], devices: tuple[DeviceMetrics, ...], platform: Platform, latency: float, lines: float
) -> Metrics:
    """lines: seconds of the busiest line in a frame."""
    on_host: dict[str, int] = {}
    energy = 0.0
    for entry in devices:
        device = platform.device(entry.device)
        on_host[device.host] = on_host.get(device.host, 0) + entry.memory
        idle = max(0.0, latency - entry.compute_s)
        energy += device.power_active * entry.compute_s + device.power_idle * idle + device.power_network * entry.line_s
    busiest = max((entry.compute_s for entry in devices), default=0.0)
    total = _mean(sum(box.count for role in roles for box in role.sent), roles)
    return Metrics(devices, latency, max(busiest, lines), energy, max(on_host.values(), default=0), total)


def _step(task: Task) -> Step:
    return task.layer, task.kind == "partial"


def _sent(routing: Routing) -> list[_Sent]:
    steps = {task_id(task): _step(task) for task in routing.tasks}
    found = []
    for box in routing.received:
        assert box.origin is not None
        made = box.origin.task
        step = ("", False) if made is None else steps[made]
        found.append(_Sent(box.origin.device, box.device, routing.nbytes(box), step))
    return found


def _latency(role: _Role, platform: Platform) -> float:
    """The barrier model: over the steps, the slowest device's compute time and the time of sending what was made."""
    routing, seconds = role.routing, role.seconds
    compute: dict[Step, dict[str, float]] = {("", False): {}}
    for task in sorted(routing.tasks, key=lambda task: (routing.layers.position[task.layer], task.kind != "partial")):
        at = compute.setdefault(_step(task), {})
        at[task.device] = at.get(task.device, 0.0) + seconds[task_id(task)]
    made: dict[Step, list[_Sent]] = {}
    for box in role.sent:
        made.setdefault(box.step, []).append(box)
    return sum(
        max(devices.values(), default=0.0) + _busy(platform, made.get(step, ())) for step, devices in compute.items()
    )


def _lines(roles: Sequence[_Role], platform: Platform, latency: bool = True) -> float:
    """Seconds of the busiest line for a frame, in the mean over the roles."""
    return _busy(platform, [box for role in roles for box in role.sent], latency, len(roles))


def _busy(platform: Platform, boxes: Iterable[_Sent], latency: bool = True, frames: int = 1) -> float:
    """Seconds until the network has carried `boxes`, all of them ready at the start, by the number of frames that they
    belong to; the links' latency is waited for once, or (`latency` false) not at all."""
    lines: dict[tuple[str, str], float] = {}
    longest = 0.0
    for box in boxes:
        link = platform.link(box.sender, box.receiver)
        if link is None:
            continue
        longest = max(longest, link.latency)
        time = link.seconds(box.count, platform.network.message)
        ends = (("out", platform.host_of[box.sender]), ("in", platform.host_of[box.receiver]))
        for end in ends if platform.network.kind == "switch" else (("all", ""),):
            lines[end] = lines.get(end, 0.0) + time
    return max(lines.values(), default=0.0) / frames + (longest if latency else 0.0)


def _devices(roles: Sequence[_Role], platform: Platform, plan: Plan) -> tuple[DeviceMetrics, ...]:
    activations = [_activations(role.routing) for role in roles]
    sent, received = Counter[str](), Counter[str]()
    for box in (box for role in roles for box in role.sent):
        sent[box.sender] += box.count
        received[box.receiver] += box.count
    work: dict[str, list[tuple[_Role, Task]]] = {name: [] for name in plan.devices}
    for role in roles:
        for task in role.routing.tasks:
            work[task.device].append((role, task))
    found = []
    for name in (device.name for device in platform.devices if device.name in work):
        own = work[name]
        weights: dict[tuple[str, Region], int] = {}
        for role, task in own:
            weights.update(weight_regions(role.routing.layers, task))
        found.append(
            DeviceMetrics(
                name,
                _mean(sum(_flops(role.routing, task) for role, task in own), roles),
                sum(role.seconds[task_id(task)] for role, task in own) / len(roles),
                sum(weights.values()),
                max(held.get(name, 0) for held in activations),
                _mean(sent[name], roles),
                _mean(received[name], roles),
            )
        )
    return tuple(found)


def _mean(total: int, roles: Sequence[_Role]) -> int:
    """Rounded up."""
    return -(-total // len(roles))


def _flops(routing: Routing, task: Task) -> int:
    layer = routing.layers.by_name[task.layer]
    (key, region), *_ = task.outputs.items()
    return flops(routing.layers, layer, None if layer.reason else region, key.reduce, merged(routing, task))


def _activations(routing: Routing) -> dict[str, int]:
    """Device → the most bytes of boxes that it holds at once.

    A computed box is held from its step to its last reader on the device, a received one (its buffer is there from
    the start of the frame) and an input up to their last reader; what a sink wants, to the end.
    """
    end = len(routing.tasks)
    spans: dict[Box, list[int]] = {}  # first and last step

    def hold(tree: Tree, at: int) -> None:
        for leaf in leaves(tree):
            span = spans.setdefault(leaf.box, [0, at])
            span[1] = max(span[1], at)

    for i, task in enumerate(routing.tasks):
        for key, region in task.outputs.items():
            spans[Box(key, region, task.device, task.lane, task_id(task))] = [i, i]
        for tree in routing.reads.get(task_id(task), {}).values():
            hold(tree, i)
    for box in routing.received:
        if box.origin is not None:  # an input that its source only sends is held by it as well
            spans.setdefault(box.origin, [0, 0])
    for delivery in routing.deliveries:
        if delivery.tree is not None:
            hold(delivery.tree, end)
    changes: dict[str, list[tuple[int, int]]] = {}
    for box, (start, stop) in spans.items():
        if box.region is not None:
            size = routing.nbytes(box)
            changes.setdefault(box.device, []).extend(((start, size), (stop + 1, -size)))
    peaks = {}
    for device, events in changes.items():
        held = peak = 0
        for _, change in sorted(events):
            held += change
            peak = max(peak, held)
        peaks[device] = peak
    return peaks
