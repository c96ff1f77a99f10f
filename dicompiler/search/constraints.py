"""What a plan must keep to besides fitting the layers: parts where there is compute, and the memory of every host.

Problem + Plan → nothing, or an error that names the host, the layer and the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dicompiler.base.errors import DicompilerError, nearest
from dicompiler.base.units import format_bytes
from dicompiler.cost.memory import program_memory
from dicompiler.cost.model import weight_regions
from dicompiler.ir.compilation import Compilation
from dicompiler.ir.devices import Host
from dicompiler.ir.metrics import DeviceMetrics, Metrics, Occupied
from dicompiler.ir.onnx.weights import raw_nbytes
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import shape_of
from dicompiler.ir.routing import Routing
from dicompiler.ir.tasks import Task
from dicompiler.partition.routing import route
from dicompiler.search.problem import Problem
from dicompiler.target.interface import Target


def check(problem: Problem, plan: Plan, metrics: Metrics | None = None) -> None:
    """DicompilerError where `plan` cannot be carried out. `metrics`: those of the plan, if they are known already."""
    check_compute(problem.platform, plan)
    check_memory(problem, plan, metrics if metrics is not None else problem.estimate(plan))


def fits(problem: Problem, plan: Plan, metrics: Metrics) -> bool:
    """Whether `check` finds nothing."""
    try:
        check(problem, plan, metrics)
    except DicompilerError:
        return False
    return True


def check_compute(platform: Platform, plan: Plan) -> None:
    """A compute-less device may hold inputs and want outputs, and that is all."""
    if plan.replicas:
        _check_replicas(platform, plan)
        return
    for name, parts in plan.layers.items():
        for i, part in enumerate(parts):
            if not platform.device(part.device).computes:
                raise DicompilerError(
                    f"plan: layers.{name}[{i}]: device {part.device!r} has no compute: give the part to another"
                )


def _check_replicas(platform: Platform, plan: Plan) -> None:
    """The same of the devices that parts are renamed to."""
    parts = dict.fromkeys(part.device for own in plan.layers.values() for part in own)
    for i, renaming in enumerate(plan.replicas):
        for name in (*renaming.values(), *(name for name in parts if name not in renaming)):
            if name not in platform.host_of:
                raise DicompilerError(
                    f"plan: replicas[{i}]: {platform.name} has no device {name!r}{nearest(name, platform.host_of)}"
                )
        for name in parts:
            place = renaming.get(name, name)
            if not platform.device(place).computes:
                raise DicompilerError(
                    f"plan: replicas[{i}]: device {place!r}, which does the work of {name!r}, has no compute: rename "
                    f"{name!r} to another"
                )


def used(platform: Platform, metrics: Metrics) -> Mapping[str, int]:
    """Host → bytes of weights and live activations of its devices, and what is added to them."""
    found = dict.fromkeys((host.name for host in platform.hosts), 0)
    for entry in metrics.devices:
        found[platform.host_of[entry.device]] += entry.needed
    return found


def room(problem: Problem) -> dict[str, int]:
    """Host → bytes that are left there for weights and activations if all its devices take part, at least 0."""
    found = {host.name: host.memory for host in problem.platform.hosts}
    for device in problem.platform.devices:
        found[device.host] = max(0, found[device.host] - problem.reserve[device.name])
    return found


def needs(problem: Problem, plan: Plan) -> Mapping[str, int]:
    """Host → bytes that `plan` needs there, as exactly as the problem can say: what a target adds is known of a
    program alone. Raises as `Problem.estimate`."""
    exact = problem.target is not None and problem.model is not None
    return used(problem.platform, problem.evaluate(plan) if exact else problem.estimate(plan))


def lacking(problem: Problem, plan: Plan) -> dict[str, int]:
    """Host → bytes that `plan` needs beyond the host's memory, for the hosts where there are some."""
    memory = {host.name: host.memory for host in problem.platform.hosts}
    return {host: count - memory[host] for host, count in needs(problem, plan).items() if count > memory[host]}


def check_memory(problem: Problem, plan: Plan, metrics: Metrics) -> None:
    """Memory is a hard limit: weights and live activations of a host's devices, and what the problem's target adds;
    where there is flash, weights there and activations in RAM. The error names the layer that takes most of it."""
    for host in problem.platform.hosts:
        own = [entry for entry in metrics.devices if problem.platform.host_of[entry.device] == host.name]
        for needed, limit, what in _limits(problem, host, own):
            if needed > limit:
                routing = route(problem.layers, plan, problem.platform.host_of)
                text = f"{_much(needed, limit)} {what} and has {format_bytes(limit)}"
                raise _over(routing, problem.platform, host, text, what.startswith("of RAM"))


