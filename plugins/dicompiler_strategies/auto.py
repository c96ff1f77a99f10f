"""The strategy `auto`, the default: simulate the plans of the other strategies and improve the best one.

If a plan leaves all layers whole, `auto` moves runs (sequences) of consecutive layers to other devices, as long as this
improves the plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Plan, PluginError, Problem, Strategy, registry
from dicompiler.plugin_api.search import (
    DEFAULT_BUDGET_S,
    INTERRUPTED_NOTE,
    MIN_SPLIT_GAIN,
    WorkBudget,
    check_constraints,
    fits_constraints,
    free_memory,
    objective_bound,
    objective_terms,
)
from dicompiler_strategies.candidate_search import CandidateSearch, EvaluatedPlan, evaluate_plans
from dicompiler_strategies.cpsat import DEFAULT_TRIES, MAX_GRADIENT_SIZE, CpSat
from dicompiler_strategies.genetic.batched_model import BatchedModel, build_batched_model
from dicompiler_strategies.genetic.encoding import PlanRows
from dicompiler_strategies.tables.cost_tables import CostTables
from dicompiler_strategies.teams.strategy import Teams
from dicompiler_strategies.transformer_heads import best_row_plans, has_attention, reduced_choices

MAX_MOVED_LAYERS = 32
"""Largest number of consecutive layers that the local search moves to another device at once."""
MAX_RUNS = 2500
"""Approximate largest number of runs (sequences of consecutive layers) that a step of the local search tries to move.

If there are more, only every nth start of a run is tried.
"""
PLAN_LAYER_DEVICE_S = 2.2e-8
"""Seconds that the reference computer needs to evaluate a plan, for each pair of a layer and a device."""
MIN_GAIN = 1e-6
"""The local search ends when a step improves the objective by less than this fraction."""


def is_plan_of_whole_layers(plan: Plan) -> bool:
    """Return True if each layer is computed whole by one device, and the plan has no replicas."""
    return not plan.replicas and all(
        len(parts) == 1 and parts[0].region is None and parts[0].reduce is None for parts in plan.layers.values()
    )


def improve_by_moves(problem: Problem, plan: Plan, budget: WorkBudget) -> Plan:
    """Return the best plan that is found by moving runs of consecutive layers to other devices.

    The plan must have each layer whole on one device, and no replicas.
    """
    model = build_batched_model(problem)
    position = {device.name: i for i, device in enumerate(problem.platform.devices)}
    row = np.array([position[plan.layers[layer.name][0].device] for layer in problem.layers.layers], np.intp)
    (value,) = _objective_values(model, row[None])
    runs = list(_list_runs(len(row)))
    step_s = len(runs) * len(row) * len(position) ** 2 * PLAN_LAYER_DEVICE_S
    while budget.try_spend(step_s):
        moved = _make_moved_rows(problem, row, runs)
        if not len(moved):
            break
        values = _objective_values(model, moved)
        best = int(values.argmin())
        if not values[best] < value * (1 - MIN_GAIN):
            break
        row, value = moved[best], values[best]
    return model.plan(row)


def _objective_values(model: BatchedModel, rows: PlanRows) -> NDArray[np.float64]:
    """Return the objective of each plan, shape (plans,); infinite if the plan does not fit into memory."""
    estimates = model.evaluate(rows)
    terms = objective_terms(model.problem.objective)
    values = np.sum([weight * estimates.objective(name) for name, weight in terms.items()], axis=0)
    limits = np.array(list(free_memory(model.problem).values()), np.float64)
    return np.where((estimates.host_memory > limits).any(axis=1), np.inf, values)


def _make_moved_rows(problem: Problem, row: PlanRows, runs: Sequence[tuple[int, int]]) -> PlanRows:
    """Return all plans that move one of the runs of consecutive layers of the plan `row` to another device.

    `row` has the index of each layer's device. `runs` are pairs (first layer, position after the last layer).
    """
    devices = [i for i, device in enumerate(problem.platform.devices) if device.can_compute]
    changed = []
    for start, stop in runs:
        for device in devices:
            if (row[start:stop] != device).any():
                other = row.copy()
                other[start:stop] = device
                changed.append(other)
    return np.array(changed, np.intp).reshape(-1, len(row))


def _list_runs(layers: int) -> Iterator[tuple[int, int]]:
    """Yield runs of 1, 2, 3, 4, 6, 8, … consecutive layers as pairs (start, stop), about MAX_RUNS at most."""
    lengths = [length for k in range(MAX_MOVED_LAYERS.bit_length()) for length in (2**k, 3 * 2**k // 2)]
    chosen = sorted({length for length in lengths if length <= min(layers, MAX_MOVED_LAYERS)})
    step = -(-layers * len(chosen) // MAX_RUNS)
    for length in chosen:
        yield from ((start, start + length) for start in range(0, layers - length + 1, step))


log = logging.getLogger("dicompiler")

MAX_PROBLEM_SIZE = {"gradient": MAX_GRADIENT_SIZE, "modnn": 20_000}
"""Largest problem (number of layers · number of devices) for which `auto` asks a strategy for a plan.

