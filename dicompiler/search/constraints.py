"""Constraints on plans beyond fitting the layers: compute, memory and states.

Parts must be on devices that compute, hosts must have enough memory, and states must stay on their device.

Every error names the host, the layer and the bytes.
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
    """Memory that a plan needs on one host.

    Attributes:
        host: Name of the host.
        kind: Kind of memory: "memory" for all of it together, or "RAM" and "flash" of a microcontroller.
        needed_bytes: Bytes that the plan needs.
        limit_bytes: Bytes that the host has.
    """

    host: str
    kind: Literal["memory", "RAM", "flash"]
    needed_bytes: int
    limit_bytes: int


def check_constraints(problem: Problem, plan: Plan, metrics: Metrics | None = None) -> None:
    """Raise DicompilerError if the plan cannot be carried out.

    Args:
        problem: The problem that the plan solves.
        plan: The plan to check.
        metrics: Metrics of the plan, if they are known already; otherwise they are estimated.

    Raises:
        DicompilerError: A part is on a device without compute, a host has too little memory, or a state would be sent.
    """
    check_compute(problem.platform, plan)
    check_memory(problem, plan, metrics if metrics is not None else problem.estimate(plan))
    check_states(problem, plan)


def fits_constraints(problem: Problem, plan: Plan, metrics: Metrics) -> bool:
    """Return True if `check_constraints` accepts the plan.

    Args:
        problem: The problem that the plan solves.
        plan: The plan to check.
        metrics: Metrics of the plan.

    Returns:
        True if the plan can be carried out.
    """
    try:
        check_constraints(problem, plan, metrics)
    except DicompilerError:
        return False
    return True


def check_states(problem: Problem, plan: Plan) -> None:
    """Raise DicompilerError if a state is read on another device than the one that computes it."""
    routing = route(problem.layers, plan, problem.platform.host_of) if problem.layers.states else None
    for state in routing.state_retentions if routing is not None else ():
        for leaf in assembly_leaves(state.assembly):
            if leaf.box.origin is not None:
                writer, readers = problem.layers.producer[state.present].name, _describe_readers(problem, state.past)
                raise DicompilerError(
                    f"plan: state {state.past!r}: device {leaf.box.origin.device!r} computes it in layer {writer!r} "
                    f"and device {state.device!r} reads it in {readers}, but states are not sent: use one device for "
                    "both, or compile without states (--state none)"
                )


def _describe_readers(problem: Problem, state: str) -> str:
    names = [layer.name for layer in problem.layers.layers if any(state in node.inputs for node in layer.nodes)]
    return f"layer{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


def check_compute(platform: Platform, plan: Plan) -> None:
    """Raise DicompilerError if a part is on a device without compute.

    Such a device may only hold inputs or receive outputs.
    """
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
                    f"plan: layers.{name}[{i}]: device {part.device!r} has no compute: use another device"
                )


def _check_renamed_compute(platform: Platform, plan: Plan) -> None:
    """Check the devices that parts are renamed to in each replica."""
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
                    f"plan: replicas[{i}]: device {place!r}, which replaces {name!r}, has no compute: rename {name!r} "
                    "to another device"
                )


def check_target_support(plan: Plan, target: Target) -> None:
    """Raise DicompilerError if the target does not support the plan's replicas or failure plans."""
    if plan.replicas and not target.can_run_replicas:
        raise DicompilerError(
            f"plan: replicas: target {target.name!r} does not support replicas: remove them, or use target 'sockets'"
        )
    if plan.failures and not target.can_tolerate_failures:
        raise DicompilerError(
            f"plan: failures: target {target.name!r} does not support failure plans: remove them, or use target "
            "'sockets'"
        )


def used_memory(platform: Platform, metrics: Metrics) -> Mapping[str, int]:
    """Return the bytes that the plan uses on each host.

    They are the weights, the live activations and the target's overhead.

    Args:
        platform: The platform.
        metrics: Metrics of the plan.

    Returns:
        Host name → bytes.
    """
    used = dict.fromkeys((host.name for host in platform.hosts), 0)
    for entry in metrics.devices:
        used[platform.host_of[entry.device]] += entry.total_memory
    return used


def free_memory(problem: Problem) -> dict[str, int]:
    """Return the bytes that each host has for weights and activations if all its devices take part.

    Args:
        problem: The problem.

    Returns:
        Host name → bytes, at least 0.
    """
    free = {host.name: host.memory for host in problem.platform.hosts}
    for device in problem.platform.devices:
        free[device.host] = max(0, free[device.host] - problem.target_overhead[device.name])
    return free


def needed_memory(problem: Problem, plan: Plan) -> Mapping[str, int]:
    """Return the bytes that a plan needs on each host, as exactly as the problem can say.

    With a model and a target, the plan is lowered to a program and the target is asked for the memory that it adds.

    Args:
        problem: The problem.
        plan: The plan.

    Returns:
        Host name → bytes.

    Raises:
        DicompilerError: The plan does not fit the layers.
    """
    exact = problem.target is not None and problem.model is not None
    return used_memory(problem.platform, problem.evaluate(plan) if exact else problem.estimate(plan))


def missing_memory(problem: Problem, plan: Plan) -> dict[str, int]:
    """Return the bytes that a plan needs beyond each host's memory.

    Args:
        problem: The problem.
        plan: The plan.

    Returns:
        Host name → missing bytes, only for hosts with too little memory.
    """
    limits = {host.name: host.memory for host in problem.platform.hosts}
    return {name: n - limits[name] for name, n in needed_memory(problem, plan).items() if n > limits[name]}


