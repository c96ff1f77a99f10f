"""What a plan must keep to besides fitting the layers: parts where there is compute, and the memory of every host.

Problem + Plan → nothing, or an error that names the host, the layer and the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.base.units import format_bytes
from dicompiler.cost.memory import MemoryUse
from dicompiler.cost.op_counts import activation_nbytes, weight_regions
from dicompiler.ir.metrics import DeviceFootprint, Metrics
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.routing import Routing, assembly_leaves
from dicompiler.partition.plan_validation import failure_plan_in_errors
from dicompiler.partition.routing import route
from dicompiler.search.problem import Problem
from dicompiler.target.target_base import Target


@dataclass(frozen=True)
class HostMemoryNeed:
    """Bytes that are `needed` of a host's memory, RAM or flash, and how many it has (`limit`)."""

    host: str
    kind: Literal["memory", "RAM", "flash"]
    needed_bytes: int
    limit_bytes: int


def check_constraints(problem: Problem, plan: Plan, metrics: Metrics | None = None) -> None:
    """DicompilerError where `plan` cannot be carried out. `metrics`: those of the plan, if they are known already."""
    check_compute(problem.platform, plan)
    check_memory(problem, plan, metrics if metrics is not None else problem.estimate(plan))
    check_states(problem, plan)


def fits_constraints(problem: Problem, plan: Plan, metrics: Metrics) -> bool:
    """Whether `check_constraints` finds nothing."""
    try:
        check_constraints(problem, plan, metrics)
    except DicompilerError:
        return False
    return True


def check_states(problem: Problem, plan: Plan) -> None:
    """A state is read where it is made: it never travels."""
    routing = route(problem.layers, plan, problem.platform.host_of) if problem.layers.states else None
    for one in routing.state_retentions if routing is not None else ():
        for leaf in assembly_leaves(one.assembly):
            if leaf.box.origin is not None:
                made, read = problem.layers.producer[one.present].name, _describe_readers(problem, one.past)
                raise DicompilerError(
                    f"plan: state {one.past!r}: {one.device!r} reads in {read} what {leaf.box.origin.device!r} makes "
                    f"of it in layer {made!r}, and states do not travel: let one device do both, or have no states "
                    "(--state none)"
                )


def _describe_readers(problem: Problem, state: str) -> str:
    """The layers that read a state, as they are told."""
    names = [layer.name for layer in problem.layers.layers if any(state in node.inputs for node in layer.nodes)]
    return f"layer{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


def check_compute(platform: Platform, plan: Plan) -> None:
    """A compute-less device may hold inputs and want outputs, and that is all."""
    for loss in plan.failures:
        with failure_plan_in_errors(plan, loss.failed):
            check_compute(platform, loss.plan)
    if plan.replicas:
        _check_renamed_compute(platform, plan)
        return
    for name, parts in plan.layers.items():
        for i, part in enumerate(parts):
            if not platform.device(part.device).can_compute:
                raise DicompilerError(
                    f"plan: layers.{name}[{i}]: device {part.device!r} has no compute: give the part to another"
                )


def _check_renamed_compute(platform: Platform, plan: Plan) -> None:
    """The same of the devices that parts are renamed to."""
    workers = dict.fromkeys(part.device for parts in plan.layers.values() for part in parts)
    for i, renaming in enumerate(plan.replicas):
        for name in (*renaming.values(), *(name for name in workers if name not in renaming)):
            if name not in platform.host_of:
                raise DicompilerError(
                    f"plan: replicas[{i}]: {platform.name} has no device {name!r}{did_you_mean(name, platform.host_of)}"
                )
        for name in workers:
            place = renaming.get(name, name)
            if not platform.device(place).can_compute:
                raise DicompilerError(
                    f"plan: replicas[{i}]: device {place!r}, which does the work of {name!r}, has no compute: rename "
                    f"{name!r} to another"
                )


def check_target_support(plan: Plan, target: Target) -> None:
    """DicompilerError where the plan deals out frames in turn (replicas), or survives losses, and the target cannot."""
    if plan.replicas and not target.can_run_replicas:
        raise DicompilerError(
            f"plan: replicas: target {target.name!r} cannot deal out frames in turn: leave them out, or take target "
            "'sockets'"
        )
    if plan.failures and not target.can_tolerate_failures:
        raise DicompilerError(
            f"plan: losses: target {target.name!r} cannot go on without a device: leave them out, or take target "
            "'sockets'"
        )


def used_memory(platform: Platform, metrics: Metrics) -> Mapping[str, int]:
    """Host → bytes of weights and live activations of its devices, and what is added to them."""
    used = dict.fromkeys((host.name for host in platform.hosts), 0)
    for entry in metrics.devices:
        used[platform.host_of[entry.device]] += entry.total_memory
    return used


def free_memory(problem: Problem) -> dict[str, int]:
    """Host → bytes that are left there for weights and activations if all its devices take part, at least 0."""
    free = {host.name: host.memory for host in problem.platform.hosts}
    for device in problem.platform.devices:
        free[device.host] = max(0, free[device.host] - problem.target_overhead[device.name])
    return free


def needed_memory(problem: Problem, plan: Plan) -> Mapping[str, int]:
    """Host → bytes that `plan` needs there, as exactly as the problem can say: what a target adds is known of a
    program alone. Raises as `Problem.estimate`."""
    exact = problem.target is not None and problem.model is not None
    return used_memory(problem.platform, problem.evaluate(plan) if exact else problem.estimate(plan))


