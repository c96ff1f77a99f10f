"""Exact minimum of a sum of tables over a graph, by variable elimination.

    tables (choices of v,) + tables (choices of u, choices of v) → the minimum, and a selection that reaches it

Eliminating variable v adds up all tables that contain v, minimises the sum over v, and leaves a table over v's
neighbours (the message). In a chain this is the Viterbi algorithm. The cost grows with the size of the largest sum, so
that the order matters; min-fill is used.
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
"""Elements of the largest table that elimination may build (256 MiB), see `EliminationOrder.largest_table`."""


@dataclass(frozen=True, eq=False)
class _TableFactor:
    """A table over the variables of `scope`, with one axis for each."""

    scope: tuple[int, ...]
    table: Floats


@dataclass(frozen=True, eq=False)
class EliminationStep:
    """One step of the elimination."""

    variable: int
    neighbours: tuple[int, ...]

    @property
    def scope(self) -> tuple[int, ...]:
        return self.variable, *self.neighbours


@dataclass(frozen=True, eq=False)
class EliminationOrder:
    """The elimination order of a graph. It does not depend on the values of the tables.

    Attributes:
        choice_counts: Number of choices of each variable.
        steps: The steps, in order.
    """

    choice_counts: tuple[int, ...]
    steps: tuple[EliminationStep, ...]

    @cached_property
    def step_of_variable(self) -> Mapping[int, int]:
        """Variable → number of its step."""
        return {bucket.variable: k for k, bucket in enumerate(self.steps)}

    @property
    def largest_table(self) -> int:
        """Elements of the largest table that is built."""
        return max(self.table_elements, default=1)

    @cached_property
    def table_elements(self) -> tuple[int, ...]:
        """Elements of each step's table."""
        return tuple(math.prod(self.choice_counts[v] for v in bucket.scope) for bucket in self.steps)


def build_elimination_order(sizes: Sequence[int], edges: Sequence[LayerEdge]) -> EliminationOrder:
    """Return the min-fill order: next is the variable whose neighbours miss the fewest edges.

    Of equal ones the variable with the smallest table is next, then the first.
    """
    neighbours_of: dict[int, set[int]] = {variable: set() for variable in range(len(sizes))}
    for i, j in edges:
        neighbours_of[i].add(j)
        neighbours_of[j].add(i)

    def cost(variable: int) -> tuple[int, int, int]:
        neighbours = neighbours_of[variable]
        missing = sum(len(neighbours - neighbours_of[u]) - 1 for u in neighbours) // 2
        return missing, math.prod(sizes[u] for u in (variable, *neighbours)), variable

    costs = {variable: cost(variable) for variable in neighbours_of}
    buckets = []
    while costs:
        variable = min(costs, key=lambda variable: costs[variable])
        neighbours = neighbours_of.pop(variable)
        buckets.append(EliminationStep(variable, tuple(sorted(neighbours))))
        del costs[variable]
        for u in neighbours:
            neighbours_of[u] |= neighbours - {u}
            neighbours_of[u].discard(variable)
        for u in neighbours.union(*(neighbours_of[w] for w in neighbours)):
            costs[u] = cost(u)
    return EliminationOrder(tuple(sizes), tuple(buckets))


def minimise_exactly(
    plan: EliminationOrder, node: Sequence[Floats], edge: Mapping[LayerEdge, Floats]
) -> tuple[float, tuple[int, ...]]:
    """Return the least Σ node + Σ edge, and the selection that reaches it with the lowest choices first."""
    factors = _place_tables(plan, node, edge)
    least = 0.0
    for k, bucket in enumerate(plan.steps):
        least += _send_message(plan, factors, k, _minimise_first_axis(plan, bucket.scope, factors[k]))
    selection = [0] * len(plan.choice_counts)
    for bucket, bucket_factors in zip(reversed(plan.steps), reversed(factors), strict=True):
        scope = bucket.scope
        column: Floats = np.zeros(1)
        for factor in _small_first(bucket_factors):
            at = tuple(slice(None) if v == bucket.variable else selection[v] for v in factor.scope)
            column = column + factor.table[at]
        selection[scope[0]] = int(column.argmin())
    return least, tuple(selection)