On larger problems, these strategies would use up the whole budget.
"""
QUICK_STRATEGIES = ("single", "replicate", "pipeline", "modnn")
"""Strategies that usually take milliseconds. `auto` asks them first, even if the budget is small."""
SLOW_STRATEGIES = {
    "latency": ("heads", "cpsat", "dp", "gradient"),
    "throughput": ("teams", "genetic", "cpsat", "heads"),
    "energy": ("dp", "cpsat", "gradient", "genetic", "heads"),
    "memory": ("teams", "heads", "genetic", "cpsat"),
    "communication": ("dp", "cpsat", "genetic", "heads"),
}
"""For each objective, the slower strategies in the order in which `auto` asks them: most gain for their time first.

By default, no other slow strategies are asked. For latency with a budget of 2 s, the plans of `cpsat` were up to 17 %
better than those of `dp` (ShuffleNet), and at most 2 % worse. For throughput and memory, `teams` nearly always finds
the best plan. The plans of `cpsat` for memory needed 1.2 to 5 times the memory of the best plan, because it counts
weights only. But no other strategy splits the weights of embeddings by rows. `heads` minimises the latency, which often
saves energy too: for ViT-Tiny on unequal boards, its plan needs 1.4 % less energy than those of the others.
"""
DEFAULT_STRATEGIES = (*QUICK_STRATEGIES, "heads", "teams", "dp", "cpsat", "gradient", "genetic")
MOVES_SHARE = 0.2
"""Fraction of a strategy's remaining budget that `auto` may use to move layers of its plan to other devices."""
EXACT_OBJECTIVES = ("memory", "communication")
"""Objectives that are counted in bytes and therefore exact. Seconds and joules are only predicted."""
PROVEN_RATIO = 1 + 1e-6
"""The search ends if the objective of the best plan is at most this factor times its lower bound."""


