"""The two levels of the search: a fast model of many plans, and an evaluation of each plan by itself."""

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
from dicompiler_strategies.genetic.encoding import ChoiceEncoding, Encoding, Genes, NaiveEncoding, SplitPointEncoding
from dicompiler_strategies.genetic.nsga2 import Array

if TYPE_CHECKING:
    from dicompiler_strategies.tables.cost_tables import CostTables

log = logging.getLogger("dicompiler")

MeasureFunction = Callable[[Plan], Metrics]
"""Function of the second level: Plan → Metrics, or MeasuredMetrics if the energy of each device was measured.

If it raises DicompilerError, the plan is left out with a warning.
"""

SPLIT_SHARE_RANGE = (0.35, 0.65)
"""Range of the random share of a run's load at which it is split for another device."""

UNMEASURED_VALUE = 1e30
"""Objective value of a plan that could not be measured: finite, because the search computes with it."""


class PlanSpace(Protocol):
    """The first level of a search: its plans, its fast model, and the encoding of each stage."""

    def evaluate(self, rows: Genes, names: Sequence[str]) -> tuple[Array, Array]:
        """Return the objectives (P, M) and the largest relative excess over a host's memory (P,)."""

    def plan(self, row: Genes) -> Plan:
        """Return the plan of one row (L,)."""

    def encoding(self, devices: int) -> Encoding:
        """Return the encoding of plans on at most this many devices, the fastest."""

    def grow_plans(self, rng: np.random.Generator, rows: Genes, devices: int, count: int) -> Genes:
        """Return `count` random plans derived from `rows` (P, L) that may use more devices, up to `devices`."""

    def seed_plans(self, devices: int) -> Genes:
        """Return plans (S, L) that are good starting points, above all those on one device."""


@dataclass(frozen=True)
class WholeLayerSpace:
    """Plans of whole layers; rows contain the platform position of each layer's device."""

    model: BatchedModel
    naive: bool

    def evaluate(self, rows: Genes, names: Sequence[str]) -> tuple[Array, Array]:
        estimates = self.model.evaluate(rows)
        limits = _memory_limits(self.model.problem)
        return (
            np.stack([estimates.objective(name) for name in names], axis=1),
            (estimates.host_memory / limits - 1).max(axis=1),
        )

    def plan(self, row: Genes) -> Plan:
        return self.model.plan(row)

    def encoding(self, devices: int) -> Encoding:
        layers = len(self.model.problem.layers.layers)
        chosen = self._fastest_devices(devices)
        return NaiveEncoding(layers, chosen) if self.naive else SplitPointEncoding(layers, chosen, len(chosen))

    def grow_plans(self, rng: np.random.Generator, rows: Genes, devices: int, count: int) -> Genes:
        """Split runs of layers in two, the second half for a device without layers."""
        return np.array([self._split_runs(rng, rows[rng.integers(len(rows))], devices) for _ in range(count)], np.intp)

    def _split_runs(self, rng: np.random.Generator, row: Genes, devices: int) -> Genes:
        """Split the run with most seconds or weights (at random) near its middle, for each free device."""
        row, by_time = row.copy(), rng.random() < 0.5
        for device in rng.permutation([device for device in self._fastest_devices(devices) if device not in row]):
            ends = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(row))), len(row)]
            loads = self.model.seconds[np.arange(len(row)), row] if by_time else self.model.weight_bytes
            runs = [np.cumsum(loads[start:stop]) for start, stop in pairwise(ends)]
            heaviest = int(np.argmax([run[-1] for run in runs]))
            share = runs[heaviest][-1] * rng.uniform(*SPLIT_SHARE_RANGE)
            row[ends[heaviest] + int(np.searchsorted(runs[heaviest], share)) + 1 : ends[heaviest + 1]] = device
        return row

    def seed_plans(self, devices: int) -> Genes:
        """Return all layers on one device, for each device, and balanced runs on the fastest devices."""
        from dicompiler_strategies.pipeline import balance_runs

        layers, chosen = len(self.model.problem.layers.layers), self._fastest_devices(devices)
        ends = balance_runs(self.model.seconds[:, chosen].T.tolist())
        balanced = np.repeat(chosen, np.diff((0, *ends)))
        return np.array([*(np.full(layers, d) for d in chosen), balanced], np.intp)

    def _fastest_devices(self, count: int) -> tuple[int, ...]:
        devices = self.model.problem.platform.devices
        places = [i for i, device in enumerate(devices) if device.can_compute]
        return tuple(sorted(places, key=lambda i: -devices[i].rate)[:count])


