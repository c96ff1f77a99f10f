"""Dynamic program that chooses the stages of a pipeline.

    StageModel → StageSolution

The search minimises the largest load: the seconds per frame for which a device or link is busy, or the memory of a
device. A unit u is one device, or several that compute a stage (consecutive layers) in turn. The traffic of a stage is
the time for which its messages occupy links.

best[S][i] is the least traffic with which the set of devices S computes the layers before position i, such that no load
exceeds a limit T. It is the minimum over units u and positions j < i of best[S - u][j] + traffic of the layers j to i -
1 on u. The least limit T with a solution is found by bisection.

After Hu et al., "Pipeline Parallelism for Inference on Heterogeneous Edge Computing" (PipeEdge, 2021).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dicompiler_strategies.stages.interval_loads import Floats
from dicompiler_strategies.stages.stage_model import StageModel, StageUnit
from dicompiler_strategies.stages.turns import MAX_ROUND_FRAMES

MAX_ROUNDS = 40
"""Largest number of steps of the bisection over the load (seconds or bytes) of a device or link."""
PROOF_GAP = 1e-6
"""The search ends if the largest load is at most this fraction above its lower bound."""

DeviceCounts = tuple[int, ...]
"""A set of devices, as the number of devices of each kind. Devices of one kind are interchangeable."""


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one device, or on several devices that take frames in turn.

    Attributes:
        start: Position of the first layer.
        stop: Position after the last layer.
        turns: For each frame of a repeating round, the name of the device that computes it.
    """

    start: int
    stop: int
    turns: tuple[str, ...]


@dataclass(frozen=True)
class StageSolution:
    """The best stages of a pipeline that a search found.

    Attributes:
        stages: The stages in order.
        value: The largest load: seconds between frames, or bytes of memory.
        bound: Lower bound: no solution for the same stage model has a smaller value.
    """

    stages: tuple[Stage, ...]
    value: float
    bound: float

    @property
    def round_length(self) -> int:
        """Number of frames after which the order of devices repeats in all stages."""
        return math.lcm(*(len(stage.turns) for stage in self.stages))

    def describe(self, objective: str) -> str:
        stages = " | ".join(f"{stage.stop - stage.start} on {' '.join(stage.turns)}" for stage in self.stages)
        unit = "bytes of memory" if objective == "memory" else "s between frames"
        return f"{self.value:.6g} {unit}, at least {self.bound:.6g} with stages of whole layers: layers {stages}"


@dataclass(frozen=True)
class _LastStages:
    """The last stage of the best solution for a set of devices, as arrays over the end position of this stage.

    Attributes:
        starts: Index of the position (between layers) at which the stage begins.
        units: Index of the unit (one device, or several that take frames in turn) that computes the stage.
    """

    starts: NDArray[np.intp]
    units: NDArray[np.intp]


def find_best_stages(model: StageModel, is_ordered: bool = False) -> StageSolution | None:
    """Return the stages that minimise the largest load, and then the traffic; None if nothing fits.

    A load is the seconds per frame for which a device or link is busy, or the memory of a device. With `is_ordered`,
    stages use the kinds of devices in the order of `model.kinds`.
    """
    solution = _find_stages(model, is_ordered)
    if solution is None or solution.round_length <= MAX_ROUND_FRAMES:
        return solution
    limited = []
    # The round of the plan is the least common multiple of the stages' rounds, and is too long. Stages are therefore
    # limited to rounds that divide 12 (or 16).
    for frames in (12, 16):
        units = tuple(unit for unit in model.units if frames % len(unit.turns) == 0)
        limited.append(_find_stages(replace(model, units=units), is_ordered))
    found = [other for other in limited if other is not None]
    best = min(found, key=lambda other: other.value, default=None)
    return None if best is None else replace(best, bound=solution.bound)


def _find_stages(model: StageModel, is_ordered: bool) -> StageSolution | None:
    """Return the stages with the least largest load (seconds or bytes), found by bisection; None if nothing fits.

    The number of frames until the devices of all stages repeat their order is not limited.
    """
    search = _PipelineSearch(model, is_ordered)
    low = search.least_load()
    if low == np.inf:
        return None
    high, best = np.inf, None
    limit = low
    for _ in range(MAX_ROUNDS):
        found = search.least_traffic(limit * (1 + 1e-12))
        if found is not None and search.value(found) < high:
            high, best = search.value(found), found
        if found is None or search.value(found) > limit * (1 + 1e-9):
            low = max(low, limit)
        if high <= low * (1 + PROOF_GAP):
            break
        limit = (low + high) / 2 if high < np.inf else 2 * limit
    if best is None:
        return None
    return StageSolution(search.name_devices(best), high, min(low, high))


