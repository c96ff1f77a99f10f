"""Checks that a plan can run: its devices can compute, hosts have enough memory, and no state is sent.

A state is a graph output that becomes a graph input of the next frame, such as a key/value cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dicompiler.base.errors import DicompilerError, did_you_mean
from dicompiler.base.units import format_bytes, format_needed_bytes
from dicompiler.cost.memory import MemoryUse
from dicompiler.cost.op_counts import activation_nbytes, weight_regions
from dicompiler.ir.metrics import DeviceFootprint, Metrics
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.routing import Routing, assembly_leaves
from dicompiler.partition.routing import failure_plan_in_errors, route
from dicompiler.search.problem import Problem
from dicompiler.target.target_base import Target

MAX_NAMED_HOSTS = 3
"""Maximum number of hosts that an error about too little memory names."""


@dataclass(frozen=True)
class HostMemoryNeed:
    """The memory that a plan needs on one host, and the memory that the host has.

    Attributes:
        host: Name of the host.
        kind: "memory" for all memory of the host; "RAM" or "flash" for one of the two memories of a microcontroller.
        needed_bytes: Bytes that the plan needs.
        limit_bytes: Bytes that the host has.
    """

    host: str
    kind: Literal["memory", "RAM", "flash"]
    needed_bytes: int
    limit_bytes: int

    @property
    def is_exceeded(self) -> bool:
        return self.needed_bytes > self.limit_bytes

    @property
    def size_texts(self) -> tuple[str, str, str]:
        """The needed bytes, the missing bytes, and the bytes that the host has, as texts."""
        needed, missing, limit = self.needed_bytes, self.needed_bytes - self.limit_bytes, self.limit_bytes
        return format_needed_bytes(needed), format_needed_bytes(missing), format_bytes(limit)


def check_constraints(problem: Problem, plan: Plan, metrics: Metrics | None = None) -> None:
    """Raise DicompilerError if a plan cannot run on the problem's platform.

    Args:
        problem: The problem that the plan solves.
        plan: The plan to check.
        metrics: Metrics of the plan, which contain its memory use. Default: those of `Problem.estimate`.

    Raises:
        DicompilerError: The plan computes on a device without compute, a host has too little memory, or a device reads
            a state (an output of the previous frame) that another device computes.
    """
    check_compute(problem.platform, plan)
    check_memory(problem, plan, metrics if metrics is not None else problem.estimate(plan))
    check_states(problem, plan)


def fits_constraints(problem: Problem, plan: Plan, metrics: Metrics) -> bool:
    """Return True if `check_constraints` accepts the plan.

    Args:
        problem: The problem that the plan solves.
        plan: The plan to check.
        metrics: Metrics of the plan, which contain its memory use.

    Returns:
        True if the plan can run.
    """
    try:
        check_constraints(problem, plan, metrics)
    except DicompilerError:
        return False
    return True


def check_states(problem: Problem, plan: Plan) -> None:
    """Raise DicompilerError if a device reads a state that another device computes.

    States are graph outputs that become graph inputs of the next frame. Devices do not send them to each other.
    """
    layers = problem.layers
    if not layers.states:
        return
    for state in route(layers, plan, problem.platform.host_of).state_retentions:
        for leaf in assembly_leaves(state.assembly):
            if leaf.box.origin is not None:
                readers = [
                    layer.name for layer in layers.layers if any(state.past in node.inputs for node in layer.nodes)
                ]
                raise DicompilerError(
                    f"plan: state {state.past!r}: device {leaf.box.origin.device!r} computes it in layer "
                    f"{layers.producer[state.present].name!r} and device {state.device!r} reads it in "
                    f"layer{'s' if len(readers) > 1 else ''} {', '.join(map(repr, readers))}, but states are not sent: "
                    "use one device for both, or compile without states (--state none)"
                )


def check_plan_devices(platform: Platform, plan: Plan) -> None:
    """Raise DicompilerError if a plan names a device that the platform does not have.

    Args:
        platform: The platform.
        plan: The plan. Its failure plans are checked too. Names that replicas (copies of the plan on other devices)
            replace are not checked.

    Raises:
        DicompilerError: The message states the place in the plan, and the nearest name.
    """
    named = {f"layers.{name}[{i}]": part.device for name, parts in plan.layers.items() for i, part in enumerate(parts)}
    named |= {f"{key}[{i}]": name for key in ("source", "sink") for i, name in enumerate(getattr(plan, key))}
    named |= {f"engines.{name}": name for name in plan.engines}
    renamed = {name for renaming in plan.replicas for name in renaming}
    for place, name in named.items():
        if name not in platform.host_of and name not in renamed:
            close = did_you_mean(name, platform.host_of)
            raise DicompilerError(
                f"plan: {place}: platform {platform.name!r} has no device {name!r}{close}: use one of its devices"
            )
    for failure in plan.failures:
        with failure_plan_in_errors(plan, failure.failed):
            check_plan_devices(platform, failure.plan)


def check_compute(platform: Platform, plan: Plan) -> None:
    """Raise DicompilerError if a plan, its replicas or its failure plans place a layer on a device without compute."""
    for failure in plan.failures:
        with failure_plan_in_errors(plan, failure.failed):
            check_compute(platform, failure.plan)
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
    """Raise DicompilerError if a replica (the plan on other devices) uses an unknown device or one without compute."""
    workers = dict.fromkeys(part.device for parts in plan.layers.values() for part in parts)
    for i, renaming in enumerate(plan.replicas):
        for name in (*renaming.values(), *(name for name in workers if name not in renaming)):
            if name not in platform.host_of:
                raise DicompilerError(
                    f"plan: replicas[{i}]: {platform.name} has no device {name!r}{did_you_mean(name, platform.host_of)}"
                )
        for name in workers:
            new_name = renaming.get(name, name)
            if not platform.device(new_name).can_compute:
                raise DicompilerError(
                    f"plan: replicas[{i}]: device {new_name!r}, which replaces {name!r}, has no compute: let "
                    f"another device replace {name!r}"
                )


def check_target_support(plan: Plan, target: Target) -> None:
    """Raise DicompilerError if the target cannot run the plan's replicas (copies on other devices) or failure plans."""
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
    """Return the bytes that a plan uses on each host for weights, activations and the target's overhead.

    Args:
        platform: The platform on which the plan runs.
        metrics: Metrics of the plan.

    Returns:
        Used bytes by host name.
    """
    used = dict.fromkeys((host.name for host in platform.hosts), 0)
    for entry in metrics.devices:
        used[platform.host_of[entry.device]] += entry.total_memory
    return used