def _limits(problem: Problem, host: Host, own: Sequence[DeviceMetrics]) -> list[tuple[int, int, str]]:
    """(bytes needed, bytes there, of and for what) of the devices of a host."""
    if host.flash:
        return [
            (sum(entry.activations for entry in own), host.ram, "of RAM for activations"),
            (sum(entry.weights for entry in own), host.flash, "of flash for weights"),
        ]
    added = "" if problem.target is None else f" and what target {problem.target.name!r} adds,"
    return [(sum(entry.needed for entry in own), host.memory, f"for weights and activations{added}")]


def check_program(compilation: Compilation, target: Target) -> None:
    """The same of a program, for one frame: weights, activations, buffers, and what the target that runs it adds; and
    that the target can deal out frames, if the plan does."""
    if compilation.plan is not None and compilation.plan.replicas and not target.replicas:
        raise DicompilerError(
            f"plan: replicas: target {target.name!r} cannot deal out frames in turn: leave them away, or take target "
            "'sockets'"
        )
    program, platform, routing = compilation.program, compilation.platform, compilation.routing
    assert program is not None and platform is not None and routing is not None
    if compilation.occupied:
        check_occupied(platform, compilation.occupied)
        return
    held, added = program_memory(program), target.memory(program)
    for host in platform.hosts:
        own = [device.device for device in program.devices if device.host == host.name]
        needed, more = sum(held[name].total for name in own), sum(added[name] for name in own)
        if needed + more > host.memory:
            text = f"{_much(needed + more, host.memory)} to run, {format_bytes(more)} of it added by target "
            text += f"{target.name!r}, and has {format_bytes(host.memory)}"
            raise _over(routing, platform, host, text)
        weights = sum(held[name].weights for name in own)
        if host.flash and weights > host.flash:
            text = f"{_much(weights, host.flash)} of flash for weights and has {format_bytes(host.flash)}"
            raise _over(routing, platform, host, text)
        if host.flash and needed + more - weights > host.ram:
            text = f"{_much(needed + more - weights, host.ram)} of RAM to run and has {format_bytes(host.ram)}"
            raise _over(routing, platform, host, text, True)


def check_occupied(platform: Platform, occupied: Sequence[Occupied]) -> None:
    """The same of what a target has measured: RAM and flash, each by itself where a host has flash."""
    for host in platform.hosts:
        own = [one for one in occupied if platform.host_of[one.device] == host.name]
        ram, flash = sum(one.ram for one in own), sum(one.flash for one in own)
        limits = [("RAM", ram, host.ram), ("flash", flash, host.flash)]
        for i, (kind, needed, limit) in enumerate(limits if host.flash else [("memory", ram + flash, host.memory)]):
            if needed > limit:
                worst = max(own, key=lambda one: (one.ram, one.flash)[i])
                raise DicompilerError(
                    f"plan: host {host.name} needs {format_bytes(needed)} of {kind}, {format_bytes(needed - limit)} "
                    f"more than the {format_bytes(limit)} that it has: cut {worst.where[i]} into smaller parts, or "
                    "give it to another device (--fit searches)"
                )


def _much(needed: int, limit: int) -> str:
    return f"{format_bytes(needed)} ({format_bytes(needed - limit)} too much)"


def _over(routing: Routing, platform: Platform, host: Host, needed: str, live: bool = False) -> DicompilerError:
    """The error for a host that has too little memory. needed: how much of what, and how much it has; live: of what
    changes, not of weights."""
    sizes: dict[str, int] = {}
    for task in (task for role in routing.roles for task in role.tasks):
        if platform.host_of[task.device] == host.name:
            if live:
                sizes[task.layer] = max(sizes.get(task.layer, 0), _live(routing, task))
            else:
                own = sum(weight_regions(routing.layers, task).values())
                sizes[task.layer] = sizes.get(task.layer, 0) + own
    largest = max(sizes, key=lambda name: sizes[name], default=None)
    if largest is None:
        remedy = "it only holds inputs or outputs: make another device the source or the sink"
    elif live:
        remedy = f"cut it into smaller tiles, above all layer {largest!r}, which reads and makes "
        remedy += f"{format_bytes(sizes[largest])} (--fit searches)"
    else:
        remedy = (
            f"give it less of the network, above all of layer {largest!r} ({format_bytes(sizes[largest])} of weights)"
        )
    return DicompilerError(f"plan: host {host.name} needs {needed}: {remedy}")


def _live(routing: Routing, task: Task) -> int:
    """Bytes of what a task reads and makes."""
    regions = {**task.needs, **{key: region for key, region in task.outputs.items() if region is not None}}
    tensors = routing.layers.tensors
    return sum(raw_nbytes(tensors[key.tensor].dtype, shape_of(region)) for key, region in regions.items())
