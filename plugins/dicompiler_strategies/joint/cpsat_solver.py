"""CP-SAT on the choices that the Lagrangian relaxation has not dropped.

A choice is one way to split a layer; a selection has one choice for each layer. The CP-SAT model has a Boolean variable
for each choice, and for each pair of choices of two connected layers.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.joint.joint_model import JointModel
from dicompiler_strategies.joint.lagrangian import RELATIVE_SLACK, RelaxedProblem

log = logging.getLogger("dicompiler")
FIRST_MAX_PAIRS, MAX_PAIRS = 15_000, 200_000
"""Largest number of pairs of choices (of two connected layers) in a CP-SAT model: at first, and later.

If there are more, the least promising choices are left out, and the result proves no bound.
"""
COST_UNITS = 1 << 40
"""Integer that stands for the best known value, because CP-SAT accepts only integer costs.

All costs are scaled in the same way and rounded down, so that lower bounds stay valid.
"""


@dataclass(frozen=True)
class SolverEffort:
    """Limits of CP-SAT. Equal limits give equal results, unless the budget's deadline comes first.

    Attributes:
        deterministic_s: Time limit in deterministic seconds, which count the solver's work and not the clock.
        workers: Number of search workers.
        seed: Random seed.
        budget: Limit of the work of the whole search; the solver's work is counted in it.
    """

    deterministic_s: float = 10.0
    workers: int = 2
    seed: int = 0
    budget: WorkBudget = field(default_factory=WorkBudget)


@dataclass(frozen=True)
class SolverResult:
    """The best selection (one way to split each layer), with a lower bound.

    Attributes:
        best: Best selection, as the index of each layer's choice in the cost tables; None if none is known.
        value: Objective value of the best selection.
        bound: Lower bound on the values of all selections.
        interrupted: True if Ctrl-C ended the search.
    """

    best: tuple[int, ...] | None
    value: float
    bound: float
    interrupted: bool = False


def solve_remaining(relaxed: RelaxedProblem, effort: SolverEffort, is_wide: bool = False) -> SolverResult:
    """Search for a better selection than the best one of a relaxation, or for a proof that there is none.

    The first search is over the choices with the smallest lower bounds. The second one is over all choices that can
    still be in a better selection.

    Args:
        relaxed: Result of the relaxation.
        effort: Limits of CP-SAT.
        is_wide: True if the graph is too wide for variable elimination. There is then no second search.
    """
    half = replace(effort, deterministic_s=effort.deterministic_s / 2)
    first = _solve_once(relaxed, half, FIRST_MAX_PAIRS)
    # The lower bounds of a wide graph exclude hardly any choice. The model of a second search would therefore have
    # nearly all pairs of choices, and would take gigabytes.
    if first.interrupted or (is_wide and first.best is not None):
        return first
    if first.best is None:
        return _solve_once(relaxed, effort, MAX_PAIRS)
    if first.value <= first.bound * (1 + 1e-6):
        return first
    keep = [totals <= first.value * (1 + RELATIVE_SLACK) for totals in relaxed.choice_bounds]
    if not all(mask.any() for mask in keep):
        return replace(first, bound=first.value)
    bounds = tuple(totals[mask] for totals, mask in zip(relaxed.choice_bounds, keep, strict=True))
    bound, model = max(relaxed.bound, first.bound), relaxed.model.keep_choices(keep)
    return _solve_once(RelaxedProblem(bound, first.best, first.value, model, bounds), half, MAX_PAIRS)


def _solve_once(relaxed: RelaxedProblem, effort: SolverEffort, max_pairs: int) -> SolverResult:
    """Run CP-SAT with at most `max_pairs` pairs of choices of connected layers.

    Return the better result of CP-SAT and the relaxation. A choice is one way to split a layer.
    """
    model = _truncate_choices(relaxed, max_pairs)
    is_complete = model is relaxed.model
    if any(not len(costs) for costs in model.node):
        return SolverResult(relaxed.best, relaxed.value, relaxed.bound)
    scale = relaxed.value
    if not (math.isfinite(scale) and scale > 0):
        scale = max(1.0, float(sum(np.abs(costs).max() for costs in (*model.node, *model.node_loads)) + 1))
    solver_model = _SolverModel(model, scale / COST_UNITS)
    start = model.from_original(relaxed.best) if relaxed.best is not None else None
    if start is not None:
        solver_model.start_from(start)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_deterministic_time = min(effort.deterministic_s, max(0.1, effort.budget.remaining_s))
    if effort.budget.deadline < math.inf:
        parameters.max_time_in_seconds = max(0.1, effort.budget.seconds_to_deadline())
    parameters.num_workers, parameters.random_seed = effort.workers, effort.seed
    # Interleave the workers in a fixed order. Otherwise the result would depend on their speed.
    parameters.interleave_search = effort.workers > 1
    status, interrupted = run_solver(solver, solver_model.model, _SolutionLogger(scale / COST_UNITS, relaxed.bound))
    effort.budget.spend(solver.response_proto.deterministic_time)
    best, value = relaxed.best, relaxed.value
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        chosen = tuple(next(c for c, x in enumerate(xs) if solver.boolean_value(x)) for xs in solver_model.chosen)
        if model.fits_limits(chosen) and model.value(chosen) < value:
            best, value = model.to_original(chosen), model.value(chosen)
    bound = relaxed.bound
    if is_complete and status == cp_model.INFEASIBLE:
        bound = value
    elif is_complete and status != cp_model.MODEL_INVALID:
        # The solver's bound does not cover plans with choices that the relaxation dropped. They are not better than
        # `relaxed.value`.
        bound = max(bound, min(solver.best_objective_bound * scale / COST_UNITS, relaxed.value, value))
        if status == cp_model.OPTIMAL:
            bound = max(bound, value * (1 - solver_model.terms / COST_UNITS))
    return SolverResult(best, value, bound, interrupted)


def run_solver(
    solver: cp_model.CpSolver, model: cp_model.CpModel, callback: cp_model.CpSolverSolutionCallback | None = None
) -> tuple[cp_model.CpSolverStatus, bool]:
    """Return the status of the solver, and True if Ctrl-C ended it."""
    # The solver must not catch Ctrl-C: the signal handler that it restores afterwards would kill the process. It runs
    # in its own thread, because Python does not see Ctrl-C while the main thread is inside the solver.
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        future, interrupted = pool.submit(solver.solve, model, callback), False
        while True:
            try:
                # Wait only briefly: if another thread got the signal, Python handles Ctrl-C between two waits.
                return future.result(timeout=0.2), interrupted
            except TimeoutError:
                continue
            except KeyboardInterrupt:
                interrupted = True
                solver.stop_search()


def _truncate_choices(relaxed: RelaxedProblem, max_pairs: int) -> JointModel:
    """Return the relaxation's model with about `max_pairs` pairs of choices (ways to split a layer) or fewer.

    Only the choices of each layer with the smallest lower bounds are kept.
    """
    model = relaxed.model
    max_choices = max((len(costs) for costs in model.node), default=0)
    while sum(table.size for table in model.edge.values() if min(table.shape) > 1) > max_pairs and max_choices > 2:
        max_choices = max_choices * 3 // 4
        ranks = [np.argsort(np.argsort(bounds, kind="stable"), kind="stable") for bounds in relaxed.choice_bounds]
        model = relaxed.model.keep_choices([rank < max_choices for rank in ranks])
    return model


class _LinearSum:
    """A linear expression of the CP-SAT model: a sum of Boolean variables times numbers."""

    def __init__(self) -> None:
        self.variables: list[cp_model.IntVar] = []
        self.factors: list[float] = []

    def add(self, variables: list[cp_model.IntVar], factors: NDArray[np.float64]) -> None:
        for variable, factor in zip(variables, factors.tolist(), strict=True):
            if factor:
                self.variables.append(variable)
                self.factors.append(factor)

    def in_units(self, unit: float) -> cp_model.LinearExprT:
        return cp_model.LinearExpr.weighted_sum(self.variables, [math.floor(factor / unit) for factor in self.factors])


class _SolverModel:
    """The CP-SAT model of the joint problem: choose one way to split each layer, at the least cost.

    CP-SAT accepts only integers, so costs are rounded down to multiples of `unit`.
    """

    def __init__(self, model: JointModel, unit: float) -> None:
        self.model = cp_model.CpModel()
        self.chosen = [[self.model.new_bool_var("") for _ in costs] for costs in model.node]
        for variables in self.chosen:
            self.model.add_exactly_one(variables)
        cost, loads = _LinearSum(), [_LinearSum() for _ in model.load_limits]
        for v, node_cost in enumerate(model.node):
            cost.add(self.chosen[v], node_cost)
            for r, load in enumerate(loads):
                load.add(self.chosen[v], model.node_loads[v][:, r])
        for (i, j), table in model.edge.items():
            edge_loads = model.edge_loads.get((i, j), np.zeros((*table.shape, 0)))
            if table.any() or edge_loads.any():
                pairs = self._add_pairs(self.chosen[i], self.chosen[j])
                cost.add(pairs, table.ravel())
                for r in range(edge_loads.shape[2]):
                    loads[r].add(pairs, edge_loads[:, :, r].ravel())
        self.terms = len(cost.variables) + max((len(load.variables) for load in loads), default=0) + 1
        largest = self.model.new_int_var(0, 1 << 60, "")
        for load, limit in zip(loads, model.load_limits, strict=True):
            # A load is an amount such as the bytes on a host. Limited loads are bytes, and so integers already.
            is_limited = math.isfinite(limit)
            self.model.add(load.in_units(1 if is_limited else unit) <= (math.floor(limit) if is_limited else largest))
        self.model.minimize(largest if model.is_minimax else cost.in_units(unit))

    def _add_pairs(self, rows: list[cp_model.IntVar], columns: list[cp_model.IntVar]) -> list[cp_model.IntVar]:
        """Return a Boolean variable for each pair of choices (ways to split a layer) of two layers, row by row.

        The variable of a choice is the sum of the variables of its pairs.

        Args:
            rows: Variables of the first layer's choices.
            columns: Variables of the second layer's choices.
        """
        if len(rows) == 1:
            return columns
        if len(columns) == 1:
            return rows
        pairs = [[self.model.new_bool_var("") for _ in columns] for _ in rows]
        for variable, row in zip(rows, pairs, strict=True):
            self.model.add(sum(row) == variable)
        for variable, column in zip(columns, zip(*pairs, strict=True), strict=True):
            self.model.add(sum(column) == variable)
        return [pair for row in pairs for pair in row]

    def start_from(self, selection: tuple[int, ...]) -> None:
        for variables, chosen in zip(self.chosen, selection, strict=True):
            for c, variable in enumerate(variables):
                self.model.add_hint(variable, c == chosen)


class _SolutionLogger(cp_model.CpSolverSolutionCallback):
    """A callback of CP-SAT that logs the value, the bound and the gap of each better solution."""

    def __init__(self, unit: float, bound: float) -> None:
        super().__init__()
        self.unit, self.bound = unit, bound

    def on_solution_callback(self) -> None:
        value, bound = self.objective_value * self.unit, max(self.bound, self.best_objective_bound * self.unit)
        gap = (value - bound) / abs(value) if value else 0.0
        log.info("cpsat: value %.6g, bound %.6g, gap %.2f %%", value, bound, 100 * gap)
