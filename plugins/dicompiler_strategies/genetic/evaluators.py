"""The two levels of the search as functions of plans: a batched model, and every plan measured by itself.

Level one: rows of plans → objectives, thousands at once.   Level two: `measure(plan)` → Metrics → objectives.
"""

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
"""The hook of the second level: a plan goes in, what it comes to comes out; a `Measurement` where the energy of each
device was measured too. DicompilerError where a plan cannot be measured: it is then left out, with a warning."""

SPLIT_SHARE_RANGE = (0.35, 0.65)
"""Where a run of layers is cut for another device: at a random share of its load between these."""

UNMEASURED_VALUE = 1e30
"""Every number of a plan that could not be measured: finite, because the search computes with it."""


class PlanSpace(Protocol):
    """The first level of a search: its plans, its fast model, and the encoding of each stage."""

    def evaluate(self, rows: Genes, names: Sequence[str]) -> tuple[Array, Array]:
        """Plans (P, L) → (objectives (P, M), bytes over a host's memory relative to it (P,))."""

    def plan(self, row: Genes) -> Plan:
        """The plan of one row (L,)."""

    def encoding(self, devices: int) -> Encoding:
        """Chromosomes of plans on at most that many devices, the fastest."""

    def grow_plans(self, rng: np.random.Generator, rows: Genes, devices: int, count: int) -> Genes:
        """`count` random plans that come from `rows` (P, L), plans of fewer devices, by use of up to `devices`."""

    def seed_plans(self, devices: int) -> Genes:
        """Plans (S, L) that are worth starting from: above all those on one device."""


@dataclass(frozen=True)
class WholeLayerSpace:
    """Plans of whole layers. Rows name the place in the platform of each layer's device."""

    model: BatchedModel
    naive: bool

    def evaluate(self, rows: Genes, names: Sequence[str]) -> tuple[Array, Array]:
        """All numbers from the batched model, see `analytic.AnalyticModel`."""
        estimates = self.model.evaluate(rows)
        limits = _memory_limits(self.model.problem)
        return (
            np.stack([estimates.objective(name) for name in names], axis=1),
            (estimates.host_memory / limits - 1).max(axis=1),
        )

    def plan(self, row: Genes) -> Plan:
        """Every layer whole on its device."""
        return self.model.plan(row)

    def encoding(self, devices: int) -> Encoding:
        """As many groups as devices."""
        layers = len(self.model.problem.layers.layers)
        chosen = self._fastest_devices(devices)
        return NaiveEncoding(layers, chosen) if self.naive else SplitPointEncoding(layers, chosen, len(chosen))

    def grow_plans(self, rng: np.random.Generator, rows: Genes, devices: int, count: int) -> Genes:
        """Runs of layers cut in two, the second half for a device that has nothing yet; once or for several devices."""
        return np.array([self._split_runs(rng, rows[rng.integers(len(rows))], devices) for _ in range(count)], np.intp)

    def _split_runs(self, rng: np.random.Generator, row: Genes, devices: int) -> Genes:
        """The heaviest run is cut about its middle, for one free device after the other; heavy in seconds or in bytes
        of weights, which is as random as the place of the cut."""
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
        """All layers on one device, for each of them; and runs that take the same time, on the fastest, in order."""
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
    """Plans that take one of its choices for each layer. Rows are numbers of choices.

    The fast model is that of `tables.cost_tables`: latency with a barrier between layers. The time between frames is
    that of the busiest device or of all bytes on one line; memory counts weights alone, energy nothing of the network.
    The second level sees the rest.
    """

    tables: CostTables
    device_counts: tuple[tuple[int, ...], ...]
    """For each layer the number of devices of each of its choices."""

    @classmethod
    def from_problem(cls, problem: Problem) -> TiledLayerSpace:
        """The level with the tables of `problem`."""
        from dicompiler_strategies.tables.cost_tables import build_cost_tables

        cost_tables = build_cost_tables(problem)
        counts = tuple(tuple(len({p.device for p in c.parts}) for c in choices) for choices in cost_tables.choices)
        return cls(cost_tables, counts)

    def evaluate(self, rows: Genes, names: Sequence[str]) -> tuple[Array, Array]:
        """The objectives from the sums of the tables."""
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
        """The parts of the chosen choices."""
        return self.tables.plan([int(number) for number in row])

    def encoding(self, devices: int) -> Encoding:
        """The choices of at most `devices` devices; a layer that has none keeps its first."""
        labels = tuple(tuple(choice.label for choice in choices) for choices in self.tables.choices)
        allowed = tuple(
            tuple(i for i, count in enumerate(counts) if count <= devices) or (0,) for counts in self.device_counts
        )
        return ChoiceEncoding(len(labels), labels, allowed)

    def grow_plans(self, rng: np.random.Generator, rows: Genes, devices: int, count: int) -> Genes:
        """Plans of which a run of layers takes a choice of one label, which may be one of more devices."""
        return self.encoding(devices).mutate(rng, rows[rng.integers(len(rows), size=count)])

    def seed_plans(self, devices: int) -> Genes:
        """For each label all layers that have it, the rest being whole; labels in order of appearance."""
        encoding = self.encoding(devices)
        assert isinstance(encoding, ChoiceEncoding)
        return encoding.uniform_plans()


def build_measuring_evaluator(
    problem: Problem, names: Sequence[str], plan: Callable[[Genes], Plan], measure: MeasureFunction | None
) -> Callable[[Genes], tuple[Array, Array]]:
    """The second level: every plan by `measure`, by default `Problem.evaluate_all`."""

    def evaluate(rows: Genes) -> tuple[Array, Array]:
        plans = [plan(row) for row in rows]
        found = problem.evaluate_all(plans) if measure is None else [_measure_or_error(measure, one) for one in plans]
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
    """The objectives of one plan, and by how much it passes the memory of a host."""
    if isinstance(metrics, DicompilerError):
        log.warning("a plan is left out: %s", metrics)
        return [UNMEASURED_VALUE] * len(names), UNMEASURED_VALUE
    reached = objective_values(platform, metrics, names)
    taken = used_memory(platform, metrics)
    return [reached[name] for name in names], max(taken[host.name] / host.memory - 1 for host in platform.hosts)


def _memory_limits(problem: Problem) -> Array:
    """Bytes (hosts,), at least 1, that a host has for weights and activations."""
    return np.maximum(np.array(list(free_memory(problem).values()), np.float64), 1.0)
