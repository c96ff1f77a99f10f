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
RESTART_SHARE = 0.85
"""Random restarts end when the search has used this fraction of its budget.

The budget of the search is the remaining budget after the tables are built.
"""


@dataclass(frozen=True)
class Teams(Strategy):
    """Runs of layers on a device or a team of devices, for the objectives throughput and memory.

        conv1 conv2 | conv3 … conv8 | conv9 … fc2      on pi01, pi02 and pi03 in rows | pi02 | pi04

    A team splits each layer of its run by rows or by output channels. A device may belong to several teams. A local
    search moves runs of layers to other devices and teams as long as this reduces the largest load: the seconds of the
    busiest device or link, or the memory of the fullest host. Then the search changes two random runs and begins again.
    """

    name: ClassVar[str] = "teams"
    tries: int = field(
        default=60,
        metadata={"help": "the search ends after this number of random restarts in a row without a better plan"},
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
        return self.plan_from(problem, budget)

    def plan_from(self, problem: Problem, budget: WorkBudget, known: Sequence[Plan] = ()) -> Plan:
        """Return the best plan that the search finds within the budget.

        It also begins at those of the plans `known` that this strategy can express.

        Raises:
            UsageError: The objective is neither throughput nor memory.
        """
        if problem.objective not in SUPPORTED_OBJECTIVES:
            raise UsageError(
                f"teams: objective {problem.objective!r} is not supported: use {' or '.join(SUPPORTED_OBJECTIVES)}"
            )
        search = CandidateSearch(problem, self.name, budget)
        single = problem.best_single_device[0]
        # The search minimises predicted loads. By simulation, the plan with which it begins may be the better one.
        pipeline = Pipeline(turns=False).plan(problem)
        search.try_plans([(single, self.name), (pipeline, self.name)])
        try:
            tables = build_cost_tables(problem, team_choices(problem), budget)
        except DicompilerError:
            if not budget.is_exceeded():
                raise
        else:
            runs = RunSearch(tables.choices, build_objective(tables), budget)
            for selection in self._selections(tables, runs, pipeline, known):
                search.try_plans([(tables.plan(selection.tolist()), self.name)], is_always=True)
            search.trim()
        return single if search.best is None else search.best.plan

    def _selections(
        self, tables: CostTables, runs: RunSearch, pipeline: Plan, known: Sequence[Plan]
    ) -> Iterator[Selections]:
        """Yield the plans (indices of each layer's choice) that the local search finds from several starts.

        The plans `known` are started from last, so that `auto` cannot find a worse plan with them than without them.
        """
        problem = tables.problem
        names = " ".join(device.name for device in devices_by_rate(problem))
        starts = [
            *_find_selections(tables, [pipeline]),
            np.zeros(len(tables.choices), np.intp),
            *(runs.uniform_selection(label) for label in runs.labels if label.endswith(f" on {names}")),
        ]
        limit_s = runs.budget.spent_s + RESTART_SHARE * runs.budget.remaining_s
        for group in (starts, _find_selections(tables, known)):
            yield from self._improve_and_restart(runs, group, limit_s)

    def _improve_and_restart(
        self, runs: RunSearch, starts: Sequence[Selections], limit_s: float
    ) -> Iterator[Selections]:
        """Yield the plans that the search finds from `starts`, and from random changes of the best one.

        The random changes end when the budget's counted work reaches `limit_s`.
        """
        found = []
        for start in starts:
            found.append(runs.improve(start))
            yield found[-1]
        random, best = np.random.default_rng(self.seed), min(found, key=runs.objective.value, default=None)
        failures = 0
        while best is not None and len(runs.labels) > 1 and failures < self.tries:
            if runs.budget.is_exceeded() or runs.budget.spent_s > limit_s:
                return
            changed = runs.improve(runs.perturb(best, random))
            yield changed
            is_better = runs.objective.value(changed) < runs.objective.value(best)
            best, failures = (changed, 0) if is_better else (best, failures + 1)


def _find_selections(tables: CostTables, plans: Sequence[Plan]) -> list[Selections]:
    """Return the plans whose splits are all in the tables, as the index of each layer's split."""
    selections = map(tables.find_selection, plans)
    return [np.array(selection, np.intp) for selection in selections if selection is not None]


def team_choices(problem: Problem) -> ChoiceSet:
    """Return the strategy's ways to split a layer: whole on each device, or by rows or output channels on each team."""
    teams = tuple(tuple(device.name for device in team) for team in list_teams(devices_by_rate(problem)))
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
    """Return the objective of the tables' problem, throughput or memory, with the memory limits of the hosts."""
    problem, sent = tables.problem, find_sent_tensors(tables)
    memory = build_memory_model(tables, sent)
    free = free_memory(problem)
    limits = np.maximum([float(free[host.name]) for host in problem.platform.hosts], 1.0)
    sent_states = find_sent_states(tables)
    if problem.objective == "memory":
        return RunObjective(memory, sent_states=sent_states)
    # A team (devices that split a layer) may store some tensors twice. Memory is therefore not checked if every host
    # has twice the memory that a single device needs.
    single = memory.loads(np.zeros((1, len(tables.choices)), np.intp)).max()
    is_limited = 2 * single > limits.min()
    return RunObjective(build_period_model(tables, sent), memory if is_limited else None, limits, sent_states)
