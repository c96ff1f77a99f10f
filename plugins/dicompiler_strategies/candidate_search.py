"""Candidates for the simulator: plans that are best under the barrier model, or would be if sending cost less.

Problem + Tables → selections;   Problem + plans → the plan that the simulator finds best, and plans around it.

The barrier model counts all sending, but without barriers much of it goes on beside the computing. So the optimum is
found anew with the edges at a fraction λ of their time, for several λ, and the simulator chooses. Around the best one
runs of layers are then decided anew, also with cheaper sending, as long as the simulator likes what comes of it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Plan, Problem
from dicompiler.plugin_api.costs import Metrics
from dicompiler.plugin_api.search import WorkBudget, fits_constraints
from dicompiler_strategies.joint.variable_elimination import (
    MAX_TABLE_ELEMENTS,
    build_elimination_order,
    minimise_exactly,
)
from dicompiler_strategies.overlap_waves import FIRST_WAVE_SHARES, SHARE_STEPS, overlap_orders
from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.tables.cost_tables import CostTables, LayerEdge, restrict_edges, to_original_numbers
from dicompiler_strategies.trim_parts import trim_parts
from dicompiler_strategies.work import EVALUATED_PARTS_PER_S

log = logging.getLogger("dicompiler")

LAMBDAS = (1.0, 0.7, 0.5, 0.3, 0.15, 0.05)
"""Of VGG16 and ResNet-50 on 4 and 8 devices no best plan lay outside these."""
MAX_SIMULATED_PARTS = 6_000
"""Parts of all layers beyond which a plan takes too long to be simulated in a search: it is estimated then."""
HOPELESS_RATIO = 2.2
"""Without barriers times are up to 54 % lower (VGG16): what the barrier model gives more than this many times the best
simulated time is not simulated."""
NEIGHBOURS_PER_STEP = 4
"""Plans around the best one that are evaluated before going on."""
MAX_SPARING_LOSS = 1.02
"""How many times its value a plan may cost that holds fewer weights: predictions are further off than that."""
MAX_SPARED_LAYERS = 8
MAX_RUN_LAYERS = 256
"""In a run of layers that is decided anew."""
MAX_RUN_CHOICES = 48
"""Choices of a layer when a run of layers is decided anew."""
MAX_VAIN_TRIES = 100
"""Plans that are tried around the best one without a better one."""
MAX_TRIED_PARTS = 20_000
"""Parts of all plans that are tried around the best one: they take about ten seconds."""


@dataclass(frozen=True)
class EvaluatedPlan:
    """A plan and what it comes to."""

    plan: Plan
    metrics: Metrics
    origin: str

    def value(self, problem: Problem) -> float:
        """The objective's value."""
        return self.metrics.objective_value(problem.objective)


def evaluate_plans(problem: Problem, plans: Iterable[tuple[Plan, str]]) -> list[EvaluatedPlan]:
    """The plans (each with its origin) with their simulated metrics, at once where the problem has an executor; without
    those that fit no memory or do not fit the layers."""
    given = list(plans)
    small = [plan for plan, _ in given if _count_parts(plan) <= MAX_SIMULATED_PARTS]
    simulated = iter(problem.evaluate_all(small))
    evaluated = []
    for plan, origin in given:
        metrics = next(simulated) if _count_parts(plan) <= MAX_SIMULATED_PARTS else problem.estimate(plan)
        if isinstance(metrics, Metrics) and fits_constraints(problem, plan, metrics):
            evaluated.append(EvaluatedPlan(plan, metrics, origin))
    return evaluated


def _count_parts(plan: Plan) -> int:
    """Parts of all layers."""
    return sum(map(len, plan.layers.values()))


def find_optima(tables: CostTables, lambdas: Sequence[float] = LAMBDAS) -> Iterator[tuple[int, ...]]:
    """The optimum for each λ, without repetitions; nothing where the layer graph is too entangled to eliminate."""
    order = build_elimination_order(tables.choice_counts, list(tables.edge_seconds))
    if order.largest_table > MAX_TABLE_ELEMENTS:
        return
    seen = set()
    for scale in lambdas:
        _, selection = minimise_exactly(
            order, tables.node_seconds, {edge: scale * table for edge, table in tables.edge_seconds.items()}
        )
        if selection not in seen:
            seen.add(selection)
            yield selection


