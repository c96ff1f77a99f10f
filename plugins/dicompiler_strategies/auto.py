"""The strategy `auto`, the default: simulate the plans of the other strategies and improve the best one."""

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
"""For each strategy, the largest number of layers · devices for which it is asked. For larger problems, it would use up
the whole budget.
"""
DEFAULT_STRATEGIES = ("single", "pipeline", "modnn", "heads", "cpsat", "dp", "gradient", "replicate")
"""The strategies that are asked, in order. cpsat comes before slow strategies that rarely have the best plan, so that a
small budget omits the slow ones.
"""
TABLE_STRATEGIES = ("cpsat", "gradient")
"""Strategies that need cost tables of all layers. If the tables of a large network do not fit into the budget, these
strategies are asked last, and only if no other strategy has found a plan that splits the network.
"""
NOT_FOR_ATTENTION = ("cpsat", "dp", "gradient")
"""Strategies that are not asked for the latency or memory of a network with attention: heads finds better plans in a
tenth of the time.
"""


@dataclass(frozen=True)
class Auto(Strategy):
    """The best plan of all strategies by simulation, improved by local search.

        single, pipeline, modnn, heads or cpsat, dp, gradient → simulator → best plan → other choices for a layer → …

    If the objective is a weighted sum, each strategy is asked once for each term of the sum. The weighted sum then
    ranks all plans.

    The budget is counted in seconds of a reference computer, so that equal inputs give equal plans. On a slower machine
    the search also stops when the budget's real time has passed. The plan then depends on the machine, and its note
    says so.
    """

    name: ClassVar[str] = "auto"
    budget: float = field(
        default=DEFAULT_BUDGET_S, metadata={"help": "seconds after which the best plan so far is taken"}
    )
    tries: int = field(default=DEFAULT_TRIES, metadata={"help": "plans to try around the best one"})
    seed: int = field(default=0, metadata={"help": "seed of the plans that are tried"})
    strategies: tuple[str, ...] = field(default=DEFAULT_STRATEGIES, metadata={"help": "strategies to begin with"})

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"budget must be more than 0 s, not {self.budget:g}")
        if self.tries < 0:
            raise ValueError(f"tries must be 0 or more, not {self.tries}")

    def plan(self, problem: Problem) -> Plan:
        """Return the best plan found. If you interrupt the search, it returns the best plan so far.

        Raises:
            DicompilerError: No strategy found a plan that satisfies the constraints.
        """
        run = _AutoSearch(problem, self)
        search, note = run.search, ""
        try:
            run.run()
        except KeyboardInterrupt:
            if search.best is None:
                raise
            note = INTERRUPTED_NOTE
        if search.best is None:
            raise run.error() or DicompilerError("auto: no strategy has a plan: use a larger budget")
        note = note or search.budget.note()
        if note:
            log.warning("auto: %s: this is the best plan so far", note)
        log.info("auto: the best plan is by %s", search.best.origin)
        return replace(self._prefer_single_device(problem, search.best), note=note)

    def _prefer_single_device(self, problem: Problem, best: EvaluatedPlan) -> Plan:
        """Return the best plan, or the plan of the best single device if that is predicted to be nearly as good.

        A speedup below MIN_SPLIT_GAIN is within the error of the prediction. On platforms without runtime costs, the
        best plan is returned without this comparison.
        """
        plan, metrics = problem.best_single_device
        prefers_single = problem.runtime_costs and metrics.objective_value(
            problem.objective
        ) <= MIN_SPLIT_GAIN * best.value(problem)
        if prefers_single and evaluate_plans(problem, [(plan, "one device")]):
            return replace(plan, chosen_strategy="single")
        return replace(best.plan, chosen_strategy=best.origin)