def check_memory(problem: Problem, plan: Plan, metrics: Metrics) -> None:
    """Raise DicompilerError if weights, live activations and the target's overhead exceed a host's memory.

    On a host with flash, weights are counted against flash and activations against RAM. The error names the layer that
    needs most of it.
    """
    platform, target = problem.platform, problem.target
    # On hosts with flash the estimate leaves the target's overhead out: such targets measure it themselves.
    flash = {host.name for host in platform.hosts if host.flash}
    memory = {
        e.device: MemoryUse(e.weights, e.activations, 0, 0 if platform.host_of[e.device] in flash else e.overhead_bytes)
        for e in metrics.devices
    }
    if need := _first_exceeded(host_memory_needs(platform, memory)):
        added = "" if target is None else f" and what target {target.name!r} adds,"
        purpose_of_all = f"for weights and activations{added}"
        purpose = {"memory": purpose_of_all, "RAM": "of RAM for activations", "flash": "of flash for weights"}[
            need.kind
        ]
        raise _memory_error(
            need, purpose, _memory_remedy(need, route(problem.layers, plan, platform.host_of), platform)
        )


def check_program_memory(compilation: PipelineState, memory: Mapping[str, MemoryUse], target: Target) -> None:
    """Check the memory of a program.

    Args:
        compilation: The compilation with its program.
        memory: Device → memory use of one frame with the target's overhead. The target's own measurement replaces it.
        target: The target that emits the program.

    Raises:
        DicompilerError: A host has too little memory.
    """
    platform, routing = compilation.platform, compilation.routing
    assert platform is not None and routing is not None
    if compilation.footprints:
        check_measured_memory(platform, compilation.footprints)
    elif need := _first_exceeded(host_memory_needs(platform, memory, include_sum=True)):
        added = sum(use.added for name, use in memory.items() if platform.host_of[name] == need.host)
        purpose_of_all = f"to run, {format_bytes(added)} of it added by target {target.name!r},"
        purpose = {"memory": purpose_of_all, "RAM": "of RAM to run", "flash": "of flash for weights"}[need.kind]
        raise _memory_error(need, purpose, _memory_remedy(need, routing, platform))


def check_measured_memory(platform: Platform, occupied: Sequence[DeviceFootprint]) -> None:
    """Check the RAM and flash that a target measured against the limits of the hosts.

    Args:
        platform: The platform.
        occupied: Measured footprint of each device.

    Raises:
        DicompilerError: A host has too little memory.
    """
    memory = {entry.device: MemoryUse(entry.flash, entry.ram, 0) for entry in occupied}
    if need := _first_exceeded(host_memory_needs(platform, memory)):
        of_host = [entry for entry in occupied if platform.host_of[entry.device] == need.host]
        index = 1 if need.kind == "flash" else 0
        largest = max(of_host, key=lambda entry: (entry.ram, entry.flash)[index]).largest_consumers[index]
        raise _memory_error(need, "", f"cut {largest} into smaller parts or use another device for it (--fit searches)")


def host_memory_needs(
    platform: Platform, memory: Mapping[str, MemoryUse], include_sum: bool = False
) -> Iterator[HostMemoryNeed]:
    """Yield the memory that the devices of each host need together.

    Hosts with flash need RAM and flash separately.

    Args:
        platform: The platform.
        memory: Device → memory use.
        include_sum: For hosts with flash, also yield the sum of RAM and flash against all memory.

    Yields:
        One entry for each kind of memory of each host.
    """
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


def _memory_error(need: HostMemoryNeed, purpose: str, remedy: str) -> DicompilerError:
    """Return the error for one host.

    Args:
        need: The need that exceeds its limit.
        purpose: Text that says which memory is needed and why; "" if the need was measured.
        remedy: Text that says how to fix it.
    """
    needed, excess, limit = map(
        format_bytes, (need.needed_bytes, need.needed_bytes - need.limit_bytes, need.limit_bytes)
    )
    if purpose:
        text = f"{needed} ({excess} too much) {purpose} and has {limit}"
    else:
        text = f"{needed} of {need.kind}, {excess} more than it has ({limit})"
    return DicompilerError(f"plan: host {need.host} needs {text}: {remedy}")


def _memory_remedy(need: HostMemoryNeed, routing: Routing, platform: Platform) -> str:
    """Return a remedy that names the layer that needs most of the memory."""
    sizes: dict[str, int] = {}
    for task in (task for role in routing.roles for task in role.tasks if platform.host_of[task.device] == need.host):
        known, weights = sizes.get(task.layer, 0), sum(weight_regions(routing.layers, task).values())
        sizes[task.layer] = (
            max(known, activation_nbytes(routing.layers, task)) if need.kind == "RAM" else known + weights
        )
    if not sizes:
        return "it only holds inputs or outputs: use another device as the source or the sink"
    layer = max(sizes, key=lambda name: sizes[name])
    size = format_bytes(sizes[layer])
    if need.kind == "RAM":
        return f"use smaller tiles, above all for layer {layer!r}, which reads and writes {size} (--fit searches)"
    return f"move layers to other hosts, above all parts of layer {layer!r} ({size} of weights)"
