"""Candidates for the simulator: plans that are best under the barrier model, or would be if sending cost less.

Problem + Tables → selections;   Problem + plans → the plan that the simulator finds best.

The barrier model counts all sending, but without barriers much of it goes on beside the computing. So the optimum is
found anew with the edges at a fraction λ of their time, for several λ, and the simulator chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dicompiler.limits import fits
from dicompiler.metrics import Metrics
from dicompiler.plan import Plan
from dicompiler.problem import Problem
from dicompiler.tables import Tables
from dicompiler_strategies.joint.elimination import LIMIT, graph, minimise

LAMBDAS = (1.0, 0.7, 0.5, 0.3, 0.15, 0.05)
"""Of VGG16 and ResNet-50 on 4 and 8 devices no best plan lay outside these."""
PARTS = 6_000
"""Parts of all layers beyond which a plan takes too long to be simulated in a search: it is estimated then."""


@dataclass(frozen=True)
class Weighed:
    """A plan and what it comes to."""

    plan: Plan
    metrics: Metrics
    origin: str

    def value(self, problem: Problem) -> float:
        """The objective's value."""
        return self.metrics.value(problem.objective)


def weigh(problem: Problem, plans: Iterable[tuple[Plan, str]]) -> list[Weighed]:
    """The plans (each with its origin) with their simulated metrics, at once where the problem has an executor; without
    those that fit no memory or do not fit the layers."""
    given = list(plans)
    small = [plan for plan, _ in given if _is_small(plan)]
    simulated = iter(problem.evaluate_all(small))
    found = []
    for plan, origin in given:
        metrics = next(simulated) if _is_small(plan) else problem.estimate(plan)
        if isinstance(metrics, Metrics) and fits(problem, plan, metrics):
            found.append(Weighed(plan, metrics, origin))
    return found


def _is_small(plan: Plan) -> bool:
    return sum(map(len, plan.layers.values())) <= PARTS


def best(problem: Problem, found: Iterable[Weighed]) -> Weighed | None:
    """The one with the least value, the first of equals; None where there is none."""
    return min(found, key=lambda one: one.value(problem), default=None)


def family(tables: Tables, lambdas: Sequence[float] = LAMBDAS) -> Iterator[tuple[int, ...]]:
    """The optimum for each λ, without repetitions; nothing where the layer graph is too entangled to eliminate."""
    order = graph([len(own) for own in tables.choices], list(tables.edge))
    if order.widest > LIMIT:
        return
    seen = set()
    for scale in lambdas:
        _, selection = minimise(order, tables.node, {edge: scale * table for edge, table in tables.edge.items()})
        if selection not in seen:
            seen.add(selection)
            yield selection


def neighbours(tables: Tables, selection: Sequence[int], seed: int, scale: float = 0.5) -> Iterator[tuple[int, ...]]:
    """Endless: selections near `selection`, in turn one with another choice for one layer (among the four that the
    barrier model likes best there) and the optimum under randomly disturbed times."""
    random = np.random.default_rng(seed)
    order = graph([len(own) for own in tables.choices], list(tables.edge))
    free = [i for i, own in enumerate(tables.choices) if len(own) > 1]
    while free:
        i = free[int(random.integers(len(free)))]
        around = tables.node[i].copy()
        for (a, b), table in tables.edge.items():
            if b == i:
                around = around + scale * table[selection[a], :]
            if a == i:
                around = around + scale * table[:, selection[b]]
        others = [int(k) for k in np.argsort(around, kind="stable") if k != selection[i]][:4]
        chosen = others[int(random.integers(len(others)))]
        yield (*selection[:i], chosen, *selection[i + 1 :])
        if order.widest <= LIMIT:
            node = [own * np.exp(random.normal(0, 0.1)) for own in tables.node]
            edge = {key: scale * table * np.exp(random.normal(0, 0.3)) for key, table in tables.edge.items()}
            yield minimise(order, node, edge)[1]
