"""Exact minimum of a sum of tables over a graph, by variable elimination.

Each variable is a layer, and its values are the layer's choices (ways to split it). There is a table of costs for each
variable, and for each edge (pair of connected layers). The elimination of a variable adds up all tables with this
variable and minimises the sum over its choices. The result, called a message, is a table over the variable's
neighbours. In a chain of layers, this is the Viterbi algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.tables.cost_tables import LayerEdge

MAX_TABLE_ELEMENTS = 1 << 25
"""Largest number of elements of a table that elimination may build (256 MiB of 64-bit floats)."""
ADDITIONS_PER_READ = 3
"""Additions in the processor's cache that take as long as reading one element from memory."""


@dataclass(frozen=True, eq=False)
class _TableFactor:
    """A table of costs with one axis for each variable (layer) of `scope`."""

    scope: tuple[int, ...]
    table: Floats


@dataclass(frozen=True, eq=False)
class EliminationStep:
    """The elimination of one variable (layer), with the variables that are its neighbours at that time."""

    variable: int
    neighbours: tuple[int, ...]

    @property
    def scope(self) -> tuple[int, ...]:
        return self.variable, *self.neighbours


@dataclass(frozen=True, eq=False)
class EliminationOrder:
    """The order in which the variables of a graph are eliminated, which depends only on the graph.

    Attributes:
        choice_counts: Number of choices (ways to split it) of each variable (layer).
        steps: The steps, in order; each eliminates one variable.
    """

    choice_counts: tuple[int, ...]
    steps: tuple[EliminationStep, ...]

    @cached_property
    def step_of_variable(self) -> Mapping[int, int]:
        return {step.variable: k for k, step in enumerate(self.steps)}

    @cached_property
    def parents(self) -> tuple[int | None, ...]:
        """For each step, the later step that uses its result: the first one that eliminates a neighbour, or None."""
        return tuple(min((self.step_of_variable[v] for v in s.neighbours), default=None) for s in self.steps)

    @property
    def largest_table(self) -> int:
        return max(self.table_elements, default=1)

    @property
    def work(self) -> tuple[int, int]:
        """Work of the elimination of all variables: the number of elements that are read, and of NumPy calls."""
        return sum(self.table_elements) // ADDITIONS_PER_READ, 3 * len(self.steps)

    @cached_property
    def table_elements(self) -> tuple[int, ...]:
        return tuple(math.prod(self.choice_counts[v] for v in step.scope) for step in self.steps)


def build_elimination_order(choice_counts: Sequence[int], edges: Sequence[LayerEdge]) -> EliminationOrder:
    """Return the min-fill order: next is the variable whose elimination adds the fewest edges between its neighbours.

    Of equal variables, the one with the smallest table is next, then the one with the lowest index.

    Args:
        choice_counts: Number of choices of each variable (layer).
        edges: Pairs of connected variables.
    """
    neighbours_of: dict[int, set[int]] = {variable: set() for variable in range(len(choice_counts))}
    for i, j in edges:
        neighbours_of[i].add(j)
        neighbours_of[j].add(i)

    def cost(variable: int) -> tuple[int, int, int]:
        neighbours = neighbours_of[variable]
        missing = sum(len(neighbours - neighbours_of[u]) - 1 for u in neighbours) // 2
        return missing, math.prod(choice_counts[u] for u in (variable, *neighbours)), variable

    costs = {variable: cost(variable) for variable in neighbours_of}
    steps = []
    while costs:
        variable = min(costs, key=lambda variable: costs[variable])
        neighbours = neighbours_of.pop(variable)
        steps.append(EliminationStep(variable, tuple(sorted(neighbours))))
        del costs[variable]
        for u in neighbours:
            neighbours_of[u] |= neighbours - {u}
            neighbours_of[u].discard(variable)
        for u in neighbours.union(*(neighbours_of[w] for w in neighbours)):
            costs[u] = cost(u)
    return EliminationOrder(tuple(choice_counts), tuple(steps))


def minimise_exactly(
    order: EliminationOrder, node: Sequence[Floats], edge: Mapping[LayerEdge, Floats]
) -> tuple[float, tuple[int, ...]]:
    """Return the least sum of all cost tables, and the choice of each variable that leads to it.

    Of equally good choices, the one with the lowest index is returned.

    Args:
        order: The order of elimination. Variables are layers, choices are ways to split them.
        node: A table for each variable.
        edge: A table for each pair of connected variables.
    """
    factors, _, least = _eliminate(order, node, edge)
    selection = [0] * len(order.choice_counts)
    for step, step_factors in zip(reversed(order.steps), reversed(factors), strict=True):
        column: Floats = np.zeros(1)
        for factor in _small_first(step_factors):
            index = tuple(slice(None) if v == step.variable else selection[v] for v in factor.scope)
            column = column + factor.table[index]
        selection[step.variable] = int(column.argmin())
    return least, tuple(selection)


