"""Exact minimum of a sum of tables over a graph, by variable elimination (min-plus, min-fill order).

Unary tables + edge tables → the minimum, a selection that has it, and the minimum for each choice held fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dicompiler_strategies.tables.cost_tables import Edge
from dicompiler_strategies.tables.footprints import Floats

LIMIT = 1 << 25
"""Elements of the largest table that elimination may make (256 MiB); see `Graph.widest`."""


@dataclass(frozen=True, eq=False)
class _Factor:
    """A table over the variables of `scope`, one axis for each."""

    scope: tuple[int, ...]
    table: Floats


@dataclass(frozen=True, eq=False)
class Bucket:
    """One step of the elimination: `variable` goes, `rest` are its neighbours by then."""

    variable: int
    rest: tuple[int, ...]

    @property
    def scope(self) -> tuple[int, ...]:
        return self.variable, *self.rest


@dataclass(frozen=True, eq=False)
class Graph:
    """The shape of a problem and the order of its elimination; it does not depend on what the tables hold.

    sizes: choices of each variable.
    """

    sizes: tuple[int, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Variable → the number of its bucket."""
        return {bucket.variable: k for k, bucket in enumerate(self.buckets)}

    @property
    def widest(self) -> int:
        """Elements of the largest table on the way."""
        return max(self.elements, default=1)

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Elements of each bucket's table."""
        return tuple(math.prod(self.sizes[v] for v in bucket.scope) for bucket in self.buckets)


def graph(sizes: Sequence[int], edges: Sequence[Edge]) -> Graph:
    """The elimination order: always a variable whose neighbours miss the fewest edges among them (min-fill), of equals
    the one with the smallest table, then the first."""
    around: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for i, j in edges:
        around[i].add(j)
        around[j].add(i)

    def price(v: int) -> tuple[int, int, int]:
        near = around[v]
        missing = sum(len(near - around[u]) - 1 for u in near) // 2
        return missing, math.prod(sizes[u] for u in (v, *near)), v

    prices = {v: price(v) for v in around}
    buckets = []
    while prices:
        v = min(prices, key=lambda v: prices[v])
        near = around.pop(v)
        buckets.append(Bucket(v, tuple(sorted(near))))
        del prices[v]
        for u in near:
            around[u] |= near - {u}
            around[u].discard(v)
        for u in near.union(*(around[w] for w in near)):
            prices[u] = price(u)
    return Graph(tuple(sizes), tuple(buckets))


def minimise(plan: Graph, node: Sequence[Floats], edge: Mapping[Edge, Floats]) -> tuple[float, tuple[int, ...]]:
    """(the least Σ node + Σ edge, a selection that has it; of equals the one with the lowest choices met first)."""
    factors = _placed(plan, node, edge)
    least = 0.0
    for k, bucket in enumerate(plan.buckets):
        least += _send(plan, factors, k, _least(plan, bucket.scope, factors[k]))
    selection = [0] * len(plan.sizes)
    for bucket, bucket_factors in zip(reversed(plan.buckets), reversed(factors), strict=True):
        scope = bucket.scope
        column: Floats = np.zeros(1)
        for factor in _in_order(bucket_factors):
            at = tuple(slice(None) if v == bucket.variable else selection[v] for v in factor.scope)
            column = column + factor.table[at]
        selection[scope[0]] = int(column.argmin())
    return least, tuple(selection)