class CandidateSearch:
    """The best plan so far, by simulation. Plans are evaluated a few at a time, the same ones whether there is
    somebody to evaluate them at once or not.

    name: who searches, for the log. allowance: what may still be tried; it is spent.
    """

    def __init__(self, problem: Problem, name: str, allowance: WorkBudget | None = None) -> None:
        self.problem, self.name, self.allowance = problem, name, allowance or WorkBudget()
        # A target has no part in any objective, and to ask it what it adds to memory takes a program: only what would
        # be the best is evaluated with it.
        self.problem_without_target = replace(problem, target=None)
        self.best: EvaluatedPlan | None = None
        self._seen: set[object] = set()

    def try_plans(self, plans: Iterable[tuple[Plan, str]]) -> bool:
        """Whether one of the plans is better than the best so far, which it then is. Where there is one, plans that
        would take more than what is left of the allowance are left out."""
        new = []
        for plan, origin in plans:
            key = tuple(plan.layers.values()), tuple(tuple(one.items()) for one in plan.replicas)
            if key not in self._seen:
                self._seen.add(key)
                if not self._spend_evaluation(plan):
                    break
                new.append((plan, origin))
        return self.accept_best(evaluate_plans(self.problem_without_target, new))

    def accept_best(self, evaluated: Iterable[EvaluatedPlan]) -> bool:
        """The same of what is evaluated already; of equals the first."""
        least = math.inf if self.best is None else self.best.value(self.problem)
        for one in sorted(evaluated, key=lambda one: one.value(self.problem)):
            value = one.value(self.problem)
            if value >= least:
                return False
            if self.problem.target is None or evaluate_plans(self.problem, [(one.plan, one.origin)]):
                self.best = one
                log.info("%s: %s: %s %.4g", self.name, one.origin, self.problem.objective, value)
                return True
        return False

    def _spend_evaluation(self, plan: Plan) -> bool:
        """Counts an evaluation; whether it may still be done: the first one is, whatever it takes."""
        seconds = _count_parts(plan) / EVALUATED_PARTS_PER_S
        if self.best is None:
            self.allowance.spend(seconds)
            return True
        return self.allowance.try_spend(seconds)

    def try_optima(self, tables: CostTables) -> None:
        """Evaluates the optima of the tables with cheaper sending."""
        for selection in find_optima(tables):
            if self.allowance.is_exceeded():
                return
            if not self._is_hopeless(tables, selection):
                self.try_plans([(tables.plan(selection), "cpsat")])

    def try_neighbours(self, tables: CostTables, tries: int, seed: int) -> None:
        """Tries plans around the best one, if it is one of the tables', and goes on from any that is better: so many in
        all, or PATIENCE of them in vain, or EFFORT parts, whatever is less."""
        selection = None if self.best is None else tables.find_selection(self.best.plan)
        effort, last = MAX_TRIED_PARTS, 0
        for step in range(0, tries, NEIGHBOURS_PER_STEP):
            if (
                self.best is None
                or selection is None
                or effort < 0
                or step - last > MAX_VAIN_TRIES
                or self.allowance.is_exceeded()
            ):
                return
            moves = itertools.islice(neighbours(tables, selection, seed + step), min(NEIGHBOURS_PER_STEP, tries - step))
            plans = [tables.plan(move) for move in moves if not self._is_hopeless(tables, move)]
            effort -= sum(map(_count_parts, plans))
            origin = self.best.origin  # whose plan it was at first
            if self.try_plans((plan, origin) for plan in plans):
                selection, last = tables.find_selection(self.best.plan), step

    def reduce_weights(self, tables: CostTables) -> None:
        """Where a device holds more weights of a layer than it must, and the value is hardly worse without them (SPARED
        in all), it holds fewer: tried for the SPARING layers with most of them, if they are a hundredth of all."""
        selection = None if self.best is None else tables.find_selection(self.best.plan)
        if self.best is None or selection is None or self.problem.objective != "latency":
            return
        limit = MAX_SPARING_LOSS * self.best.value(self.problem)
        most = [weights.max(axis=1) for weights in tables.weight_bytes]
        beyond = [int(held[chosen] - held.min()) for held, chosen in zip(most, selection, strict=True)]
        worth = sum(int(held[chosen]) for held, chosen in zip(most, selection, strict=True)) / 100
        for i in sorted(range(len(beyond)), key=lambda i: -beyond[i])[:MAX_SPARED_LAYERS]:
            if beyond[i] <= worth or self.allowance.is_exceeded():
                return
            (seconds,), _ = _restrict_to_layers(tables, selection, [i], 1.0)
            fewest = np.flatnonzero(most[i] == most[i].min())
            tried = (*selection[:i], int(fewest[seconds[fewest].argmin()]), *selection[i + 1 :])
            plan = tables.plan(tried)
            if not self._spend_evaluation(plan):
                return
            for one in evaluate_plans(self.problem_without_target, [(plan, self.best.origin)]):
                alike = one.value(self.problem) <= limit
                if alike and (self.problem.target is None or evaluate_plans(self.problem, [(one.plan, one.origin)])):
                    self.best, selection = one, tried

    def trim(self) -> None:
        """Evaluates the best plan without what nobody reads."""
        if (
            self.best is not None
            and self.problem.model is not None
            and _count_parts(self.best.plan) <= MAX_SIMULATED_PARTS
        ):
            self.try_plans([(trim_parts(self.problem, self.best.plan), self.best.origin)])

    def try_waves(self, others: Iterable[Plan] = ()) -> None:
        """Evaluates the best plan, and others, in waves: what others wait for first, the rest while that travels."""
        if self.best is None or self.problem.objective != "latency" or self.problem.model is None:
            return
        for plan in (self.best.plan, *others):
            if _count_parts(plan) <= MAX_SIMULATED_PARTS // 2:
                self._try_wave_shares(plan, self.best.origin)

    def _try_wave_shares(self, plan: Plan, origin: str) -> None:
        """Evaluates a plan in waves of the usual shares, then of shares nearer and nearer to that of the best one."""
        best = 1.0
        for step in (0.0, *SHARE_STEPS):
            for share, waved in overlap_orders(
                self.problem, plan, (best - step, best + step) if step else FIRST_WAVE_SHARES
            ):
                if self.allowance.is_exceeded():
                    return
                if self.try_plans([(waved, origin)]):
                    best = share
            if best == 1.0:
                return

    def _is_hopeless(self, tables: CostTables, selection: Sequence[int]) -> bool:
        """Whether the tables' seconds are so many that simulating them is in vain."""
        if self.best is None or self.problem.objective != "latency":
            return False
        return tables.total_seconds(selection) > HOPELESS_RATIO * self.best.value(self.problem)