def free_memory(problem: Problem) -> dict[str, int]:
    """Return the bytes that each host has for weights and activations.

    The target's overhead is subtracted for every device of a host, because a plan may use all devices.

    Args:
        problem: The problem with its platform and target.

    Returns:
        Free bytes by host name, at least 0.
    """
    free = {host.name: host.memory for host in problem.platform.hosts}
    for device in problem.platform.devices:
        free[device.host] = max(0, free[device.host] - problem.target_overhead[device.name])
    return free


def needed_memory(problem: Problem, plan: Plan) -> Mapping[str, int]:
    """Return the bytes that a plan needs on each host.

    With a model and a target in the problem, the compiled program is measured; otherwise the bytes are estimated.

    Args:
        problem: The problem that the plan solves.
        plan: Plan for the problem's layers.

    Returns:
        Needed bytes by host name.

    Raises:
        DicompilerError: The plan does not match the problem's layers.
    """
    exact = problem.target is not None and problem.model is not None
    return used_memory(problem.platform, problem.evaluate(plan) if exact else problem.estimate(plan))


def missing_memory(problem: Problem, plan: Plan) -> dict[str, int]:
    """Return the bytes by which a plan exceeds the memory of each host.

    Args:
        problem: The problem that the plan solves.
        plan: Plan for the problem's layers.

    Returns:
        Missing bytes by host name, only for hosts with too little memory.
    """
    limits = {host.name: host.memory for host in problem.platform.hosts}
    return {name: n - limits[name] for name, n in needed_memory(problem, plan).items() if n > limits[name]}


def check_memory(problem: Problem, plan: Plan, metrics: Metrics) -> None:
    """Raise DicompilerError if weights, activations and the target's overhead exceed a host's memory.

    On a host with flash (a microcontroller), the weights must fit into flash and the activations into RAM.
    """
    platform = problem.platform
    memory = {}
    for entry in metrics.devices:
        # The target's overhead is omitted for hosts with flash (microcontrollers), because the target measures it only
        # after the compilation. `check_measured_memory` then checks it.
        has_flash = platform.host(platform.host_of[entry.device]).flash
        memory[entry.device] = MemoryUse(entry.weights, entry.activations, 0, 0 if has_flash else entry.overhead_bytes)
    if not any(need.is_exceeded for need in host_memory_needs(platform, memory)):
        return
    if problem.target is not None and problem.model is not None and not any(host.flash for host in platform.hosts):
        # `memory` is an estimate, and a lower bound. The error message needs the predicted memory of the compiled
        # program instead.
        memory = problem.program_memory_use(problem.draft_program(plan))
    routing = route(problem.layers, plan, platform.host_of)
    target_name = "" if problem.target is None else problem.target.name
    raise _memory_error(platform, routing, tuple(host_memory_needs(platform, memory)), memory, target_name)


