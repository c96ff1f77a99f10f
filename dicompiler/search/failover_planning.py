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
            f"survive {selection}: state {problem.layers.states[0][0]!r} is on one device, and lost with it: leave out "
            "--survive, or have no states (--state none)"
        )
    losses = _FailurePlanner(problem, strategy, plan, plan_is_fixed)
    tries = [_FailoverSearch(losses, _PlanOption(problem, replace(plan, failures=())), selection)]
    if not tries[0].options:
        if not losses.uncovered_reasons:  # none of them takes part
            return plan
        raise DicompilerError(f"survive {selection}: no loss can be covered: {losses.describe_uncovered()}")
    if losses.uncovered_reasons:
        log.warning("survive %s: not covered: %s", selection, losses.describe_uncovered())
    while tries[-1].fitting_plan() is None and not plan_is_fixed and len(tries) < MAX_MAIN_PLANS:
        others = [one for one in losses.main_options() if one.plan not in [other.main.plan for other in tries]]
        if not others:
            break
        tries.append(_FailoverSearch(losses, min(others, key=lambda option: option.value), selection))
    if (found := tries[-1].fitting_plan()) is None:
        raise tries[0].memory_error()
    if len(tries) > 1:
        log.warning("survive %s: what the fastest plan would need for it does not fit: another is taken", selection)
    notes = dict.fromkeys(one.note for one in (found, *losses.plans.values()) if one is not None and one.note)
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

    def remaining_ends(self, plan: Plan, lost: FailedDevices) -> tuple[FailedDevices, FailedDevices] | None:
        """Return source and sink after a failure, or None if the failure cannot be covered.

        Devices that remain keep their role. If none remains and the ends were not given by the user, both move to the
        first remaining device that computes.
        """
        first = self.problem.platform.devices[0]
        default = not (self.plan_is_fixed or self.problem.source or self.problem.sink) and first.can_compute
        moves = default and plan.source == plan.sink == (first.name,)
        found: list[FailedDevices] = []
        for names, does in ((plan.source, "holds the inputs"), (plan.sink, "wants the outputs")):
            left = tuple(name for name in names if name not in lost)
            if not left and not moves:
                given = self.problem.platform.device(names[0]).can_compute
                reason = "as was given" if given else "and has no compute"
                self.uncovered_reasons.setdefault(names[0], f"{names[0]}, which {does} {reason}")
                return None
            found.append(left or next((d.name,) for d in self.problem.platform.computing_devices if d.name not in lost))
        return found[0], found[1]

    def describe_uncovered(self) -> str:
        return "losses of " + "; ".join(self.uncovered_reasons.values())

    def plan_without(self, lost: FailedDevices, rest: Problem) -> Plan | None:
        """Return the strategy's plan for the remaining devices.

        Sets of interchangeable devices are planned once.
        """
        if lost not in self.plans:
            key = self._platform_key(rest)
            if key not in self._plans_by_key:
                log.info("%s decides without %s", self.strategy.name, ", ".join(lost))
                self._plans_by_key[key] = rest, self._run_strategy(rest)
            like, found = self._plans_by_key[key]
            self.plans[lost] = None if found is None else _rename_devices(found, like.platform, rest)
        return self.plans[lost]

    def _run_strategy(self, rest: Problem) -> Plan | None:
        try:
            plan = replace(self.strategy.plan(rest), wire_format=self.plan.wire_format)
            self.strategy.check_feasible(rest, plan)
        except DicompilerError as error:
            log.info("%s has no plan for what is left: %s", self.strategy.name, error)
            return None
        return plan

    def _platform_key(self, rest: Problem) -> object:
        """Return a key that is equal for platforms that differ only in names, so that one plan serves both."""
        platform = rest.platform
        hosts = {host.name: str(i) for i, host in enumerate(platform.hosts)}
        place = {device.name: i for i, device in enumerate(platform.devices)}
        network = platform.network
        links = tuple(replace(one, hosts=(hosts[one.hosts[0]], hosts[one.hosts[1]])) for one in network.links)
        return (
            tuple(replace(host, name=hosts[host.name]) for host in platform.hosts),
            tuple((replace(one, name="", host=hosts[one.host]), self._costs[one.name]) for one in platform.devices),
            replace(network, links=links),
            tuple(place[name] for name in rest.source),
            tuple(place[name] for name in rest.sink),
        )

    @cached_property
    def _costs(self) -> Mapping[str, object]:
        """Device → what each layer, whole, and its runtime cost there."""
        problem = self.problem
        shares = [
            (one, LayerShare(None if one.whole_reason else full_region(output_shape(problem.layers, one))))
            for one in problem.layers.layers
        ]
        return {
            device.name: (
                tuple(problem.cost_model.seconds(problem.layers, *share, device) for share in shares),
                problem.runtime_costs.get(device.name),
            )
            for device in problem.platform.devices
        }

    def main_options(self) -> list[_PlanOption]:
        """Other main plans: failure plans with the same source and sink, and the best single device."""
        ends = self.plan.source, self.plan.sink
        for lost, plan in self.plans.items():
            if plan is not None and (plan.source, plan.sink) == ends:
                self._main_options.setdefault(lost, _PlanOption(self.problem, plan))
        return [*self._main_options.values(), self._single_device_option]

    @cached_property
    def _single_device_option(self) -> _PlanOption:
        return _PlanOption(self.problem, self.problem.best_single_device[0])