@dataclass(frozen=True)
class _PipelineSearch:
    model: StageModel
    is_ordered: bool

    @cached_property
    def capacity(self) -> DeviceCounts:
        return tuple(len(kind.names) for kind in self.model.kinds)

    @cached_property
    def sets(self) -> list[DeviceCounts]:
        """Sets of devices, each as the number of devices of each kind. Smaller sets come first."""
        every = itertools.product(*(range(count + 1) for count in self.capacity))
        return sorted(every, key=lambda counts: (sum(counts), counts))

    @cached_property
    def transitions(self) -> dict[DeviceCounts, list[tuple[int, DeviceCounts]]]:
        """The possible units (devices that compute a stage in turn) of the next stage, by the devices already used.

        Devices are given as numbers of devices of each kind. Each unit is a pair: its index in `model.units`, and the
        devices that are used after adding it.
        """
        steps: dict[DeviceCounts, list[tuple[int, DeviceCounts]]] = {}
        for used in self.sets:
            for index, unit in enumerate(self.model.units):
                total = tuple(a + b for a, b in zip(used, unit.counts, strict=True))
                if all(a <= b for a, b in zip(total, self.capacity, strict=True)) and self._is_in_order(used, unit):
                    steps.setdefault(used, []).append((index, total))
        return steps

    def _is_in_order(self, used: DeviceCounts, unit: StageUnit) -> bool:
        return not self.is_ordered or not any(used[unit.counts.index(1) :])

    def _unused_load(self, used: DeviceCounts) -> float:
        loads = zip(self.model.unused_load, used, strict=True)
        return max((load for load, count in loads if not count), default=0.0)

    def least_load(self) -> float:
        """Return the smallest possible value of the largest load (seconds or bytes) of a device or link.

        The load of a network medium that all devices share is not included.
        """
        size = len(self.model.positions)
        best = {used: np.full(size, np.inf) for used in self.sets}
        best[self.sets[0]][0] = 0.0
        for used in self.sets:
            known = np.flatnonzero(best[used] < np.inf)
            for index, total in self.transitions.get(used, ()) if len(known) else ():
                load = _above_diagonal(self.model.units[index].load)[known]
                np.minimum(best[total], np.maximum(best[used][known, None], load).min(axis=0), out=best[total])
        return min(max(float(best[used][-1]), self._unused_load(used)) for used in self.sets)

    def least_traffic(self, limit: float) -> tuple[tuple[int, int, int], ...] | None:
        """Return the stages with the least traffic and with no load above `limit` (seconds or bytes).

        A stage is (index of its first position, index of its end, index of the unit that computes it). The result is
        None if there are no such stages.
        """
        size = len(self.model.positions)
        costs = [np.where(_above_diagonal(unit.load) <= limit, unit.traffic, np.inf) for unit in self.model.units]
        best = {used: np.full(size, np.inf) for used in self.sets}
        last = {used: _LastStages(np.zeros(size, np.intp), np.zeros(size, np.intp)) for used in self.sets}
        best[self.sets[0]][0] = 0.0
        for used in self.sets:
            known = np.flatnonzero(best[used] < np.inf)
            for index, total in self.transitions.get(used, ()) if len(known) else ():
                sums = best[used][known, None] + costs[index][known]
                rows = sums.argmin(axis=0)
                least = sums[rows, np.arange(size)]
                better = least < best[total]
                best[total][better] = least[better]
                last[total].starts[better] = known[rows[better]]
                last[total].units[better] = index
        ends = [used for used in self.sets if best[used][-1] < np.inf and self._unused_load(used) <= limit]
        if not ends:
            return None
        return self._trace(min(ends, key=lambda used: float(best[used][-1])), last)

    def _trace(self, used: DeviceCounts, last: dict[DeviceCounts, _LastStages]) -> tuple[tuple[int, int, int], ...]:
        stages, stop = [], len(self.model.positions) - 1
        while stop:
            start, unit = int(last[used].starts[stop]), int(last[used].units[stop])
            stages.append((start, stop, unit))
            used = tuple(a - b for a, b in zip(used, self.model.units[unit].counts, strict=True))
            stop = start
        return tuple(reversed(stages))

    def value(self, stages: Sequence[tuple[int, int, int]]) -> float:
        """Return the largest load (seconds or bytes) of a device or link, or of the medium that all devices share."""
        units = self.model.units
        used = tuple(map(sum, zip(*(units[unit].counts for _, _, unit in stages), strict=True)))
        loads = [float(units[unit].load[start, stop]) for start, stop, unit in stages]
        if self.model.has_shared_medium:
            loads.append(sum(float(units[unit].traffic[start, stop]) for start, stop, unit in stages))
        return max(*loads, self._unused_load(used))

    def name_devices(self, stages: Sequence[tuple[int, int, int]]) -> tuple[Stage, ...]:
        free = [list(kind.names) for kind in self.model.kinds]
        named = []
        for start, stop, unit in stages:
            counts = self.model.units[unit].counts
            names = [free[kind].pop(0) for kind, count in enumerate(counts) for _ in range(count)]
            positions, turns = self.model.positions, self.model.units[unit].turns
            named.append(Stage(positions[start], positions[stop], tuple(names[i] for i in turns)))
        return tuple(named)


def _above_diagonal(load: Floats) -> Floats:
    """Return a copy of the array, with infinity for stages without layers."""
    result: Floats = np.where(np.triu(np.ones_like(load), 1) > 0, load, np.inf)
    return result
