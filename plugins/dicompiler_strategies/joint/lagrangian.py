"""Lagrangian relaxation: loads with limits get prices, and elimination solves the rest exactly.

For prices λ ≥ 0 of the limited loads, min over selections of [cost + Σ_r λ_r · load_r] − Σ_r λ_r · limit_r is a lower
bound on every selection within the limits. Subgradient steps raise the bound. Choices whose own bound exceeds the value
of the best known selection are dropped.

    JointModel → a lower bound, the best selection found, and the model without the choices that cannot improve it
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

log = logging.getLogger("dicompiler")
RELATIVE_SLACK = 1e-9
"""Values closer than this are equal, because sums of floats in different orders differ by less."""


@dataclass(frozen=True, eq=False)
class RelaxedProblem:
    """The result of a relaxation.

    Attributes:
        bound: Lower bound on all selections within the limits.
        best: Best selection found, in original numbers; None if none is within the limits.
        value: Its value.
        model: Model with the choices that a better selection may still have.
        choice_bounds: For each choice that is left, a lower bound on the selections with it.
    """

    bound: float
    best: tuple[int, ...] | None
    value: float
    model: JointModel
    choice_bounds: tuple[Floats, ...]

    @property
    def is_proven(self) -> bool:
        """True if the best selection is optimal."""
        return self.best is not None and self.value <= self.bound + RELATIVE_SLACK * abs(self.value)


def coordinate_descent(
    model: JointModel, selection: Sequence[int], budget: WorkBudget | None = None, rounds: int = 20
) -> tuple[int, ...]:
    """Improve a selection layer by layer until nothing improves or the budget is exceeded.

    Excess over the limits counts first, then the value.
    """
    chosen, budget = list(selection), budget or WorkBudget()
    edges_of: dict[int, list[tuple[int, int]]] = {}
    for i, j in model.edge:
        edges_of.setdefault(i, []).append((i, j))
        edges_of.setdefault(j, []).append((i, j))
    for _ in range(rounds):
        if not budget.try_steps(sum(map(len, model.node)), 2 * len(chosen)):
            break
        before = list(chosen)
        loads = model.selection_loads(chosen)
        for v in range(len(chosen)):
            cost, load = (
                model.node[v].copy(),
                model.node_loads[v].copy() if model.node_loads else np.zeros((len(model.node[v]), 0)),
            )
            for i, j in edges_of.get(v, ()):
                cost += model.edge[i, j][:, chosen[j]] if i == v else model.edge[i, j][chosen[i]]
                if (i, j) in model.edge_loads:
                    table = model.edge_loads[i, j]
                    load[:, : table.shape[2]] += table[:, chosen[j]] if i == v else table[chosen[i]]
            totals = loads - load[chosen[v]] + load
            excess = (
                np.maximum(totals - model.load_limits, 0).sum(axis=1) if len(model.load_limits) else np.zeros(len(cost))
            )
            # Of equal maxima the smaller mean is better; otherwise loads below the largest one would never fall.
            value = totals.max(axis=1) + 1e-6 * totals.mean(axis=1) if model.is_minimax else cost
            best = int(np.lexsort((value, excess))[0])
            if (excess[best], value[best]) < (excess[chosen[v]], value[chosen[v]]):
                loads = totals[best]
                chosen[v] = best
        if chosen == before:
            break
    return tuple(chosen)


class _PriceSearch:
    """The state of a relaxation: the model, the best bound, and the best selection."""

    def __init__(self, model: JointModel, start: Sequence[Sequence[int]], budget: WorkBudget) -> None:
        self.model, self.budget = model, budget
        self.bound, self.best, self.value = -np.inf, None, np.inf
        self.choice_bounds: tuple[Floats, ...] = ()
        self.load_scale = np.where(np.isfinite(model.load_limits) & (model.load_limits > 0), model.load_limits, 1.0)
        for selection in start:
            now = model.from_original(selection)
            if now is not None:
                self.accept_if_better(now)
                self.improve_locally(now)

    best: tuple[int, ...] | None

    def accept_if_better(self, selection: tuple[int, ...]) -> None:
        if self.model.fits_limits(selection):
            value = self.model.value(selection)
            if value < self.value:
                self.best, self.value = self.model.to_original(selection), value

    def improve_locally(self, selection: tuple[int, ...]) -> None:
        """Accept the local optimum that coordinate descent reaches from a selection."""
        self.accept_if_better(coordinate_descent(self.model, selection, self.budget))

    def spend_elimination(self) -> bool:
        """Return True and count one elimination if the budget allows it."""
        order = self.model.elimination_order
        return self.budget.try_steps(sum(order.table_elements), 3 * len(order.steps))

    def minimise_at_prices(self, prices: Floats) -> tuple[int, ...]:
        """Return the best selection at these prices, and raise the bound."""
        node, edge = self.model.priced_tables(prices)
        least, selection = minimise_exactly(self.model.elimination_order, node, edge)
        is_limited = np.isfinite(self.model.load_limits)
        self.bound = max(self.bound, least - float(prices[is_limited] @ self.model.load_limits[is_limited]))
        self.accept_if_better(selection)
        return selection

    def find_feasible(self, prices: Floats) -> None:
        """Search for good selections within the limits, with prices that rise and then fall in smaller steps."""
        is_limited = np.isfinite(self.model.load_limits)
        if not is_limited.any():
            return
        unit = np.where(is_limited, max(abs(self.bound), 1e-12) / self.load_scale, 0.0)
        raised, step = prices.copy(), 0.02
        for _ in range(40):
            if not self.spend_elimination():
                break
            node, edge = self.model.priced_tables(raised)
            _, selection = minimise_exactly(self.model.elimination_order, node, edge)
            self.improve_locally(selection)
            excess = np.where(
                is_limited,
                self.model.selection_loads(selection) - np.where(is_limited, self.model.load_limits, 0.0),
                0.0,
            )
            if (excess <= 0).all():
                raised, step = raised - np.minimum(raised - prices, step * unit), step / 2
            else:
                raised, step = raised + step * unit * (excess > 0), step * 1.2

    def drop_choices(self, prices: Floats) -> None:
        """Drop every choice if its least total at these prices is above the best known value."""
        node, edge = self.model.priced_tables(prices)
        is_limited = np.isfinite(self.model.load_limits)
        constant = float(prices[is_limited] @ self.model.load_limits[is_limited])
        self.choice_bounds = tuple(
            totals - constant for totals in min_marginals(self.model.elimination_order, node, edge)
        )
        if self.best is None:
            return
        keep = [totals <= self.value + RELATIVE_SLACK * abs(self.value) for totals in self.choice_bounds]
        if all(mask.any() for mask in keep):
            self.model = self.model.keep_choices(keep)
            self.choice_bounds = tuple(totals[mask] for totals, mask in zip(self.choice_bounds, keep, strict=True))
        else:  # No remaining selection is better than the best one known.
            self.bound = max(self.bound, self.value)


def relax_with_prices(
    model: JointModel, start: Sequence[Sequence[int]] = (), budget: WorkBudget | None = None, iterations: int = 60
) -> RelaxedProblem:
    """Raise the bound with subgradient steps on the prices, beginning with the selections `start`.

    Without loads one elimination is the proof. Prices of limited loads are at least 0. Prices of a minimax objective
    sum to 1, because the largest load is at least any weighted mean of the loads. The search is deterministic.
    """
    search = _PriceSearch(model, start, budget or WorkBudget())
    if not len(model.load_limits):
        search.minimise_at_prices(np.zeros(0))
        return RelaxedProblem(search.bound, search.best, search.value, search.model, search.choice_bounds)
    is_unlimited = np.isinf(model.load_limits)
    prices = (
        np.where(is_unlimited, 1.0 / max(1, is_unlimited.sum()), 0.0)
        if model.is_minimax
        else np.zeros(len(model.load_limits))
    )
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
        if search.best is not None and search.value <= search.bound + RELATIVE_SLACK * abs(search.value):
            break
        prices = _update_prices(search, prices, selection, factor)
        if number % 10 == 9:
            search.find_feasible(best_prices)
            log.info("cpsat: relaxation %d: value %.6g, bound %.6g", number + 1, search.value, search.bound)
            search.drop_choices(best_prices)
    search.find_feasible(best_prices)
    search.drop_choices(best_prices)
    return RelaxedProblem(search.bound, search.best, search.value, search.model, search.choice_bounds)


def bound_without_elimination(
    model: JointModel, start: Sequence[Sequence[int]], budget: WorkBudget | None = None
) -> RelaxedProblem:
    """Return bounds for a graph that is too wide to eliminate.

    The bound is the sum of every table's own minimum. The best selection comes from elimination over the most promising
    choices, followed by local search.
    """
    search = _PriceSearch(model, start, budget or WorkBudget())
    edge_least = {e: float(table.min()) for e, table in model.edge.items()}
    least_total = sum(float(costs.min()) for costs in model.node) + sum(edge_least.values())
    choice_bounds = [costs + (least_total - costs.min()) for costs in model.node]
    for (i, j), table in model.edge.items():
        choice_bounds[i] = choice_bounds[i] + table.min(axis=1) - edge_least[i, j]
        choice_bounds[j] = choice_bounds[j] + table.min(axis=0) - edge_least[i, j]
    if not model.is_minimax:  # This one elimination is always done.
        promising = _most_promising(model, choice_bounds)
        _, selection = minimise_exactly(promising.elimination_order, promising.node, promising.edge)
        chosen = model.from_original(promising.to_original(selection))
        assert chosen is not None
        search.accept_if_better(chosen)
        search.improve_locally(chosen)
    return RelaxedProblem(
        max(float(totals.min()) for totals in choice_bounds), search.best, search.value, model, tuple(choice_bounds)
    )


def _most_promising(model: JointModel, choice_bounds: Sequence[Floats]) -> JointModel:
    """Return the model with as many choices as elimination can handle, those with the least bounds."""
    reduced, max_choices = model, max(map(len, choice_bounds))
    while reduced.elimination_order.largest_table > MAX_TABLE_ELEMENTS and max_choices > 1:
        max_choices = max_choices * 3 // 4
        reduced = model.keep_choices(
            [np.argsort(np.argsort(totals, kind="stable"), kind="stable") < max_choices for totals in choice_bounds]
        )
    return reduced


def _update_prices(search: _PriceSearch, prices: Floats, selection: Sequence[int], factor: float) -> Floats:
    """Return the prices after a step along the subgradient.

    The subgradient is the excess over the limits; for a minimax objective it is the difference to the weighted mean.
    """
    model = search.model
    loads, is_unlimited = model.selection_loads(selection), np.isinf(model.load_limits)
    if model.is_minimax:
        mean = float(prices[is_unlimited] @ loads[is_unlimited])
        spread = float(np.abs(loads[is_unlimited] - mean).max()) or 1.0
        moved = prices.copy()
        moved[is_unlimited] = prices[is_unlimited] * np.exp(factor * (loads[is_unlimited] - mean) / spread)
        moved[is_unlimited] /= moved[is_unlimited].sum()
        return np.where(is_unlimited, moved, np.maximum(0.0, prices + factor * _polyak_step(search, loads, selection)))
    return np.maximum(0.0, prices + factor * _polyak_step(search, loads, selection))


def _polyak_step(search: _PriceSearch, loads: Floats, selection: Sequence[int]) -> Floats:
    """Return Polyak's step for limited loads in relative units; 0 for the others."""
    capped = np.isfinite(search.model.load_limits)
    excess = np.where(capped, (loads - np.where(capped, search.model.load_limits, 0.0)) / search.load_scale, 0.0)
    norm = float(excess @ excess)
    if norm == 0:
        return excess
    bound = search.bound if np.isfinite(search.bound) else 0.0
    target = search.value if np.isfinite(search.value) else 1.5 * max(bound, search.model.value(selection))
    return max(target - bound, 1e-3 * abs(target)) * excess / norm / search.load_scale