def _rename_devices(plan: Plan, platform: Platform, rest: Problem) -> Plan:
    """Return the plan on another platform, with devices replaced by their position."""
    names = dict(zip([one.name for one in platform.devices], [one.name for one in rest.platform.devices], strict=True))
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

    def __init__(self, losses: _FailurePlanner, main: _PlanOption, survive: FailureSelection) -> None:
        self.planner, self.main, self.selection = losses, main, survive
        self.problem = losses.problem
        self.options: dict[FailedDevices, list[_PlanOption]] = {}
        self.tried_takeovers: set[tuple[FailedDevices, int]] = set()
        used, seen = set(main.plan.devices), set[FailedDevices]()
        while new := [lost for lost in survive.device_sets(self.problem.platform, used) if lost not in seen]:
            for lost in new:
                seen.add(lost)
                if ends := losses.remaining_ends(main.plan, lost):
                    self.options[lost] = [self._first_option(lost, remove_devices(self.problem, lost, *ends))]
                    used |= set(self.options[lost][0].plan.devices)

    def _first_option(self, lost: FailedDevices, rest: Problem) -> _PlanOption:
        """Return the first candidate for a failure.

        It is a known plan that does not use the failed devices, or the strategy's plan, or the best plan in which
        survivors take over.
        """
        for known in ((), *(other for other in self.options if set(other) < set(lost))):
            goes_on = (self.options[known][0] if known else self.main).plan
            if not set(goes_on.devices).intersection(lost):
                return _PlanOption(rest, goes_on)
        if (plan := self.planner.plan_without(lost, rest)) is not None:
            return _PlanOption(rest, plan)
        return min(self._takeover_options(lost, rest, self.main), key=lambda option: option.value)

    def _takeover_options(self, lost: FailedDevices, rest: Problem, of: _PlanOption) -> list[_PlanOption]:
        plan = replace(of.plan, source=rest.source, sink=rest.sink, note="")
        left = [device.name for device in rest.platform.computing_devices]
        return [_PlanOption(rest, one) for one in reassignments(rest.layers, plan, lost, left)]

    def _add_takeover_options(self, picked: Mapping[FailedDevices, _PlanOption]) -> None:
        """Add takeovers as candidates.

        They derive from the main plan and from the plans picked for one failed device less.
        """
        for lost, current in picked.items():
            smaller = (option for other, option in picked.items() if len(other) < len(lost) and set(other) < set(lost))
            for of in (self.main, *smaller):
                if (lost, id(of)) not in self.tried_takeovers and set(of.plan.devices).intersection(lost):
                    self.tried_takeovers.add((lost, id(of)))
                    self.options[lost] += self._takeover_options(lost, current.problem, of)

    @cached_property
    def _fitting_plan(self) -> Plan | None:
        return self._fit_failures(list(self.options))[0]

    def fitting_plan(self) -> Plan | None:
        """Return the plan with one failure plan for each failure, or None if no combination fits into memory."""
        return self._fitting_plan

    def _fit_failures(self, covered: Sequence[FailedDevices]) -> tuple[Plan | None, dict[str, int]]:
        """Return the plan for some of the failures, or None, and host → missing bytes in the end."""
        picked = {lost: self.options[lost][0] for lost in covered}
        tried = {id(option) for option in picked.values()}
        while True:
            plan = self._merge_plans(picked)
            lacking = missing_memory(self.problem, plan)
            move = self._find_swap(picked, lacking, tried) if lacking else None
            if move is None:
                return (None, lacking) if lacking else (plan, {})
            picked[move[0]] = move[1]
            tried.add(id(move[1]))

    def _merge_plans(self, picked: Mapping[FailedDevices, _PlanOption]) -> Plan:
        """Return one plan with the picked failure plans.

        Failed devices that no plan uses are left out of the keys.
        """
        used = {name for option in (self.main, *picked.values()) for name in option.plan.devices}
        losses: dict[FailedDevices, Plan] = {}
        for lost, option in picked.items():
            losses.setdefault(tuple(name for name in lost if name in used), option.plan)
        place = {device.name: i for i, device in enumerate(self.problem.platform.devices)}
        order = sorted(losses, key=lambda lost: (len(lost), [place[name] for name in lost]))
        return replace(self.main.plan, failures=tuple(FailurePlan(lost, losses[lost]) for lost in order if lost))

    def _find_swap(
        self, picked: Mapping[FailedDevices, _PlanOption], lacking: Mapping[str, int], tried: Collection[int]
    ) -> tuple[FailedDevices, _PlanOption] | None:
        """Return the failure whose plan should be replaced, and the new plan.

        Of the replacements that free all missing bytes, the one that costs the least time is taken; otherwise the one
        that frees most bytes. None if none frees any.
        """
        self._add_takeover_options(picked)
        now = self._needed_bytes(picked)
        best: tuple[tuple[float, float], tuple[FailedDevices, _PlanOption]] | None = None
        for lost, current in picked.items():
            for option in self.options[lost]:
                if id(option) in tried:
                    continue
                needed = self._needed_bytes({**picked, lost: option})
                freed = sum(min(size, now[host] - needed[host]) for host, size in lacking.items())
                over = sum(
                    max(0, needed[host.name] - max(host.memory, now[host.name]))
                    for host in self.problem.platform.hosts
                    if host.name not in lacking
                )
                if freed - over > 0:
                    all_of_it = freed - over >= sum(lacking.values())
                    rank = (-1.0, option.value - current.value) if all_of_it else (0.0, float(over - freed))
                    if best is None or rank < best[0]:
                        best = rank, (lost, option)
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
        kept: list[FailedDevices] = []
        failed: tuple[FailedDevices, dict[str, int]] | None = None
        if lacking := missing_memory(self.problem, self.main.plan):
            return self._format_error("the plan for when nothing is lost", lacking, "nothing fits")
        for lost in self.options:
            found, lacking = self._fit_failures([*kept, lost])
            if found is not None:
                kept.append(lost)
            else:
                failed = failed or (lost, lacking)
        assert failed is not None
        beside = "" if len(kept) == 0 else " beside the others"
        return self._format_error(
            f"the plan without {', '.join(failed[0])}{beside}", failed[1], self._describe_fitting(kept)
        )

    def _format_error(self, what: str, lacking: Mapping[str, int], offer: str) -> DicompilerError:
        host, size = max(lacking.items(), key=lambda entry: entry[1])
        limit = format_bytes(self.problem.platform.host(host).memory)
        return DicompilerError(
            f"survive {self.selection}: {what} needs {format_bytes(size)} more on host {host} than its {limit}: {offer}"
        )

    def _describe_fitting(self, kept: Collection[FailedDevices]) -> str:
        smaller = [
            n
            for n in range(1, self.selection.max_failed)
            if all(lost in kept for lost in self.options if len(lost) <= n)
        ]
        alone = [lost[0] for lost in kept if len(lost) == 1]
        return f"--survive {smaller[-1] if smaller else ','.join(alone) or 0} fits"
