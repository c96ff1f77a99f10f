"""CP-SAT on what the relaxation has left: one Boolean for each choice, one for each pair of choices on an edge.

Relaxed → a better selection, a better bound, or the proof that there is none.
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
"""Pairs of choices that a CP-SAT model may have, at first and then; beyond it the least promising choices are left out,
and with them the proof."""
COST_UNITS = 1 << 40
"""Costs become whole numbers, rounded down: the best known value is this many units, so that bounds stay valid."""


@dataclass(frozen=True)
class SolverEffort:
    """How long CP-SAT works: deterministic seconds (not the clock's), workers, seed. Equal ones give equal results, but
    where the allowance's deadline comes first. What it worked is spent of the allowance, and no more than is left."""

    deterministic_s: float = 10.0
    workers: int = 2
    seed: int = 0
    budget: WorkBudget = field(default_factory=WorkBudget)


@dataclass(frozen=True)
class SolverResult:
    """best: a selection (numbers of the first choices), None where there is none. bound: none is below it."""

    best: tuple[int, ...] | None
    value: float
    bound: float
    interrupted: bool = False


def solve_remaining(relaxed: RelaxedProblem, effort: SolverEffort, wide: bool = False) -> SolverResult:
    """Continues from `relaxed`: on the most promising choices first, whose best value then drops others. wide: on
    those alone: the bounds of a graph that is too wide to eliminate drop hardly any, and a model of all pairs takes
    gigabytes."""
    first = _solve_once(relaxed, replace(effort, deterministic_s=effort.deterministic_s / 2), FIRST_MAX_PAIRS)
    if wide and first.best is not None:
        return first
    if first.interrupted or first.best is None or first.value <= first.bound * (1 + 1e-6):
        return first if first.interrupted or first.best is not None else _solve_once(relaxed, effort, MAX_PAIRS)
    keep = [totals <= first.value * (1 + RELATIVE_SLACK) for totals in relaxed.choice_bounds]
    if not all(mask.any() for mask in keep):
        return replace(first, bound=first.value)
    least = tuple(totals[mask] for totals, mask in zip(relaxed.choice_bounds, keep, strict=True))
    rest = RelaxedProblem(
        max(relaxed.bound, first.bound), first.best, first.value, relaxed.model.keep_choices(keep), least
    )
    return _solve_once(rest, replace(effort, deterministic_s=effort.deterministic_s / 2), MAX_PAIRS)


def _solve_once(relaxed: RelaxedProblem, effort: SolverEffort, pairs: int) -> SolverResult:
    """One CP-SAT search over at most so many pairs."""
    left, whole = _truncate_choices(relaxed, pairs)
    if any(not len(costs) for costs in left.node):
        return SolverResult(relaxed.best, relaxed.value, relaxed.bound)
    scale = relaxed.value if math.isfinite(relaxed.value) and relaxed.value > 0 else max(1.0, _cost_magnitude(left))
    builder = _SolverModel(left, scale / COST_UNITS)
    start = left.from_original(relaxed.best) if relaxed.best is not None else None
    if start is not None:
        builder.hint(start)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_deterministic_time = min(effort.deterministic_s, max(0.1, effort.budget.remaining_s))
    if effort.budget.deadline < math.inf:
        parameters.max_time_in_seconds = max(0.1, effort.budget.seconds_to_deadline())
    parameters.num_workers, parameters.random_seed = effort.workers, effort.seed
    parameters.interleave_search = effort.workers > 1  # without it several workers do not repeat their results
    status, interrupted = run_solver(solver, builder.model, _SolutionLogger(scale / COST_UNITS, relaxed.bound))
    effort.budget.spend(solver.response_proto.deterministic_time)
    best, value = relaxed.best, relaxed.value
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        chosen = tuple(next(c for c, x in enumerate(xs) if solver.boolean_value(x)) for xs in builder.chosen)
        if left.fits_limits(chosen) and left.value(chosen) < value:
            best, value = left.to_original(chosen), left.value(chosen)
    bound = relaxed.bound
    if whole and status == cp_model.INFEASIBLE:
        bound = value
    elif whole and status != cp_model.MODEL_INVALID:
        # What has been dropped is no better than the value known before.
        bound = max(bound, min(solver.best_objective_bound * scale / COST_UNITS, relaxed.value, value))
        if status == cp_model.OPTIMAL:
            bound = max(bound, value * (1 - builder.terms / COST_UNITS))
    return SolverResult(best, value, bound, interrupted)


def run_solver(
    solver: cp_model.CpSolver, posed: cp_model.CpModel, watch: cp_model.CpSolverSolutionCallback | None = None
) -> tuple[cp_model.CpSolverStatus, bool]:
    """(the status, whether Ctrl-C ended it). The solver works in a thread of its own: while the main thread is inside
    it, Python cannot see Ctrl-C; and it must not catch Ctrl-C itself, for the default that it then puts back is to
    kill the process."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        future, interrupted = pool.submit(solver.solve, posed, watch), False
        while True:
            try:
                return future.result(timeout=0.2), interrupted  # awake now and then: Ctrl-C may wake another thread
            except TimeoutError:
                continue
            except KeyboardInterrupt:
                interrupted = True
                solver.stop_search()


def _cost_magnitude(model: JointModel) -> float:
    return float(sum(np.abs(costs).max() for costs in (*model.node, *model.node_loads)) + 1)


def _truncate_choices(relaxed: RelaxedProblem, pairs: int) -> tuple[JointModel, bool]:
    """(the model with at most so many pairs, whether it is all of it): the choices with the least bounds are kept."""
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
        """A Boolean for each pair, row by row: their sums over a row and a column are the choices' own Booleans."""
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
            if math.isfinite(cap):  # bytes: whole numbers as they are
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
        """A selection to begin with."""
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
    """Shows each better selection with the gap that is left."""

    def __init__(self, unit: float, bound: float) -> None:
        super().__init__()
        self.unit, self.bound = unit, bound

    def on_solution_callback(self) -> None:
        value, bound = self.objective_value * self.unit, max(self.bound, self.best_objective_bound * self.unit)
        gap = (value - bound) / abs(value) if value else 0.0
        log.info("cpsat: value %.6g, bound %.6g, gap %.2f %%", value, bound, 100 * gap)