def min_marginals(
    plan: EliminationOrder, node: Sequence[Floats], edge: Mapping[LayerEdge, Floats]
) -> tuple[Floats, ...]:
    """Return for each variable the least total (choices,) with each of its choices fixed.

    Messages are first sent upwards, as in `minimise_exactly`. Then each step returns to its children its own joint
    table, minimised over the other variables, without the child's own message.
    """
    factors = _place_tables(plan, node, edge)
    messages: list[Floats] = []
    parents: list[int | None] = []
    roots = []
    for k, bucket in enumerate(plan.steps):
        message = _minimise_first_axis(plan, bucket.scope, factors[k])
        messages.append(message)
        parents.append(_receiving_step(plan, bucket))
        roots.append(_send_message(plan, factors, k, message))
    constant = sum(roots)
    marginals: list[Floats] = [np.zeros(0)] * len(plan.choice_counts)
    back: list[_TableFactor | None] = [None] * len(plan.steps)
    children: dict[int, list[int]] = {}
    for k, parent in enumerate(parents):
        if parent is not None:
            children.setdefault(parent, []).append(k)
    for k in range(len(plan.steps) - 1, -1, -1):
        bucket, returned = plan.steps[k], back[k]
        table = _add_tables(plan, bucket.scope, [*factors[k], returned] if returned is not None else factors[k])
        least = table.min(axis=tuple(range(1, table.ndim)))
        # The constant contains the minima of all connected components, this root's included.
        marginals[bucket.variable] = least + (constant - least.min())
        for child in children.get(k, ()):
            rest = plan.steps[child].neighbours
            gone = tuple(axis for axis, v in enumerate(bucket.scope) if v not in rest)
            kept = tuple(v for v in bucket.scope if v in rest)
            down = table.min(axis=gone)
            order = [kept.index(v) for v in rest]
            back[child] = _TableFactor(rest, down.transpose(order) - messages[child])
        factors[k] = []
    return tuple(marginals)


def _receiving_step(plan: EliminationOrder, bucket: EliminationStep) -> int | None:
    """Return the step that receives the message: that of the first neighbour to be eliminated."""
    return min((plan.step_of_variable[v] for v in bucket.neighbours), default=None)


def _place_tables(
    plan: EliminationOrder, node: Sequence[Floats], edge: Mapping[LayerEdge, Floats]
) -> list[list[_TableFactor]]:
    """Return for each step the tables whose first eliminated variable is the step's."""
    factors: list[list[_TableFactor]] = [[] for _ in plan.steps]
    for v, table in enumerate(node):
        factors[plan.step_of_variable[v]].append(_TableFactor((v,), table))
    for scope, table in edge.items():
        factors[min(plan.step_of_variable[v] for v in scope)].append(_TableFactor(scope, table))
    return factors


def _send_message(plan: EliminationOrder, factors: list[list[_TableFactor]], k: int, message: Floats) -> float:
    """Give a step's message to the receiving step; without neighbours it is a number, which is returned."""
    parent = _receiving_step(plan, plan.steps[k])
    if parent is None:
        return float(message)
    factors[parent].append(_TableFactor(plan.steps[k].neighbours, message))
    return 0.0


def _small_first(factors: Sequence[_TableFactor]) -> list[_TableFactor]:
    """Return the factors ordered by size, so that sums are cheap and reproducible to the bit."""
    return sorted(factors, key=lambda factor: factor.table.size)


def _align_axes(scope: tuple[int, ...], factor: _TableFactor) -> Floats:
    """Return the factor's table with one axis, possibly of length 1, for each variable of `scope`."""
    order = sorted(range(len(factor.scope)), key=lambda axis: scope.index(factor.scope[axis]))
    lengths = dict(zip(factor.scope, factor.table.shape, strict=True))
    return factor.table.transpose(order).reshape([lengths.get(v, 1) for v in scope])


def _add_tables(plan: EliminationOrder, scope: tuple[int, ...], factors: Sequence[_TableFactor]) -> Floats:
    """Return the sum of the factors as one table over `scope`."""
    total: Floats = np.zeros((1,) * len(scope))
    for factor in _small_first(factors):
        total = total + _align_axes(scope, factor)
    return np.ascontiguousarray(np.broadcast_to(total, tuple(plan.choice_counts[v] for v in scope)))


def _minimise_first_axis(plan: EliminationOrder, scope: tuple[int, ...], factors: Sequence[_TableFactor]) -> Floats:
    """Return the minimum of the joint table over its first variable, in pieces that fit into the cache."""
    least: Floats
    if len(scope) < 3:
        least = _add_tables(plan, scope, factors).min(axis=0)
        return least
    sizes = [plan.choice_counts[v] for v in scope]
    tables = [_align_axes(scope, factor) for factor in _small_first(factors)]
    least = np.empty(sizes[1:])
    for i in range(sizes[1]):
        total: Floats = np.zeros((1,) * len(scope))
        for table in tables:
            total = total + (table if table.shape[1] == 1 else table[:, i : i + 1])
        least[i] = total.min(axis=0)[0]
    return least