def min_marginals(
    order: EliminationOrder, node: Sequence[Floats], edge: Mapping[LayerEdge, Floats]
) -> tuple[Floats, ...]:
    """Return, for each choice of each variable, the least sum of all tables with this choice.

    Args:
        order: The order of elimination. Variables are layers, choices are ways to split them.
        node: A table for each variable.
        edge: A table for each pair of connected variables.
    """
    factors, messages, least_total = _eliminate(order, node, edge)
    marginals: list[Floats] = [np.zeros(0)] * len(order.choice_counts)
    children: dict[int | None, list[int]] = {}
    for child, parent in enumerate(order.parents):
        children.setdefault(parent, []).append(child)
    # From the last step to the first, each step adds up its tables, its children's messages and the table that its
    # parent has returned. To each child it returns this sum, minimised over other variables, minus the child's message.
    for k in range(len(order.steps) - 1, -1, -1):
        step = order.steps[k]
        table = _add_tables(order, step.scope, factors[k])
        least = table.min(axis=tuple(range(1, table.ndim)))
        # `least` covers one connected component of the graph. Add the minima of the other components.
        marginals[step.variable] = least + (least_total - least.min())
        for child in children.get(k, ()):
            neighbours = order.steps[child].neighbours
            other_axes = tuple(axis for axis, v in enumerate(step.scope) if v not in neighbours)
            kept = tuple(v for v in step.scope if v in neighbours)
            returned = table.min(axis=other_axes).transpose([kept.index(v) for v in neighbours])
            factors[child].append(_TableFactor(neighbours, returned - messages[child]))
        factors[k] = []
    return tuple(marginals)


def _eliminate(
    order: EliminationOrder, node: Sequence[Floats], edge: Mapping[LayerEdge, Floats]
) -> tuple[list[list[_TableFactor]], list[Floats], float]:
    """Eliminate all variables (layers) in order.

    Returns:
        The tables that each step adds up; the message of each step (their sum, minimised over the step's variable); the
        least sum of all tables.
    """
    factors: list[list[_TableFactor]] = [[] for _ in order.steps]
    for v, table in enumerate(node):
        factors[order.step_of_variable[v]].append(_TableFactor((v,), table))
    for scope, table in edge.items():
        factors[min(order.step_of_variable[v] for v in scope)].append(_TableFactor(scope, table))
    messages, least = list[Floats](), 0.0
    for k, step in enumerate(order.steps):
        messages.append(_minimise_first_axis(order, step.scope, factors[k]))
        parent = order.parents[k]
        if parent is None:
            least += float(messages[k])
        else:
            factors[parent].append(_TableFactor(step.neighbours, messages[k]))
    return factors, messages, least


def _small_first(factors: Sequence[_TableFactor]) -> list[_TableFactor]:
    """Return the tables ordered by size, so that sums are cheap and reproducible to the bit."""
    return sorted(factors, key=lambda factor: factor.table.size)


def _align_axes(scope: tuple[int, ...], factor: _TableFactor) -> Floats:
    """Return the table with one axis for each variable of `scope`, of length 1 for variables that it lacks."""
    order = sorted(range(len(factor.scope)), key=lambda axis: scope.index(factor.scope[axis]))
    lengths = dict(zip(factor.scope, factor.table.shape, strict=True))
    return factor.table.transpose(order).reshape([lengths.get(v, 1) for v in scope])


def _add_tables(order: EliminationOrder, scope: tuple[int, ...], factors: Sequence[_TableFactor]) -> Floats:
    total: Floats = np.zeros((1,) * len(scope))
    for factor in _small_first(factors):
        total = total + _align_axes(scope, factor)
    return np.ascontiguousarray(np.broadcast_to(total, tuple(order.choice_counts[v] for v in scope)))


def _minimise_first_axis(order: EliminationOrder, scope: tuple[int, ...], factors: Sequence[_TableFactor]) -> Floats:
    """Return the sum of the tables, minimised over the first variable of `scope`."""
    if len(scope) < 3:
        return np.asarray(_add_tables(order, scope, factors).min(axis=0))
    # Compute the sum in pieces that fit into the processor's cache.
    sizes = [order.choice_counts[v] for v in scope]
    tables = [_align_axes(scope, factor) for factor in _small_first(factors)]
    least: Floats = np.empty(sizes[1:])
    for i in range(sizes[1]):
        total: Floats = np.zeros((1,) * len(scope))
        for table in tables:
            total = total + (table if table.shape[1] == 1 else table[:, i : i + 1])
        least[i] = total.min(axis=0)[0]
    return least
