"""The joint search: it chooses one way to split each layer, for all layers at once.

`solve_jointly` finds the best plan over the choices (ways to split each layer) of cost tables, with a lower bound. It
uses Lagrangian relaxation and CP-SAT, and searches for plans that fit into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Plan, Problem
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler.plugin_api.search import (
    INTERRUPTED_NOTE,
    check_constraints,
    describe_plan_memory,
    free_memory,
    missing_memory,
    needed_memory,
)
from dicompiler.plugin_api.utilities import format_bytes, format_needed_bytes
from dicompiler_strategies.joint.cpsat_solver import SolverEffort, SolverResult, solve_remaining
from dicompiler_strategies.joint.joint_model import JointModel, activation_bytes, build_joint_model
from dicompiler_strategies.joint.lagrangian import RelaxedProblem, bound_without_elimination, relax_with_prices
from dicompiler_strategies.joint.variable_elimination import MAX_TABLE_ELEMENTS
from dicompiler_strategies.tables.choice_footprints import device_host_matrix, source_and_sink
from dicompiler_strategies.tables.choices import devices_by_rate
from dicompiler_strategies.tables.cost_tables import CostTables

log = logging.getLogger("dicompiler")
PROOF_GAP = 1e-6
"""Largest relative gap of a plan that is reported as optimal: the rounding error of integer costs."""
AMPLE_COPIES = 8
"""A generous limit on the copies of a tensor on one device: received tensors, partial sums and buffers."""
MAX_LIMITED_LAYERS = 4
"""Largest number of layers with a memory constraint: their inputs and outputs, and all weights, must fit."""
MAX_MEMORY_ROUNDS = 12
"""Largest number of searches, each with tighter limits than the last, until the plan fits into memory."""


@dataclass(frozen=True)
class JointSolution:
    """The best plan that was found, with a lower bound.

    The bound holds for all plans of the same choice set (ways to split layers) in the same cost model. It does not hold
    for a simulated latency, which has no barriers between layers.

    Attributes:
        plan: The plan.
        selection: Index of the choice (way to split it) of each layer.
        value: Objective value of the plan in the cost model.
        bound: Lower bound on the value.
        is_proven: True if the plan is optimal.
        choice_set: Description of the choice set.
        cost_model: Description of the cost model.
        interrupted: True if Ctrl-C ended the search.
    """

    plan: Plan
    selection: tuple[int, ...]
    value: float
    bound: float
    is_proven: bool
    choice_set: str
    cost_model: str
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """Relative gap between the plan's value and its lower bound; 0 if the plan is proven to be optimal."""
        return 0.0 if self.is_proven or not self.value else max(0.0, (self.value - self.bound) / abs(self.value))

    def text(self) -> str:
        """Return one line with the value, the bound, the gap, and the choice set that the bound covers."""
        how = "proven optimal" if self.is_proven else f"gap {100 * self.gap:.2f} %"
        stopped = ", interrupted" if self.interrupted else ""
        return (
            f"value {self.value:.6g}, bound {self.bound:.6g} ({how}{stopped}) in {self.cost_model}, "
            f"over: {self.choice_set}"
        )


def solve_jointly(cost_tables: CostTables, effort: SolverEffort = SolverEffort()) -> JointSolution:  # noqa: B008
    """Return the best plan over the choices (ways to split a layer) of the tables, within the hosts' memory.

    Ctrl-C ends the search with the best plan so far.

    Raises:
        DicompilerError: No plan fits into memory. The error names the memory that would suffice, or a layer that does
            not fit on any host.
    """
    return _JointSearch(cost_tables, effort).solve()