def check_program_memory(compilation: PipelineState, memory: Mapping[str, MemoryUse], target: Target) -> None:
    """Raise DicompilerError if a host has too little memory for the program of a compilation.

    `memory` is the predicted memory use for one frame by device name. If the target has measured the memory of the
    program, the measured values are used instead.
    """
    platform, routing = compilation.platform, compilation.routing
    assert platform is not None and routing is not None
    if compilation.footprints:
        check_measured_memory(platform, compilation.footprints)
        return
    needs = tuple(host_memory_needs(platform, memory, include_sum=True))
    if any(need.is_exceeded for need in needs):
        raise _memory_error(platform, routing, needs, memory, target.name)


def check_measured_memory(platform: Platform, occupied: Sequence[DeviceFootprint]) -> None:
    """Raise DicompilerError if RAM or flash measured by a target exceeds the memory of a host.

    Args:
        platform: The platform with the memory of each host.
        occupied: RAM and flash that the target measured, for each device.

    Raises:
        DicompilerError: A host has too little RAM or flash.
    """
    memory = {entry.device: MemoryUse(entry.flash, entry.ram, 0) for entry in occupied}
    if need := next((need for need in host_memory_needs(platform, memory) if need.is_exceeded), None):
        of_host = [entry for entry in occupied if platform.host_of[entry.device] == need.host]
        index = 1 if need.kind == "flash" else 0
        largest = max(of_host, key=lambda entry: (entry.ram, entry.flash)[index]).largest_consumers[index]
        needed, excess, limit = need.size_texts
        raise DicompilerError(
            f"plan: host {need.host} needs {needed} of {need.kind}, {excess} more than it has ({limit}): cut {largest} "
            "into smaller parts or use another device for it (--fit searches)"
        )


def host_memory_needs(
    platform: Platform, memory: Mapping[str, MemoryUse], include_sum: bool = False
) -> Iterator[HostMemoryNeed]:
    """Yield the memory that the devices of each host need together.

    A host with flash has one entry for RAM and one for flash, and with `include_sum` a third one for their sum.
    `memory` is the memory use by device name.
    """
    for host in platform.hosts:
        uses = [use for name, use in memory.items() if platform.host_of[name] == host.name]
        total, weights = sum(use.total for use in uses), sum(use.weights for use in uses)
        if include_sum or not host.flash:
            yield HostMemoryNeed(host.name, "memory", total, host.memory)
        if host.flash:
            yield HostMemoryNeed(host.name, "RAM", total - weights, host.ram)
            yield HostMemoryNeed(host.name, "flash", weights, host.flash)


def describe_memory_shares(platform: Platform, memory: Mapping[str, MemoryUse], host: str, target_name: str) -> str:
    """Return the memory that a program needs on a host, by purpose.

    Example: "247 kB weights + 23.3 kB buffers and activations + 67.4 MB runtime of target 'sockets'".
    `memory` is the memory use by device name. `target_name` is "" if the target's runtime is not counted.
    """
    uses = [use for name, use in memory.items() if platform.host_of[name] == host]
    shares = [
        f"{format_bytes(sum(use.weights for use in uses))} weights",
        f"{format_bytes(sum(use.buffers + use.activations for use in uses))} buffers and activations",
    ]
    if target_name:
        shares.append(f"{format_bytes(sum(use.added for use in uses))} runtime of target {target_name!r}")
    return " + ".join(shares) + ("" if target_name else ", without the runtime of a target")


def describe_plan_memory(problem: Problem, plan: Plan) -> tuple[int, str]:
    """Return the largest memory that a plan needs on one host, and a text that divides it by purpose.

    Args:
        problem: The problem that the plan solves.
        plan: Plan for the problem's layers.

    Returns:
        The number of bytes, and a text with those of weights, of buffers and activations, and of the target's runtime.
        Without a model and a target, the bytes are estimated, and the text is "".
    """
    fullest, shares = max(_plan_memory_needs(problem, plan), key=lambda entry: entry[0].needed_bytes)
    return fullest.needed_bytes, shares


