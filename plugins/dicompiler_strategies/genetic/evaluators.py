"""Evaluation of plans in the two levels of the genetic search: many at once by a fast model, then one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dicompiler.plugin_api import DicompilerError, Plan, Platform, Problem
from dicompiler.plugin_api.costs import Metrics
from dicompiler.plugin_api.search import free_memory, objective_values, used_memory
from dicompiler_strategies.genetic.batched_model import BatchedModel
from dicompiler_strategies.genetic.encoding import ChoiceEncoding, Encoding, NaiveEncoding, PlanRows, SplitPointEncoding
from dicompiler_strategies.genetic.nsga2 import Array

if TYPE_CHECKING:
    from dicompiler_strategies.tables.cost_tables import CostTables

log = logging.getLogger("dicompiler")

MeasureFunction = Callable[[Plan], Metrics]
"""A function that evaluates a plan. If it raises DicompilerError, the plan is omitted with a warning.

It returns MeasuredMetrics if the energy of each device was measured.
"""

SPLIT_SHARE_RANGE = (0.35, 0.65)
"""Range of the fraction that stays on the device if a run of consecutive layers is split over two devices."""

UNMEASURED_VALUE = 1e30
"""Value of each objective of a plan that could not be measured. It must be finite for the search."""


class PlanSpace(Protocol):
    """Interface of a set of plans, with a fast model that evaluates them and an encoding as chromosomes.

    Plans are arrays of shape (plans, layers) with an integer for each layer. The argument `devices` of the methods is a
    limit. Plans of whole layers use only this number of devices, the fastest ones. Plans of tiles split each layer over
    at most this number of devices.
    """

    def evaluate(self, rows: PlanRows, names: Sequence[str]) -> tuple[Array, Array]:
        """Return the objectives of each plan, shape (plans, names), and its excess over the memory, shape (plans,).

        The excess is the largest value of (needed − available) / available of all hosts.
        """

    def plan(self, row: PlanRows) -> Plan:
        pass

    def encoding(self, devices: int) -> Encoding:
        """Return the encoding of the plans within the limit `devices`."""

    def grow_plans(self, rng: np.random.Generator, rows: PlanRows, devices: int, count: int) -> PlanRows:
        """Return `count` plans within the limit `devices`, each a random change of one of the plans `rows`."""

    def seed_plans(self, devices: int) -> PlanRows:
        """Return good starting points within the limit `devices`, among them plans on one device."""


@dataclass(frozen=True)
class WholeLayerSpace:
    """Plans of whole layers, as rows with the platform position of each layer's device.

    Attributes:
        model: The fast model that evaluates many plans at once.
        naive: True for AutoDiCE's naive encoding, False for its split-point encoding.
    """

    model: BatchedModel
    naive: bool

    def evaluate(self, rows: PlanRows, names: Sequence[str]) -> tuple[Array, Array]:
        estimates = self.model.evaluate(rows)
        excess = (estimates.host_memory / _memory_limits(self.model.problem) - 1).max(axis=1)
        return np.stack([estimates.objective(name) for name in names], axis=1), excess

    def plan(self, row: PlanRows) -> Plan:
        return self.model.plan(row)

    def encoding(self, devices: int) -> Encoding:
        layers = len(self.model.problem.layers.layers)
        chosen = self._fastest_devices(devices)
        return NaiveEncoding(layers, chosen) if self.naive else SplitPointEncoding(layers, chosen, len(chosen))

    def grow_plans(self, rng: np.random.Generator, rows: PlanRows, devices: int, count: int) -> PlanRows:
        """Return `count` changed copies of random plans of `rows`.

        In each copy, those of the `devices` fastest devices that the plan does not use get some of its layers.
        """
        return np.array([self._split_runs(rng, rows[rng.integers(len(rows))], devices) for _ in range(count)], np.intp)

    def _split_runs(self, rng: np.random.Generator, row: PlanRows, devices: int) -> PlanRows:
        """Return the plan `row`, changed so that it uses all of the `devices` fastest devices.

        Each unused device gets about half of the heaviest run (consecutive layers on one device): its last layers. The
        heaviest run has the most seconds, or the most bytes of weights; which of both counts is random.
        """
        row, by_time = row.copy(), rng.random() < 0.5
        for device in rng.permutation([device for device in self._fastest_devices(devices) if device not in row]):
            ends = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(row))), len(row)]
            loads = self.model.seconds[np.arange(len(row)), row] if by_time else self.model.weight_bytes
            runs = [np.cumsum(loads[start:stop]) for start, stop in pairwise(ends)]
            heaviest = int(np.argmax([run[-1] for run in runs]))
            share = runs[heaviest][-1] * rng.uniform(*SPLIT_SHARE_RANGE)
            row[ends[heaviest] + int(np.searchsorted(runs[heaviest], share)) + 1 : ends[heaviest + 1]] = device
        return row

    def seed_plans(self, devices: int) -> PlanRows:
        """Return a plan on each of the `devices` fastest devices alone, and a balanced pipeline over all of them."""
        from dicompiler_strategies.balanced_runs import balance_runs

        layers, chosen = len(self.model.problem.layers.layers), self._fastest_devices(devices)
        ends = balance_runs(self.model.seconds[:, chosen].T.tolist())
        balanced = np.repeat(chosen, np.diff((0, *ends)))
        return np.array([*(np.full(layers, d) for d in chosen), balanced], np.intp)

    def _fastest_devices(self, count: int) -> tuple[int, ...]:
        devices = self.model.problem.platform.devices
        positions = [i for i, device in enumerate(devices) if device.can_compute]
        return tuple(sorted(positions, key=lambda i: -devices[i].rate)[:count])


@dataclass(frozen=True)
class TiledLayerSpace:
    """Plans that split each layer in one of several ways (choices), as rows with the index of each layer's choice.

    The fast model is that of `tables.cost_tables`, which simplifies:

    - Latency: each layer begins when all devices have finished the layer before (a barrier).
    - Time between frames: the larger of the busiest device's computing time and the time to send all bytes in turn.
    - Memory: only weights are counted.
    - Energy: the energy of the network is omitted.

    Attributes:
        tables: Costs of all choices of all layers.
        device_counts: For each choice of each layer, the number of devices that it uses.
    """

    tables: CostTables
    device_counts: tuple[tuple[int, ...], ...]

    @classmethod
    def from_problem(cls, problem: Problem) -> TiledLayerSpace:
        from dicompiler_strategies.tables.cost_tables import build_cost_tables

        tables = build_cost_tables(problem)
        return cls(tables, tuple(tuple(len({p.device for p in c.parts}) for c in row) for row in tables.choices))

    def evaluate(self, rows: PlanRows, names: Sequence[str]) -> tuple[Array, Array]:
        from dicompiler_strategies.tables.choice_footprints import device_host_matrix
        from dicompiler_strategies.tables.cost_tables import sum_tables

        tables, platform = self.tables, self.tables.problem.platform
        latency = tables.total_seconds_of(rows)
        compute, weights = (
            sum((of_layer[numbers] for of_layer, numbers in zip(arrays, rows.T, strict=True)), start=np.zeros(()))
            for arrays in (tables.compute_seconds, tables.weight_bytes)
        )
        sent_bytes = sum_tables(tables.node_bytes, tables.edge_bytes, rows)
        active, idle = (np.array([getattr(d, f"power_{k}") for d in platform.devices]) for k in ("active", "idle"))
        is_used = compute > 0
        period = np.maximum(compute.max(axis=1), platform.network.transfer_s(sent_bytes))
        frame = active * compute + idle * np.maximum(0.0, latency[:, None] - compute)
        stream = active * compute + idle * np.maximum(0.0, period[:, None] - compute)
        memory = weights @ device_host_matrix(platform)
        objectives = {
            "latency": latency,
            "throughput": period,
            "energy": (frame * is_used).sum(axis=1),
            "memory": memory.max(axis=1),
            "communication": sent_bytes,
            "device-memory": weights.max(axis=1),
            "device-energy": (stream * is_used).max(axis=1),
        }
        excess = (memory / _memory_limits(tables.problem) - 1).max(axis=1)
        return np.stack([objectives[name] for name in names], axis=1), excess

    def plan(self, row: PlanRows) -> Plan:
        return self.tables.plan([int(number) for number in row])

    def encoding(self, devices: int) -> ChoiceEncoding:
        """Return the encoding of the ways to split layers over at most `devices` devices."""
        labels = tuple(tuple(choice.label for choice in choices) for choices in self.tables.choices)
        # A layer without any such choice keeps its first choice.
        allowed = [[i for i, count in enumerate(counts) if count <= devices] or [0] for counts in self.device_counts]
        return ChoiceEncoding(len(labels), labels, tuple(map(tuple, allowed)))

    def grow_plans(self, rng: np.random.Generator, rows: PlanRows, devices: int, count: int) -> PlanRows:
        """Return `count` plans: random plans of `rows` with one layer or a short run of layers split in another way."""
        return self.encoding(devices).mutate(rng, rows[rng.integers(len(rows), size=count)])

    def seed_plans(self, devices: int) -> PlanRows:
        return self.encoding(devices).uniform_plans()


def build_measuring_evaluator(
    problem: Problem, names: Sequence[str], build_plan: Callable[[PlanRows], Plan], measure: MeasureFunction | None
) -> Callable[[PlanRows], tuple[Array, Array]]:
    """Return a function that evaluates plans one by one, for the second level of the search.

    Args:
        problem: The problem.
        names: The objectives.
        build_plan: Function that decodes a row of integers to a plan.
        measure: Function that evaluates a plan; None for the simulator (`Problem.evaluate_all`).

    Returns:
        A function from rows to the objectives, shape (rows, names), and the relative excess over a host's memory.
    """

    def evaluate(rows: PlanRows) -> tuple[Array, Array]:
        plans = [build_plan(row) for row in rows]
        results = problem.evaluate_all(plans) if measure is None else [_measure_or_error(measure, p) for p in plans]
        pairs = [_objectives_and_excess(problem.platform, names, metrics) for metrics in results]
        return np.array([objectives for objectives, _ in pairs]), np.array([excess for _, excess in pairs])

    return evaluate


def _measure_or_error(measure: MeasureFunction, plan: Plan) -> Metrics | DicompilerError:
    try:
        return measure(plan)
    except DicompilerError as error:
        return error


def _objectives_and_excess(
    platform: Platform, names: Sequence[str], metrics: Metrics | DicompilerError
) -> tuple[list[float], float]:
    """Return the objectives of a plan, and the largest relative excess over a host's memory."""
    if isinstance(metrics, DicompilerError):
        log.warning("genetic: a plan is left out: %s", metrics)
        return [UNMEASURED_VALUE] * len(names), UNMEASURED_VALUE
    values, memory = objective_values(platform, metrics, names), used_memory(platform, metrics)
    return [values[name] for name in names], max(memory[host.name] / host.memory - 1 for host in platform.hosts)


def _memory_limits(problem: Problem) -> Array:
    """Return the bytes of each host for weights and activations; at least 1, because they are divisors."""
    return np.maximum(np.array(list(free_memory(problem).values()), np.float64), 1.0)
