"""Choice of failure plans: a plan for each set of failed devices, such that all plans fit into memory together.

Problem + Strategy + Plan + FailureSelection → Plan with failure plans

The strategy makes a failure plan, or `reassignments` only moves the work of failed devices. In the second case the
remaining devices need fewer additional weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from dicompiler.base.errors import DicompilerError
from dicompiler.base.units import format_bytes
from dicompiler.cost.op_counts import weight_regions
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import FailurePlan, LayerShare, Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import Region, full_region, split_proportionally, with_interval
from dicompiler.partition.bounds_inference import cuttable_axes, make_share_task, output_shape
from dicompiler.partition.routing import route_on_platform
from dicompiler.partition.tiling import named_axes
from dicompiler.search.constraints import missing_memory
from dicompiler.search.failure_cases import (
    FailedDevices,
    FailureSelection,
    StoredWeights,
    remove_devices,
    stored_weights,
)
from dicompiler.search.problem import Problem, whole_layer_seconds
from dicompiler.search.strategy import Strategy

MAX_TAKEOVER_CANDIDATES = 8
"""Maximum number of remaining devices that are tried as the only one that takes over the work of failed devices."""

_Reassign = Callable[[Layer, Part], Iterable[Part]]


def reassignments(layers: LayerGraph, plan: Plan, failed: Collection[str], survivors: Sequence[str]) -> Iterator[Plan]:
    """Yield variants of a plan in which the devices `survivors` compute the parts of the devices `failed`.

    A part is one device's piece of a layer. It is cut into one piece for each survivor, or moved whole to one survivor.
    If the plan has replicas without failed devices, the first variant consists of these replicas. Source and sink stay.
    """
    roles = plan.replica_roles
    intact = [
        i
        for i, role in enumerate(roles)
        if not any(part.device in failed for parts in role.layers.values() for part in parts)
    ]
    if len(intact) > 1:
        yield replace(plan, replicas=tuple(plan.replicas[i] for i in intact))
    elif intact:
        yield roles[intact[0]]
    base = roles[0]

    def reassign(move_part: _Reassign) -> Plan:
        moved = {}
        for layer in layers.layers:
            parts = [move_part(layer, part) if part.device in failed else [part] for part in base.layers[layer.name]]
            moved[layer.name] = tuple(dict.fromkeys(chain.from_iterable(parts)))
        return replace(base, layers=moved)

    yield reassign(lambda layer, part: _cut_for_survivors(layers, layer, part, survivors))
    yield reassign(_BalancedReassignment(layers, survivors))
    for name in survivors[:MAX_TAKEOVER_CANDIDATES]:
        yield reassign(_BalancedReassignment(layers, [name]))


class _BalancedReassignment:
    """Function that moves each part of a failed device to the remaining device with the fewest added weights so far."""

    def __init__(self, layers: LayerGraph, survivors: Sequence[str]) -> None:
        self.layers, self.assigned_bytes = layers, dict.fromkeys(survivors, 0)

    def __call__(self, layer: Layer, part: Part) -> Iterator[Part]:
        name = min(self.assigned_bytes, key=lambda name: self.assigned_bytes[name])
        task = make_share_task(self.layers, layer, LayerShare(None if layer.whole_reason else part.region, part.reduce))
        self.assigned_bytes[name] += 1 + sum(weight_regions(self.layers, task).values())
        yield replace(part, device=name)


def _cut_for_survivors(layers: LayerGraph, layer: Layer, part: Part, survivors: Sequence[str]) -> Iterator[Part]:
    """Yield equal pieces of a part (a device's piece of a layer), one for each device of `survivors`.

    The part is cut along its channels if possible, because this cuts its weights too; otherwise along its longest axis.
    A part that cannot be cut is moved to the first survivor. The reduction axis is never cut.
    """
    region = () if layer.whole_reason else part.region or full_region(output_shape(layers, layer))
    axes = [axis for axis in cuttable_axes(layers, layer) if region[axis][1] - region[axis][0] > 1] if region else []
    if not axes:
        yield replace(part, device=survivors[0])
        return
    channel = named_axes(layers)[layer.output].get("channel")
    axis = channel if channel in axes else max(axes, key=lambda axis: region[axis][1] - region[axis][0])
    assert axis is not None
    start, stop = region[axis]
    for name, (low, high) in zip(survivors, split_proportionally(stop - start, [1.0] * len(survivors)), strict=True):
        if low < high:
            yield replace(part, device=name, region=with_interval(region, axis, (start + low, start + high)))


log = logging.getLogger("dicompiler")

MAX_MAIN_PLANS = 4
"""Maximum number of main plans (plans for use while no device has failed) for which failure plans are searched."""


def add_failover_plans(
    problem: Problem, strategy: Strategy, plan: Plan, selection: FailureSelection, is_plan_fixed: bool = False
) -> Plan:
    """Return `plan` with a failure plan for each set of failed devices that `selection` contains.

    All plans must fit into memory together. If they do not, slower failure plans are tried, and then other plans in
    place of `plan`.

    Args:
        problem: The problem without failures.
        strategy: Strategy that makes the failure plans. If it finds none, the remaining devices take over the failed
            devices' work.
        plan: The plan for use while no device has failed.
        selection: The failures to tolerate.
        is_plan_fixed: True if the user gave the plan, so that the plan, its source and its sink must not change.

    Raises:
        DicompilerError: No plan is possible after any of the failures, or the plans do not fit into memory together.
    """
    if problem.layers.states:
        raise DicompilerError(
            f"tolerate-failures: {selection}: state {problem.layers.states[0][0]!r} exists on one device only and "
            "would be lost with it: omit --tolerate-failures, or compile without states (--state none)"
        )
    planner = _FailurePlanner(problem, strategy, plan, is_plan_fixed)
    searches = [_FailoverSearch(planner, _PlanOption(problem, replace(plan, failures=())), selection)]
    if not searches[0].options:
        if not planner.uncovered_reasons:  # The plan uses no device that may fail, so it needs no failure plan.
            return plan
        raise DicompilerError(
            f"tolerate-failures: {selection}: no failure can be covered: {planner.describe_uncovered()}"
        )
    if planner.uncovered_reasons:
        log.warning("tolerate-failures: %s: not covered: %s", selection, planner.describe_uncovered())
    while searches[-1].fitting_plan is None and not is_plan_fixed and len(searches) < MAX_MAIN_PLANS:
        tried = [search.main.plan for search in searches]
        others = [option for option in planner.main_options() if option.plan not in tried]
        if not others:
            break
        searches.append(_FailoverSearch(planner, min(others, key=lambda option: option.value), selection))
    if (found := searches[-1].fitting_plan) is None:
        raise searches[0].memory_error()
    if len(searches) > 1:
        log.warning(
            "tolerate-failures: %s: the failure plans of the fastest plan do not fit: another plan is used", selection
        )
    notes = dict.fromkeys(each.note for each in (found, *planner.plans.values()) if each is not None and each.note)
    return replace(found, model_digest=plan.model_digest, note="; ".join(notes))


@dataclass
class _PlanOption:
    """A candidate plan for one set of failed devices, and the problem on the remaining devices."""

    problem: Problem
    plan: Plan

    @cached_property
    def weights(self) -> StoredWeights:
        return stored_weights(route_on_platform(self.problem.platform, self.problem.layers, self.plan))

    @cached_property
    def activations(self) -> Mapping[str, int]:
        return {entry.device: entry.activations for entry in self.problem.estimate(self.plan).devices}

    @cached_property
    def value(self) -> float:
        return self.problem.evaluate(self.plan).objective_value(self.problem.objective)


@dataclass
class _FailurePlanner:
    """Maker of the strategy's failure plans. They do not depend on the main plan, so each is made only once.

    Attributes:
        problem: The problem without failures.
        strategy: The strategy.
        plan: The main plan, which is used while no device has failed.
        is_plan_fixed: True if the user gave the main plan.
        plans: The strategy's plan for each set of failed devices; None if the strategy finds no plan.
        uncovered_reasons: Reason why no plan is possible after the failure of a device, by device name.
    """

    problem: Problem
    strategy: Strategy
    plan: Plan
    is_plan_fixed: bool
    plans: dict[FailedDevices, Plan | None] = field(default_factory=dict)
    uncovered_reasons: dict[str, str] = field(default_factory=dict)
    _plans_by_key: dict[object, tuple[Problem, Plan | None]] = field(default_factory=dict)
    _main_options: dict[FailedDevices, _PlanOption] = field(default_factory=dict)

    def remaining_ends(self, plan: Plan, failed: FailedDevices) -> tuple[FailedDevices, FailedDevices] | None:
        """Return the sources and sinks after a failure; None if no plan is possible (see `uncovered_reasons`).

        If all sources or all sinks failed, the first remaining device that computes replaces them. A plan, source or
        sink that the user chose is not replaced.
        """
        first = self.problem.platform.devices[0]
        is_default = not (self.is_plan_fixed or self.problem.source or self.problem.sink) and first.can_compute
        can_move = is_default and plan.source == plan.sink == (first.name,)
        computing = self.problem.platform.computing_devices
        ends: list[FailedDevices] = []
        for names, role in ((plan.source, "source"), (plan.sink, "sink")):
            remaining = tuple(name for name in names if name not in failed)
            if not remaining and not can_move:
                reason = self._describe_fixed_end(names[0], role)
                self.uncovered_reasons.setdefault(names[0], f"{names[0]} {reason}")
                return None
            ends.append(remaining or next((d.name,) for d in computing if d.name not in failed))
        return ends[0], ends[1]

    def _describe_fixed_end(self, device: str, role: str) -> str:
        if not self.problem.platform.device(device).can_compute:
            return f"is the {role} and has no compute"
        return f"is the {role} in the given plan" if self.is_plan_fixed else f"was given as the {role}"

    def describe_uncovered(self) -> str:
        return "; ".join(self.uncovered_reasons.values())

    def plan_without(self, failed: FailedDevices, remaining: Problem) -> Plan | None:
        """Return the strategy's plan for the remaining devices, or None if the strategy finds none.

        For platforms that differ only in the names of devices, the strategy runs once.
        """
        if failed not in self.plans:
            key = self._platform_key(remaining)
            if key not in self._plans_by_key:
                log.info("%s plans without %s", self.strategy.name, ", ".join(failed))
                self._plans_by_key[key] = remaining, self._run_strategy(remaining)
            planned_problem, plan = self._plans_by_key[key]
            self.plans[failed] = plan and _rename_devices(plan, planned_problem.platform, remaining)
        return self.plans[failed]

    def _run_strategy(self, remaining: Problem) -> Plan | None:
        try:
            plan = replace(self.strategy.plan(remaining), wire_format=self.plan.wire_format)
            self.strategy.check_feasible(remaining, plan)
        except DicompilerError as error:
            log.info("%s has no plan for the remaining devices: %s", self.strategy.name, error)
            return None
        return plan

    def _platform_key(self, remaining: Problem) -> object:
        """Return a key that is equal for two problems if their platforms differ only in names."""
        platform = remaining.platform
        hosts = {host.name: str(i) for i, host in enumerate(platform.hosts)}
        place = {device.name: i for i, device in enumerate(platform.devices)}
        network = platform.network
        links = tuple(replace(link, hosts=(hosts[link.hosts[0]], hosts[link.hosts[1]])) for link in network.links)
        return (
            tuple(replace(host, name=hosts[host.name]) for host in platform.hosts),
            tuple((replace(d, name="", host=hosts[d.host]), self._costs[d.name]) for d in platform.devices),
            replace(network, links=links),
            tuple(place[name] for name in remaining.source),
            tuple(place[name] for name in remaining.sink),
        )

    @cached_property
    def _costs(self) -> Mapping[str, object]:
        """Seconds of every whole layer, and costs of the target's runtime (messages, calls, copies), by device name."""
        problem = self.problem
        return {
            device.name: (whole_layer_seconds(problem, device), problem.runtime_costs.get(device.name))
            for device in problem.platform.devices
        }

    def main_options(self) -> list[_PlanOption]:
        """Return candidates for another main plan (the plan that is used while no device has failed).

        They are failure plans with the source and the sink of the main plan, and the plan of the best single device.
        """
        ends = self.plan.source, self.plan.sink
        for failed, plan in self.plans.items():
            if plan is not None and (plan.source, plan.sink) == ends:
                self._main_options.setdefault(failed, _PlanOption(self.problem, plan))
        return [*self._main_options.values(), self._single_device_option]

    @cached_property
    def _single_device_option(self) -> _PlanOption:
        return _PlanOption(self.problem, self.problem.best_single_device[0])


def _rename_devices(plan: Plan, platform: Platform, remaining: Problem) -> Plan:
    """Return a plan for `platform`, with its devices renamed to those of `remaining.platform` in the same order."""
    names = {old.name: new.name for old, new in zip(platform.devices, remaining.platform.devices, strict=True)}
    return replace(
        plan,
        layers={name: tuple(replace(p, device=names[p.device]) for p in parts) for name, parts in plan.layers.items()},
        source=tuple(names[name] for name in plan.source),
        sink=tuple(names[name] for name in plan.sink),
        replicas=tuple({names[a]: names[b] for a, b in renaming.items()} for renaming in plan.replicas),
    )


class _FailoverSearch:
    """The search for failure plans that fit into memory together with one main plan.

    Attributes:
        main: The main plan, which is used while no device has failed.
        options: Candidate plans for each set of failed devices.
        tried_takeovers: Pairs (failed devices, id of a plan) for which the variants of the plan have been added to
            `options`.
    """

    def __init__(self, planner: _FailurePlanner, main: _PlanOption, selection: FailureSelection) -> None:
        self.planner, self.main, self.selection = planner, main, selection
        self.problem = planner.problem
        self.options: dict[FailedDevices, list[_PlanOption]] = {}
        self.tried_takeovers: set[tuple[FailedDevices, int]] = set()
        used, seen = set(main.plan.devices), set[FailedDevices]()
        while new := [failed for failed in selection.device_sets(self.problem.platform, used) if failed not in seen]:
            for failed in new:
                seen.add(failed)
                if ends := planner.remaining_ends(main.plan, failed):
                    self.options[failed] = [self._first_option(failed, remove_devices(self.problem, failed, *ends))]
                    used |= set(self.options[failed][0].plan.devices)

    def _first_option(self, failed: FailedDevices, remaining: Problem) -> _PlanOption:
        """Return the first candidate plan for the failure of the devices `failed`.

        It is, in this order: an existing plan without these devices (which needs no further memory), the strategy's
        plan, or the best plan in which the remaining devices take over the failed devices' work.
        """
        smaller = (options[0] for other, options in self.options.items() if set(other) < set(failed))
        for option in (self.main, *smaller):
            if not set(option.plan.devices).intersection(failed):
                return _PlanOption(remaining, option.plan)
        if (plan := self.planner.plan_without(failed, remaining)) is not None:
            return _PlanOption(remaining, plan)
        return min(self._takeover_options(failed, remaining, self.main), key=lambda option: option.value)

    def _takeover_options(self, failed: FailedDevices, remaining: Problem, base: _PlanOption) -> list[_PlanOption]:
        plan = replace(base.plan, source=remaining.source, sink=remaining.sink, note="")
        survivors = [device.name for device in remaining.platform.computing_devices]
        return [_PlanOption(remaining, variant) for variant in reassignments(remaining.layers, plan, failed, survivors)]

    def _add_takeover_options(self, picked: Mapping[FailedDevices, _PlanOption]) -> None:
        """Add candidate plans in which remaining devices take over the work of failed ones.

        They are variants of the main plan, and of the plans that `picked` has for fewer failed devices.
        """
        for failed, current in picked.items():
            smaller = (option for other, option in picked.items() if set(other) < set(failed))
            for base in (self.main, *smaller):
                if (failed, id(base)) not in self.tried_takeovers and set(base.plan.devices).intersection(failed):
                    self.tried_takeovers.add((failed, id(base)))
                    self.options[failed] += self._takeover_options(failed, current.problem, base)

    @cached_property
    def fitting_plan(self) -> Plan | None:
        return self._fit_failures(list(self.options))[0]

    def _fit_failures(self, covered: Sequence[FailedDevices]) -> tuple[Plan | None, dict[str, int]]:
        """Return the main plan with plans for the failures `covered`, and the bytes that hosts lack, by host name.

        The plan is None if no combination of candidates fits into memory.
        """
        picked = {failed: self.options[failed][0] for failed in covered}
        tried = {id(option) for option in picked.values()}
        while True:
            plan = self._merge_plans(picked)
            missing = missing_memory(self.problem, plan)
            swap = self._find_swap(picked, missing, tried) if missing else None
            if swap is None:
                return (None, missing) if missing else (plan, {})
            picked[swap[0]] = swap[1]
            tried.add(id(swap[1]))

    def _merge_plans(self, picked: Mapping[FailedDevices, _PlanOption]) -> Plan:
        """Return the main plan with the failure plans in `picked`, by set of failed devices.

        Devices that no plan uses are removed from these sets, because their failure has no effect.
        """
        used = {name for option in (self.main, *picked.values()) for name in option.plan.devices}
        plans: dict[FailedDevices, Plan] = {}
        for failed, option in picked.items():
            plans.setdefault(tuple(name for name in failed if name in used), option.plan)
        place = {device.name: i for i, device in enumerate(self.problem.platform.devices)}
        order = sorted(plans, key=lambda failed: (len(failed), [place[name] for name in failed]))
        return replace(self.main.plan, failures=tuple(FailurePlan(failed, plans[failed]) for failed in order if failed))

    def _find_swap(
        self, picked: Mapping[FailedDevices, _PlanOption], missing: Mapping[str, int], tried: Collection[int]
    ) -> tuple[FailedDevices, _PlanOption] | None:
        """Return a set of failed devices and another candidate plan for it that frees memory; None if there is none.

        A candidate that frees all missing bytes and adds the least time is preferred, then the one that frees the most.

        Args:
            picked: The present plan for each set of failed devices.
            missing: Missing bytes by host name.
            tried: Ids of candidates that must not be picked again.
        """
        self._add_takeover_options(picked)
        now = self._needed_bytes(picked)
        best: tuple[tuple[float, float], tuple[FailedDevices, _PlanOption]] | None = None
        for failed, current in picked.items():
            for option in self.options[failed]:
                if id(option) in tried:
                    continue
                needed = self._needed_bytes({**picked, failed: option})
                freed = sum(min(size, now[host] - needed[host]) for host, size in missing.items())
                over = sum(
                    max(0, needed[host.name] - max(host.memory, now[host.name]))
                    for host in self.problem.platform.hosts
                    if host.name not in missing
                )
                if freed - over > 0:
                    frees_all = freed - over >= sum(missing.values())
                    rank = (-1.0, option.value - current.value) if frees_all else (0.0, float(over - freed))
                    if best is None or rank < best[0]:
                        best = rank, (failed, option)
        return None if best is None else best[1]

    def _needed_bytes(self, picked: Mapping[FailedDevices, _PlanOption]) -> dict[str, int]:
        """Return the estimated bytes that the main plan and the plans in `picked` need together, by host name.

        Weights that several plans use are counted once. One plan runs at a time, so the largest activations count.
        """
        host_of = self.problem.platform.host_of
        weights: dict[tuple[str, str, Region], int] = {}
        live = dict.fromkeys(host_of, 0)
        for option in (self.main, *picked.values()):
            weights |= option.weights
            for name, size in option.activations.items():
                live[name] = max(live[name], size)
        needed = {host.name: 0 for host in self.problem.platform.hosts}
        for name, size in (*live.items(), *((key[0], size) for key, size in weights.items())):
            needed[host_of[name]] += size
        return needed

    def memory_error(self) -> DicompilerError:
        """Return an error that names the host that lacks the most memory, and failures that can be tolerated."""
        covered: list[FailedDevices] = []
        misfit: tuple[FailedDevices, dict[str, int]] | None = None
        if missing := missing_memory(self.problem, self.main.plan):
            return self._format_error("the plan without failures", missing, "no failure plan fits")
        for failed in self.options:
            found, missing = self._fit_failures([*covered, failed])
            if found is not None:
                covered.append(failed)
            else:
                misfit = misfit or (failed, missing)
        assert misfit is not None
        subject = f"the plan for the failure of {' and '.join(misfit[0])}, together with the other plans,"
        return self._format_error(subject, misfit[1], self._describe_fitting(covered))

    def _format_error(self, subject: str, missing: Mapping[str, int], remedy: str) -> DicompilerError:
        host, size = max(missing.items(), key=lambda entry: entry[1])
        limit = format_bytes(self.problem.platform.host(host).memory)
        return DicompilerError(
            f"tolerate-failures: {self.selection}: {subject} needs {format_bytes(size)} more than host {host} has "
            f"({limit}): {remedy}"
        )

    def _describe_fitting(self, covered: Collection[FailedDevices]) -> str:
        smaller = [
            count
            for count in range(1, self.selection.max_failed)
            if all(failed in covered for failed in self.options if len(failed) <= count)
        ]
        single = [failed[0] for failed in covered if len(failed) == 1]
        return f"use --tolerate-failures {smaller[-1] if smaller else ','.join(single) or 0}, which fits"
