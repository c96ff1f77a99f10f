"""Losses of devices: which are to be survived, the problem that is left then, and what a plan for it comes to.

text → Survive;   Problem + lost devices → Problem;   Problem + Plan with losses → LossMetrics
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from dicompiler.base.errors import DicompilerError, UsageError, nearest
from dicompiler.cost.counting import weight_regions
from dicompiler.cost.losses import Away, Case, Stretch, play
from dicompiler.ir.metrics import LossMetrics
from dicompiler.ir.plan import Loss, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import Region
from dicompiler.ir.routing import Routing
from dicompiler.partition.routing import route_on
from dicompiler.search.problem import Problem

HOSTS = "hosts"
"""The word for all devices of a host together."""

Lost = tuple[str, ...]
Held = Mapping[tuple[str, str, Region], int]
"""(Device, tensor, region) → bytes of weights."""


@dataclass(frozen=True)
class Survive:
    """Which losses are to be covered: of every set of at most `count` devices that plans use, of the devices of each
    host together (`hosts`), or of each of `devices` alone."""

    count: int = 0
    hosts: bool = False
    devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: int | str | Survive | None) -> Survive:
        """2, "2", "hosts" or "pi02,pi03". UsageError for a number below 0."""
        if isinstance(given, Survive) or given is None:
            return given or cls()
        text = str(given).strip()
        if text.lstrip("+-").isdecimal():
            if int(text) < 0:
                raise UsageError(f"survive {text}: give how many devices at most may be lost: 0 or more")
            return cls(int(text))
        return cls(hosts=True) if text == HOSTS else cls(devices=tuple(name.strip() for name in text.split(",")))

    def __bool__(self) -> bool:
        return bool(self.count or self.hosts or self.devices)

    def __str__(self) -> str:
        return HOSTS if self.hosts else ",".join(self.devices) or str(self.count)

    def check(self, platform: Platform) -> None:
        """UsageError where the platform has no such devices, or nothing that computes would be left."""
        for name in self.devices:
            if name not in platform.host_of:
                known = nearest(name, [HOSTS, *platform.host_of])
                raise UsageError(f"survive: {name!r} is no number, not '{HOSTS}' and no device{known}")
        count = len(platform.computing)
        hosts = len({device.host for device in platform.computing})
        if self.hosts and hosts < 2:
            raise UsageError("survive hosts: one host has all that computes: nothing is left without it")
        if self.count >= count or (self.devices and count < 2):
            there = "one device computes" if count == 1 else f"{count} devices compute"
            least = "survive nothing (0)" if count == 1 else f"survive at most {count - 1}"
            raise UsageError(f"survive {self}: on {platform.name} {there}: {least}")

    def sets(self, platform: Platform, used: Collection[str]) -> Iterator[Lost]:
        """The sets of devices of which some are used, in platform order, the smallest first."""
        names = [device.name for device in platform.devices if device.name in used]
        if self.hosts:
            for host in platform.hosts:
                together = tuple(name for name, of in platform.host_of.items() if of == host.name)
                if set(together).intersection(names):
                    yield together
        elif self.devices:
            yield from ((name,) for name in names if name in self.devices)
        else:
            for size in range(1, self.count + 1):
                yield from combinations(names, size)


def loss_metrics(problem: Problem, plan: Plan) -> tuple[LossMetrics, ...]:
    """What the plan comes to by itself, then each of its plans for losses; () where it has none."""
    if not plan.losses:
        return ()
    alone = replace(plan, losses=())
    own = held_weights(route_on(problem.platform, problem.layers, alone))
    found = [LossMetrics((), problem.evaluate(alone), 0)]
    for loss in plan.losses:
        rest = without(problem, loss.lost)
        weights = held_weights(route_on(rest.platform, rest.layers, loss.plan))
        stored = sum(size for key, size in weights.items() if key not in own)
        found.append(LossMetrics(loss.lost, rest.evaluate(loss.plan), stored))
    return tuple(found)


def without(problem: Problem, lost: Collection[str], source: Lost = (), sink: Lost = ()) -> Problem:
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


def held_weights(routing: Routing) -> Held:
    """(Device, tensor, region) → bytes, of all roles."""
    return {
        (task.device, *key): size
        for role in routing.roles
        for task in role.tasks
        for key, size in weight_regions(routing.layers, task).items()
    }


def played_losses(
    problem: Problem, plan: Plan, aways: Sequence[Away], frames: int, in_flight: int, spans: bool = False
) -> tuple[Stretch, ...]:
    """A stream by `plan` during which devices are lost, by its plans for that; see `cost.losses.play`. DicompilerError
    for a device that the platform has not, and for losses that no plan covers."""
    for one in aways:
        problem.platform.device(one.device)
    known: dict[Lost, Case] = {}

    def case(away: Lost) -> Case:
        gone = {name for name in away if name in plan.devices}
        every = (Loss((), replace(plan, losses=())), *plan.losses)
        found = next((loss for loss in sorted(every, key=lambda loss: len(loss.lost)) if gone <= {*loss.lost}), None)
        if found is None:
            raise DicompilerError(
                f"simulate: no plan covers the loss of {' and '.join(away)}: plan for more (--survive {len(gone)})"
            )
        same = next(loss for loss in every if loss.plan == found.plan)
        if same.lost not in known:
            rest = without(problem, same.lost)
            known[same.lost] = Case(same.lost, rest.workload(same.plan)[1], rest.platform)
        return known[same.lost]

    return play(case, aways, frames, in_flight, spans)
