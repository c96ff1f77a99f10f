"""Local search: change the splits of single layers, then of sequences of layers, as long as the cost falls.

    ObjectiveTables + selections, shape (plans, layers) → improved selections

A choice is one way to split a layer over devices. A selection represents a plan: the number of one choice for each
layer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.gradient.objective_tables import ObjectiveTables, Selections
from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.tables.cost_tables import LayerEdge

_MAX_SWEEPS = 50
_PRICE_ROUNDS = 16
# Largest number of layers that change together. Fused layers must change together, because their extra rows (halos)
# depend on each other.
_MAX_RUN_LAYERS = 6
# Largest number of elements of a temporary array. Larger computations are done in blocks.
_MAX_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class LocalSearch:
    """Local search for selections with the least cost: one layer or a few layers change at a time.

    A selection has the number of one choice (way to split it) for each layer. The cost is Σ node (of choices) + Σ edge
    (of choices of two connected layers), plus a penalty for exceeded memory limits. When the budget is used up, the
    methods return the current selections.

    Attributes:
        tables: The costs of all choices, and the memory limits.
        budget: The work that the search may do.
    """

    tables: ObjectiveTables
    budget: WorkBudget = field(default_factory=WorkBudget)

    @cached_property
    def _neighbours(self) -> tuple[tuple[tuple[int, Floats], ...], ...]:
        """For each layer a, the layers b that are connected to it, each with a table of costs.

        The table has the shape (choices of b, choices of a), for the ways to split the layers.
        """
        joined: list[list[tuple[int, Floats]]] = [[] for _ in self.tables.node]
        for (i, j), table in self.tables.edge.items():
            joined[i].append((j, self._transposed_edges[i, j]))
            joined[j].append((i, table))
        return tuple(map(tuple, joined))

    def penalised_cost(self, selections: Selections) -> Floats:
        """Return the cost of each plan, shape (plans,), with the penalty for exceeded memory limits."""
        costs = self.tables.values(selections)
        if len(self.tables.limits):
            costs = costs + self.tables.excess_price * self.tables.relative_excess(self.tables.weight_loads(selections))
        return costs

    def run(self, selections: Selections, elite: int = 8) -> Selections:
        """Return improved selections (plans) without duplicates, the cheapest first.

        Single layers are changed in all selections, sequences of layers only in the `elite` cheapest ones.
        """
        single = self.rank(self.improve_layers(selections))
        best = single[:elite]
        if len(self.tables.limits):
            best = self.rank(self.improve_layers(self.price_memory(best)))
        for _ in range(_MAX_SWEEPS):
            after = self.improve_layers(self.improve_runs(best))
            if (self.penalised_cost(after) >= self.penalised_cost(best) * (1 - 1e-12)).all():
                break
            best = self.rank(after)
        return self.rank(np.concatenate((best, single[elite:])))

    def price_memory(self, selections: Selections) -> Selections:
        """Return the given selections (plans), and those found while prices of memory are adapted (dual ascent).

        Each byte of weights on a host has a price, which rises while the host has too many weights, and falls
        otherwise.
        """
        tables, met = self.tables, [selections]
        unit = tables.loss_scale / np.maximum(tables.limits, 1.0)
        prices = np.zeros((len(selections), len(tables.limits)))
        for step in range(_PRICE_ROUNDS):
            over = tables.weight_loads(met[-1]) / np.maximum(tables.limits, 1.0) - 1.0
            prices = np.maximum(prices + over / np.sqrt(1 + step / 4), 0.0)
            met.append(self.improve_runs(met[-1], prices * unit))
        return np.unique(np.concatenate(met), axis=0)

    def rank(self, selections: Selections) -> Selections:
        once = np.unique(selections, axis=0)
        return once[np.argsort(self.penalised_cost(once), kind="stable")]

    def improve_layers(self, selections: Selections) -> Selections:
        """Set one layer after another to its best choice (way to split it), until no layer changes."""
        current = selections.copy()
        layers = range(len(self.tables.node))
        for _ in range(_MAX_SWEEPS):
            before = current.copy()
            for a in (*layers, *reversed(layers)):
                if not self.budget.try_steps(*self._work_of(len(current), (a,))):
                    return current
                costs = self._choice_costs(current, a)
                if len(self.tables.limits):
                    rest = self.tables.weight_loads(current) - self.tables.weights[a][current[:, a]]
                    loads = rest[:, None, :] + self.tables.weights[a][None]
                    costs = costs + self.tables.excess_price * self.tables.relative_excess(loads)
                current[:, a] = _better_choices(costs, current[:, a])
            if (current == before).all():
                break
        return current

    @cached_property
    def _paths(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, a sequence of at most _MAX_RUN_LAYERS layers that begins with it, if there is any.

        Each layer reads the layer before it, and is connected to no other layer of the sequence except the next one.
        Dynamic programming can therefore find the best ways to split them.
        """
        readers: dict[int, list[int]] = {}
        for i, j in self.tables.edge:
            readers.setdefault(i, []).append(j)
        paths = []
        for layer in range(len(self.tables.node)):
            path = [layer]
            while len(path) < _MAX_RUN_LAYERS:
                connected = {b for a in path[:-1] for b, _ in self._neighbours[a]}
                next_layers = [j for j in readers.get(path[-1], ()) if j not in connected]
                if not next_layers:
                    break
                path.append(next_layers[0])
            if len(path) > 1:
                paths.append(tuple(path))
        return tuple(paths)

    def improve_runs(self, selections: Selections, prices: Floats | None = None) -> Selections:
        """Set one sequence of layers after another to its best choices (ways to split its layers).

        Without `prices`, no change violates a memory limit that was satisfied before.

        Args:
            selections: The selections.
            prices: Cost of a byte of weights on each limited host, shape (plans, limited hosts). It is added to the
                cost, and memory limits are then ignored.
        """
        current = selections.copy()
        # Without memory limits, the best choices of a sequence depend only on the choices of the layers around it. Skip
        # sequences that are known to be optimal for these.
        can_skip = prices is None and not len(self.tables.limits)
        for path in self._paths:
            rows = np.arange(len(current))
            if can_skip:
                rows = rows[[self._surroundings_key(row, path) not in self._known_optimal for row in current]]
            if not self.budget.try_steps(*self._work_of(len(rows), path)):
                break
            step = max(1, _MAX_BLOCK_ELEMENTS // max(self.tables.edge[pair].size for pair in pairwise(path)))
            for start in range(0, len(rows), step):
                block = rows[start : start + step]
                current[block] = self._improve_path(current[block], path, None if prices is None else prices[block])
            if can_skip:
                self._known_optimal.update(self._surroundings_key(row, path) for row in current[rows])
        return current

    @cached_property
    def _known_optimal(self) -> set[tuple[int, bytes]]:
        """Keys (see `_surroundings_key`) of sequences of layers that are split in the best way."""
        return set()

    @cached_property
    def _run_surroundings(self) -> dict[int, Selections]:
        """For each sequence of layers, by its first layer: the indices of its layers and of their direct neighbours."""
        return {
            path[0]: np.array(sorted({*path, *(b for a in path for b, _ in self._neighbours[a])}))
            for path in self._paths
        }

    def _surroundings_key(self, selection: Selections, path: Sequence[int]) -> tuple[int, bytes]:
        """Return a cache key: the ways to split the layers of a sequence and their direct neighbours."""
        return path[0], selection[self._run_surroundings[path[0]]].tobytes()

    def _improve_path(self, selections: Selections, path: Sequence[int], prices: Floats | None) -> Selections:
        """Return the plans with the best ways to split a sequence of layers, by dynamic programming.

        `prices` are the costs of a byte of weights, shape (plans, limited hosts). If None, memory limits are enforced
        instead.
        """
        costs = []
        for k, layer in enumerate(path):
            layer_costs = self._choice_costs(selections, layer, (*path[max(0, k - 1) : k], *path[k + 1 : k + 2]))
            costs.append(layer_costs if prices is None else layer_costs + prices @ self.tables.weights[layer].T)
        rows = np.arange(len(selections))
        least_costs, before = costs[0], costs[0][rows, selections[:, path[0]]]
        previous_choices: list[Selections] = []
        for (a, b), layer_costs in zip(pairwise(path), costs[1:], strict=True):
            at_a, at_b = selections[:, a], selections[:, b]
            before = before + layer_costs[rows, at_b] + self.tables.edge[a, b][at_a, at_b]
            both = least_costs[:, None, :] + self._transposed_edges[a, b][None]
            previous_choices.append(both.argmin(axis=2))
            least_costs = np.take_along_axis(both, previous_choices[-1][:, :, None], axis=2)[:, :, 0] + layer_costs
        chosen = least_costs.argmin(axis=1)
        least_costs, after = least_costs[rows, chosen], selections.copy()
        after[:, path[-1]] = chosen
        for layer, previous in zip(reversed(path[:-1]), reversed(previous_choices), strict=True):
            chosen = previous[rows, chosen]
            after[:, layer] = chosen
        if prices is not None:
            return after
        if len(self.tables.limits):
            least_costs, before = self.penalised_cost(after), self.penalised_cost(selections)
        return np.where((least_costs < before * (1 - 1e-12))[:, None], after, selections)

    @cached_property
    def _transposed_edges(self) -> dict[LayerEdge, Floats]:
        """Transposed cost tables of connected layers, because a minimum over the last axis is faster."""
        return {edge: np.ascontiguousarray(table.T) for edge, table in self.tables.edge.items()}

    def _work_of(self, plans: int, layers: Sequence[int]) -> tuple[int, int]:
        """Return the work to improve the given layers in some plans: array elements, and NumPy calls."""
        elements = sum(len(self.tables.node[a]) * (1 + len(self._neighbours[a])) for a in layers)
        pairs = sum(self.tables.edge[pair].size for pair in pairwise(layers))
        loads = len(self.tables.node) if len(self.tables.limits) else 0
        return plans * (elements + pairs + 4 * loads), 2 * len(layers) + loads // 4

    def _choice_costs(self, selections: Selections, a: int, without: Collection[int] = ()) -> Floats:
        """Return the cost of each choice (way to split it) of layer `a` in each plan, shape (plans, choices of a).

        It includes the transfers to and from connected layers, except those in `without`.
        """
        costs = np.repeat(self.tables.node[a][None], len(selections), axis=0)
        for b, table in self._neighbours[a]:
            if b not in without:
                costs += table[selections[:, b]]
        return costs


def _better_choices(costs: Floats, current: Selections) -> Selections:
    """Return the cheapest choice (way to split a layer) in each plan, or the current one if none is clearly cheaper.

    Args:
        costs: Costs of shape (plans, choices).
        current: Number of the current choice in each plan.
    """
    rows = np.arange(len(costs))
    best = costs.argmin(axis=1)
    present = costs[rows, current]
    return np.where(costs[rows, best] < present - 1e-12 * np.abs(present), best, current)