def missing_memory(problem: Problem, plan: Plan) -> dict[str, int]:
    """Host → bytes that `plan` needs beyond the host's memory, for the hosts where there are some."""
    limits = {host.name: host.memory for host in problem.platform.hosts}
    return {name: n - limits[name] for name, n in needed_memory(problem, plan).items() if n > limits[name]}


def check_memory(problem: Problem, plan: Plan, metrics: Metrics) -> None:
    """Memory is a hard limit: weights and live activations of a host's devices, and what the problem's target adds;
    where there is flash, weights there and activations in RAM. The error names the layer that takes most of it."""
    platform, target = problem.platform, problem.target
    flash = {host.name for host in platform.hosts if host.flash}  # there an estimate counts nothing that is added
    memory = {
        e.device: MemoryUse(e.weights, e.activations, 0, 0 if platform.host_of[e.device] in flash else e.overhead_bytes)
        for e in metrics.devices
    }
    if need := _first_exceeded(host_memory_needs(platform, memory)):
        added = "" if target is None else f" and what target {target.name!r} adds,"
        together = f"for weights and activations{added}"
        what = {"memory": together, "RAM": "of RAM for activations", "flash": "of flash for weights"}[need.kind]
        raise _memory_error(need, what, _memory_remedy(need, route(problem.layers, plan, platform.host_of), platform))


def check_program_memory(compilation: PipelineState, memory: Mapping[str, MemoryUse], target: Target) -> None:
    """The same of a program, by what the target has measured, or else by `memory`: `program_memory` of one frame with
    what the target adds."""
    platform, routing = compilation.platform, compilation.routing
    assert platform is not None and routing is not None
    if compilation.footprints:
        check_measured_memory(platform, compilation.footprints)
    elif need := _first_exceeded(host_memory_needs(platform, memory, include_sum=True)):
        added = sum(use.added for name, use in memory.items() if platform.host_of[name] == need.host)
        together = f"to run, {format_bytes(added)} of it added by target {target.name!r},"
        what = {"memory": together, "RAM": "of RAM to run", "flash": "of flash for weights"}[need.kind]
        raise _memory_error(need, what, _memory_remedy(need, routing, platform))


def check_measured_memory(platform: Platform, occupied: Sequence[DeviceFootprint]) -> None:
    """The same of what a target has measured: RAM and flash, each by itself where a host has flash."""
    memory = {entry.device: MemoryUse(entry.flash, entry.ram, 0) for entry in occupied}
    if need := _first_exceeded(host_memory_needs(platform, memory)):
        of_host = [entry for entry in occupied if platform.host_of[entry.device] == need.host]
        i = 1 if need.kind == "flash" else 0
        largest = max(of_host, key=lambda entry: (entry.ram, entry.flash)[i]).largest_consumers[i]
        raise _memory_error(
            need, "", f"cut {largest} into smaller parts, or give it to another device (--fit searches)"
        )


def host_memory_needs(
    platform: Platform, memory: Mapping[str, MemoryUse], include_sum: bool = False
) -> Iterator[HostMemoryNeed]:
    """What devices need of their hosts. memory: by device; its weights lie in flash where a host has some. There RAM
    and flash are needed each by itself (and, with `together`, before that their sum); elsewhere all is one."""
    for host in platform.hosts:
        uses = [use for name, use in memory.items() if platform.host_of[name] == host.name]
        total, weights = sum(use.total for use in uses), sum(use.weights for use in uses)
        if include_sum or not host.flash:
            yield HostMemoryNeed(host.name, "memory", total, host.memory)
        if host.flash:
            yield HostMemoryNeed(host.name, "RAM", total - weights, host.ram)
            yield HostMemoryNeed(host.name, "flash", weights, host.flash)


def _first_exceeded(needs: Iterable[HostMemoryNeed]) -> HostMemoryNeed | None:
    return next((need for need in needs if need.needed_bytes > need.limit_bytes), None)


def _memory_error(need: HostMemoryNeed, what: str, remedy: str) -> DicompilerError:
    """what: of which memory and for what; "" where it was measured."""
    needed, excess, limit = map(
        format_bytes, (need.needed_bytes, need.needed_bytes - need.limit_bytes, need.limit_bytes)
    )
    if what:
        text = f"{needed} ({excess} too much) {what} and has {limit}"
    else:
        text = f"{needed} of {need.kind}, {excess} more than the {limit} that it has"
    return DicompilerError(f"plan: host {need.host} needs {text}: {remedy}")


def _memory_remedy(need: HostMemoryNeed, routing: Routing, platform: Platform) -> str:
    """It names the layer with the largest task, where RAM is short, or with most weights."""
    sizes: dict[str, int] = {}
    for task in (task for role in routing.roles for task in role.tasks if platform.host_of[task.device] == need.host):
        known, weights = sizes.get(task.layer, 0), sum(weight_regions(routing.layers, task).values())
        sizes[task.layer] = (
            max(known, activation_nbytes(routing.layers, task)) if need.kind == "RAM" else known + weights
        )
    if not sizes:
        return "it only holds inputs or outputs: make another device the source or the sink"
    layer = max(sizes, key=lambda name: sizes[name])
    size = format_bytes(sizes[layer])
    if need.kind == "RAM":
        return f"cut it into smaller tiles, above all layer {layer!r}, which reads and makes {size} (--fit searches)"
    return f"give it less of the network, above all of layer {layer!r} ({size} of weights)"
