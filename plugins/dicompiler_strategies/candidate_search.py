"""Search, by simulation, among plans that are good in the barrier model.

In the barrier model, a layer begins when all devices have finished the layer before, so that sending never overlaps
with computing. In reality it does. The search therefore computes the best plan of this model several times, with the
sending times multiplied by factors λ ≤ 1. The simulator selects the best of these plans, which is then improved by
small changes.

    Problem + CostTables → selections (one way to split each layer) → plans
    Problem + plans → the best plan by simulation

If several devices each add up all partial sums of a layer, the search also lets each of them add up one slice and send
it to the others (a reduce-scatter and an all-gather).

    sums of channels 0:9 on each of three devices  ⇒  sums of channels 0:3, 3:6 and 6:9, one slice on each device

With n devices and sums of b bytes, each device then sends 2 · b · (n - 1) / n bytes in two exchanges, instead of b · (n
- 1) bytes in one.

The search also reorders plans in two waves: a device sends the rows of the first wave while it computes the second. In
this example, other devices need the keys and values of an attention layer, but not its queries.

    before: keys and values of rows 0:50, and queries
    after:  keys and values of rows 0:35 (first wave), then of rows 35:50 (second wave), then queries

Waves follow Galaxy (Ye et al., arXiv 2405.17245), which sends results while it computes the next ones.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Layer, LayerGraph, LayerShare, Part, Plan, Problem, Region
from dicompiler.plugin_api.costs import Metrics
from dicompiler.plugin_api.regions import (
    Box,
    Routing,
    Task,
    TaskId,
    align_region,
    assembly_leaves,
    full_region,
    make_share_task,
    output_shape,
    route_on_platform,
    split_axis,
    with_interval,
)
from dicompiler.plugin_api.search import WorkBudget, fits_constraints
from dicompiler_strategies.joint.variable_elimination import (
    MAX_TABLE_ELEMENTS,
    build_elimination_order,
    minimise_exactly,
)
from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.tables.choices import find_cuttable_axis
from dicompiler_strategies.tables.cost_tables import CostTables, LayerEdge, restrict_edges, to_original_numbers
from dicompiler_strategies.trim_parts import trim_parts

FIRST_WAVE_SHARES = (1.0, 0.7, 0.6, 0.8, 0.5)
"""Fractions of a layer's rows in the first wave, in the order in which they are tried.

The rows of the first wave are sent while the others are computed. With 1.0 there is no second wave, but parts that no
other device needs are still computed last.
"""
SHARE_STEPS = (0.05, 0.025)
"""The search then tries fractions at these distances from the best one of FIRST_WAVE_SHARES."""
LATE_LANE, FIRST_WAVE_LANE, SECOND_WAVE_LANE = range(3)
"""Lanes of a reordered plan. A lane is a group of a device's parts.

