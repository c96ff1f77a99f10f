"""Choice of failure plans: one for each failure, such that all plans fit into memory together.

Problem + Strategy + Plan + FailureSelection → Plan with failure plans
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dicompiler.base.errors import DicompilerError
from dicompiler.base.units import format_bytes
from dicompiler.ir.plan import FailurePlan, LayerShare, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import Region, full_region
from dicompiler.partition.bounds_inference import output_shape
from dicompiler.partition.routing import route_on_platform
from dicompiler.search.constraints import missing_memory
from dicompiler.search.failover_reassignment import reassignments
from dicompiler.search.failure_cases import (
    FailedDevices,
    FailureSelection,
    StoredWeights,
    remove_devices,
    stored_weights,
)
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy

log = logging.getLogger("dicompiler")

MAX_MAIN_PLANS = 4
"""Number of plans that are tried for the case that no device has failed."""


def add_failover_plans(
    problem: Problem, strategy: Strategy, plan: Plan, selection: FailureSelection, plan_is_fixed: bool = False
) -> Plan:
    """Return the plan with a failure plan for each failure of the selection.

    The failure plans come from the strategy, or from survivors that take over parts. If they do not fit into memory
    together, slower ones are tried, and then other main plans.

    Args:
        problem: The problem.
        strategy: The strategy that plans for the remaining devices.
        plan: The plan for the case that no device has failed.
        selection: The failures to tolerate.
        plan_is_fixed: The user gave the plan. It is not replaced, and its source and sink stay.

    Returns:
        The plan with its failure plans.

    Raises:
        DicompilerError: No failure can be covered, or the plans do not fit into memory together. The error says how
            many bytes are missing where, and which failures could be tolerated.
    """
    if problem.layers.states:
        raise DicompilerError(
            f"tolerate-failures: {selection}: state {problem.layers.states[0][0]!r} exists on one device only and "
            "would be lost with it: omit --tolerate-failures, or compile without states (--state none)"
        )
    planner = _FailurePlanner(problem, strategy, plan, plan_is_fixed)
    searches = [_FailoverSearch(planner, _PlanOption(problem, replace(plan, failures=())), selection)]
    if not searches[0].options:
        if not planner.uncovered_reasons:  # No device of the selection is used.
            return plan
        raise DicompilerError(
            f"tolerate-failures: {selection}: no failure can be covered: {planner.describe_uncovered()}"
        )
    if planner.uncovered_reasons:
        log.warning("tolerate-failures: %s: not covered: %s", selection, planner.describe_uncovered())
    while searches[-1].fitting_plan is None and not plan_is_fixed and len(searches) < MAX_MAIN_PLANS:
        tried = [search.main.plan for search in searches]
        others = [option for option in planner.main_options() if option.plan not in tried]
        if not others:
            break
        searches.append(_FailoverSearch(planner, min(others, key=lambda option: option.value), selection))
    if (found := searches[-1].fitting_plan) is None:
        raise searches[0].memory_error()
    if len(searches) > 1:
        log.warning("tolerate-failures: %s: the failure plans of the fastest plan do not fit: using another", selection)
    notes = dict.fromkeys(each.note for each in (found, *planner.plans.values()) if each is not None and each.note)
    return replace(found, model_digest=plan.model_digest, note="; ".join(notes))


@dataclass
class _PlanOption:
    """A plan for one set of failed devices (or for none) and the problem on the remaining devices."""

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
    """Failure plans that do not depend on the main plan.

    Each set of failed devices is therefore planned only once.

    Attributes:
        problem: The problem with all devices.
        strategy: The strategy that plans for the remaining devices.
        plan: The main plan that was given.
        plan_is_fixed: True if the user gave the plan.
        plans: Failed devices → the strategy's plan; None if it has none.
        uncovered_reasons: Device → reason why its failure cannot be covered.
    """

    problem: Problem
    strategy: Strategy
    plan: Plan
    plan_is_fixed: bool
    plans: dict[FailedDevices, Plan | None] = field(default_factory=dict)
    uncovered_reasons: dict[str, str] = field(default_factory=dict)
    _plans_by_key: dict[object, tuple[Problem, Plan | None]] = field(default_factory=dict)
    _main_options: dict[FailedDevices, _PlanOption] = field(default_factory=dict)

    def remaining_ends(self, plan: Plan, failed: FailedDevices) -> tuple[FailedDevices, FailedDevices] | None:
        """Return source and sink after a failure, or None if the failure cannot be covered.

        Devices that remain keep their role. If none remains and the ends were not given by the user, both move to the
        first remaining device that computes.
        """
        first = self.problem.platform.devices[0]
        default = not (self.plan_is_fixed or self.problem.source or self.problem.sink) and first.can_compute
        moves = default and plan.source == plan.sink == (first.name,)
        found: list[FailedDevices] = []
        for names, role in ((plan.source, "source"), (plan.sink, "sink")):
            remaining = tuple(name for name in names if name not in failed)
            if not remaining and not moves:
                was_given = self.problem.platform.device(names[0]).can_compute
                reason = f"was given as the {role}" if was_given else f"is the {role} and has no compute"
                self.uncovered_reasons.setdefault(names[0], f"{names[0]} {reason}")
                return None
            computing = self.problem.platform.computing_devices
            found.append(remaining or next((d.name,) for d in computing if d.name not in failed))
        return found[0], found[1]

    def describe_uncovered(self) -> str:
        return "; ".join(self.uncovered_reasons.values())

    def plan_without(self, failed: FailedDevices, remaining: Problem) -> Plan | None:
        """Return the strategy's plan for the remaining devices; interchangeable sets are planned once."""
        if failed not in self.plans:
            key = self._platform_key(remaining)
            if key not in self._plans_by_key:
                log.info("%s plans without %s", self.strategy.name, ", ".join(failed))
                self._plans_by_key[key] = remaining, self._run_strategy(remaining)
            like, found = self._plans_by_key[key]
            self.plans[failed] = None if found is None else _rename_devices(found, like.platform, remaining)
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
        """Return a key that is equal for platforms that differ only in names, so that one plan serves both."""
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
        """Device → seconds of each whole layer, and runtime costs."""
        problem = self.problem
        shares = [
            (layer, LayerShare(None if layer.whole_reason else full_region(output_shape(problem.layers, layer))))
            for layer in problem.layers.layers
        ]
        return {
            device.name: (
                tuple(problem.cost_model.seconds(problem.layers, *share, device) for share in shares),
                problem.runtime_costs.get(device.name),
            )
            for device in problem.platform.devices
        }

    def main_options(self) -> list[_PlanOption]:
        """Return other main plans: failure plans with the same source and sink, and the best single device."""
        ends = self.plan.source, self.plan.sink
        for failed, plan in self.plans.items():
            if plan is not None and (plan.source, plan.sink) == ends:
                self._main_options.setdefault(failed, _PlanOption(self.problem, plan))
        return [*self._main_options.values(), self._single_device_option]

    @cached_property
    def _single_device_option(self) -> _PlanOption:
        return _PlanOption(self.problem, self.problem.best_single_device[0])