@dataclass(frozen=True)
class Auto(Strategy):
    """The best plan of several strategies by simulation, improved by small changes.

        single, replicate, pipeline, modnn → heads, cpsat, … → simulator → best plan → small changes

    Strategies that take milliseconds are asked first. The other strategies that serve the objective follow in the order
    of their expected gain. At the end, `auto` tries small changes of the best plan.

    Each strategy has the whole budget, and so have the small changes. By the values that `auto` computes, the plan is
    therefore at least as good as that of each asked strategy with the same budget. There is one exception: if the best
    plan gains less than MIN_SPLIT_GAIN over the best single device, the plan uses this device. The search ends early if
    the best plan reaches the lower bound of the objective. If the budget ends a strategy or the changes, the note of
    the plan says so.

    The budget is counted in seconds of a reference computer, so that equal inputs give equal plans. On a slow or busy
    machine, the clock also stops a strategy, after three times the budget or 20 seconds, whichever is longer. The plan
    then depends on the machine.
    """

    name: ClassVar[str] = "auto"
    budget: float = field(
        default=DEFAULT_BUDGET_S,
        metadata={
            "help": "limit of the work of each strategy, and of the small changes, in seconds of a reference computer"
        },
    )
    tries: int = field(
        default=DEFAULT_TRIES,
        metadata={"help": "largest number of plans to try that differ a little from the best one"},
    )
    seed: int = field(default=0, metadata={"help": "seed of the random choice of these plans, and of cpsat"})
    strategies: tuple[str, ...] = field(
        default=DEFAULT_STRATEGIES,
        metadata={"help": "strategies that are asked for a plan; `auto` then tries changes of the best one"},
    )

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"budget must be more than 0 s, not {self.budget:g}")
        if self.tries < 0:
            raise ValueError(f"tries must be 0 or more, not {self.tries}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be from 0 to 2147483647, not {self.seed}")

    def plan(self, problem: Problem) -> Plan:
        """Return the best plan found; if you interrupt the search, the best plan so far.

        Raises:
            DicompilerError: No strategy found a plan that satisfies the constraints.
        """
        auto_search = _AutoSearch(problem, self)
        search, note = auto_search.search, ""
        try:
            auto_search.run()
        except KeyboardInterrupt:
            if search.best is None:
                raise
            note = INTERRUPTED_NOTE
        if search.best is None:
            raise auto_search.error()
        note = note or auto_search.budget_note()
        if note:
            again = " (press Ctrl-C again to end the command)" if note == INTERRUPTED_NOTE else ""
            log.warning("auto: %s: this is the best plan so far%s", note, again)
        plan = self._prefer_single_device(problem, search.best)
        log.info("auto: the best plan is by %s", plan.chosen_strategy)
        return replace(plan, note=note)

    def _prefer_single_device(self, problem: Problem, best: EvaluatedPlan) -> Plan:
        """Return the best plan, or the plan of the best single device if it is predicted to be nearly as good.

        A speedup of less than MIN_SPLIT_GAIN is within the error of the prediction. Objectives counted in bytes are
        exact, so for them the best plan is always returned.
        """
        plan, metrics = problem.best_single_device
        is_predicted = problem.runtime_costs and not set(EXACT_OBJECTIVES) & set(objective_terms(problem.objective))
        is_close = metrics.objective_value(problem.objective) <= MIN_SPLIT_GAIN * best.value(problem)
        if is_predicted and is_close and evaluate_plans(problem, [(plan, "one device")]):
            return replace(plan, chosen_strategy="single")
        return replace(best.plan, chosen_strategy=best.found_by)