def neighbours(
    tables: CostTables, selection: Sequence[int], seed: int, scale: float = 0.5
) -> Iterator[tuple[int, ...]]:
    """Endless: selections near `selection`, in turn one with another choice for one layer (among the four that the
    barrier model likes best there) and one with a run of layers decided anew, see `_decided`."""
    random = np.random.default_rng(seed)
    free = [i for i, count in enumerate(tables.choice_counts) if count > 1]
    while free:
        i = free[int(random.integers(len(free)))]
        around, _ = _restrict_to_layers(tables, selection, [i], scale)
        others = [int(k) for k in np.argsort(around[0], kind="stable") if k != selection[i]][:4]
        chosen = others[int(random.integers(len(others)))]
        yield (*selection[:i], chosen, *selection[i + 1 :])
        anew = _redecide_run(tables, selection, random)
        if anew is not None:
            yield anew


def _redecide_run(tables: CostTables, selection: Sequence[int], random: np.random.Generator) -> tuple[int, ...] | None:
    """The selection with the optimum for a run of layers of random place and length: with sending at one of the
    fractions λ of its time, and all times disturbed. None where that is too entangled."""
    count = len(selection)
    length = min(count, MAX_RUN_LAYERS, 2 ** int(random.integers(1, count.bit_length() + 2)))
    start = int(random.integers(count - length + 1))
    node, edge = _restrict_to_layers(tables, selection, range(start, start + length), float(random.choice(LAMBDAS)))
    node = [seconds * np.exp(random.normal(0, 0.1)) for seconds in node]
    edge = {key: table * np.exp(random.normal(0, 0.3)) for key, table in edge.items()}
    kept = _promising_choices(node, edge)
    order = build_elimination_order([len(few) for few in kept], list(edge))
    if order.largest_table > MAX_TABLE_ELEMENTS:
        return None
    node = [seconds[few] for seconds, few in zip(node, kept, strict=True)]
    chosen = to_original_numbers(kept, minimise_exactly(order, node, restrict_edges(edge, kept))[1])
    return (*selection[:start], *chosen, *selection[start + length :])


def _promising_choices(node: Sequence[Floats], edge: Mapping[LayerEdge, Floats]) -> list[NDArray[np.intp]]:
    """For each layer the choices, at most FEW, that cost least if the others suit them."""
    least = [seconds.copy() for seconds in node]
    for (i, j), table in edge.items():
        least[i] += table.min(axis=1)
        least[j] += table.min(axis=0)
    return [np.sort(np.argsort(seconds, kind="stable")[:MAX_RUN_CHOICES]) for seconds in least]


def _restrict_to_layers(
    tables: CostTables, selection: Sequence[int], layers: Collection[int], scale: float
) -> tuple[list[Floats], dict[LayerEdge, Floats]]:
    """(node, edge) of some layers, numbered anew, all others as selected; edges at `scale` times their time."""
    places = {layer: k for k, layer in enumerate(layers)}
    node = [tables.node_seconds[layer].copy() for layer in layers]
    edge = {}
    for (i, j), table in tables.edge_seconds.items():
        if i in places and j in places:
            edge[places[i], places[j]] = scale * table
        elif i in places:
            node[places[i]] += scale * table[:, selection[j]]
        elif j in places:
            node[places[j]] += scale * table[selection[i]]
    return node, edge