Between two exchanges, a device computes its lanes in this order. An exchange is a step in which devices or lanes read
tensors of others. A late part usually reads tensors of the other lanes, so it follows after the exchange that sends the
waves. There it comes first, before the parts that need received tensors, so its lane has the lowest number.
"""


def make_plans_in_waves(
    problem: Problem, plan: Plan, shares: Sequence[float] = FIRST_WAVE_SHARES
) -> Iterator[tuple[float, Plan]]:
    """Yield pairs (fraction, plan in two waves), for several fractions of rows in the first wave.

    The rows of the first wave are sent while the second is computed. Nothing is yielded for a plan that has lanes
    (groups of parts that a device computes in turn), replicas or failure plans.
    """
    if plan.replicas or plan.failures or any(part.lane for parts in plan.layers.values() for part in parts):
        return
    dependencies = _TaskDependencies.from_routing(route_on_platform(problem.platform, problem.layers, plan))
    known = [plan]
    for share in shares:
        ordered = dependencies.order_in_waves(plan, share)
        if ordered not in known:
            known.append(ordered)
            yield share, ordered


@dataclass(frozen=True)
class _TaskDependencies:
    """Tasks of a routing, grouped by their dependencies. A task computes one part of a layer on its device.

    The stage of a task is the number of exchanges that must come before it. On each chain of dependencies that ends
    with the task, count the tasks that read from other devices, including the task itself. The largest count is the
    stage.

    Attributes:
        routing: The tasks, and the regions of tensors that they send to each other.
        sending_tasks: Tasks with an output that is sent to another device.
        local_inputs: For each task, the tasks of the same device and stage whose output it reads.
        late_tasks: Tasks that can be computed after the next exchange. It sends nothing that depends on them, but it
            waits for other tasks of their device and stage, which should therefore come first.
        waiting_tasks: Tasks that read data from other devices.
    """

    routing: Routing
    sending_tasks: frozenset[TaskId]
    local_inputs: dict[TaskId, list[TaskId]]
    late_tasks: frozenset[TaskId]
    waiting_tasks: frozenset[TaskId]

    @classmethod
    def from_routing(cls, routing: Routing) -> _TaskDependencies:
        read = {_task_id(task): list(_read_boxes(routing, task)) for task in routing.tasks}
        waiting = frozenset(key for key, boxes in read.items() if any(box.origin is not None for box in boxes))
        stage, local = dict[TaskId, int](), dict[TaskId, list[TaskId]]()
        for task in routing.tasks:
            boxes = read[_task_id(task)]
            producers = [producer for box in boxes if (producer := (box.origin or box).task)]
            task_stage = max((stage[key] for key in producers), default=0) + (_task_id(task) in waiting)
            stage[_task_id(task)] = task_stage
            local_tasks = [box.task for box in boxes if box.task is not None]
            local[_task_id(task)] = [key for key in dict.fromkeys(local_tasks) if stage[key] == task_stage]
        sent = frozenset(box.origin.task for box in routing.received_boxes if box.origin and box.origin.task)
        urgent = set(sent)
        for task in reversed(routing.tasks):
            if _task_id(task) in urgent:
                urgent.update(local[_task_id(task)])
        busy = {(task.device, stage[_task_id(task)]) for task in routing.tasks if _task_id(task) in urgent}
        not_urgent = (task for task in routing.tasks if _task_id(task) not in urgent)
        late = frozenset(_task_id(task) for task in not_urgent if (task.device, stage[_task_id(task)]) in busy)
        return cls(routing, sent, local, late, waiting)

    def order_in_waves(self, plan: Plan, share: float) -> Plan:
        """Return the plan with a fraction `share` of rows in a first wave, which is sent during the second wave."""
        cuts = self._wave_cuts(plan, share) if share < 1 else {}
        if not cuts and not self.late_tasks:
            return plan

        def parts(name: str, index: int, part: Part) -> tuple[Part, ...]:
            if (name, index) in cuts:
                first, second = cuts[name, index]
                return (
                    replace(part, region=first, lane=FIRST_WAVE_LANE),
                    replace(part, region=second, lane=SECOND_WAVE_LANE),
                )
            return (replace(part, lane=LATE_LANE if (name, index) in self.late_tasks else FIRST_WAVE_LANE),)

        layers = {
            name: tuple(new for index, part in enumerate(layer_parts) for new in parts(name, index, part))
            for name, layer_parts in plan.layers.items()
        }
        return replace(plan, layers=layers)

    def _wave_cuts(self, plan: Plan, share: float) -> dict[TaskId, tuple[Region, Region]]:
        """Return the two regions of each task that is split, so that the first region is sent early.

        `share` is the fraction of rows in the first region. Tasks that read data from other devices are not split.
        """
        chosen, cuts = set(self.sending_tasks), dict[TaskId, tuple[Region, Region]]()
        for task in reversed(self.routing.tasks):
            task_id = _task_id(task)
            if (
                task_id in chosen
                and task_id not in self.waiting_tasks
                and (found := self._split_task(task, plan, share))
            ):
                cuts[task_id] = found
                chosen.update(self.local_inputs[task_id])
        return cuts

    def _split_task(self, task: Task, plan: Plan, share: float) -> tuple[Region, Region] | None:
        """Split the region of a task in two along the axis along which it is already split.

        The first region has the fraction `share` of the length of this axis. The result is None if the task is split
        along no axis or several axes, if the layer cannot be split at this position, or if one of the two regions needs
        as much of an input as the whole task.
        """
        layers, region = self.routing.layers, plan.layers[task.layer][task.index].region
        if task.kind != "plain" or region is None or layers.layer_by_name[task.layer].whole_reason:
            return None
        layer = layers.layer_by_name[task.layer]
        whole = full_region(output_shape(layers, layer))
        along = [axis for axis, interval in enumerate(region) if interval != whole[axis]]
        if len(along) != 1:
            return None
        (axis,), (start, stop) = along, region[along[0]]
        middle = start + round(share * (stop - start))
        if not start < middle < stop:
            return None
        first, second = with_interval(region, axis, (start, middle)), with_interval(region, axis, (middle, stop))
        tasks = [make_share_task(layers, layer, LayerShare(piece)) for piece in (first, second)]
        is_exact = all(align_region(layers, layer, piece) == piece for piece in (first, second))
        needs_less = all(piece_task.needs.get(key) != need for piece_task in tasks for key, need in task.needs.items())
        return (first, second) if is_exact and needs_less else None


def _task_id(task: Task) -> TaskId:
    return task.layer, task.index


def _read_boxes(routing: Routing, task: Task) -> Iterator[Box]:
    for tree in routing.reads.get(_task_id(task), {}).values():
        for leaf in assembly_leaves(tree):
            yield leaf.box


MIN_SLICE_DEVICES = 3
"""Fewest devices among which partial sums are added up in slices.

