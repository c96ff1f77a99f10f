"""The strategy `gradient`: gradient descent on the probabilities of each layer's splits, then local search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from dicompiler.plugin_api import DicompilerError, Plan, Problem, Strategy, UsageError
from dicompiler.plugin_api.search import (
    DEFAULT_BUDGET_S,
    INTERRUPTED_NOTE,
    WorkBudget,
    describe_missing_memory,
    missing_memory,
)
from dicompiler_strategies.candidate_search import CandidateSearch
from dicompiler_strategies.gradient.local_search import LocalSearch
from dicompiler_strategies.gradient.objective_tables import ObjectiveTables, build_objective_tables, check_objective
from dicompiler_strategies.gradient.relaxation import DescentInterrupted, DescentSettings, minimise_relaxation
from dicompiler_strategies.joint.choice_budget import affordable_choices
from dicompiler_strategies.tables.choices import ChoiceSet
from dicompiler_strategies.tables.cost_tables import CostTables, build_cost_tables, to_kept_numbers, to_original_numbers

Partition = Literal["equal", "proportional", "all"]
Initialisation = Literal["heuristics", "random"]
_SHARES_OF_PARTITION: Mapping[Partition, tuple[str, ...]] = {
    "equal": ("equal",),
    "proportional": ("rate",),
    "all": ("equal", "rate", "memory"),
}
# Limit on the multiplications of the descent, which determines the default number of restarts (at least _MIN_RESTARTS).
# The descent may also take no more than a quarter of the budget.
_MAX_DESCENT_MULTIPLICATIONS, _MIN_RESTARTS = 6e9, 8
# Multiplications of the descent that the reference computer makes in a second.
_MULTIPLICATIONS_PER_S = 5e9
# Number of best plans that a search returns. If they need too much memory, the next search begins with them.
_MAX_OTHER_SELECTIONS = 8
# Largest number of further searches with less memory for weights, if a plan did not fit.
_MAX_REPAIRS = 8


def check_descent_options(options: Strategy, learning_rate: float) -> None:
    """Raise UsageError if a common option of `gradient` and `diapason` is out of range."""
    least = {"fusion_limit": 0, "iterations": 1, "restarts": 1, "seed": 0}
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise UsageError(f"{options.name}: option {name!r}: expected at least {bound}, got {value}")
    if not (learning_rate > 0 and math.isfinite(learning_rate)):
        raise UsageError(f"{options.name}: option 'learning_rate': expected a number above 0, got {learning_rate}")


@dataclass(frozen=True)
class BestSelection:
    """The best selection that a search found: for each layer, the number of one way to split it.

    Attributes:
        selection: The selection.
        value: Its cost in s or J.
        fits_memory: True if its weights fit into memory.
        others: The next best selections, the best one first.
        interrupted: True if the user interrupted the search.
    """

    selection: tuple[int, ...]
    value: float
    fits_memory: bool
    others: tuple[tuple[int, ...], ...] = ()
    interrupted: bool = False


@dataclass(frozen=True)
class Gradient(Strategy):
    """Gradient descent on the probabilities of each layer's splits, after DIAPASON, with more kinds of splits.

        conv1: height 4 (0.3) | grid 2x2 (0.6) | …      ⇒  conv1: grid 2x2 +1

    Local search then improves the most probable splits ("+1" is an extra row of each tile). The objective is latency or
    energy. Costs are those of the barrier model, in which neither layers nor computing and sending overlap. The
    strategy `diapason` is the published method. This strategy differs from it:

    - The loss is normalised.
    - The steps follow the natural gradient.
    - The temperature of the softmax falls.
    - Each restart begins near another kind of split.
    """

    name: ClassVar[str] = "gradient"
    partition: Partition = field(
        default="all",
        metadata={
            "help": "size of each device's part of a layer: equal, proportional to its speed, or all (also by memory)"
        },
    )
    fusion_limit: int = field(
        default=4, metadata={"help": "largest number of extra rows of a tile; with n, about n layers need no exchange"}
    )
    initialisation: Initialisation = field(
        default="heuristics", metadata={"help": "begin near different kinds of splits (heuristics), or at random"}
    )
    learning_rate: float = field(default=0.4, metadata={"help": "learning rate of the normalised loss"})
    iterations: int = field(default=60, metadata={"help": "number of steps of the gradient descent"})
    restarts: int | None = field(
        default=None,
        metadata={"help": "number of runs of the descent from different initial values; by default up to 64"},
    )
    seed: int = field(default=0, metadata={"help": "seed of the random numbers"})
    device_counts: tuple[int, ...] = field(
        default=(), metadata={"help": "numbers of devices to split over; by default 2 to 8, then in growing steps"}
    )
    budget: float = field(
        default=DEFAULT_BUDGET_S, metadata={"help": "limit of the search's work, in seconds of a reference computer"}
    )

    def __post_init__(self) -> None:
        check_descent_options(self, self.learning_rate)
        if not self.budget > 0:
            raise UsageError(f"gradient: option 'budget': expected a number above 0, got {self.budget:g}")
        if any(count < 2 for count in self.device_counts):
            raise UsageError("gradient: option 'device_counts': expected integers of at least 2, such as 2,4")

    def plan(self, problem: Problem) -> Plan:
        """Return the best plan found, or the plan of the best single device if the simulator prefers it.

        Raises:
            UsageError: The objective is neither latency nor energy.
            DicompilerError: The search found no plan that fits into the hosts' memory.
        """
        plan = self.plan_within(problem, WorkBudget(self.budget))
        search = CandidateSearch(problem, self.name)
        search.try_plans([(plan, self.name), (problem.best_single_device[0], self.name)])
        return plan if search.best is None else replace(search.best.plan, note=plan.note)

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        check_objective(self.name, problem.objective)
        choices = affordable_choices(problem, self.choice_set(problem), budget.remaining_s / 2)
        return self.plan_over_tables(build_cost_tables(problem, choices, budget), budget)

    def choice_set(self, problem: Problem) -> ChoiceSet:
        counts = self.device_counts or default_device_counts(len(problem.platform.computing_devices))
        return ChoiceSet(
            device_counts=counts, extra_rows=self.fusion_limit, shares=_SHARES_OF_PARTITION[self.partition]
        )

    def plan_over_tables(self, cost_tables: CostTables, budget: WorkBudget | None = None) -> Plan:
        """Return the best plan in the cost tables that fits into memory.

        The tables count only the memory of weights. If a plan exceeds the memory of a host, the search is repeated with
        less memory for weights.
        """
        problem, budget = cost_tables.problem, budget or WorkBudget(self.budget)
        best = self.search_tables(cost_tables, budget=budget)
        reserve: dict[str, int] = {}
        for _ in range(_MAX_REPAIRS):
            plan = cost_tables.plan(best.selection)
            missing = missing_memory(problem, plan)
            if not missing:
                return replace(plan, note=INTERRUPTED_NOTE if best.interrupted else budget.note())
            if best.interrupted:
                raise KeyboardInterrupt
            if not best.fits_memory:
                break
            # Reserve 5/4 of the missing bytes on the host. From the second time on, reserve them on all hosts, because
            # otherwise the excess may move from host to host.
            reserved = {host: reserve.get(host, 0) + 5 * missing.get(host, 0) // 4 for host in {*reserve, *missing}}
            largest = max(reserved.values()) if reserve else 0
            reserve = {host.name: max(largest, reserved.get(host.name, 0)) for host in problem.platform.hosts}
            best = self.search_tables(
                cost_tables, (best.selection, *best.others), reserve, descent=False, budget=budget
            )
        raise memory_error(self.name, problem, plan)

    def search_tables(
        self,
        cost_tables: CostTables,
        hints: Sequence[Sequence[int]] = (),
        reserve: Mapping[str, int] | None = None,
        descent: bool = True,
        budget: WorkBudget | None = None,
    ) -> BestSelection:
        """Return the best selection (one way to split each layer) for the objective of the problem.

        Args:
            cost_tables: The choices of each layer with their costs, and the problem.
            hints: Further selections that local search improves.
            reserve: Bytes of memory that weights must leave free, by host name.
            descent: False to improve only the hints.
            budget: Limit of the work; None for no limit.
        """
        best: BestSelection | None = None
        budget = budget or WorkBudget()
        objectives = build_objective_tables(cost_tables, cost_tables.problem.objective, reserve)
        settings = self._descent_settings(objectives, budget.remaining_s / 4) if descent else None
        for tables in objectives:
            found = _search_objective(tables, settings, hints, budget)
            if found is not None and (
                best is None or (not found.fits_memory, found.value) < (not best.fits_memory, best.value)
            ):
                best = found
            if found is not None and found.interrupted:
                best = replace(best or found, interrupted=True)
                break
        assert best is not None
        return best

    def _descent_settings(self, objectives: Sequence[ObjectiveTables], limit_s: float) -> DescentSettings:
        """Return the settings of the descent on each table. Large tables and several tables get fewer restarts.

        `limit_s` limits the work of all restarts, in seconds of the reference computer.
        """
        default = DescentSettings()
        work = (
            2
            * default.iterations
            * sum(table.size for tables in objectives for table in tables.edge.values())
            / len(objectives)
        )
        affordable = min(_MAX_DESCENT_MULTIPLICATIONS, _MULTIPLICATIONS_PER_S * limit_s) / max(work, 1.0)
        most = int(max(_MIN_RESTARTS, min(default.restarts, affordable)))
        restarts = most if self.restarts is None else self.restarts
        return DescentSettings(
            learning_rate=self.learning_rate,
            iterations=self.iterations,
            restarts=-(-restarts // len(objectives)),
            seed=self.seed,
            is_biased=self.initialisation == "heuristics",
        )


def _search_objective(
    tables: ObjectiveTables, settings: DescentSettings | None, hints: Sequence[Sequence[int]], budget: WorkBudget
) -> BestSelection | None:
    """Return the best selection (one way to split each layer) by the costs in one ObjectiveTables.

    The result is None without a descent and without valid hints.

    Args:
        tables: The costs.
        settings: Settings of the descent; None to omit it.
        hints: Further selections that local search improves. Those with choices that are not in the tables are ignored.
        budget: Limit of the work.
    """
    placed = [place for hint in hints if (place := to_kept_numbers(tables.kept_choices, hint)) is not None]
    starts = np.array(placed, np.intp).reshape(-1, len(tables.node))
    stopped = False
    if settings is not None:
        try:
            descended = minimise_relaxation(tables, settings, budget)
        except DescentInterrupted as stop:
            descended, stopped = stop.selections, True
        starts = np.concatenate((descended, starts))
    if not len(starts):
        return None
    search = LocalSearch(tables, budget)
    try:
        best = (search.rank(starts) if stopped else search.run(starts))[:_MAX_OTHER_SELECTIONS]
    except KeyboardInterrupt:
        best, stopped = search.rank(starts)[:_MAX_OTHER_SELECTIONS], True
    fits_memory = bool(tables.relative_excess(tables.weight_loads(best[:1]))[0] == 0)
    first, *others = (to_original_numbers(tables.kept_choices, selection) for selection in best.tolist())
    return BestSelection(first, float(tables.values(best[:1])[0]), fits_memory, tuple(others), stopped)


def default_device_counts(devices: int) -> tuple[int, ...]:
    """Return the numbers of devices to split layers over: 2 to 8, then in growing steps, and `devices`.

    default_device_counts(20) → (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)
    """
    # Few numbers keep the tables small: their size grows with the square of the number of choices.
    counts = list(range(2, min(devices, 8) + 1))
    while counts and counts[-1] < devices:
        counts.append(min(devices, counts[-1] + 2 * max(1, counts[-1] // 6)))
    return tuple(counts)


def memory_error(strategy: str, problem: Problem, plan: Plan, note: str = "") -> DicompilerError:
    """Return the error for a best plan that does not fit into memory. `note` is appended to the message."""
    need = describe_missing_memory(problem, plan)
    return DicompilerError(
        f"{strategy}: no plan was found that fits into memory: the best one needs {need}: use more memory or more "
        f"hosts{note}"
    )
