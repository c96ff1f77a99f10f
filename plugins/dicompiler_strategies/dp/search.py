"""The dynamic program of the strategy `dp`, after eq. (2) of the CoopAI paper, for any layer graph.

    candidate runs + RunPricing → RunPath: the cheapest sequence of runs that covers all layers, in layer order

A run is a sequence of consecutive layers that a team (a set of devices) computes in one way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dicompiler.plugin_api import LayerGraph, Problem
from dicompiler.plugin_api.regions import full_region
from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.dp.box_arrays import DeviceBoxes, missing_elements
from dicompiler_strategies.dp.candidate_runs import CANDIDATE_RUNS_PER_S, CandidateRun, bytes_per_element
from dicompiler_strategies.dp.device_team import DeviceTeam, TensorForm
from dicompiler_strategies.tables.choice_footprints import Floats

SUMMED_OBJECTIVES = ("latency", "energy", "communication")
"""Objectives that are sums over runs of layers. Throughput and memory are maxima over devices."""

FormState = tuple[tuple[str, TensorForm], ...]
"""Name and form of each tensor that later layers still read. The form is its distribution over the devices."""


@dataclass(frozen=True, eq=False)
class RunPricing:
    """The cost of a run of layers: the objective, plus a price for weights on hosts with too little memory.

    Attributes:
        problem: The problem, whose objective is one of `SUMMED_OBJECTIVES`.
        byte_prices: Price of a byte of weights by device name, in units of the objective; 0 for other devices.
    """

    problem: Problem
    byte_prices: Mapping[str, float] = field(default_factory=dict)

    def run_cost(self, team: DeviceTeam, seconds: float, sent_bytes: float, run: CandidateRun | None) -> float:
        """Return the cost of a run of layers, in the objective's unit (s, bytes or J), plus the price of its weights.

        The energy of sending is not counted.

        Args:
            team: The devices that compute the run.
            seconds: Seconds of the run, with the transfers before it.
            sent_bytes: Bytes that are sent in the run.
            run: The run; None for the transfer of the network's outputs to the sinks.
        """
        devices = team.problem.platform.devices
        total = {"latency": seconds, "communication": sent_bytes}.get(self.problem.objective)
        if total is None:
            total = seconds * sum(devices[i].power_idle for i in team.members)
            for step in run.steps if run is not None else ():
                total += sum(float(step[i]) * (devices[i].power_active - devices[i].power_idle) for i in team.members)
        return total if run is None else total + self.weight_price(team, run.weights)

    def weight_price(self, team: DeviceTeam, weights: Floats) -> float:
        """Return the price of the weights on hosts with too little memory.

        `weights` are the bytes of weights on each of the n devices of the team's platform, shape (n,).
        """
        if not self.byte_prices:
            return 0.0
        devices = team.problem.platform.devices
        return sum(
            self.byte_prices.get(device.name, 0.0) * float(count)
            for device, count in zip(devices, weights, strict=True)
        )


@dataclass(frozen=True, eq=False)
class RunPath:
    """A sequence of runs of consecutive layers that covers all layers.

    Attributes:
        team: The devices that compute the runs.
        cost: Cost in units of the objective, with the prices of weights on hosts that have too little memory.
        seconds: Seconds in the barrier model, in which nothing overlaps.
        total_bytes: Bytes that are sent between devices.
        runs: The runs, in layer order.
    """

    team: DeviceTeam
    cost: float
    seconds: float
    total_bytes: float
    runs: tuple[CandidateRun, ...]

    @property
    def weights(self) -> Floats:
        return np.asarray(sum(run.weights for run in self.runs), np.float64)


@dataclass(frozen=True, eq=False)
class _PathNode:
    cost: float
    seconds: float
    total_bytes: float
    run: CandidateRun | None
    previous: _PathNode | None

    def runs_so_far(self) -> tuple[CandidateRun, ...]:
        result = []
        at: _PathNode | None = self
        while at is not None and at.run is not None:
            result.append(at.run)
            at = at.previous
        return tuple(reversed(result))


def find_cheapest_path(
    team: DeviceTeam,
    runs: Sequence[Sequence[CandidateRun]],
    pricing: RunPricing,
    budget: WorkBudget | None = None,
    beam: int = 24,
) -> RunPath:
    """Return the cheapest sequence of runs (consecutive layers computed in one way) that covers all layers.

    A state s is the distribution of each tensor that later layers read. T_p(s) is the least cost to compute the first p
    layers and end in state s. A run r computes the layers start(r) to stop(r) - 1, and costs e(r, s) if it begins in
    state s. The recurrence is T_p(s') = min over r and s of T_start(r)(s) + e(r, s), for all runs r with stop(r) = p
    that end in state s'.

    The result is optimal for a chain of layers. In a network with many parallel branches it may not be.

    Args:
        team: The devices that compute the runs.
        runs: For each position, the runs that begin there.
        pricing: The cost of a run.
        budget: The work that the search may do.
        beam: Number of cheapest states that are kept at each position.

    Raises:
        BudgetExceeded: The budget is exceeded before all layers are covered.
    """
    graph, budget = team.layers, budget or WorkBudget()
    last = _last_readers(graph)
    best: list[dict[FormState, _PathNode]] = [{} for _ in range(len(graph.layers) + 1)]
    opening: FormState = tuple((name, "source") for name in graph.inputs)
    best[0][_open_tensors(opening, last, 0)] = _PathNode(0.0, 0.0, 0.0, None, None)
    for position in range(len(graph.layers)):
        states = sorted(best[position].items(), key=lambda entry: entry[1].cost)[:beam]
        budget.spend_or_raise(len(states) * len(runs[position]) / CANDIDATE_RUNS_PER_S)
        for state, node in states:
            forms = dict(state)
            for run in runs[position]:
                seconds, sent_bytes = run.cost_for_forms(team, forms)
                cost = node.cost + pricing.run_cost(team, seconds, sent_bytes, run)
                outputs = [
                    (name, run.form)
                    for layer in graph.layers[run.start : run.stop]
                    for name in layer.outputs
                    if last.get(name, 0) > run.stop
                ]
                after = (*_open_tensors(state, last, run.stop), *outputs)
                known = best[run.stop].get(after)
                if known is None or cost < known.cost:
                    best[run.stop][after] = _PathNode(
                        cost, node.seconds + seconds, node.total_bytes + sent_bytes, run, node
                    )
        best[position] = {}
    ends = [_deliver_outputs(team, pricing, dict(state), node) for state, node in best[-1].items()]
    end = min(ends, key=lambda node: (node.cost, node.total_bytes))
    return RunPath(team, end.cost, end.seconds, end.total_bytes, (end.previous or end).runs_so_far())


def _last_readers(graph: LayerGraph) -> dict[str, int]:
    """Return, for each tensor, the position after its last reader; number of layers + 1 for network outputs."""
    last = {name: graph.position[readers[-1].name] + 1 for name, readers in graph.consumers.items()}
    return last | dict.fromkeys(graph.delivered_outputs, len(graph.layers) + 1)


def _open_tensors(state: FormState, last: Mapping[str, int], position: int) -> FormState:
    """Return the entries (tensor, distribution over devices) of `state` that a layer at `position` or later reads."""
    return tuple([entry for entry in state if last.get(entry[0], 0) > position])


def _deliver_outputs(
    team: DeviceTeam, pricing: RunPricing, forms: Mapping[str, TensorForm], node: _PathNode
) -> _PathNode:
    """Return the end of a path (a sequence of runs of layers) after the network's outputs were sent to the sinks.

    Args:
        team: The devices that compute the runs.
        pricing: The cost of a run.
        forms: How each network output is distributed over the devices.
        node: The end of a path that covers all layers.
    """
    platform = team.problem.platform
    sinks = team.device_indices(team.problem.sink)
    total = np.zeros((len(platform.devices),) * 2)
    for name in team.layers.delivered_outputs:
        shape = team.layers.tensors[name].shape
        if shape is not None:
            need = DeviceBoxes.from_regions(shape, team.boxes_on(full_region(shape), sinks))
            form = forms[name]
            missing = missing_elements(need, team.stored_boxes(name, form), form in ("source", "everywhere"))
            total += missing * bytes_per_element(team.layers, name)
    seconds, sent_bytes = float(team.link_loads.transfer_seconds(total)), float(total.sum())
    cost = node.cost + pricing.run_cost(team, seconds, sent_bytes, None)
    return _PathNode(cost, node.seconds + seconds, node.total_bytes + sent_bytes, None, node)