class _AutoSearch:
    """One execution of `auto`: ask the strategies one after another, then improve the best plan."""

    def __init__(self, problem: Problem, options: Auto) -> None:
        self.problem, self.options = problem, options
        self.search = CandidateSearch(problem, "auto", WorkBudget.from_seconds(options.budget))
        # The plan of cpsat, if cpsat has already tried plans around it.
        self.refined: EvaluatedPlan | None = None
        self.errors: dict[str, DicompilerError] = {}

    def run(self) -> None:
        names = self.options.strategies
        if self.is_too_large:
            names = tuple(sorted(names, key=lambda name: name in TABLE_STRATEGIES))
        strategies = {name: registry().make("strategies", name) for name in names}
        for name, strategy in strategies.items():
            if self.search.budget.is_exceeded() and self.search.best is not None:
                return
            if name in TABLE_STRATEGIES and self.is_too_large and self.best_plan_splits:
                continue
            # If cpsat tries plans around the best one, it has evaluated gradient's plans as well.
            is_covered = name == "gradient" and self.refined is not None and self.options.tries > 0
            if (
                self.problem_size <= MAX_PROBLEM_SIZE.get(name, math.inf)
                and not is_covered
                and not (self.uses_heads and name in NOT_FOR_ATTENTION)
            ):
                for problem in self.objective_problems:
                    self._run_strategy(name, strategy, problem)
        if self.is_too_large and self.best_plan_splits:
            self.search.trim()
        else:
            self._search_tables()
        if not self.search.budget.is_exceeded():
            self.search.try_waves(best_row_plans(self.tables) if self.uses_heads else ())

    def _search_tables(self) -> None:
        """Search the cost tables for better plans near the best plan."""
        if self.refined is None and not self.search.budget.is_exceeded():
            self.search.try_optima(self.tables)
        best = self.search.best
        if best is None or self.refined is None or best.value(self.problem) < self.refined.value(self.problem):
            if not self.search.budget.is_exceeded():
                self.search.try_neighbours(self.tables, self.options.tries, self.options.seed)
            if self.uses_heads:
                self.search.reduce_weights(self.tables)
            self.search.trim()

    @cached_property
    def is_too_large(self) -> bool:
        """True if the budget does not suffice to fill cpsat's cost tables with all choices that cpsat asks for."""
        return (
            not self.uses_heads
            and self.problem_size > MAX_GRADIENT_SIZE
            and self.affordable_choices != CpSat().requested_choices(self.problem)
        )

    @cached_property
    def affordable_choices(self) -> ChoiceSet:
        """The choices for which cpsat's cost tables can be filled within the budget."""
        return CpSat().affordable_choices(self.problem, self.options.budget)

    @cached_property
    def problem_size(self) -> int:
        """Number of layers times number of devices."""
        return len(self.problem.layers.layers) * len(self.problem.platform.devices)

    @property
    def best_plan_splits(self) -> bool:
        """True if the best plan so far uses several devices."""
        return self.search.best is not None and len(self.search.best.plan.devices) > 1

    @cached_property
    def objective_problems(self) -> tuple[Problem, ...]:
        """One copy of the problem for each term of the objective, because few strategies support weighted sums."""
        terms = objective_terms(self.problem.objective)
        return (self.problem,) if len(terms) == 1 else tuple(replace(self.problem, objective=name) for name in terms)

    @cached_property
    def uses_heads(self) -> bool:
        """True if the strategy `heads` replaces the strategies in NOT_FOR_ATTENTION."""
        is_supported = {"heads"} & set(self.options.strategies) and self.problem.objective in ("latency", "memory")
        return bool(is_supported) and len(self.problem.platform.computing_devices) > 1 and has_attention(self.problem)

    @cached_property
    def tables(self) -> CostTables:
        """The cost tables of `heads` if it is used, else those of cpsat.

        Raises DicompilerError if a plan exists already, and the budget is exceeded before the tables are filled.
        """
        if self.uses_heads:
            return reduced_choices(self.problem, len(self.problem.platform.computing_devices), "equal")
        budget = WorkBudget(self.options.budget) if self.search.best is None else self.search.budget
        return CpSat().build_tables(self.problem, budget, self.affordable_choices)

    def error(self) -> DicompilerError | None:
        """Return the error that explains best why there is no plan: cpsat's, else the first one."""
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
        """Ask a strategy for a plan, evaluate it, and return it."""
        if isinstance(strategy, CpSat) and problem is self.problem:
            tried = replace(strategy, tries=self.options.tries, seed=self.options.seed)
            refined = tried.plan_over_tables(self.tables, self.search.budget)
            # cpsat may return a plan that breaks a constraint if the budget was exceeded.
            if fits_constraints(self.problem, refined.plan, refined.metrics):
                self.search.accept_best([refined])
                self.refined = refined if self.problem.objective == "latency" else None
            return refined.plan
        plan = strategy.plan_within(problem, self.search.budget)
        self.search.try_plans([(plan, name)])
        return plan
