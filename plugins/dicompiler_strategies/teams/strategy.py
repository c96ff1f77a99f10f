"""The strategy `teams`: runs of layers, each on one device or on a team of devices that splits its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import ClassVar

import numpy as np

from dicompiler.plugin_api import Device, DicompilerError, Plan, Problem, Strategy, UsageError
from dicompiler.plugin_api.search import DEFAULT_BUDGET_S, WorkBudget, free_memory
from dicompiler_strategies.candidate_search import CandidateSearch
from dicompiler_strategies.pipeline import Pipeline
from dicompiler_strategies.tables.choices import ChoiceSet, devices_by_rate
from dicompiler_strategies.tables.cost_tables import CostTables, build_cost_tables
from dicompiler_strategies.teams.load_models import (
    Selections,
    build_memory_model,
    build_period_model,
    find_sent_states,
    find_sent_tensors,
)
from dicompiler_strategies.teams.run_search import RunObjective, RunSearch

SUPPORTED_OBJECTIVES = ("throughput", "memory")
MAX_DEVICES_FOR_ALL_TEAMS = 4
"""Up to this number of devices, every set of at least two devices is a team, which may split layers."""
MAX_DEVICES_FOR_PARTIAL_TEAMS = 12
"""Above this number of devices, the only team is that of all devices. Tables of more teams would be too large."""
RANDOM_CHANGE_SHARE = 0.85
"""Random changes end at this fraction of the budget that is left after the tables are built.

The rest is kept for the plans `known` (see `Teams.plan_from`).
"""


@dataclass(frozen=True)
class Teams(Strategy):
    """Runs of layers on a device or a team of devices, for the objectives throughput and memory.

        conv1, conv2       split by rows on the team pi01, pi02, pi03
        conv3 … conv8      whole on pi02
        conv9 … fc2        whole on pi04

    A team splits each layer of its run by rows or by output channels. A device may belong to several teams. A local
    search moves runs of layers to other devices and teams as long as this reduces the largest load: the seconds of the
    busiest device or link, or the memory of the fullest host. Then the search splits two random runs in another way (a
    random change) and begins again.
    """

    name: ClassVar[str] = "teams"
    tries: int = field(
        default=60, metadata={"help": "random changes end after this number in a row without a better plan"}
    )
    seed: int = field(default=0, metadata={"help": "seed of the random changes"})
    budget: float = field(
        default=DEFAULT_BUDGET_S, metadata={"help": "limit of the search's work, in seconds of a reference computer"}
    )

    def __post_init__(self) -> None:
        if self.tries < 0:
            raise UsageError(f"teams: tries is {self.tries}: use 0 or more")
        if not self.budget > 0:
            raise UsageError(f"teams: budget is {self.budget:g}: use more than 0 s")

    def plan(self, problem: Problem) -> Plan:
        """Return the best plan found; at worst, the plan of the best single device.

        Raises:
            UsageError: The objective is neither throughput nor memory.
        """
        budget = WorkBudget(self.budget)
        plan = self.plan_within(problem, budget)
        return replace(plan, note=budget.note())

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        """Return the best plan that the search finds within the caller's budget."""
        return self.plan_from(problem, budget)

    def plan_from(self, problem: Problem, budget: WorkBudget, known: Sequence[Plan] = ()) -> Plan:
        """Return the best plan that the search finds within the caller's budget.

        In addition to its own starts, the search begins at those of the plans `known` that this strategy can express.

        Raises:
            UsageError: The objective is neither throughput nor memory.
        """
        if problem.objective not in SUPPORTED_OBJECTIVES:
            raise UsageError(
                f"teams: objective {problem.objective!r} is not supported: use {' or '.join(SUPPORTED_OBJECTIVES)}"
            )
        search = CandidateSearch(problem, self.name, budget)
        single = problem.best_single_device[0]
        # The search minimises predicted loads. In the simulation, the pipeline plan may still be better than all plans
        # found from it, so it is tried too.
        pipeline = Pipeline(turns=False).plan(problem)
        search.try_plans([(single, self.name), (pipeline, self.name)])
        try:
            tables = build_cost_tables(problem, team_choices(problem), budget)
        except DicompilerError:
            # If the tables do not fit into the budget, the plans tried so far remain.
            if not budget.is_exceeded():
                raise
        else:
            run_search = RunSearch(tables.choices, build_objective(tables), budget)
            for selection in self._selections(tables, run_search, pipeline, known):
                search.try_plans([(tables.plan(selection.tolist()), self.name)], ignores_budget=True)
            search.trim()
        return single if search.best is None else search.best.plan

    def _selections(
        self, tables: CostTables, run_search: RunSearch, pipeline: Plan, known: Sequence[Plan]
    ) -> Iterator[Selections]:
        """Yield the plans (indices of each layer's choice) that the local search finds from several starts.

        The search begins at the plans `known` only after all others. They thus cannot change what it finds without
        them. (The strategy `auto` passes such plans.)
        """
        problem = tables.problem
        names = " ".join(device.name for device in devices_by_rate(problem))
        starts = [
            *_find_selections(tables, [pipeline]),
            np.zeros(len(tables.choices), np.intp),
            *(run_search.uniform_selection(label) for label in run_search.labels if label.endswith(f" on {names}")),
        ]
        limit_s = run_search.budget.spent_s + RANDOM_CHANGE_SHARE * run_search.budget.remaining_s
        for group in (starts, _find_selections(tables, known)):
            yield from self._improve_and_change(run_search, group, limit_s)

    def _improve_and_change(
        self, run_search: RunSearch, starts: Sequence[Selections], limit_s: float
    ) -> Iterator[Selections]:
        """Yield the plans that the search finds from `starts`, and from random changes of the best one.

        The random changes end when the budget's counted work reaches `limit_s`.
        """
        found = []
        for start in starts:
            found.append(run_search.improve(start))
            yield found[-1]
        random, best = np.random.default_rng(self.seed), min(found, key=run_search.objective.value, default=None)
        failures = 0
        while best is not None and len(run_search.labels) > 1 and failures < self.tries:
            if run_search.budget.is_exceeded() or run_search.budget.spent_s > limit_s:
                return
            changed = run_search.improve(run_search.change_randomly(best, random))
            yield changed
            is_better = run_search.objective.value(changed) < run_search.objective.value(best)
            best, failures = (changed, 0) if is_better else (best, failures + 1)