@dataclass(frozen=True)
class TiledLayerSpace:
    """Plans with one choice for each layer; rows contain the numbers of choices.

    The fast model is that of `tables.cost_tables`: latency has a barrier after each layer. The time between frames is
    that of the busiest device, or of all bytes on one link. Memory counts weights only, and energy leaves the network
    out. The second level corrects this.
    """

    tables: CostTables
    device_counts: tuple[tuple[int, ...], ...]

    @classmethod
    def from_problem(cls, problem: Problem) -> TiledLayerSpace:
        from dicompiler_strategies.tables.cost_tables import build_cost_tables

        cost_tables = build_cost_tables(problem)
        counts = tuple(tuple(len({p.device for p in c.parts}) for c in choices) for choices in cost_tables.choices)
        return cls(cost_tables, counts)

    def evaluate(self, rows: Genes, names: Sequence[str]) -> tuple[Array, Array]:
        from dicompiler_strategies.tables.choice_footprints import device_host_matrix
        from dicompiler_strategies.tables.cost_tables import sum_tables

        platform = self.tables.problem.platform
        latency = self.tables.total_seconds_of(rows)
        compute, weights = (
            sum((per_choice[column] for per_choice, column in zip(table, rows.T, strict=True)), start=np.zeros(()))
            for table in (self.tables.compute_seconds, self.tables.weight_bytes)
        )
        traffic = sum_tables(self.tables.node_bytes, self.tables.edge_bytes, rows)
        active, idle = (
            np.array([getattr(d, f"power_{kind}") for d in platform.devices]) for kind in ("active", "idle")
        )
        taking_part = compute > 0
        period = np.maximum(compute.max(axis=1), platform.network.transfer_s(traffic))
        frame = active * compute + idle * np.maximum(0.0, latency[:, None] - compute)
        stream = active * compute + idle * np.maximum(0.0, period[:, None] - compute)
        memory = weights @ device_host_matrix(platform)
        numbers = {
            "latency": latency,
            "throughput": period,
            "energy": (frame * taking_part).sum(axis=1),
            "memory": memory.max(axis=1),
            "communication": traffic,
            "device-memory": weights.max(axis=1),
            "device-energy": (stream * taking_part).max(axis=1),
        }
        over = (memory / _memory_limits(self.tables.problem) - 1).max(axis=1)
        return np.stack([numbers[name] for name in names], axis=1), over

    def plan(self, row: Genes) -> Plan:
        return self.tables.plan([int(number) for number in row])

    def encoding(self, devices: int) -> Encoding:
        """Return the choices on at most `devices` devices; a layer without any keeps its first choice."""
        labels = tuple(tuple(choice.label for choice in choices) for choices in self.tables.choices)
        allowed = tuple(
            tuple(i for i, count in enumerate(counts) if count <= devices) or (0,) for counts in self.device_counts
        )
        return ChoiceEncoding(len(labels), labels, allowed)

    def grow_plans(self, rng: np.random.Generator, rows: Genes, devices: int, count: int) -> Genes:
        """Let a run of layers use choices with one label, possibly with more devices."""
        return self.encoding(devices).mutate(rng, rows[rng.integers(len(rows), size=count)])

    def seed_plans(self, devices: int) -> Genes:
        """Return for each label the plan in which all layers that have it use it."""
        encoding = self.encoding(devices)
        assert isinstance(encoding, ChoiceEncoding)
        return encoding.uniform_plans()


def build_measuring_evaluator(
    problem: Problem, names: Sequence[str], plan: Callable[[Genes], Plan], measure: MeasureFunction | None
) -> Callable[[Genes], tuple[Array, Array]]:
    """Return the second level: every plan by `measure`, or by default by `Problem.evaluate_all`."""

    def evaluate(rows: Genes) -> tuple[Array, Array]:
        plans = [plan(row) for row in rows]
        found = (
            problem.evaluate_all(plans)
            if measure is None
            else [_measure_or_error(measure, candidate) for candidate in plans]
        )
        records = [_objectives_and_excess(problem.platform, names, metrics) for metrics in found]
        return np.array([numbers for numbers, _ in records]), np.array([over for _, over in records])

    return evaluate


def _measure_or_error(measure: MeasureFunction, plan: Plan) -> Metrics | DicompilerError:
    try:
        return measure(plan)
    except DicompilerError as error:
        return error


def _objectives_and_excess(
    platform: Platform, names: Sequence[str], metrics: Metrics | DicompilerError
) -> tuple[list[float], float]:
    """Return the objectives of one plan, and its largest relative excess over a host's memory."""
    if isinstance(metrics, DicompilerError):
        log.warning("genetic: a plan is left out: %s", metrics)
        return [UNMEASURED_VALUE] * len(names), UNMEASURED_VALUE
    reached = objective_values(platform, metrics, names)
    taken = used_memory(platform, metrics)
    return [reached[name] for name in names], max(taken[host.name] / host.memory - 1 for host in platform.hosts)


def _memory_limits(problem: Problem) -> Array:
    """Return the bytes (hosts,), at least 1, that a host has for weights and activations."""
    return np.maximum(np.array(list(free_memory(problem).values()), np.float64), 1.0)
