"""Sets of devices that may fail, and the problem and the metrics on the remaining devices."""

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
from dicompiler.search.problem import Problem, plan_workload

HOSTS_KEYWORD = "hosts"
"""Value of `--tolerate-failures` for the failure of all devices of any one host."""

FailedDevices = tuple[str, ...]
StoredWeights = Mapping[tuple[str, str, Region], int]
"""Bytes of each weight region that a device stores, by (device, name of the weight, region)."""


@dataclass(frozen=True)
class FailureSelection:
    """The device failures that a plan must tolerate.

    Attributes:
        max_failed: Largest number of devices that fail together, out of all devices that plans use.
        whole_hosts: True if all devices of any one host fail together.
        devices: Names of devices. Each of them may fail while all other devices work.
    """

    max_failed: int = 0
    whole_hosts: bool = False
    devices: tuple[str, ...] = ()

    @classmethod
    def parse(cls, value: int | str) -> FailureSelection:
        """Return the device failures to tolerate that a user's value describes.

        The value is a number of devices (2 or "2"), "hosts", or a comma-separated list of device names.

        Raises:
            UsageError: The number is negative.
        """
        text = str(value).strip()
        if text.lstrip("+-").isdecimal():
            if int(text) < 0:
                raise UsageError(
                    f"tolerate-failures: {text} is negative: give the largest number of failed devices, 0 or more"
                )
            return cls(int(text))
        if text == HOSTS_KEYWORD:
            return cls(whole_hosts=True)
        return cls(devices=tuple(name.strip() for name in text.split(",")))

    def __bool__(self) -> bool:
        return bool(self.max_failed or self.whole_hosts or self.devices)

    def __str__(self) -> str:
        return HOSTS_KEYWORD if self.whole_hosts else ",".join(self.devices) or str(self.max_failed)

    def check_platform(self, platform: Platform) -> None:
        """Raise UsageError if the platform lacks a selected device, or if no device that computes would remain."""
        for name in self.devices:
            if name not in platform.host_of:
                hint = did_you_mean(name, [HOSTS_KEYWORD, *platform.host_of])
                raise UsageError(f"tolerate-failures: {name!r} is not a number, '{HOSTS_KEYWORD}' or a device{hint}")
        count = len(platform.computing_devices)
        hosts = len({device.host for device in platform.computing_devices})
        if self.whole_hosts and hosts < 2:
            raise UsageError(
                "tolerate-failures: hosts: all devices that compute are on one host, so none would remain: give a "
                "number of devices, or names of devices"
            )
        if self.max_failed >= count or (self.devices and count < 2):
            computing = "only one device computes" if count == 1 else f"only {count} devices compute"
            remedy = "use 0" if count == 1 else f"use at most {count - 1}"
            cause = f"a device must remain, but {computing} on {platform.name}"
            raise UsageError(f"tolerate-failures: {self}: {cause}: {remedy}")

    def device_sets(self, platform: Platform, used: Collection[str]) -> Iterator[FailedDevices]:
        """Yield the sets of devices that may fail together, smallest sets first.

        Sets without any of the devices in `used` (those that plans use) are omitted, because such failures have no
        effect.
        """
        names = [device.name for device in platform.devices if device.name in used]
        if self.whole_hosts:
            for host in platform.hosts:
                of_host = tuple(name for name, host_name in platform.host_of.items() if host_name == host.name)
                if set(of_host).intersection(names):
                    yield of_host
        elif self.devices:
            yield from ((name,) for name in names if name in self.devices)
        else:
            for size in range(1, self.max_failed + 1):
                yield from combinations(names, size)


def failure_metrics(problem: Problem, plan: Plan) -> tuple[FailureMetrics, ...]:
    """Return the metrics of a plan without failures, followed by those of its failure plans; () if it has none."""
    if not plan.failures:
        return ()
    main = replace(plan, failures=())
    main_weights = stored_weights(route_on_platform(problem.platform, problem.layers, main))
    results = [FailureMetrics((), problem.evaluate(main), 0)]
    for failure in plan.failures:
        remaining = remove_devices(problem, failure.failed)
        weights = stored_weights(route_on_platform(remaining.platform, remaining.layers, failure.plan))
        added = sum(size for key, size in weights.items() if key not in main_weights)
        results.append(FailureMetrics(failure.failed, remaining.evaluate(failure.plan), added))
    return tuple(results)


def remove_devices(
    problem: Problem, failed: Collection[str], source: FailedDevices = (), sink: FailedDevices = ()
) -> Problem:
    """Return the problem without the devices `failed`, with the sources `source` and the sinks `sink`.

    Empty sources or sinks mean the first remaining device.
    """
    platform = problem.platform
    devices = tuple(device for device in platform.devices if device.name not in failed)
    host_names = {device.host for device in devices}
    links = tuple(link for link in platform.network.links if host_names.issuperset(link.hosts))
    remaining = replace(
        platform,
        hosts=tuple(host for host in platform.hosts if host.name in host_names),
        devices=devices,
        network=replace(platform.network, links=links),
    )
    return replace(problem, platform=remaining, source=source, sink=sink)


def stored_weights(routing: Routing) -> StoredWeights:
    """Return the bytes of each weight region that a device stores, by (device, name of the weight, region).

    Replicas (copies of the plan on other devices) and failure plans are included.
    """
    return {
        (task.device, *key): size
        for role in routing.roles
        for task in role.tasks
        for key, size in weight_regions(routing.layers, task).items()
    }


def simulate_failures(
    problem: Problem, plan: Plan, outages: Sequence[Outage], frames: int, in_flight: int, spans: bool = False
) -> tuple[StreamInterval, ...]:
    """Simulate a stream of frames during which devices fail and the plan's failure plans are used.

    Args:
        problem: The problem that the plan solves.
        plan: The plan with its failure plans.
        outages: Periods in which devices are down.
        frames: Number of frames.
        in_flight: Number of frames that are computed at the same time.
        spans: True to include the periods in which devices computed and sent in the result.

    Raises:
        UsageError: The platform lacks a device.
        DicompilerError: No failure plan covers a set of failed devices.
    """
    for outage in outages:
        try:
            # This call raises an error if the platform lacks the device.
            problem.platform.device(outage.device)
        except DicompilerError as error:
            raise UsageError(str(error)) from error
    plans = (FailurePlan((), replace(plan, failures=())), *plan.failures)
    cases: dict[FailedDevices, FailureCase] = {}

    def find_case(down: FailedDevices) -> FailureCase:
        used = {name for name in down if name in plan.devices}
        smallest_first = sorted(plans, key=lambda failure: len(failure.failed))
        found = next((failure for failure in smallest_first if used <= {*failure.failed}), None)
        if found is None:
            raise DicompilerError(
                f"simulate: no plan covers the failure of {' and '.join(down)}: plan for more failures "
                f"(--tolerate-failures {len(used)})"
            )
        first = next(failure for failure in plans if failure.plan == found.plan)
        if first.failed not in cases:
            remaining = remove_devices(problem, first.failed)
            cases[first.failed] = FailureCase(first.failed, plan_workload(remaining, first.plan)[1], remaining.platform)
        return cases[first.failed]

    return simulate_outages(find_case, outages, frames, in_flight, spans)