With two devices, slices would not reduce the bytes that are sent.
"""


def slice_sums(layers: LayerGraph, plan: Plan) -> Plan:
    """Return the plan in which no device adds up all partial sums of a layer, if MIN_SLICE_DEVICES or more did so.

    Each of these devices then adds up one slice, and the layers that read the sum gather the slices.
    """
    return replace(
        plan, layers={name: _slice_layer(layers, layers.layer_by_name[name], plan.layers[name]) for name in plan.layers}
    )


def _slice_layer(layers: LayerGraph, layer: Layer, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    partial_sums = tuple(part for part in parts if part.reduce is not None)
    mergers = [part for part in parts if part.reduce is None]
    devices = {part.device for part in mergers}
    is_whole_on_each = len(devices) == len(mergers) and all(part.region is None for part in mergers)
    if not partial_sums or not is_whole_on_each or len(mergers) < MIN_SLICE_DEVICES:
        return parts
    axis = find_cuttable_axis(layers, layer, "channel")
    if axis is None:
        return parts
    whole = full_region(output_shape(layers, layer))
    cuts = zip(mergers, split_axis(layers, layer, axis, [1.0] * len(mergers)), strict=True)
    slices = (replace(part, region=with_interval(whole, axis, cut)) for part, cut in cuts if cut[0] < cut[1])
    return (*partial_sums, *slices)


log = logging.getLogger("dicompiler")

SENDING_FACTORS = (1.0, 0.7, 0.5, 0.3, 0.15, 0.05)
"""Factors λ on sending times, because sending partly overlaps with computing.

For VGG16 and ResNet-50 on 4 and 8 devices, smaller or larger factors never gave a better plan.
"""
EVALUATED_PARTS_PER_S = 6_000
"""Parts (pieces of layers) that the simulator is assumed to simulate in a second of the reference computer.

The rate is cautious: 8 500 to 12 200 parts per second were measured, on networks of 240 to 940 layers.
"""
MAX_SIMULATED_PARTS = 6_000
"""Largest number of parts (pieces of layers) of a plan that is simulated. Larger plans are only estimated."""
HOPELESS_RATIO = 2.2
"""Plans are not simulated if the cost tables predict more than this many times the best simulated time.

In the tables, nothing overlaps. Simulated times were at most 54 % lower (VGG16), i.e. by a factor of 2.2.
"""
NEIGHBOURS_PER_STEP = 4
"""Number of small changes of the best plan that are evaluated at a time."""
MAX_SPARING_LOSS = 1.02
"""Factor by which the objective may grow if the device that stores most weights of a layer then stores fewer.

The objective is predicted with a larger error than this.
"""
MAX_SPARED_LAYERS = 8
"""Number of layers that are split in another way, one after another, to store fewer weights."""
MAX_RUN_LAYERS = 256
"""Largest number of consecutive layers whose splits are optimised together."""
MAX_RUN_CHOICES = 48
"""Largest number of ways to split a layer, if consecutive layers are optimised together."""
MAX_VAIN_TRIES = 100
"""Number of plans without an improvement after which the search stops changing the best plan."""
MAX_TRIED_PARTS = 20_000
"""Total number of parts (pieces of layers) of the tried plans after which the search stops changing the best plan.