class _AutoSearch:
    """One execution of `auto`."""

    def __init__(self, problem: Problem, options: Auto) -> None:
        self.problem, self.options = problem, options
        self.search = CandidateSearch(problem, "auto")  # `_budget_of` replaces its budget at each step.
        # The plan of cpsat, if it has already tried small changes of this plan itself, within its budget.
        self.refined: EvaluatedPlan | None = None
        self.errors: dict[str, DicompilerError] = {}
        # The reasons why strategies were not asked, by name.
        self.unasked: dict[str, str] = {}
        # For each note of an exceeded budget, the steps of the search that it ended.
        self.ended_steps: dict[str, list[str]] = {}
        self.left_out: list[str] = []

    def run(self) -> None:
        for name in self._strategy_names():
            if self._is_done():
                return
            self._ask(name)
        if not self._is_done():
            with self._budget_of("small changes"):
                self._try_changes()

    def _try_changes(self) -> None:
        """Try small changes of the best plan."""
        best = self.search.best
        if best is not None and best.plan.replicas:
            self.search.trim()
        else:
            self._search_tables()
        self.search.try_sliced_sums()
        if self.problem.objective == "latency" and self._has_time("parts in waves"):
            can_use_heads = self.uses_heads and self._fill_tables("parts in waves of heads")
            self.search.try_waves(best_row_plans(self.tables) if can_use_heads else ())

    @contextmanager
    def _budget_of(self, step: str) -> Iterator[None]:
        """Give a step of the search a budget of its own, and record the note of this budget if it was exceeded."""
        self.search.budget = WorkBudget.from_seconds(self.options.budget)
        try:
            yield
        finally:
            note = self.search.budget.note()
            if note and step not in self.ended_steps.setdefault(note, []):
                self.ended_steps[note].append(step)

    def _ask(self, name: str) -> None:
        strategy = registry().make("strategies", name)
        if reason := self._reason_not_to_ask(name):
            self.unasked[name] = reason
            log.info("auto: does not ask %s: %s", name, reason)
            return
        for problem in self.objective_problems:
            self._run_strategy(name, strategy, problem)

    def _strategy_names(self) -> list[str]:
        """Return the names of the strategies, in the order in which they are asked.

        If the option `strategies` is given, its strategies that are not in QUICK_STRATEGIES or SLOW_STRATEGIES for the
        objective, such as third-party strategies, follow after the quick ones.
        """
        chosen = self.options.strategies
        quick = [name for name in QUICK_STRATEGIES if name in chosen]
        served = [name for term in objective_terms(self.problem.objective) for name in SLOW_STRATEGIES[term]]
        slow = [name for name in dict.fromkeys(served) if name in chosen]
        others = [name for name in chosen if name not in (*QUICK_STRATEGIES, *slow)]
        return [*quick, *slow] if chosen == DEFAULT_STRATEGIES else [*quick, *others, *slow]

    def _reason_not_to_ask(self, name: str) -> str:
        """Return why the strategy `name` is too slow, cannot help or has already run; "" if it should be asked."""
        if self.problem_size > MAX_PROBLEM_SIZE.get(name, math.inf):
            return "the network and the platform are too large for it"
        if name == "heads" and not has_attention(self.problem):
            return "the network has no attention"
        if name == "replicate" and self.problem.target is not None and not self.problem.target.can_run_replicas:
            return f"target {self.problem.target.name} cannot run replicas"
        # With small changes (tries > 0), cpsat has run gradient and evaluated its plans.
        if name == "gradient" and self.refined is not None and self.options.tries > 0:
            return "cpsat has already run it"
        return ""

    def _has_time(self, step: str) -> bool:
        """Return True if the budget is not exceeded; otherwise record that the search omits `step`."""
        if not self.search.budget.is_exceeded():
            return True
        self.left_out.append(step)
        return False

    def _is_done(self) -> bool:
        """Return True if the best plan reaches the lower bound of the objective.

        If its objective is below the bound, the bound does not hold for the cost model, and better plans may exist.
        """
        best = self.search.best
        return best is not None and self.bound / PROVEN_RATIO <= best.value(self.problem) <= PROVEN_RATIO * self.bound

    @cached_property
    def bound(self) -> float:
        return objective_bound(self.problem) or 0.0

    def budget_note(self) -> str:
        """Return the plan's note about the steps that the budget ended or left out.

        The note is empty if no budget was exceeded, or if the plan is proven to be optimal anyway.
        """
        if self._is_done():
            return ""
        notes = [f"{note} in these steps: {', '.join(steps)}" for note, steps in self.ended_steps.items()]
        return "; ".join(notes) + (f" and left out: {', '.join(self.left_out)}" if self.left_out else "")

    def _search_tables(self) -> None:
        """Try plans from the cost tables: optimal ones, and small changes of the best plan."""
        # These plans come from the method of cpsat, so they are tried only if the option `strategies` names cpsat.
        is_requested = "cpsat" in self.options.strategies and self.refined is None
        if is_requested and self._fill_tables("optima with cheaper messages"):
            self.search.try_optima(self.tables)
        best = self.search.best
        if best is None or self.refined is None or best.value(self.problem) < self.refined.value(self.problem):
            if self.options.tries and self._fill_tables("plans near the best one"):
                self.search.try_neighbours(self.tables, self.options.tries, self.options.seed)
            self.search.trim()

    def _fill_tables(self, step: str) -> bool:
        """Fill the cost tables; return False if they cannot be filled within the budget, or are empty.

        If the budget is exceeded, record that the search omits `step`.
        """
        if not self._has_time(step):
            return False
        try:
            return bool(self.tables.choices)
        except DicompilerError as error:
            log.info("auto: left out: %s: %s", step, error)
            if self.search.budget.is_exceeded():
                self.left_out.append(step)
            return False

    @cached_property
    def problem_size(self) -> int:
        return len(self.problem.layers.layers) * len(self.problem.platform.devices)

    @cached_property
    def objective_problems(self) -> tuple[Problem, ...]:
        """One copy of the problem for each term of the objective, because few strategies support weighted sums."""
        terms = objective_terms(self.problem.objective)
        return (self.problem,) if len(terms) == 1 else tuple(replace(self.problem, objective=name) for name in terms)

    @cached_property
    def uses_heads(self) -> bool:
        """True if the small changes use the cost tables of the strategy `heads`."""
        is_requested = "heads" in self.options.strategies and self.problem.objective in ("latency", "memory")
        return is_requested and len(self.problem.platform.computing_devices) > 1 and has_attention(self.problem)

    @cached_property
    def tables(self) -> CostTables:
        """The cost tables for small changes: those of `heads` if it is asked, else those of cpsat.

        Raises:
            DicompilerError: The budget is exceeded before the tables are filled.
        """
        if self.uses_heads:
            return reduced_choices(self.problem, len(self.problem.platform.computing_devices), "equal")
        return self.cpsat_tables

    @cached_property
    def cpsat_tables(self) -> CostTables:
        """The cost tables of cpsat.

        Raises:
            DicompilerError: The budget is exceeded before the tables are filled.
        """
        # If no strategy has a plan yet, cpsat may be the only one that finds one. Its budget then has no clock.
        budget = WorkBudget(self.options.budget) if self.search.best is None else self.search.budget
        return CpSat().build_tables(self.problem, budget)

    def error(self) -> DicompilerError:
        """Return the error of cpsat if it failed, else that of the first failed strategy, else why none was asked."""
        if self.errors:
            return self.errors.get("cpsat", next(iter(self.errors.values())))
        reasons = "; ".join(f"it does not ask {name}: {reason}" for name, reason in self.unasked.items())
        return DicompilerError(f"auto: no strategy has a plan{reasons and f' ({reasons})'}: add others, such as single")

    def _run_strategy(self, name: str, strategy: Strategy, problem: Problem) -> None:
        log.info("auto: asks %s", name)
        try:
            with self._budget_of(name):
                plan = self._run_and_evaluate(name, strategy, problem)
            if plan.note == INTERRUPTED_NOTE:
                raise KeyboardInterrupt
            if self.search.best is None:
                check_constraints(self.problem, plan)
        except DicompilerError as error:
            self.errors[name] = error
            # A defect of a third-party strategy (PluginError) is always worth a warning.
            level = logging.WARNING if isinstance(error, PluginError) else logging.INFO
            log.log(level, "auto: %s has no plan: %s", name, error)

    def _run_and_evaluate(self, name: str, strategy: Strategy, problem: Problem) -> Plan:
        """Run a strategy, evaluate its plan and return it. If all its layers are whole, also try to move layers.

        cpsat evaluates its own plan, and no layers of it are moved.
        """
        if isinstance(strategy, CpSat):
            strategy = replace(strategy, tries=self.options.tries, seed=self.options.seed)
        if isinstance(strategy, CpSat) and problem is self.problem:
            refined = strategy.plan_over_tables(self.cpsat_tables, self.search.budget)
            # cpsat may return a plan that breaks a constraint if the budget was exceeded.
            if fits_constraints(self.problem, refined.plan, refined.metrics):
                self.search.accept_best([refined])
                has_tried_changes = self.problem.objective == "latency" and not self.search.budget.was_exceeded
                self.refined = refined if has_tried_changes else None
            return refined.plan
        if isinstance(strategy, Teams):
            known = () if self.search.best is None else (self.search.best.plan,)
            plan = strategy.plan_from(problem, self.search.budget, known)
        else:
            plan = strategy.plan_within(problem, self.search.budget)
        self.search.try_plans([(plan, name)], ignores_budget=True)
        if is_plan_of_whole_layers(plan) and plan.note != INTERRUPTED_NOTE:
            self._move_layers(plan)
        return plan

    def _move_layers(self, plan: Plan) -> None:
        with self.search.budget.share(MOVES_SHARE) as step_budget:
            moved = improve_by_moves(self.problem, plan, step_budget)
        self.search.try_plans([(moved, "layer moves")], ignores_budget=True)