def _rename_devices(plan: Plan, platform: Platform, remaining: Problem) -> Plan:
    """Return the plan on another platform, with devices replaced by their position."""
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
        planner: Plans that do not depend on the main plan.
        main: The main plan.
        selection: The failures to tolerate.
        options: Failed devices → candidate plans, the strategy's first.
        tried_takeovers: Pairs of failed devices and a plan (by id) whose takeovers are among the options already.
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
        """Return the first candidate for a failure.

        It is a known plan that does not use the failed devices, or the strategy's plan, or the best plan in which
        survivors take over.
        """
        for known in ((), *(other for other in self.options if set(other) < set(failed))):
            unaffected = (self.options[known][0] if known else self.main).plan
            if not set(unaffected.devices).intersection(failed):
                return _PlanOption(remaining, unaffected)
        if (plan := self.planner.plan_without(failed, remaining)) is not None:
            return _PlanOption(remaining, plan)
        return min(self._takeover_options(failed, remaining, self.main), key=lambda option: option.value)

    def _takeover_options(self, failed: FailedDevices, remaining: Problem, base: _PlanOption) -> list[_PlanOption]:
        plan = replace(base.plan, source=remaining.source, sink=remaining.sink, note="")
        survivors = [device.name for device in remaining.platform.computing_devices]
        return [_PlanOption(remaining, variant) for variant in reassignments(remaining.layers, plan, failed, survivors)]

    def _add_takeover_options(self, picked: Mapping[FailedDevices, _PlanOption]) -> None:
        """Add takeovers as candidates.

        They derive from the main plan and from the plans picked for one failed device less.
        """
        for failed, current in picked.items():
            smaller = (
                option for other, option in picked.items() if len(other) < len(failed) and set(other) < set(failed)
            )
            for base in (self.main, *smaller):
                if (failed, id(base)) not in self.tried_takeovers and set(base.plan.devices).intersection(failed):
                    self.tried_takeovers.add((failed, id(base)))
                    self.options[failed] += self._takeover_options(failed, current.problem, base)

    @cached_property
    def fitting_plan(self) -> Plan | None:
        """The plan with one failure plan for each failure; None if no combination fits into memory."""
        return self._fit_failures(list(self.options))[0]

    def _fit_failures(self, covered: Sequence[FailedDevices]) -> tuple[Plan | None, dict[str, int]]:
        """Return the plan for some of the failures, or None, and host → missing bytes in the end."""
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
        """Return one plan with the picked failure plans.

        Failed devices that no plan uses are left out of the keys.
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
        """Return the failure of the plan to replace, and the new plan.

        Of the replacements that free all missing bytes, the one that costs the least time is taken; otherwise the one
        that frees most bytes. None if none frees any.
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
        """Return host → estimated bytes that the picked plans need together.

        The weights of all plans are counted once each, and the largest activations of any plan.
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
        """Return the error that says which memory is missing for which failure, and which failures would fit."""
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
        together = " in addition to the others" if covered else ""
        return self._format_error(
            f"the plan without {', '.join(misfit[0])}{together}", misfit[1], self._describe_fitting(covered)
        )

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
        return f"--tolerate-failures {smaller[-1] if smaller else ','.join(single) or 0} fits"
