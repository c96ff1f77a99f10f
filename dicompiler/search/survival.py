"""Plans for what is left: beside a plan one for each loss that is to be survived, chosen so that all fit together.

Problem + Strategy + its Plan + which losses → the Plan with its losses, or an error that says what lacks where.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dicompiler.base.errors import DicompilerError
from dicompiler.base.units import format_bytes
from dicompiler.ir.plan import Loss, Plan, Share
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import Region, full
from dicompiler.partition.bounds_inference import output_shape
from dicompiler.partition.routing import route_on
from dicompiler.search.constraints import memory_lacking
from dicompiler.search.losses import Held, Lost, Survive, held_weights, without
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.search.takeover import takeovers

log = logging.getLogger("dicompiler")

MAINS = 4
"""So many plans are tried as the one for when nothing is lost."""


def surviving(problem: Problem, strategy: Strategy, plan: Plan, survive: Survive, fixed: bool = False) -> Plan:
    """`plan` with a plan for each of the losses, by `strategy` or by taking over; where they do not fit into memory
    together, one that is slower, and where none does, beside another plan. fixed: it was given, so that no other will
    do, and its source and sink stay where they are.

    Raises DicompilerError where no loss can be covered, and where they do not fit: what lacks where, and what would.
    """
    if problem.layers.states:
        raise DicompilerError(
            f"survive {survive}: state {problem.layers.states[0][0]!r} is on one device, and lost with it: leave out "
            "--survive, or have no states (--state none)"
        )
    losses = _Losses(problem, strategy, plan, fixed)
    tries = [_Choice(losses, _Option(problem, replace(plan, losses=())), survive)]
    if not tries[0].options:
        if not losses.why:  # none of them takes part
            return plan
        raise DicompilerError(f"survive {survive}: no loss can be covered: {losses.uncovered()}")
    if losses.why:
        log.warning("survive %s: not covered: %s", survive, losses.uncovered())
    while tries[-1].fit() is None and not fixed and len(tries) < MAINS:
        others = [one for one in losses.mains() if one.plan not in [other.main.plan for other in tries]]
        if not others:
            break
        tries.append(_Choice(losses, min(others, key=lambda option: option.value), survive))
    if (found := tries[-1].fit()) is None:
        raise tries[0].error()
    if len(tries) > 1:
        log.warning("survive %s: what the fastest plan would need for it does not fit: another is taken", survive)
    notes = dict.fromkeys(one.note for one in (found, *losses.planned.values()) if one is not None and one.note)
    return replace(found, network=plan.network, note="; ".join(notes))


@dataclass
class _Option:
    """A plan for a loss, or for none, on what is left then (`problem`), and what it comes to there."""

    problem: Problem
    plan: Plan

    @cached_property
    def weights(self) -> Held:
        return held_weights(route_on(self.problem.platform, self.problem.layers, self.plan))

    @cached_property
    def activations(self) -> Mapping[str, int]:
        return {entry.device: entry.activations for entry in self.problem.estimate(self.plan).devices}

    @cached_property
    def value(self) -> float:
        return self.problem.evaluate(self.plan).value(self.problem.objective)


@dataclass
class _Losses:
    """What is known of losses, whatever the plan beside them is: so each is planned once, however many `_Choice`s there
    are. planned: the strategy's plan by what is lost, None where it has none. why: device → why its loss cannot be
    covered."""

    problem: Problem
    strategy: Strategy
    plan: Plan
    fixed: bool
    planned: dict[Lost, Plan | None] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    _alike: dict[object, tuple[Problem, Plan | None]] = field(default_factory=dict)
    _mains: dict[Lost, _Option] = field(default_factory=dict)

    def ends(self, plan: Plan, lost: Lost) -> tuple[Lost, Lost] | None:
        """Source and sink of a plan without `lost`: those that are left, else the first device that is left and
        computes, where they were where they are by default. None where that loss cannot be covered."""
        first = self.problem.platform.devices[0]
        default = not (self.fixed or self.problem.source or self.problem.sink) and first.computes
        moves = default and plan.source == plan.sink == (first.name,)
        found: list[Lost] = []
        for names, does in ((plan.source, "holds the inputs"), (plan.sink, "wants the outputs")):
            left = tuple(name for name in names if name not in lost)
            if not left and not moves:
                given = self.problem.platform.device(names[0]).computes
                reason = "as was given" if given else "and has no compute"
                self.why.setdefault(names[0], f"{names[0]}, which {does} {reason}")
                return None
            found.append(left or next((d.name,) for d in self.problem.platform.computing if d.name not in lost))
        return found[0], found[1]

    def uncovered(self) -> str:
        """Of which devices losses cannot be covered, and why."""
        return "losses of " + "; ".join(self.why.values())

    def planned_for(self, lost: Lost, rest: Problem) -> Plan | None:
        """The strategy's plan on what is left; devices that are alike are planned for once."""
        if lost not in self.planned:
            key = self._kind(rest)
            if key not in self._alike:
                log.info("%s decides without %s", self.strategy.name, ", ".join(lost))
                self._alike[key] = rest, self._decided(rest)
            like, found = self._alike[key]
            self.planned[lost] = None if found is None else _renamed(found, like.platform, rest)
        return self.planned[lost]

    def _decided(self, rest: Problem) -> Plan | None:
        try:
            plan = replace(self.strategy.plan(rest), wire=self.plan.wire)
            self.strategy.check_feasible(rest, plan)
        except DicompilerError as error:
            log.info("%s has no plan for what is left: %s", self.strategy.name, error)
            return None
        return plan

    def _kind(self, rest: Problem) -> object:
        """Equal where names apart all is: what is planned for one serves the other."""
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
            (one, Share(None if one.reason else full(output_shape(problem.layers, one))))
            for one in problem.layers.layers
        ]
        return {
            device.name: (
                tuple(problem.cost.seconds(problem.layers, *share, device) for share in shares),
                problem.runtime.get(device.name),
            )
            for device in problem.platform.devices
        }

    def mains(self) -> list[_Option]:
        """Other plans for when nothing is lost: those for losses, with the same source and sink, and one device."""
        ends = self.plan.source, self.plan.sink
        for lost, plan in self.planned.items():
            if plan is not None and (plan.source, plan.sink) == ends:
                self._mains.setdefault(lost, _Option(self.problem, plan))
        return [*self._mains.values(), self._alone]

    @cached_property
    def _alone(self) -> _Option:
        return _Option(self.problem, self.problem.alone[0])


