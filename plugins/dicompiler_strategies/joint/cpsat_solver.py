"""CP-SAT on the choices that the relaxation has left.

The model has a Boolean for each choice and for each pair of choices on an edge.

    RelaxedProblem → a better selection, a better bound, or the proof that there is none
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
"""Pairs of choices that a CP-SAT model may have in the first attempt, and afterwards. Beyond that the least promising
choices are left out, and with them the proof.
"""
COST_UNITS = 1 << 40
"""Costs become integers, rounded down so that bounds stay valid. The best known value is this many units."""


@dataclass(frozen=True)
class SolverEffort:
    """Limits of CP-SAT. Equal limits give equal results, unless the budget's deadline comes first.

    Attributes:
        deterministic_s: Deterministic seconds of the solver (not of the clock).
        workers: Number of search workers.
        seed: Random seed.
        budget: Work that may be done; the solver's work is counted here.
    """

    deterministic_s: float = 10.0
    workers: int = 2
    seed: int = 0
    budget: WorkBudget = field(default_factory=WorkBudget)


@dataclass(frozen=True)
class SolverResult:
    """The best selection in original numbers, its value, and a lower bound on all selections."""

    best: tuple[int, ...] | None
    value: float
    bound: float
    interrupted: bool = False


def solve_remaining(relaxed: RelaxedProblem, effort: SolverEffort, wide: bool = False) -> SolverResult:
    """Continue from a relaxation: first over the most promising choices, then over those that are left.

    If the graph is too `wide` to eliminate, only the promising choices are searched. Its bounds drop hardly any choice,
    and a model of all pairs would take gigabytes.
    """
    first = _solve_once(relaxed, replace(effort, deterministic_s=effort.deterministic_s / 2), FIRST_MAX_PAIRS)
    if wide and first.best is not None:
        return first
    if first.interrupted or first.best is None or first.value <= first.bound * (1 + 1e-6):
        return first if first.interrupted or first.best is not None else _solve_once(relaxed, effort, MAX_PAIRS)
    keep = [totals <= first.value * (1 + RELATIVE_SLACK) for totals in relaxed.choice_bounds]
    if not all(mask.any() for mask in keep):
        return replace(first, bound=first.value)
    least = tuple(totals[mask] for totals, mask in zip(relaxed.choice_bounds, keep, strict=True))
    remaining = RelaxedProblem(
        max(relaxed.bound, first.bound), first.best, first.value, relaxed.model.keep_choices(keep), least
    )
    return _solve_once(remaining, replace(effort, deterministic_s=effort.deterministic_s / 2), MAX_PAIRS)


def _solve_once(relaxed: RelaxedProblem, effort: SolverEffort, pairs: int) -> SolverResult:
    """Run one CP-SAT search over at most this many pairs of choices."""
    model, is_complete = _truncate_choices(relaxed, pairs)
    if any(not len(costs) for costs in model.node):
        return SolverResult(relaxed.best, relaxed.value, relaxed.bound)
    scale = relaxed.value if math.isfinite(relaxed.value) and relaxed.value > 0 else max(1.0, _cost_magnitude(model))
    solver_model = _SolverModel(model, scale / COST_UNITS)
    start = model.from_original(relaxed.best) if relaxed.best is not None else None
    if start is not None:
        solver_model.hint(start)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_deterministic_time = min(effort.deterministic_s, max(0.1, effort.budget.remaining_s))
    if effort.budget.deadline < math.inf:
        parameters.max_time_in_seconds = max(0.1, effort.budget.seconds_to_deadline())
    parameters.num_workers, parameters.random_seed = effort.workers, effort.seed
    parameters.interleave_search = effort.workers > 1  # Makes the results of several workers reproducible.
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
        # Choices that were dropped are no better than the value known before.
        bound = max(bound, min(solver.best_objective_bound * scale / COST_UNITS, relaxed.value, value))
        if status == cp_model.OPTIMAL:
            bound = max(bound, value * (1 - solver_model.terms / COST_UNITS))
    return SolverResult(best, value, bound, interrupted)


def run_solver(
    solver: cp_model.CpSolver, model: cp_model.CpModel, callback: cp_model.CpSolverSolutionCallback | None = None
) -> tuple[cp_model.CpSolverStatus, bool]:
    """Return the status of the solver, and True if Ctrl-C ended it.

    The solver runs in its own thread, because Python does not see Ctrl-C while the main thread is inside it. The solver
    must not catch Ctrl-C either: the handler that it restores afterwards kills the process.
    """
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        future, interrupted = pool.submit(solver.solve, model, callback), False
        while True:
            try:
                # Wakes up regularly, because Ctrl-C may be delivered to another thread.
                return future.result(timeout=0.2), interrupted
            except TimeoutError:
                continue
            except KeyboardInterrupt:
                interrupted = True
                solver.stop_search()


def _cost_magnitude(model: JointModel) -> float:
    return float(sum(np.abs(costs).max() for costs in (*model.node, *model.node_loads)) + 1)


def _truncate_choices(relaxed: RelaxedProblem, pairs: int) -> tuple[JointModel, bool]:
    """Return the model with at most this many pairs, those with the least bounds, and True if complete."""
    model, least = relaxed.model, relaxed.choice_bounds
    most = max((len(costs) for costs in model.node), default=0)
    while sum(table.size for table in _pair_tables([len(o) for o in model.node], model)) > pairs and most > 2:
        most = most * 3 // 4
        keep = []
        for totals in least:
            mask = np.zeros(len(totals), bool)
            mask[np.argsort(totals, kind="stable")[:most]] = True
            keep.append(mask)
        model = relaxed.model.keep_choices(keep)
    return model, model is relaxed.model


def _pair_tables(sizes: list[int], model: JointModel) -> list[NDArray[np.float64]]:
    return [table for (i, j), table in model.edge.items() if sizes[i] > 1 and sizes[j] > 1]


class _SolverModel:
    """The CP-SAT model of a JointModel."""

    def __init__(self, model: JointModel, unit: float) -> None:
        self.unit, self.model = unit, cp_model.CpModel()
        self.chosen = [[self.model.new_bool_var("") for _ in costs] for costs in model.node]
        for variables in self.chosen:
            self.model.add_exactly_one(variables)
        loads: list[tuple[list[cp_model.IntVar], list[float]]] = [([], []) for _ in model.load_limits]
        cost: tuple[list[cp_model.IntVar], list[float]] = ([], [])
        for v, seconds in enumerate(model.node):
            _add_terms(cost, self.chosen[v], seconds)
            for r, terms in enumerate(loads):
                _add_terms(terms, self.chosen[v], model.node_loads[v][:, r])
        for (i, j), table in model.edge.items():
            on_loads = model.edge_loads.get((i, j))
            if not table.any() and (on_loads is None or not on_loads.any()):
                continue
            pairs = self._pairs(i, j, table.shape)
            _add_terms(cost, pairs, table.ravel())
            for r in range(0 if on_loads is None else on_loads.shape[2]):
                assert on_loads is not None
                _add_terms(loads[r], pairs, on_loads[:, :, r].ravel())
        self.terms = len(cost[0]) + max((len(load[0]) for load in loads), default=0) + 1
        self._objective(model, cost, loads)

    def _pairs(self, i: int, j: int, shape: tuple[int, ...]) -> list[cp_model.IntVar]:
        """Return a Boolean for each pair; their sums over rows and columns equal the choices' Booleans."""
        if shape[0] == 1:
            return list(self.chosen[j])
        if shape[1] == 1:
            return list(self.chosen[i])
        pairs = [[self.model.new_bool_var("") for _ in range(shape[1])] for _ in range(shape[0])]
        for a, row in enumerate(pairs):
            self.model.add(sum(row) == self.chosen[i][a])
        for b in range(shape[1]):
            self.model.add(sum(row[b] for row in pairs) == self.chosen[j][b])
        return [pair for row in pairs for pair in row]

    def _objective(
        self,
        model: JointModel,
        cost: tuple[list[cp_model.IntVar], list[float]],
        loads: list[tuple[list[cp_model.IntVar], list[float]]],
    ) -> None:
        largest = self.model.new_int_var(0, 1 << 60, "")
        for (variables, values), cap in zip(loads, model.load_limits, strict=True):
            if math.isfinite(cap):  # Bytes are integers already.
                whole = [math.floor(value) for value in values]
                self.model.add(cp_model.LinearExpr.weighted_sum(variables, whole) <= math.floor(cap))
            else:
                whole = [math.floor(value / self.unit) for value in values]
                self.model.add(cp_model.LinearExpr.weighted_sum(variables, whole) <= largest)
        if model.is_minimax:
            self.model.minimize(largest)
        else:
            whole = [math.floor(value / self.unit) for value in cost[1]]
            self.model.minimize(cp_model.LinearExpr.weighted_sum(cost[0], whole))

    def hint(self, selection: tuple[int, ...]) -> None:
        """Give the solver a selection to begin with."""
        for variables, chosen in zip(self.chosen, selection, strict=True):
            for c, variable in enumerate(variables):
                self.model.add_hint(variable, c == chosen)


def _add_terms(
    terms: tuple[list[cp_model.IntVar], list[float]], variables: list[cp_model.IntVar], values: object
) -> None:
    for variable, value in zip(variables, np.asarray(values, np.float64).tolist(), strict=True):
        if value:
            terms[0].append(variable)
            terms[1].append(value)


class _SolutionLogger(cp_model.CpSolverSolutionCallback):
    """Logs each better selection with the remaining gap."""

    def __init__(self, unit: float, bound: float) -> None:
        super().__init__()
        self.unit, self.bound = unit, bound

    def on_solution_callback(self) -> None:
        value, bound = self.objective_value * self.unit, max(self.bound, self.best_objective_bound * self.unit)
        gap = (value - bound) / abs(value) if value else 0.0
        log.info("cpsat: value %.6g, bound %.6g, gap %.2f %%", value, bound, 100 * gap)
