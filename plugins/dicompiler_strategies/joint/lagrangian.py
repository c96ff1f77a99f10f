"""Lagrangian relaxation: prices on the loads replace limits, and variable elimination solves the rest exactly.

A selection has one choice (way to split it) for each layer. It causes loads, amounts such as the bytes on a host. A
price λ_r ≥ 0 for each unit of load r replaces the limit on this load. The prices give a lower bound on the cost of
every selection within the limits:

    min over selections of [cost + Σ_r λ_r · load_r] − Σ_r λ_r · limit_r

Subgradient steps on the prices raise the bound. Choices that cannot be in a better selection are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.joint.joint_model import JointModel
from dicompiler_strategies.joint.variable_elimination import MAX_TABLE_ELEMENTS, min_marginals, minimise_exactly
from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.tables.cost_tables import LayerEdge

log = logging.getLogger("dicompiler")
RELATIVE_SLACK = 1e-9
"""Relative difference below which values count as equal, because of rounding errors."""


@dataclass(frozen=True, eq=False)
class RelaxedProblem:
    """The result of a Lagrangian relaxation of the joint problem: choose one way to split each layer.

    A selection has one choice (way to split it) for each layer.

    Attributes:
        bound: Lower bound on all selections within the limits.
        best: Best selection found within the limits, as the index of each layer's choice in the cost tables, or None.
        value: Objective value of the best selection.
        model: Model with the choices that a better selection may still have.
        choice_bounds: For each layer and each of its choices in the model, a lower bound on the selections with it.
    """

    bound: float
    best: tuple[int, ...] | None
    value: float
    model: JointModel
    choice_bounds: tuple[Floats, ...]

    @property
    def is_proven(self) -> bool:
        return self.best is not None and self.value <= self.bound + RELATIVE_SLACK * abs(self.value)


def coordinate_descent(
    model: JointModel, selection: Sequence[int], budget: WorkBudget | None = None, rounds: int = 20
) -> tuple[int, ...]:
    """Improve a selection (one way to split each layer) until no change of one layer improves it.

    A change must reduce the excess over the limits, or keep the excess and reduce the objective value.

    Args:
        model: The model.
        selection: Index of each layer's choice.
        budget: Limit of the work; None for no limit.
        rounds: Largest number of rounds over all layers.
    """
    chosen, budget = list(selection), budget or WorkBudget()
    edges_of: list[list[LayerEdge]] = [[] for _ in chosen]
    for i, j in model.edge:
        edges_of[i].append((i, j))
        edges_of[j].append((i, j))
    for _ in range(rounds):
        if not budget.try_steps(sum(map(len, model.node)), 2 * len(chosen)):
            break
        before = list(chosen)
        loads = model.selection_loads(chosen)
        for v in range(len(chosen)):
            cost = model.node[v].copy()
            load = model.node_loads[v].copy() if model.node_loads else np.zeros((len(cost), 0))
            for i, j in edges_of[v]:
                cost += model.edge[i, j][:, chosen[j]] if i == v else model.edge[i, j][chosen[i]]
                if (i, j) in model.edge_loads:
                    table = model.edge_loads[i, j]
                    load[:, : table.shape[2]] += table[:, chosen[j]] if i == v else table[chosen[i]]
            totals = loads - load[chosen[v]] + load
            excess = np.maximum(totals - model.load_limits, 0).sum(axis=1)
            # The small fraction of the mean lets loads below the largest one fall too.
            value = totals.max(axis=1) + 1e-6 * totals.mean(axis=1) if model.is_minimax else cost
            best = int(np.lexsort((value, excess))[0])
            if (excess[best], value[best]) < (excess[chosen[v]], value[chosen[v]]):
                loads = totals[best]
                chosen[v] = best
        if chosen == before:
            break
    return tuple(chosen)


class _PriceSearch:
    """The state of the search for the best prices: the model, the best bound, and the best selection so far.

    A price is a Lagrange multiplier of a load, an amount such as the bytes on a host. A selection has one way to split
    each layer.
    """

    def __init__(self, model: JointModel, start: Sequence[Sequence[int]], budget: WorkBudget) -> None:
        self.model, self.budget = model, budget
        self.bound, self.value = -np.inf, np.inf
        self.best: tuple[int, ...] | None = None
        self.choice_bounds: tuple[Floats, ...] = ()
        self.is_limited = np.isfinite(model.load_limits)
        # Loads without a limit get the limit 0, because computations need finite numbers. `is_limited` masks them.
        self.finite_limits = np.where(self.is_limited, model.load_limits, 0.0)
        self.load_scale = np.where(self.finite_limits > 0, self.finite_limits, 1.0)
        for selection in start:
            kept = model.from_original(selection)
            if kept is not None:
                self.accept_if_better(kept)
                self.improve_locally(kept)

    def result(self) -> RelaxedProblem:
        return RelaxedProblem(self.bound, self.best, self.value, self.model, self.choice_bounds)

    def accept_if_better(self, selection: tuple[int, ...]) -> None:
        if self.model.fits_limits(selection):
            value = self.model.value(selection)
            if value < self.value:
                self.best, self.value = self.model.to_original(selection), value

    def improve_locally(self, selection: tuple[int, ...]) -> None:
        """Improve a selection (plan) layer by layer, and keep the result if it is the best one so far."""
        self.accept_if_better(coordinate_descent(self.model, selection, self.budget))

    def spend_elimination(self) -> bool:
        """Charge one variable elimination (exact minimisation) to the budget. Return False if it is exceeded."""
        return self.budget.try_steps(*self.model.elimination_order.work)

    def minimise_at_prices(self, prices: Floats) -> tuple[int, ...]:
        """Return the best plan at given prices (Lagrange multipliers) of loads. Raise the lower bound if possible."""
        node, edge = self.model.priced_tables(prices)
        least, selection = minimise_exactly(self.model.elimination_order, node, edge)
        self.bound = max(self.bound, least - self.limits_at_prices(prices))
        self.accept_if_better(selection)
        return selection

    def limits_at_prices(self, prices: Floats) -> float:
        """Return Σ limit · price over all loads (such as the bytes on a host), the constant of the Lagrangian."""
        return float(prices[self.is_limited] @ self.model.load_limits[self.is_limited])

    def find_feasible(self, prices: Floats) -> None:
        """Search for good plans within the limits of the loads, beginning with the given prices (Lagrange multipliers).

        A price rises while its load, such as the bytes on a host, exceeds the limit. When no limit is exceeded, all
        prices fall, in smaller and smaller steps.
        """
        if not self.is_limited.any():
            return
        unit = np.where(self.is_limited, max(abs(self.bound), 1e-12) / self.load_scale, 0.0)
        raised, step = prices.copy(), 0.02
        for _ in range(40):
            if not self.spend_elimination():
                break
            node, edge = self.model.priced_tables(raised)
            _, selection = minimise_exactly(self.model.elimination_order, node, edge)
            self.improve_locally(selection)
            is_exceeded = self.is_limited & (self.model.selection_loads(selection) > self.finite_limits)
            if not is_exceeded.any():
                raised, step = raised - np.minimum(raised - prices, step * unit), step / 2
            else:
                raised, step = raised + step * unit * is_exceeded, step * 1.2

    def drop_choices(self, prices: Floats) -> None:
        """Drop every choice (way to split a layer) that no better plan can have.

        A choice is dropped if its lower bound at the given prices (Lagrange multipliers) is above the best known value.
        """
        node, edge = self.model.priced_tables(prices)
        constant = self.limits_at_prices(prices)
        marginals = min_marginals(self.model.elimination_order, node, edge)
        self.choice_bounds = tuple(totals - constant for totals in marginals)
        if self.best is None:
            return
        keep = [totals <= self.value + RELATIVE_SLACK * abs(self.value) for totals in self.choice_bounds]
        if all(mask.any() for mask in keep):
            self.model = self.model.keep_choices(keep)
            self.choice_bounds = tuple(totals[mask] for totals, mask in zip(self.choice_bounds, keep, strict=True))
        else:  # A layer without any choice left proves that no selection is better.
            self.bound = max(self.bound, self.value)


def relax_with_prices(
    model: JointModel, start: Sequence[Sequence[int]] = (), budget: WorkBudget | None = None, iterations: int = 60
) -> RelaxedProblem:
    """Return the best selection found and a lower bound on all selections, by Lagrangian relaxation.

    A selection has one way to split each layer. Without loads (amounts such as the bytes on a host), the result is the
    optimum.

    Args:
        model: The model.
        start: Selections that are tried first.
        budget: Limit of the work; None for no limit.
        iterations: Largest number of subgradient steps on the prices of loads.
    """
    search = _PriceSearch(model, start, budget or WorkBudget())
    if not len(model.load_limits):
        search.minimise_at_prices(np.zeros(0))
        return search.result()
    is_unlimited, prices = np.isinf(model.load_limits), np.zeros(len(model.load_limits))
    if model.is_minimax:  # Prices that sum to 1 make the weighted mean of the loads a bound on the largest load.
        prices[is_unlimited] = 1.0 / is_unlimited.sum()
    best_prices, factor, stale_steps = prices, 1.0, 0
    for number in range(iterations):
        if not search.spend_elimination() and number:
            break
        old_bound = search.bound
        selection = search.minimise_at_prices(prices)
        search.improve_locally(selection)
        if search.bound > old_bound + 1e-4 * abs(old_bound) or number == 0:
            best_prices, stale_steps = prices, 0
        else:
            stale_steps += 1
        if stale_steps >= 5:
            factor, stale_steps = factor / 2, 0
        if search.result().is_proven:
            break
        prices = _update_prices(search, prices, selection, factor)
        if number % 10 == 9:
            search.find_feasible(best_prices)
            log.info("cpsat: relaxation %d: value %.6g, bound %.6g", number + 1, search.value, search.bound)
            search.drop_choices(best_prices)
    search.find_feasible(best_prices)
    search.drop_choices(best_prices)
    return search.result()


def bound_without_elimination(
    model: JointModel, start: Sequence[Sequence[int]], budget: WorkBudget | None = None
) -> RelaxedProblem:
    """Return a good selection and a lower bound for a graph that is too wide for variable elimination.

    A selection has one choice (way to split it) for each layer. Local search begins with the selections `start`, and
    with the optimum over a few choices of each layer (unless the objective is the largest load).
    """
    search = _PriceSearch(model, start, budget or WorkBudget())
    # The bound of a choice is the sum of the minima of all tables, over entries with this choice only. For each layer,
    # the least bound of its choices is a bound on all selections.
    edge_least = {e: float(table.min()) for e, table in model.edge.items()}
    least_total = sum(float(costs.min()) for costs in model.node) + sum(edge_least.values())
    choice_bounds = [costs + (least_total - costs.min()) for costs in model.node]
    for (i, j), table in model.edge.items():
        choice_bounds[i] = choice_bounds[i] + table.min(axis=1) - edge_least[i, j]
        choice_bounds[j] = choice_bounds[j] + table.min(axis=0) - edge_least[i, j]
    # Run this variable elimination even if it exceeds the budget, so that there is always a good plan.
    if not model.is_minimax:
        promising = _most_promising(model, choice_bounds)
        _, selection = minimise_exactly(promising.elimination_order, promising.node, promising.edge)
        chosen = model.from_original(promising.to_original(selection))
        assert chosen is not None
        search.accept_if_better(chosen)
        search.improve_locally(chosen)
    bound = max(float(totals.min()) for totals in choice_bounds)
    return RelaxedProblem(bound, search.best, search.value, model, tuple(choice_bounds))


def _most_promising(model: JointModel, choice_bounds: Sequence[Floats]) -> JointModel:
    """Return the model with so few choices (ways to split a layer) that variable elimination is possible.

    For each layer, the choices with the smallest lower bounds `choice_bounds` are kept.
    """
    reduced, max_choices = model, max(map(len, choice_bounds))
    while reduced.elimination_order.largest_table > MAX_TABLE_ELEMENTS and max_choices > 1:
        max_choices = max_choices * 3 // 4
        reduced = model.keep_choices(
            [np.argsort(np.argsort(totals, kind="stable"), kind="stable") < max_choices for totals in choice_bounds]
        )
    return reduced


def _update_prices(search: _PriceSearch, prices: Floats, selection: Sequence[int], factor: float) -> Floats:
    """Return the prices of the loads (such as the bytes on a host) after a subgradient step, scaled by `factor`.

    The subgradient of a limited load is its excess over the limit. For an unlimited load of a minimax objective, it is
    the load minus the mean of all unlimited loads, weighted with their prices.
    """
    loads, is_unlimited = search.model.selection_loads(selection), ~search.is_limited
    updated = np.maximum(0.0, prices + factor * _polyak_step(search, loads, selection))
    if search.model.is_minimax:
        mean = float(prices[is_unlimited] @ loads[is_unlimited])
        deviations = loads[is_unlimited] - mean
        scaled = prices[is_unlimited] * np.exp(factor * deviations / (float(np.abs(deviations).max()) or 1.0))
        updated[is_unlimited] = scaled / scaled.sum()
    return updated


def _polyak_step(search: _PriceSearch, loads: Floats, selection: Sequence[int]) -> Floats:
    """Return the change of the price of each load by Polyak's rule; 0 for loads without a limit.

    `loads` are amounts, such as the bytes on a host, under `selection`, the best plan at the current prices.
    """
    excess = np.where(search.is_limited, (loads - search.finite_limits) / search.load_scale, 0.0)
    norm = float(excess @ excess)
    if norm == 0:
        return excess
    bound = search.bound if np.isfinite(search.bound) else 0.0
    target = search.value if np.isfinite(search.value) else 1.5 * max(bound, search.model.value(selection))
    return max(target - bound, 1e-3 * abs(target)) * excess / norm / search.load_scale
