"""The default: runs the other strategies, lets the simulator rank their plans, and polishes the best one."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from dicompiler.plugin_api import DicompilerError, Plan, Problem, Strategy, registry
from dicompiler.plugin_api.search import (
    DEFAULT_BUDGET_S,
    INTERRUPTED_NOTE,
    MIN_SPLIT_GAIN,
    WorkBudget,
    check_constraints,
    fits_constraints,
    objective_terms,
)
from dicompiler_strategies.candidate_search import CandidateSearch, EvaluatedPlan, evaluate_plans
from dicompiler_strategies.cpsat import DEFAULT_TRIES, MAX_GRADIENT_SIZE, CpSat
from dicompiler_strategies.tables.choices import ChoiceSet
from dicompiler_strategies.tables.cost_tables import CostTables
from dicompiler_strategies.transformer_heads import best_row_plans, has_attention, reduced_choices

log = logging.getLogger("dicompiler")

MAX_PROBLEM_SIZE = {"gradient": MAX_GRADIENT_SIZE, "modnn": 20_000}
"""Strategies that are left out where layers times devices are more than that: they would take the whole budget."""
DEFAULT_STRATEGIES = ("single", "pipeline", "modnn", "heads", "cpsat", "dp", "gradient", "replicate")
"""cpsat before those that take long and seldom win: what the budget leaves out is theirs."""
TABLE_STRATEGIES = ("cpsat", "gradient")
"""They look at all layers at once. Of a network of MOST layers times devices for whose tables the budget does not pay,
dp, which counts less work, is asked before them, and they are left out if anybody has a plan that splits."""
NOT_FOR_ATTENTION = ("cpsat", "dp", "gradient")
"""Not asked for the latency or the memory of a network with attention, which heads cuts better in a tenth of the
time."""


@dataclass(frozen=True)
class Auto(Strategy):
    """The best of all strategies' plans by simulation, polished by local search.

    single, pipeline, modnn, heads or cpsat, dp, gradient → simulator → best → other choices for a layer → …

    Of an objective that is a weighted sum the strategies are asked for each term, and the sum ranks their plans.

    The work is counted, in seconds of a common computer, and the same on every run. Only where a slower machine's clock
    says that the budget is over before does the plan depend on the machine; then its note says so.
    """

    name: ClassVar[str] = "auto"
    budget: float = field(default=DEFAULT_BUDGET_S, metadata={"help": "seconds after which it takes what it has"})
    tries: int = field(default=DEFAULT_TRIES, metadata={"help": "plans to try around the best one"})
    seed: int = field(default=0, metadata={"help": "of the plans that are tried"})
    strategies: tuple[str, ...] = field(default=DEFAULT_STRATEGIES, metadata={"help": "whose plans to begin with"})

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"budget must be more than 0 s, not {self.budget:g}")
        if self.tries < 0:
            raise ValueError(f"tries must not be below 0, and is {self.tries}")

    def plan(self, problem: Problem) -> Plan:
        """Raises what a strategy raised where none has a plan that can be carried out. An interrupt gives the
        best plan so far."""
        run = _AutoSearch(problem, self)
        search, note = run.search, ""
        try:
            run.run()
        except KeyboardInterrupt:
            if search.best is None:
                raise
            note = INTERRUPTED_NOTE
        if search.best is None:
            raise run.error() or DicompilerError("auto: no strategy has a plan: raise the budget")
        note = note or search.allowance.note()
        if note:
            log.warning("auto: %s: this is the best plan so far", note)
        log.info("auto: the best plan is of %s", search.best.origin)
        return replace(self._prefer_single_device(problem, search.best), note=note)

    def _prefer_single_device(self, problem: Problem, best: EvaluatedPlan) -> Plan:
        """The best plan; the best one on one device alone where that is predicted to be nearly as good and can be
        carried out: what is gained so may as well be lost. Where runtimes cost nothing predictions are taken as they
        are."""
        plan, metrics = problem.best_single_device
        single = problem.runtime_costs and metrics.objective_value(problem.objective) <= MIN_SPLIT_GAIN * best.value(
            problem
        )
        if single and evaluate_plans(problem, [(plan, "one device")]):
            return replace(plan, chosen_strategy="single")
        return replace(best.plan, chosen_strategy=best.origin)


class _AutoSearch:
    """One run: the strategies in turn, then plans around the best one."""

    def __init__(self, problem: Problem, options: Auto) -> None:
        self.problem, self.options = problem, options
        self.search = CandidateSearch(problem, "auto", WorkBudget.from_seconds(options.budget))
        self.refined: EvaluatedPlan | None = None  # the best plan around which plans were tried
        self.errors: dict[str, DicompilerError] = {}

    def run(self) -> None:
        names = self.options.strategies
        if self.is_too_large:
            names = tuple(sorted(names, key=lambda name: name in TABLE_STRATEGIES))
        strategies = {name: registry().make("strategies", name) for name in names}
        for name, strategy in strategies.items():
            if self.search.allowance.is_exceeded() and self.search.best is not None:
                return
            if name in TABLE_STRATEGIES and self.is_too_large and self.best_plan_splits:
                continue
            # Where cpsat tries plans it has evaluated what gradient finds.
            known = name == "gradient" and self.refined is not None and self.options.tries > 0
            if (
                self.problem_size <= MAX_PROBLEM_SIZE.get(name, math.inf)
                and not known
                and not (self.uses_heads and name in NOT_FOR_ATTENTION)
            ):
                for problem in self.objective_problems:
                    self._run_strategy(name, strategy, problem)
        if self.is_too_large and self.best_plan_splits:
            self.search.trim()
        else:
            self._search_tables()
        if not self.search.allowance.is_exceeded():
            self.search.try_waves(best_row_plans(self.tables) if self.uses_heads else ())

    def _search_tables(self) -> None:
        """Looks for better plans in the tables, around the best one."""
        if self.refined is None and not self.search.allowance.is_exceeded():
            self.search.try_optima(self.tables)
        best = self.search.best
        if best is None or self.refined is None or best.value(self.problem) < self.refined.value(self.problem):
            if not self.search.allowance.is_exceeded():
                self.search.try_neighbours(self.tables, self.options.tries, self.options.seed)
            if self.uses_heads:
                self.search.reduce_weights(self.tables)
            self.search.trim()

    @cached_property
    def is_too_large(self) -> bool:
        """Whether the network is too large for the tables of cpsat."""
        return (
            not self.uses_heads
            and self.problem_size > MAX_GRADIENT_SIZE
            and self.affordable_choices != CpSat().requested_choices(self.problem)
        )

    @cached_property
    def affordable_choices(self) -> ChoiceSet:
        """What cpsat has tables of."""
        return CpSat().affordable_choices(self.problem, self.options.budget)

    @cached_property
    def problem_size(self) -> int:
        """Layers times devices."""
        return len(self.problem.layers.layers) * len(self.problem.platform.devices)

    @property
    def best_plan_splits(self) -> bool:
        """Whether the best plan so far has several devices."""
        return self.search.best is not None and len(self.search.best.plan.devices) > 1

    @cached_property
    def objective_problems(self) -> tuple[Problem, ...]:
        """What strategies are asked for: of a weighted sum, which few know, each of its terms."""
        wanted = objective_terms(self.problem.objective)
        return (self.problem,) if len(wanted) == 1 else tuple(replace(self.problem, objective=name) for name in wanted)

    @cached_property
    def uses_heads(self) -> bool:
        """Whether heads is asked instead of the others."""
        own = {"heads"} & set(self.options.strategies) and self.problem.objective in ("latency", "memory")
        return bool(own) and len(self.problem.platform.computing_devices) > 1 and has_attention(self.problem)

    @cached_property
    def tables(self) -> CostTables:
        """The tables of cpsat, of fewer choices where more than half of the budget would go into filling them; those of
        heads. DicompilerError where it is over before they are filled, and there is a plan already."""
        if self.uses_heads:
            return reduced_choices(self.problem, len(self.problem.platform.computing_devices), "equal")
        allowance = WorkBudget(self.options.budget) if self.search.best is None else self.search.allowance
        return CpSat().build_tables(self.problem, allowance, self.affordable_choices)

    def error(self) -> DicompilerError | None:
        """Why there is no plan: cpsat tells most, else the first who told."""
        return self.errors.get("cpsat", next(iter(self.errors.values()), None))

    def _run_strategy(self, name: str, strategy: Strategy, problem: Problem) -> None:
        log.info("auto: asks %s", name)
        try:
            plan = self._evaluate_strategy(name, strategy, problem)
            if self.search.best is None:
                check_constraints(self.problem, plan)
        except DicompilerError as error:
            self.errors[name] = error
            log.info("auto: %s has no plan: %s", name, error)
            return
        if plan.note == INTERRUPTED_NOTE:
            raise KeyboardInterrupt

    def _evaluate_strategy(self, name: str, strategy: Strategy, problem: Problem) -> Plan:
        """The strategy's plan, evaluated."""
        if isinstance(strategy, CpSat) and problem is self.problem:
            tried = replace(strategy, tries=self.options.tries, seed=self.options.seed)
            refined = tried.plan_over_tables(self.tables, self.search.allowance)
            if fits_constraints(self.problem, refined.plan, refined.metrics):  # cpsat gives what it has
                self.search.accept_best([refined])
                self.refined = refined if self.problem.objective == "latency" else None
            return refined.plan
        plan = strategy.plan_within(problem, self.search.allowance)
        self.search.try_plans([(plan, name)])
        return plan