def _renamed(plan: Plan, platform: Platform, rest: Problem) -> Plan:
    """The plan on another platform, with its devices in place of those of `platform` by their order."""
    names = dict(zip([one.name for one in platform.devices], [one.name for one in rest.platform.devices], strict=True))
    return replace(
        plan,
        layers={name: tuple(replace(p, device=names[p.device]) for p in parts) for name, parts in plan.layers.items()},
        source=tuple(names[name] for name in plan.source),
        sink=tuple(names[name] for name in plan.sink),
        replicas=tuple({names[a]: names[b] for a, b in renaming.items()} for renaming in plan.replicas),
    )


class _Choice:
    """A plan for when nothing is lost (`main`), and for each loss what can be chosen from, first what the strategy
    says. It holds beside this main plan alone, unlike what `_Losses` knows."""

    def __init__(self, losses: _Losses, main: _Option, survive: Survive) -> None:
        self.losses, self.main, self.survive = losses, main, survive
        self.problem = losses.problem
        self.options: dict[Lost, list[_Option]] = {}
        self.known: set[tuple[Lost, int]] = set()
        used, seen = set(main.plan.devices), set[Lost]()
        while new := [lost for lost in survive.sets(self.problem.platform, used) if lost not in seen]:
            for lost in new:
                seen.add(lost)
                if ends := losses.ends(main.plan, lost):
                    self.options[lost] = [self._best(lost, without(self.problem, lost, *ends))]
                    used |= set(self.options[lost][0].plan.devices)

    def _best(self, lost: Lost, rest: Problem) -> _Option:
        """Of the plans that go on anyway the one for the fewest losses; else the strategy's; else the best one in which
        others take over."""
        for known in ((), *(other for other in self.options if set(other) < set(lost))):
            goes_on = (self.options[known][0] if known else self.main).plan
            if not set(goes_on.devices).intersection(lost):
                return _Option(rest, goes_on)
        if (plan := self.losses.planned_for(lost, rest)) is not None:
            return _Option(rest, plan)
        return min(self._takeovers(lost, rest, self.main), key=lambda option: option.value)

    def _takeovers(self, lost: Lost, rest: Problem, of: _Option) -> list[_Option]:
        plan = replace(of.plan, source=rest.source, sink=rest.sink, note="")
        left = [device.name for device in rest.platform.computing]
        return [_Option(rest, one) for one in takeovers(rest.layers, plan, lost, left)]

    def _widen(self, picked: Mapping[Lost, _Option]) -> None:
        """Adds for each loss that others take over: in the main plan, and in what was picked for one device less."""
        for lost, current in picked.items():
            smaller = (option for other, option in picked.items() if len(other) < len(lost) and set(other) < set(lost))
            for of in (self.main, *smaller):
                if (lost, id(of)) not in self.known and set(of.plan.devices).intersection(lost):
                    self.known.add((lost, id(of)))
                    self.options[lost] += self._takeovers(lost, current.problem, of)

    @cached_property
    def _found(self) -> Plan | None:
        return self._fit(list(self.options))[0]

    def fit(self) -> Plan | None:
        """The plan with one for each loss, that fit together; None where none do."""
        return self._found

    def _fit(self, covered: Sequence[Lost]) -> tuple[Plan | None, dict[str, int]]:
        """The same for some of the losses; and host → bytes that lack in the end."""
        picked = {lost: self.options[lost][0] for lost in covered}
        tried = {id(option) for option in picked.values()}
        while True:
            plan = self._joined(picked)
            lacking = memory_lacking(self.problem, plan)
            move = self._move(picked, lacking, tried) if lacking else None
            if move is None:
                return (None, lacking) if lacking else (plan, {})
            picked[move[0]] = move[1]
            tried.add(id(move[1]))

    def _joined(self, picked: Mapping[Lost, _Option]) -> Plan:
        """One plan; of what is lost those count that take part in any of them."""
        used = {name for option in (self.main, *picked.values()) for name in option.plan.devices}
        losses: dict[Lost, Plan] = {}
        for lost, option in picked.items():
            losses.setdefault(tuple(name for name in lost if name in used), option.plan)
        place = {device.name: i for i, device in enumerate(self.problem.platform.devices)}
        order = sorted(losses, key=lambda lost: (len(lost), [place[name] for name in lost]))
        return replace(self.main.plan, losses=tuple(Loss(lost, losses[lost]) for lost in order if lost))

    def _move(
        self, picked: Mapping[Lost, _Option], lacking: Mapping[str, int], tried: Collection[int]
    ) -> tuple[Lost, _Option] | None:
        """Which loss's plan to change for which: of those that free all that lacks the one that costs the least time,
        else the one that frees most; None where none frees anything."""
        self._widen(picked)
        now = self._needed(picked)
        best: tuple[tuple[float, float], tuple[Lost, _Option]] | None = None
        for lost, current in picked.items():
            for option in self.options[lost]:
                if id(option) in tried:
                    continue
                needed = self._needed({**picked, lost: option})
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

    def _needed(self, picked: Mapping[Lost, _Option]) -> dict[str, int]:
        """Host → bytes of the weights of all plans, each once, and of the most activations, by estimate."""
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

    def error(self) -> DicompilerError:
        """What lacks where for which loss, and which losses would fit."""
        kept: list[Lost] = []
        failed: tuple[Lost, dict[str, int]] | None = None
        if lacking := memory_lacking(self.problem, self.main.plan):
            return self._error("the plan for when nothing is lost", lacking, "nothing fits")
        for lost in self.options:
            found, lacking = self._fit([*kept, lost])
            if found is not None:
                kept.append(lost)
            else:
                failed = failed or (lost, lacking)
        assert failed is not None
        beside = "" if len(kept) == 0 else " beside the others"
        return self._error(f"the plan without {', '.join(failed[0])}{beside}", failed[1], self._offer(kept))

    def _error(self, what: str, lacking: Mapping[str, int], offer: str) -> DicompilerError:
        host, size = max(lacking.items(), key=lambda entry: entry[1])
        limit = format_bytes(self.problem.platform.host(host).memory)
        return DicompilerError(
            f"survive {self.survive}: {what} needs {format_bytes(size)} more on host {host} than its {limit}: {offer}"
        )

    def _offer(self, kept: Collection[Lost]) -> str:
        smaller = [
            n for n in range(1, self.survive.count) if all(lost in kept for lost in self.options if len(lost) <= n)
        ]
        alone = [lost[0] for lost in kept if len(lost) == 1]
        return f"--survive {smaller[-1] if smaller else ','.join(alone) or 0} fits"
