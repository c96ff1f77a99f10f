"""Losses of devices: which are to be survived, the problem that is left then, and what a plan for it comes to.

text → Survive;   Problem + lost devices → Problem;   Problem + Plan with losses → LossMetrics
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean
from dicompiler.cost.failure_timeline import FailureCase, Outage, StreamInterval, simulate_outages
from dicompiler.cost.op_counts import weight_regions
from dicompiler.ir.metrics import FailureMetrics
from dicompiler.ir.plan import FailurePlan, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import Region
from dicompiler.ir.routing import Routing
from dicompiler.partition.routing import route_on_platform
from dicompiler.search.problem import Problem

HOSTS_KEYWORD = "hosts"
"""The word for all devices of a host together."""

FailedDevices = tuple[str, ...]
StoredWeights = Mapping[tuple[str, str, Region], int]
"""(Device, tensor, region) → bytes of weights."""


@dataclass(frozen=True)
class FailureSelection:
    """Which losses are to be covered: of every set of at most `count` devices that plans use, of the devices of each
    host together (`hosts`), or of each of `devices` alone."""

    max_failed: int = 0
    whole_hosts: bool = False
    devices: tuple[str, ...] = ()

    @classmethod
    def parse(cls, given: int | str | FailureSelection | None) -> FailureSelection:
        """2, "2", "hosts" or "pi02,pi03". UsageError for a number below 0."""
        if isinstance(given, FailureSelection) or given is None:
            return given or cls()
        text = str(given).strip()
        if text.lstrip("+-").isdecimal():
            if int(text) < 0:
                raise UsageError(f"survive {text}: give how many devices at most may be lost: 0 or more")
            return cls(int(text))
        return (
            cls(whole_hosts=True)
            if text == HOSTS_KEYWORD
            else cls(devices=tuple(name.strip() for name in text.split(",")))
        )

    def __bool__(self) -> bool:
        return bool(self.max_failed or self.whole_hosts or self.devices)

    def __str__(self) -> str:
        return HOSTS_KEYWORD if self.whole_hosts else ",".join(self.devices) or str(self.max_failed)

    def check_platform(self, platform: Platform) -> None:
        """UsageError where the platform has no such devices, or nothing that computes would be left."""
        for name in self.devices:
            if name not in platform.host_of:
                known = did_you_mean(name, [HOSTS_KEYWORD, *platform.host_of])
                raise UsageError(f"survive: {name!r} is no number, not '{HOSTS_KEYWORD}' and no device{known}")
        count = len(platform.computing_devices)
        hosts = len({device.host for device in platform.computing_devices})
        if self.whole_hosts and hosts < 2:
            raise UsageError("survive hosts: one host has all that computes: nothing is left without it")
        if self.max_failed >= count or (self.devices and count < 2):
            there = "one device computes" if count == 1 else f"{count} devices compute"
            least = "survive nothing (0)" if count == 1 else f"survive at most {count - 1}"
            raise UsageError(f"survive {self}: on {platform.name} {there}: {least}")

    def device_sets(self, platform: Platform, used: Collection[str]) -> Iterator[FailedDevices]:
        """The sets of devices of which some are used, in platform order, the smallest first."""
        names = [device.name for device in platform.devices if device.name in used]
        if self.whole_hosts:
            for host in platform.hosts:
                together = tuple(name for name, of in platform.host_of.items() if of == host.name)
                if set(together).intersection(names):
                    yield together
        elif self.devices:
            yield from ((name,) for name in names if name in self.devices)
        else:
            for size in range(1, self.max_failed + 1):
                yield from combinations(names, size)


def failure_metrics(problem: Problem, plan: Plan) -> tuple[FailureMetrics, ...]:
    """What the plan comes to by itself, then each of its plans for losses; () where it has none."""
    if not plan.failures:
        return ()
    alone = replace(plan, failures=())
    own = stored_weights(route_on_platform(problem.platform, problem.layers, alone))
    found = [FailureMetrics((), problem.evaluate(alone), 0)]
    for loss in plan.failures:
        rest = remove_devices(problem, loss.failed)
        weights = stored_weights(route_on_platform(rest.platform, rest.layers, loss.plan))
        stored = sum(size for key, size in weights.items() if key not in own)
        found.append(FailureMetrics(loss.failed, rest.evaluate(loss.plan), stored))
    return tuple(found)


def remove_devices(
    problem: Problem, lost: Collection[str], source: FailedDevices = (), sink: FailedDevices = ()
) -> Problem:
    """The same problem on what is left of the platform."""
    platform = problem.platform
    devices = tuple(device for device in platform.devices if device.name not in lost)
    names = {device.host for device in devices}
    links = tuple(link for link in platform.network.links if names.issuperset(link.hosts))
    left = replace(
        platform,
        hosts=tuple(host for host in platform.hosts if host.name in names),
        devices=devices,
        network=replace(platform.network, links=links),
    )
    return replace(problem, platform=left, source=source, sink=sink)


def stored_weights(routing: Routing) -> StoredWeights:
    """(Device, tensor, region) → bytes, of all roles."""
    return {
        (task.device, *key): size
        for role in routing.roles
        for task in role.tasks
        for key, size in weight_regions(routing.layers, task).items()
    }


def simulate_failures(
    problem: Problem, plan: Plan, outages: Sequence[Outage], frames: int, in_flight: int, spans: bool = False
) -> tuple[StreamInterval, ...]:
    """A stream by `plan` during which devices are lost, by its plans for that; see `cost.losses.play`. DicompilerError
    for a device that the platform has not, and for losses that no plan covers."""
    for one in outages:
        problem.platform.device(one.device)
    known: dict[FailedDevices, FailureCase] = {}

    def case(away: FailedDevices) -> FailureCase:
        gone = {name for name in away if name in plan.devices}
        every = (FailurePlan((), replace(plan, failures=())), *plan.failures)
        found = next(
            (loss for loss in sorted(every, key=lambda loss: len(loss.failed)) if gone <= {*loss.failed}), None
        )
        if found is None:
            raise DicompilerError(
                f"simulate: no plan covers the loss of {' and '.join(away)}: plan for more (--survive {len(gone)})"
            )
        same = next(loss for loss in every if loss.plan == found.plan)
        if same.failed not in known:
            rest = remove_devices(problem, same.failed)
            known[same.failed] = FailureCase(same.failed, rest.workload(same.plan)[1], rest.platform)
        return known[same.failed]

    return simulate_outages(case, outages, frames, in_flight, spans)