Simulating them takes about three seconds of the reference computer.
"""


@dataclass(frozen=True)
class EvaluatedPlan:
    """A plan with its metrics.

    Attributes:
        plan: The plan.
        metrics: Its simulated or estimated metrics.
        found_by: Name of the strategy, or of the step of `auto`, that found the plan. A changed plan keeps the name of
            the plan from which it was made.
    """

    plan: Plan
    metrics: Metrics
    found_by: str

    def value(self, problem: Problem) -> float:
        return self.metrics.objective_value(problem.objective)


def evaluate_plans(problem: Problem, plans: Iterable[tuple[Plan, str]]) -> list[EvaluatedPlan]:
    """Return the plans that satisfy the constraints, with their simulated or estimated metrics.

    `plans` are pairs of a plan and the name of the strategy that found it.
    """
    candidates = list(plans)
    small = [plan for plan, _ in candidates if _count_parts(plan) <= MAX_SIMULATED_PARTS]
    simulated = iter(problem.evaluate_all(small))
    evaluated = []
    for plan, found_by in candidates:
        metrics = next(simulated) if _count_parts(plan) <= MAX_SIMULATED_PARTS else problem.estimate(plan)
        if isinstance(metrics, Metrics) and fits_constraints(problem, plan, metrics):
            evaluated.append(EvaluatedPlan(plan, metrics, found_by))
    return evaluated


def _count_parts(plan: Plan) -> int:
    return sum(map(len, plan.layers.values()))


def find_optima(tables: CostTables, budget: WorkBudget | None = None) -> Iterator[tuple[int, ...]]:
    """Yield the best selection (one way to split each layer) by the cost tables, for each factor on sending times.

    The factors are SENDING_FACTORS. Nothing is yielded if the tables of the exact search (`minimise_exactly`) would be
    too large.
    """
    order, budget = build_elimination_order(tables.choice_counts, list(tables.edge_seconds)), budget or WorkBudget()
    if order.largest_table > MAX_TABLE_ELEMENTS:
        return
    seen = set()
    for scale in SENDING_FACTORS:
        if not budget.try_steps(*order.work):
            return
        _, selection = minimise_exactly(
            order, tables.node_seconds, {edge: scale * table for edge, table in tables.edge_seconds.items()}
        )
        if selection not in seen:
            seen.add(selection)
            yield selection


class CandidateSearch:
    """A search that evaluates plans and keeps the best one.

    Attributes:
        problem: The problem.
        name: Name of the strategy, for the log.
        budget: The work that the search may do.
        best: The best plan so far; None at the beginning.
    """

    def __init__(self, problem: Problem, name: str, budget: WorkBudget | None = None) -> None:
        self.problem, self.name, self.budget = problem, name, budget or WorkBudget()
        # To check the memory that the target needs, a plan must be compiled, which is slow. Only a plan that would
        # become the best is therefore checked with the target. No objective depends on the target.
        self.problem_without_target = replace(problem, target=None)
        self.best: EvaluatedPlan | None = None
        self._seen: set[object] = set()

    def try_plans(self, plans: Iterable[tuple[Plan, str]], ignores_budget: bool = False) -> bool:
        """Evaluate plans; return True if one is better than the best plan so far and replaces it.

        Args:
            plans: Pairs of a plan and the name of the strategy that found it. Plans that were evaluated before are
                skipped.
            ignores_budget: Evaluate the plans even if this exceeds the budget.
        """
        new = []
        for plan, found_by in plans:
            key = tuple(plan.layers.values()), tuple(tuple(renaming.items()) for renaming in plan.replicas)
            if key not in self._seen:
                if not self._spend_evaluation(plan, ignores_budget):
                    break
                self._seen.add(key)
                new.append((plan, found_by))
        return self.accept_best(evaluate_plans(self.problem_without_target, new))

    def accept_best(self, evaluated: Iterable[EvaluatedPlan]) -> bool:
        """Return True if an evaluated plan is better than the best plan so far, which it then replaces."""
        least = math.inf if self.best is None else self.best.value(self.problem)
        for candidate in sorted(evaluated, key=lambda candidate: candidate.value(self.problem)):
            value = candidate.value(self.problem)
            if value >= least:
                return False
            if self.problem.target is None or evaluate_plans(self.problem, [(candidate.plan, candidate.found_by)]):
                self.best = candidate
                log.info("%s: %s: %s %.4g", self.name, candidate.found_by, self.problem.objective, value)
                return True
        return False

    def _spend_evaluation(self, plan: Plan, ignores_budget: bool = False) -> bool:
        """Return True if the budget allows the evaluation of a plan, and subtract its cost from the budget.

        The first plan is always allowed, and with `ignores_budget` every plan.
        """
        seconds = _count_parts(plan) / EVALUATED_PARTS_PER_S
        if ignores_budget or self.best is None:
            self.budget.spend(seconds)
            return True
        return self.budget.try_spend(seconds)

    def try_optima(self, tables: CostTables) -> None:
        """Evaluate the best plans by the cost tables, for all factors on sending times in SENDING_FACTORS."""
        for selection in find_optima(tables, self.budget):
            if self.budget.is_exceeded():
                return
            if not self._is_hopeless(tables, selection):
                self.try_plans([(tables.plan(selection), "cpsat")])

    def try_neighbours(self, tables: CostTables, tries: int, seed: int) -> None:
        """Evaluate small changes of the best plan, and continue from each improvement.

        The search stops after `tries` plans, or earlier by MAX_VAIN_TRIES or MAX_TRIED_PARTS.
        """
        selection = None if self.best is None else tables.find_selection(self.best.plan)
        parts_left, last_success = MAX_TRIED_PARTS, 0
        for step in range(0, tries, NEIGHBOURS_PER_STEP):
            if (
                self.best is None
                or selection is None
                or parts_left < 0
                or step - last_success > MAX_VAIN_TRIES
                or self.budget.is_exceeded()
            ):
                return
            changes = itertools.islice(
                make_neighbours(tables, selection, seed + step), min(NEIGHBOURS_PER_STEP, tries - step)
            )
            plans = [tables.plan(changed) for changed in changes if not self._is_hopeless(tables, changed)]
            parts_left -= sum(map(_count_parts, plans))
            # The changed plan counts as found by the strategy that found the unchanged one.
            found_by = self.best.found_by
            if self.try_plans((plan, found_by) for plan in plans):
                selection, last_success = tables.find_selection(self.best.plan), step

    def reduce_weights(self, tables: CostTables) -> None:
        """Split some layers such that the device with most of their weights stores fewer bytes of them.

        The MAX_SPARED_LAYERS layers with the most bytes to save are tried one after another. A change is kept if the
        objective stays within MAX_SPARING_LOSS times its value at the beginning. A layer is left out if it saves at
        most 1 % of the bytes that the layers' fullest devices store.
        """
        selection = None if self.best is None else tables.find_selection(self.best.plan)
        if self.best is None or selection is None or self.problem.objective != "latency":
            return
        limit = MAX_SPARING_LOSS * self.best.value(self.problem)
        largest = [weights.max(axis=1) for weights in tables.weight_bytes]
        excess = [
            int(bytes_by_choice[chosen] - bytes_by_choice.min())
            for bytes_by_choice, chosen in zip(largest, selection, strict=True)
        ]
        threshold = (
            sum(int(bytes_by_choice[chosen]) for bytes_by_choice, chosen in zip(largest, selection, strict=True)) / 100
        )
        for i in sorted(range(len(excess)), key=lambda i: -excess[i])[:MAX_SPARED_LAYERS]:
            if excess[i] <= threshold or self.budget.is_exceeded():
                return
            (seconds,), _ = _restrict_to_layers(tables, selection, [i], 1.0)
            smallest = np.flatnonzero(largest[i] == largest[i].min())
            changed = (*selection[:i], int(smallest[seconds[smallest].argmin()]), *selection[i + 1 :])
            plan = tables.plan(changed)
            if not self._spend_evaluation(plan):
                return
            for candidate in evaluate_plans(self.problem_without_target, [(plan, self.best.found_by)]):
                is_close = candidate.value(self.problem) <= limit
                if is_close and (
                    self.problem.target is None or evaluate_plans(self.problem, [(candidate.plan, candidate.found_by)])
                ):
                    self.best, selection = candidate, changed

    def trim(self) -> None:
        """Evaluate the best plan without the elements that no layer reads and the network does not output."""
        if (
            self.best is not None
            and self.problem.model is not None
            and _count_parts(self.best.plan) <= MAX_SIMULATED_PARTS
        ):
            self.try_plans([(trim_parts(self.problem, self.best.plan), self.best.found_by)])

    def try_sliced_sums(self) -> None:
        """Evaluate the best plan with partial sums that are added up in slices, one slice on each device."""
        if self.best is not None:
            self.try_plans([(slice_sums(self.problem.layers, self.best.plan), self.best.found_by)])

    def try_waves(self, others: Iterable[Plan] = ()) -> None:
        """Evaluate the best plan and the plans `others`, reordered such that rows for other devices come first."""
        if self.best is None or self.problem.objective != "latency" or self.problem.model is None:
            return
        for plan in (self.best.plan, *others):
            if _count_parts(plan) <= MAX_SIMULATED_PARTS // 2 and not self.budget.is_exceeded():
                self._try_wave_shares(plan, self.best.found_by)

    def _try_wave_shares(self, plan: Plan, found_by: str) -> None:
        """Evaluate variants of a plan that compute each layer's rows in two waves, and send the first meanwhile.

        The variants have different fractions of the rows in the first wave.
        """
        best = 1.0
        for step in (0.0, *SHARE_STEPS):
            for share, waved in make_plans_in_waves(
                self.problem, plan, (best - step, best + step) if step else FIRST_WAVE_SHARES
            ):
                if self.budget.is_exceeded():
                    return
                if self.try_plans([(waved, found_by)]):
                    best = share
            if best == 1.0:
                return

    def _is_hopeless(self, tables: CostTables, selection: Sequence[int]) -> bool:
        """Return True if the cost tables predict more than HOPELESS_RATIO times the best simulated latency.

        `selection` has the number of the chosen split of each layer.
        """
        if self.best is None or self.problem.objective != "latency":
            return False
        return tables.total_seconds(selection) > HOPELESS_RATIO * self.best.value(self.problem)


def make_neighbours(
    tables: CostTables, selection: Sequence[int], seed: int, scale: float = 0.5
) -> Iterator[tuple[int, ...]]:
    """Yield small changes of `selection`, the number of the chosen split of each layer, without end.

    Two kinds of changes alternate: a random layer gets one of its four best other splits by the cost tables, and the
    splits of a random run of consecutive layers are optimised again. `scale` is the factor on sending times with which
    the splits of one layer are compared. Nothing is yielded if no layer can be split in several ways.
    """
    random = np.random.default_rng(seed)
    free = [i for i, count in enumerate(tables.choice_counts) if count > 1]
    while free:
        i = free[int(random.integers(len(free)))]
        around, _ = _restrict_to_layers(tables, selection, [i], scale)
        others = [int(k) for k in np.argsort(around[0], kind="stable") if k != selection[i]][:4]
        chosen = others[int(random.integers(len(others)))]
        yield (*selection[:i], chosen, *selection[i + 1 :])
        changed = _reoptimise_run(tables, selection, random)
        if changed is not None:
            yield changed


def _reoptimise_run(
    tables: CostTables, selection: Sequence[int], random: np.random.Generator
) -> tuple[int, ...] | None:
    """Return the selection with new splits for some consecutive layers, which begin at a random layer.

    The new splits minimise the times in the tables, multiplied by random factors. The result is None if the tables of
    the exact search (`minimise_exactly`) would be too large.
    """
    count = len(selection)
    length = min(count, MAX_RUN_LAYERS, 2 ** int(random.integers(1, count.bit_length() + 2)))
    start = int(random.integers(count - length + 1))
    node, edge = _restrict_to_layers(
        tables, selection, range(start, start + length), float(random.choice(SENDING_FACTORS))
    )
    node = [seconds * np.exp(random.normal(0, 0.1)) for seconds in node]
    edge = {key: table * np.exp(random.normal(0, 0.3)) for key, table in edge.items()}
    kept_numbers = _promising_choices(node, edge)
    order = build_elimination_order([len(numbers) for numbers in kept_numbers], list(edge))
    if order.largest_table > MAX_TABLE_ELEMENTS:
        return None
    node = [seconds[numbers] for seconds, numbers in zip(node, kept_numbers, strict=True)]
    chosen = to_original_numbers(kept_numbers, minimise_exactly(order, node, restrict_edges(edge, kept_numbers))[1])
    return (*selection[:start], *chosen, *selection[start + length :])


def _promising_choices(node: Sequence[Floats], edge: Mapping[LayerEdge, Floats]) -> list[NDArray[np.intp]]:
    """Return, for each layer, the numbers of its MAX_RUN_CHOICES cheapest splits, sorted by number.

    The cost of a split includes the cheapest possible transfers from and to each connected layer.
    """
    least = [seconds.copy() for seconds in node]
    for (i, j), table in edge.items():
        least[i] += table.min(axis=1)
        least[j] += table.min(axis=0)
    return [np.sort(np.argsort(seconds, kind="stable")[:MAX_RUN_CHOICES]) for seconds in least]


def _restrict_to_layers(
    tables: CostTables, selection: Sequence[int], layers: Collection[int], scale: float
) -> tuple[list[Floats], dict[LayerEdge, Floats]]:
    """Return the cost tables of some layers and of their edges, if all other layers are split as in `selection`.

    Sending times are multiplied by `scale`. Transfers from and to other layers are added to the costs of the layer's
    splits.
    """
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