def describe_missing_memory(problem: Problem, plan: Plan) -> str:
    """Describe the memory that a plan needs on the host that lacks the most memory.

    Example: "83.5 MB (50.4 MB weights + …) on host d0, which has 73.4 MB".

    Args:
        problem: The problem that the plan solves.
        plan: Plan for the problem's layers.

    Returns:
        The text. Without a model and a target, the bytes are estimated, and not divided by purpose.
    """
    most, shares = max(
        _plan_memory_needs(problem, plan), key=lambda entry: entry[0].needed_bytes - entry[0].limit_bytes
    )
    needed, _, limit = most.size_texts
    return f"{needed}{shares} on host {most.host}, which has {limit}"


def _plan_memory_needs(problem: Problem, plan: Plan) -> Iterator[tuple[HostMemoryNeed, str]]:
    """Yield the memory that a plan needs on each host, with a text that divides it by purpose ("" if unknown)."""
    platform = problem.platform
    if problem.target is None or problem.model is None:
        for host, nbytes in needed_memory(problem, plan).items():
            yield HostMemoryNeed(host, "memory", nbytes, platform.host(host).memory), ""
        return
    memory = problem.program_memory_use(problem.draft_program(plan))
    for need in host_memory_needs(platform, memory, include_sum=True):
        yield need, f" ({describe_memory_shares(platform, memory, need.host, problem.target.name)})"


def _memory_error(
    platform: Platform,
    routing: Routing,
    needs: Sequence[HostMemoryNeed],
    memory: Mapping[str, MemoryUse],
    target_name: str,
) -> DicompilerError:
    """Return the error for hosts with too little memory, of which it names at most MAX_NAMED_HOSTS.

    `memory` includes the runtime of the target `target_name`, or no runtime if it is "".
    """
    first_by_host: dict[str, HostMemoryNeed] = {}
    for need in needs:
        if need.is_exceeded:
            first_by_host.setdefault(need.host, need)
    exceeded = sorted(first_by_host.values(), key=lambda need: need.limit_bytes - need.needed_bytes)
    texts = []
    for need in exceeded[:MAX_NAMED_HOSTS]:
        needed, excess, limit = need.size_texts
        purpose = {"memory": "", "RAM": " of RAM for activations", "flash": " of flash for weights"}[need.kind]
        has_shares = need.kind == "memory"
        shares = f" ({describe_memory_shares(platform, memory, need.host, target_name)})" if has_shares else ""
        texts.append(f"host {need.host} needs {needed} ({excess} too much){purpose} and has {limit}{shares}")
    if len(exceeded) > MAX_NAMED_HOSTS:
        texts.append(f"{len(exceeded) - MAX_NAMED_HOSTS} more hosts have too little memory")
    return DicompilerError(f"plan: {'; '.join(texts)}: {_memory_remedy(exceeded[0], routing, platform, memory)}")


def _memory_remedy(need: HostMemoryNeed, routing: Routing, platform: Platform, memory: Mapping[str, MemoryUse]) -> str:
    """Return advice for a host with too little memory, which names the layer that needs the most memory."""
    added = sum(use.added for name, use in memory.items() if platform.host_of[name] == need.host)
    if need.kind == "memory" and added > need.limit_bytes:
        # Only microcontrollers have flash, and only target tflm is made for them.
        for_boards = "use --target tflm, or " if platform.host(need.host).flash else "use "
        return f"{for_boards}hosts with more memory, because the runtime alone does not fit"
    sizes: dict[str, int] = {}
    for task in (task for role in routing.roles for task in role.tasks if platform.host_of[task.device] == need.host):
        size = sizes.get(task.layer, 0)
        if need.kind == "RAM":
            sizes[task.layer] = max(size, activation_nbytes(routing.layers, task))
        else:
            sizes[task.layer] = size + sum(weight_regions(routing.layers, task).values())
    if not sizes:
        return "it computes no layer and only stores inputs or outputs: use another device as the source or the sink"
    layer = max(sizes, key=lambda name: sizes[name])
    largest = format_bytes(sizes[layer])
    if need.kind == "RAM":
        return f"use smaller tiles, above all for layer {layer!r}, which reads and writes {largest} (--fit searches)"
    return f"move layers to other hosts, above all parts of layer {layer!r} ({largest} of weights)"