def _find_selections(tables: CostTables, plans: Sequence[Plan]) -> list[Selections]:
    """Return the plans whose splits are all in the tables, as the index of each layer's split."""
    selections = map(tables.find_selection, plans)
    return [np.array(selection, np.intp) for selection in selections if selection is not None]


def team_choices(problem: Problem) -> ChoiceSet:
    """Return the strategy's ways to split a layer: whole on each device, or by rows or output channels on each team."""
    teams = tuple(tuple(device.name for device in team) for team in list_teams(devices_by_rate(problem)))
    # "height" is a split by rows, and "lop" one by output channels. For memory, the devices of a team compute equal
    # shares, because equal shares keep the memory of the fullest host low.
    return ChoiceSet(
        ("whole", "height", "lop") if teams else ("whole",),
        extra_rows=0,
        shares=("equal",) if problem.objective == "memory" else ("rate",),
        row_cuts=("balanced",),
        merges=("one",),
        teams=teams,
    )


def list_teams(devices: Sequence[Device]) -> list[Sequence[Device]]:
    """Return the teams (sets of devices that may split layers) of a cluster.

    - Up to MAX_DEVICES_FOR_ALL_TEAMS devices, every set of at least two devices is a team.
    - Up to MAX_DEVICES_FOR_PARTIAL_TEAMS devices, neighbours in `devices` form teams of 2, 4 and 8. Teams of equal size
      overlap by half. All devices form one more team.
    - With more devices, all devices form the only team.
    """
    count = len(devices)
    if count <= MAX_DEVICES_FOR_ALL_TEAMS:
        return [team for size in range(2, count + 1) for team in combinations(devices, size)]
    if count > MAX_DEVICES_FOR_PARTIAL_TEAMS:
        return [devices]
    sizes = [size for size in (2, 4, 8) if size < count]
    teams = [devices[start : start + size] for size in sizes for start in range(0, count - size + 1, size // 2)]
    return [*teams, devices]


def build_objective(tables: CostTables) -> RunObjective:
    """Return the objective of the search.

    Memory limits are checked only for throughput, and only if they matter.
    """
    problem, sent = tables.problem, find_sent_tensors(tables)
    memory = build_memory_model(tables, sent)
    free = free_memory(problem)
    limits = np.maximum([float(free[host.name]) for host in problem.platform.hosts], 1.0)
    sent_states = find_sent_states(tables)
    if problem.objective == "memory":
        return RunObjective(memory, sent_states=sent_states)
    # The search assumes that no host needs more than twice the memory of a single device: a team may store some tensors
    # twice. If every host has that much free memory, the check is left out. `CandidateSearch` rejects plans that
    # exceed the memory of a host in any case.
    single_device_bytes = memory.loads(np.zeros((1, len(tables.choices)), np.intp)).max()
    is_limited = 2 * single_device_bytes > limits.min()
    return RunObjective(build_period_model(tables, sent), memory if is_limited else None, limits, sent_states)