def min_marginals(plan: Graph, node: Sequence[Floats], edge: Mapping[Edge, Floats]) -> tuple[Floats, ...]:
    """For each variable the least total (choices,) with each of its choices held fast.

    Upwards as `minimise`; then downwards: what a bucket gets back from the one it sent to is that one's joint table,
    minimised to the common variables, less what it had sent itself.
    """
    factors = _placed(plan, node, edge)
    messages: list[Floats] = []
    parents: list[int | None] = []
    roots = []
    for k, bucket in enumerate(plan.buckets):
        message = _least(plan, bucket.scope, factors[k])
        messages.append(message)
        parents.append(_parent(plan, bucket))
        roots.append(_send(plan, factors, k, message))
    constant = sum(roots)
    marginals: list[Floats] = [np.zeros(0)] * len(plan.sizes)
    back: list[_Factor | None] = [None] * len(plan.buckets)
    children: dict[int, list[int]] = {}
    for k, parent in enumerate(parents):
        if parent is not None:
            children.setdefault(parent, []).append(k)
    for k in range(len(plan.buckets) - 1, -1, -1):
        bucket, returned = plan.buckets[k], back[k]
        table = _joined(plan, bucket.scope, [*factors[k], returned] if returned is not None else factors[k])
        least = table.min(axis=tuple(range(1, table.ndim)))
        # A root's own minimum is part of the constant already: other components' minima come on top of its own.
        marginals[bucket.variable] = least + (constant - least.min())
        for child in children.get(k, ()):
            rest = plan.buckets[child].rest
            gone = tuple(axis for axis, v in enumerate(bucket.scope) if v not in rest)
            kept = tuple(v for v in bucket.scope if v in rest)
            down = table.min(axis=gone)
            order = [kept.index(v) for v in rest]
            back[child] = _Factor(rest, down.transpose(order) - messages[child])
        factors[k] = []
    return tuple(marginals)


def _parent(plan: Graph, bucket: Bucket) -> int | None:
    """The bucket that takes the message: the first of the neighbours to go."""
    return min((plan.places[v] for v in bucket.rest), default=None)


def _placed(plan: Graph, node: Sequence[Floats], edge: Mapping[Edge, Floats]) -> list[list[_Factor]]:
    """Every table in the bucket of its first variable to go."""
    factors: list[list[_Factor]] = [[] for _ in plan.buckets]
    for v, table in enumerate(node):
        factors[plan.places[v]].append(_Factor((v,), table))
    for scope, table in edge.items():
        factors[min(plan.places[v] for v in scope)].append(_Factor(scope, table))
    return factors


def _send(plan: Graph, factors: list[list[_Factor]], k: int, message: Floats) -> float:
    """Puts a bucket's message where it belongs; without neighbours it is a number, which is returned."""
    parent = _parent(plan, plan.buckets[k])
    if parent is None:
        return float(message)
    factors[parent].append(_Factor(plan.buckets[k].rest, message))
    return 0.0


def _in_order(factors: Sequence[_Factor]) -> list[_Factor]:
    """The small ones first, so that adding them up is cheap. Always the same order: so are the sums, to the bit."""
    return sorted(factors, key=lambda factor: factor.table.size)


def _aligned(scope: tuple[int, ...], factor: _Factor) -> Floats:
    """The factor's table with an axis for each variable of `scope`, of length 1 where it does not depend on it."""
    order = sorted(range(len(factor.scope)), key=lambda axis: scope.index(factor.scope[axis]))
    lengths = dict(zip(factor.scope, factor.table.shape, strict=True))
    return factor.table.transpose(order).reshape([lengths.get(v, 1) for v in scope])


def _joined(plan: Graph, scope: tuple[int, ...], factors: Sequence[_Factor]) -> Floats:
    """The sum of the factors as one table over `scope`."""
    total: Floats = np.zeros((1,) * len(scope))
    for factor in _in_order(factors):
        total = total + _aligned(scope, factor)
    return np.ascontiguousarray(np.broadcast_to(total, tuple(plan.sizes[v] for v in scope)))


def _least(plan: Graph, scope: tuple[int, ...], factors: Sequence[_Factor]) -> Floats:
    """The minimum of the joint table over its first variable, worked out in pieces that stay in the cache."""
    least: Floats
    if len(scope) < 3:
        least = _joined(plan, scope, factors).min(axis=0)
        return least
    sizes = [plan.sizes[v] for v in scope]
    tables = [_aligned(scope, factor) for factor in _in_order(factors)]
    least = np.empty(sizes[1:])
    for i in range(sizes[1]):
        total: Floats = np.zeros((1,) * len(scope))
        for table in tables:
            total = total + (table if table.shape[1] == 1 else table[:, i : i + 1])
        least[i] = total.min(axis=0)[0]
    return least