class _JointSearch:
    def __init__(self, cost_tables: CostTables, effort: SolverEffort) -> None:
        self.tables, self.problem, self.effort = cost_tables, cost_tables.problem, effort
        # Choice 0 of each layer is the whole layer on the fastest device: a valid plan.
        self.start_selections = [tuple(0 for _ in cost_tables.choices)]
        self.interrupted = False
        # Names of the devices that draw idle power, if the objective is energy; None for all.
        self.powered_devices: set[str] | None = None
        self.memory = {host.name: host.memory for host in cost_tables.problem.platform.hosts}

    def solve(self) -> JointSolution:
        if min(self.problem.target_overhead.values()) > max(self.memory.values()):
            # The target's runtime needs more memory than any host has. This check raises the error.
            check_constraints(self.problem, self.problem.best_single_device[0])
        keep = self._possible_choices()
        if self.problem.objective == "energy":
            best, bound = self._solve_energy(keep)
        else:
            best, bound = self._solve_model(build_joint_model(self.tables).keep_choices(keep), self.start_selections)
        # If the best plan without memory limits fits, it is also the best plan with limits.
        if best is not None and not self._missing_memory(best):
            return self._build_solution(best, bound)
        self.powered_devices = None
        return self._solve_with_limits(keep, best, bound)

    def _solve_with_limits(
        self, keep: Sequence[NDArray[np.bool_]], best: tuple[int, ...] | None, bound: float
    ) -> JointSolution:
        """Return the best plan that fits into memory.

        If a plan does not fit, a limit is added: all weights plus the inputs and outputs of the plan's fullest layer
        must fit. After MAX_LIMITED_LAYERS such limits, the memory for weights is reduced by the missing bytes instead.

        Args:
            keep: For each layer, a mask of the choices (ways to split it) that fit into memory without other layers.
            best: The best selection without memory limits.
            bound: The lower bound without memory limits.
        """
        limits, limited_layers, bound_is_valid = free_memory(self.problem), list[int](), True
        for _ in range(MAX_MEMORY_ROUNDS):
            start = self.start_selections if best is None else [*self.start_selections, best]
            best, own_bound = self._solve_model(
                build_joint_model(self.tables, limits, limited_layers=limited_layers).keep_choices(keep), start
            )
            bound = max(bound, own_bound) if bound_is_valid else bound
            if best is None:
                break
            missing = self._missing_memory(best)
            if not missing:
                return self._build_solution(best, bound)
            fullest = self._fullest_layer(best, missing)
            if fullest not in limited_layers and len(limited_layers) < MAX_LIMITED_LAYERS:
                limited_layers.append(fullest)
                continue
            # Reserve the missing bytes for activations. This may exclude plans that fit, so later bounds are not valid.
            bound_is_valid = False
            for host, missing_bytes in missing.items():
                limits[host] = max(0, limits[host] - missing_bytes)
        return self._solve_least_memory(bound)

    def _fullest_layer(self, selection: Sequence[int], hosts: Collection[str]) -> int:
        """Return the position of the layer with the most bytes of inputs and outputs on one of `hosts`.

        `selection` has the index of each layer's choice (way to split it).
        """
        host_numbers = [i for i, host in enumerate(self.problem.platform.hosts) if host.name in hosts]
        chosen = zip(activation_bytes(self.tables), selection, strict=True)
        return int(np.argmax([host_bytes[c][host_numbers].max() for host_bytes, c in chosen]))

    def _solve_energy(self, keep: Sequence[NDArray[np.bool_]]) -> tuple[tuple[int, ...] | None, float]:
        """Return the best selection (one way to split each layer) for the objective energy, and a lower bound.

        Every powered device draws idle power. The problem is therefore solved with the 1, 2, … fastest devices powered,
        in addition to sources and sinks.

        Args:
            keep: For each layer, a mask of the choices that may be used.
        """
        best, value, bound = None, np.inf, np.inf
        source, sink = source_and_sink(self.problem)
        for count in range(1, len(devices_by_rate(self.problem)) + 1):
            powered = {*source, *sink, *(device.name for device in devices_by_rate(self.problem)[:count])}
            inside = [
                mask & np.array([all(part.device in powered for part in choice.parts) for choice in choices])
                for mask, choices in zip(keep, self.tables.choices, strict=True)
            ]
            if not all(mask.any() for mask in inside):
                continue
            model = build_joint_model(self.tables, powered=powered)
            selection, own_bound = self._solve_model(model.keep_choices(inside), self.start_selections)
            bound = min(bound, own_bound)
            if selection is not None and model.value(selection) < value:
                best, value, self.powered_devices = selection, model.value(selection), powered
        return best, bound

    def _solve_model(self, model: JointModel, start: Sequence[Sequence[int]]) -> tuple[tuple[int, ...] | None, float]:
        """Return the best selection (one way to split each layer) within the limits, or None, and a lower bound.

        The search begins with the selections `start`.
        """
        relaxed: RelaxedProblem | None = None
        try:
            is_wide = model.elimination_order.largest_table > MAX_TABLE_ELEMENTS
            relaxed = (bound_without_elimination if is_wide else relax_with_prices)(model, start, self.effort.budget)
            left = sum(len(costs) for costs in relaxed.model.node)
            log.info("cpsat: value %.6g, bound %.6g, %d choices left", relaxed.value, relaxed.bound, left)
            if relaxed.is_proven:
                return relaxed.best, relaxed.bound
            result: SolverResult = solve_remaining(relaxed, self.effort, is_wide)
            self.interrupted |= result.interrupted
            return result.best, result.bound
        except KeyboardInterrupt:
            self.interrupted = True
            if relaxed is not None:
                return relaxed.best, relaxed.bound
            feasible = [now for s in start if (now := model.from_original(s)) is not None and model.fits_limits(now)]
            best = min(feasible, key=model.value, default=None)
            return (None if best is None else model.to_original(best)), 0.0

    def _possible_choices(self) -> list[NDArray[np.bool_]]:
        """Return, for each layer, a mask of the choices (ways to split it) that fit into memory without other layers.

        Raises:
            DicompilerError: No choice of a layer fits.
        """
        hosts = self.problem.platform.hosts
        limits = np.array([host.memory for host in hosts], np.float64)
        host_matrix, names = device_host_matrix(self.problem.platform), [d.name for d in self.problem.platform.devices]
        overhead = np.array([self.problem.target_overhead[name] for name in names], np.float64)
        keep: list[NDArray[np.bool_]] = []
        sizes = zip(self.tables.choices, self.tables.weight_bytes, activation_bytes(self.tables), strict=True)
        for i, (choices, weights, tensor_bytes) in enumerate(sizes):
            need = weights @ host_matrix + tensor_bytes
            if overhead.any():
                used = [{part.device for part in choice.parts} for choice in choices]
                is_used = np.array([[name in devices for name in names] for devices in used])
                need += (is_used * overhead) @ host_matrix
            fits: NDArray[np.bool_] = np.all(need <= limits, axis=1)
            if not fits.any():
                least = format_needed_bytes(int(need.max(axis=1).min()))
                name = self.problem.layers.layers[i].name
                cause = f"layer {name!r} fits nowhere, because its smallest split alone needs {least} on a host"
                raise self._least_memory_error(self._select_least_memory(), cause)
            keep.append(fits)
        return keep

    def _missing_memory(self, selection: Sequence[int]) -> Mapping[str, int]:
        """Return the missing bytes, by host name, of the plan with these choices (ways to split the layers)."""
        return {} if self._has_ample_memory() else missing_memory(self.problem, self.tables.plan(selection))

    def _has_ample_memory(self) -> bool:
        """Return True if every host has so much memory that every plan fits, by a quick upper estimate."""
        layers = self.problem.layers
        sizes = {False: 0, True: 0}
        for tensor in layers.tensors.values():
            if tensor.shape is not None:
                sizes[tensor.is_constant] += raw_nbytes(tensor.dtype, tensor.shape)
        # The worst case: all devices are on one host, each with copies of all tensors. With a target, weights are
        # copied while they are loaded.
        devices = len(self.problem.platform.devices)
        weight_copies = 1 if self.problem.target is None else AMPLE_COPIES
        device_bytes = weight_copies * sizes[True] + AMPLE_COPIES * sizes[False]
        return min(self.memory.values()) >= devices * (device_bytes + 2 * max(self.problem.target_overhead.values()))

    def _solve_least_memory(self, bound: float) -> JointSolution:
        """Return the plan with the fewest bytes of weights on the fullest host.

        Raises:
            DicompilerError: The plan does not fit. The error names the memory that would suffice.
        """
        best = self._select_least_memory()
        needed = needed_memory(self.problem, self.tables.plan(best))
        if all(needed[host] <= self.memory[host] for host in needed):
            return self._build_solution(best, bound)
        raise self._least_memory_error(best, "no plan fits into memory")

    def _select_least_memory(self) -> tuple[int, ...]:
        tables = replace(self.tables, problem=replace(self.problem, objective="memory"))
        best, _ = self._solve_model(build_joint_model(tables), self.start_selections)
        assert best is not None
        return best

    def _least_memory_error(self, selection: Sequence[int], cause: str) -> DicompilerError:
        """Return the error that no plan fits, which names the memory that would suffice.

        Args:
            selection: Index of the choice of each layer in the plan that needs the least memory.
            cause: Beginning of the message.
        """
        plans = [self.tables.plan(selection), self.problem.best_single_device[0]]
        need, shares = min(describe_plan_memory(self.problem, plan) for plan in plans)
        sizes = [float(weights[c].max()) for weights, c in zip(self.tables.weight_bytes, selection, strict=True)]
        layer = self.problem.layers.layers[int(np.argmax(sizes))].name
        return DicompilerError(
            f"plan: {cause}: {format_needed_bytes(need)} on each host would suffice{shares}: use more memory or more "
            f"hosts (layer {layer!r} has {format_bytes(int(max(sizes)))} of weights on one device)"
        )

    def _build_solution(self, selection: tuple[int, ...], bound: float) -> JointSolution:
        value = build_joint_model(self.tables, powered=self.powered_devices).value(selection)
        bound = min(bound, value)
        proven = value - bound <= PROOF_GAP * abs(value)
        plan = self.tables.plan(selection)
        if self.interrupted:
            log.warning("cpsat: interrupted: this is the best plan so far (press Ctrl-C again to end the command)")
            plan = replace(plan, note=INTERRUPTED_NOTE)
        choice_set, cost_model = self.tables.options.describe(), _describe_cost_model(self.problem)
        return JointSolution(plan, selection, value, bound, proven, choice_set, cost_model, self.interrupted)


def _describe_cost_model(problem: Problem) -> str:
    inside = {
        "latency": "seconds with a barrier after each layer",
        "energy": "joules with a barrier after each layer, the network's power left out, the fastest devices on",
        "throughput": "seconds of the busiest device or link",
        "memory": "bytes of weights on the fullest host",
        "communication": "bytes, counted for each edge of the layer graph",
    }[problem.objective]
    return f"{inside}, cost model {problem.cost_model.name}, {problem.platform.network.kind} network"
