"""The whole search: relaxation, CP-SAT, and plans that fit into memory, with a bound and what it holds for.

Tables → JointSolution.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import (
    INTERRUPTED,
    DicompilerError,
    Plan,
    Problem,
    format_bytes,
    free_memory,
    memory_lacking,
    memory_needed,
    raw_nbytes,
)
from dicompiler_strategies.joint.elimination import LIMIT
from dicompiler_strategies.joint.model import JointModel, activations, joint_model
from dicompiler_strategies.joint.relaxation import Relaxed, relax, unrelaxed
from dicompiler_strategies.joint.solving import Effort, SolverResult, finish
from dicompiler_strategies.tables.choices import ranked
from dicompiler_strategies.tables.cost_tables import Tables
from dicompiler_strategies.tables.footprints import on_hosts, source_and_sink

log = logging.getLogger("dicompiler")
PROOF = 1e-6
"""Relative gap at which a value counts as proven: what rounding to whole numbers can come to."""
AMPLE = 8  # copies of a tensor that a device may hold: received, joined, partial sums, buffers
FULL = 4  # layers whose tensors are kept within the limits by the model itself
ROUNDS = 12  # of solving again with more room left for activations


@dataclass(frozen=True)
class JointSolution:
    """The best plan found. value: its objective in the model named by `cost_model`; no plan of `choice_set` has less
    than `bound` there. It is no bound for other choices, nor for a makespan without barriers.

    interrupted: the search was stopped by hand.
    """

    plan: Plan
    selection: tuple[int, ...]
    value: float
    bound: float
    proven: bool
    choice_set: str
    cost_model: str
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """(value - bound) / value; 0 where proven."""
        return 0.0 if self.proven or not self.value else max(0.0, (self.value - self.bound) / abs(self.value))

    def text(self) -> str:
        """One line: value, bound, gap and what they hold for."""
        how = "proven optimal" if self.proven else f"gap {100 * self.gap:.2f} %"
        stopped = ", interrupted" if self.interrupted else ""
        return (
            f"value {self.value:.6g}, bound {self.bound:.6g} ({how}{stopped}) in {self.cost_model}, "
            f"over: {self.choice_set}"
        )


def solve(cost_tables: Tables, effort: Effort = Effort()) -> JointSolution:  # noqa: B008
    """The best plan over the choices of the tables, the hosts' memory being hard limits.

    Ctrl-C ends the search with the best so far. Raises DicompilerError where no plan fits into memory, with the
    smallest limit that would do, and the layer that fits nowhere where there is one.
    """
    return _Joint(cost_tables, effort).solve()


class _Joint:
    def __init__(self, cost_tables: Tables, effort: Effort) -> None:
        self.tables, self.problem, self.effort = cost_tables, cost_tables.problem, effort
        self.start = [tuple(0 for _ in cost_tables.choices)]  # everything on the fastest device
        self.interrupted = False
        self.on: set[str] | None = None  # the devices that are on, where that is part of the question
        self.memory = {host.name: host.memory for host in cost_tables.problem.platform.hosts}

    def solve(self) -> JointSolution:
        """Without limits first: where that plan fits, it is the best of all."""
        keep = self._possible()
        if self.problem.objective == "energy":
            best, bound = self._powered(keep)
        else:
            best, bound = self._best(joint_model(self.tables).kept(keep), self.start)
        if best is not None and not self._over(best):
            return self._solution(best, bound)
        self.on = None
        return self._limited(keep, best, bound)

    def _limited(self, keep: Sequence[NDArray[np.bool_]], best: tuple[int, ...] | None, bound: float) -> JointSolution:
        """The best plan that fits. Of a plan that does not, the layer with the most tensors beside the weights is kept
        within the limits as well from then on, which holds for every plan; where that is not enough, less room is left
        for weights, which costs the bound its meaning: then it stays as it was."""
        limits, full, valid = free_memory(self.problem), list[int](), True
        for _ in range(ROUNDS):
            start = self.start if best is None else [*self.start, best]
            best, own_bound = self._best(joint_model(self.tables, limits, full=full).kept(keep), start)
            bound = max(bound, own_bound) if valid else bound
            if best is None:
                break
            over = self._over(best)
            if not over:
                return self._solution(best, bound)
            fullest = self._fullest(best, over)
            if fullest not in full and len(full) < FULL:
                full.append(fullest)
                continue
            valid = False
            for host, lacking in over.items():  # leave as much room as this plan's activations were too large
                limits[host] = max(0, limits[host] - lacking)
        return self._smallest(bound)

    def _fullest(self, selection: Sequence[int], hosts: Collection[str]) -> int:
        """The layer whose tensors take most on one of these hosts."""
        places = [i for i, host in enumerate(self.problem.platform.hosts) if host.name in hosts]
        live = [held[c][places].max() for held, c in zip(activations(self.tables), selection, strict=True)]
        return int(np.argmax(live))

    def _powered(self, keep: Sequence[NDArray[np.bool_]]) -> tuple[tuple[int, ...] | None, float]:
        """Energy: one model for each number of the fastest devices that are on; all that are on draw idle power."""
        best, value, bound = None, np.inf, np.inf
        source, sink = source_and_sink(self.problem)
        for count in range(1, len(ranked(self.problem)) + 1):
            on = {*source, *sink, *(device.name for device in ranked(self.problem)[:count])}
            inside = [
                mask & np.array([all(part.device in on for part in choice.parts) for choice in choices])
                for mask, choices in zip(keep, self.tables.choices, strict=True)
            ]
            if not all(mask.any() for mask in inside):
                continue
            powered = joint_model(self.tables, on=on)
            selection, own_bound = self._best(powered.kept(inside), self.start)
            bound = min(bound, own_bound)
            if selection is not None and powered.value(selection) < value:
                best, value, self.on = selection, powered.value(selection), on
        return best, bound

    def _best(self, limited: JointModel, start: Sequence[Sequence[int]]) -> tuple[tuple[int, ...] | None, float]:
        """(the best selection, the bound) of a model."""
        relaxed: Relaxed | None = None
        try:
            wide = limited.graph.widest > LIMIT
            relaxed = (unrelaxed if wide else relax)(limited, start, self.effort.allowance)
            left = sum(len(costs) for costs in relaxed.left.node)
            log.info("cpsat: value %.6g, bound %.6g, %d choices left", relaxed.value, relaxed.bound, left)
            if relaxed.proven:
                return relaxed.best, relaxed.bound
            result: SolverResult = finish(relaxed, self.effort, wide)
            self.interrupted |= result.interrupted
            return result.best, result.bound
        except KeyboardInterrupt:
            self.interrupted = True
            if relaxed is not None:
                return relaxed.best, relaxed.bound
            possible = [now for s in start if (now := limited.now(s)) is not None and limited.fits(now)]
            best = min(possible, key=limited.value, default=None)
            return (None if best is None else limited.first(best)), 0.0

    def _possible(self) -> list[NDArray[np.bool_]]:
        """For each layer the choices that can fit at all. Raises where a layer has none."""
        hosts = self.problem.platform.hosts
        caps = np.array([host.memory for host in hosts], np.float64)
        place = on_hosts(self.problem.platform)
        reserve = np.array([self.problem.reserve[d.name] for d in self.problem.platform.devices], np.float64)
        keep: list[NDArray[np.bool_]] = []
        for i, (held, live) in enumerate(zip(self.tables.weights, activations(self.tables), strict=True)):
            need = held @ place + live
            if reserve.any():
                need += (self._taking_part(i) * reserve) @ place
            fits: NDArray[np.bool_] = np.all(need <= caps, axis=1)
            if not fits.any():
                least = int(need.max(axis=1).min())
                raise DicompilerError(
                    f"cpsat: layer {self.problem.layers.layers[i].name!r} fits nowhere: its smallest split needs "
                    f"{format_bytes(least)} on a host: give the hosts at least that much memory"
                )
            keep.append(fits)
        return keep

    def _taking_part(self, layer: int) -> NDArray[np.bool_]:
        """Which devices have a part in each choice of a layer: (choices, devices)."""
        names = [device.name for device in self.problem.platform.devices]
        parts = [{part.device for part in choice.parts} for choice in self.tables.choices[layer]]
        return np.array([[name in used for name in names] for used in parts])

    def _over(self, selection: Sequence[int]) -> Mapping[str, int]:
        """Host → bytes that it lacks, for the hosts that do not hold their share of the plan."""
        return {} if self._plenty() else memory_lacking(self.problem, self.tables.plan(selection))

    def _plenty(self) -> bool:
        """Whether every host could hold all weights and AMPLE times all tensors: no plan needs a closer look. With a
        target AMPLE times all weights (they are copied while they are loaded) and twice what it always adds."""
        layers = self.problem.layers
        sizes = {False: 0, True: 0}
        for tensor in layers.tensors.values():
            if tensor.shape is not None:
                sizes[tensor.constant] += raw_nbytes(tensor.dtype, tensor.shape)
        devices = len(self.problem.platform.devices)  # those of one host may hold copies
        copies = 1 if self.problem.target is None else AMPLE
        added = 2 * max(self.problem.reserve.values())
        return min(self.memory.values()) >= devices * (copies * sizes[True] + AMPLE * sizes[False] + added)

    def _smallest(self, bound: float) -> JointSolution:
        """The plan that needs the least memory, where it fits; else the error."""
        least = replace(self.tables, problem=replace(self.problem, objective="memory"))
        best, _ = self._best(joint_model(least), self.start)
        assert best is not None
        plan = self.tables.plan(best)
        needed = memory_needed(self.problem, plan)
        if all(needed[host] <= self.memory[host] for host in needed):
            return self._solution(best, bound)
        need = max(needed.values())
        sizes = [float(held[c].max()) for held, c in zip(self.tables.weights, best, strict=True)]
        layer = self.problem.layers.layers[int(np.argmax(sizes))].name
        raise DicompilerError(
            f"cpsat: no plan fits into memory: {format_bytes(int(need))} on each host would do; most of it is for "
            f"layer {layer!r} ({format_bytes(int(max(sizes)))} of weights on one device): give hosts more, or add some"
        )

    def _solution(self, selection: tuple[int, ...], bound: float) -> JointSolution:
        powered = joint_model(self.tables, on=self.on)
        value = powered.value(selection)
        bound = min(bound, value)
        proven = value - bound <= PROOF * abs(value)
        plan = self.tables.plan(selection)
        if self.interrupted:
            log.warning("cpsat: interrupted: this is the best plan so far (Ctrl-C again ends the command)")
            plan = replace(plan, note=INTERRUPTED)
        return JointSolution(
            plan,
            selection,
            value,
            bound,
            proven,
            self.tables.options.text(),
            _model_name(self.problem),
            self.interrupted,
        )


def _model_name(problem: Problem) -> str:
    """What values and bounds are in."""
    inside = {
        "latency": "seconds with a barrier after each layer",
        "energy": "joules with a barrier after each layer, the network's power left out, the fastest devices on",
        "throughput": "seconds of the busiest device or line",
        "memory": "bytes of weights on the fullest host",
        "communication": "bytes, counted for each edge of the layer graph",
    }[problem.objective]
    return f"{inside}, cost model {problem.cost.name}, {problem.platform.network.kind} network"
