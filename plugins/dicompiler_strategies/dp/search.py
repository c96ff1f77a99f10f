"""The dynamic programme over a team's moves: eq. (2) of CoopAI, generalised to any layer graph and to several forms.

Moves + Pricing → the cheapest path of moves that covers all layers, in layer order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dicompiler.plugin_api import LayerGraph, Problem
from dicompiler.plugin_api.regions import full_region
from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.dp.box_arrays import DeviceBoxes, missing_elements
from dicompiler_strategies.dp.candidate_runs import CandidateRun, bytes_per_element
from dicompiler_strategies.dp.device_team import DeviceTeam, TensorForm
from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.work import CANDIDATE_RUNS_PER_S

SUMMED_OBJECTIVES = ("latency", "energy", "communication")
"""Of dicompiler.base.objectives those that are sums over the moves; throughput and memory are maxima, which this search
cannot add up."""

FormState = tuple[
    tuple[str, TensorForm], ...
]  # the tensors that are still read, in the order of their making, and their forms


@dataclass(frozen=True, eq=False)
class RunPricing:
    """What a move costs: `objective`, and `price`: device → for each byte of weights there, where memory is short."""

    problem: Problem
    byte_prices: Mapping[str, float] = field(default_factory=dict)

    def run_cost(self, team: DeviceTeam, seconds: float, count: float, move: CandidateRun | None) -> float:
        """Seconds, bytes or Joule (without the energy of sending) of one move, and the price of its weights."""
        devices = team.problem.platform.devices
        total = {"latency": seconds, "communication": count}.get(self.problem.objective)
        if total is None:
            total = seconds * sum(devices[i].power_idle for i in team.members)
            for step in move.steps if move is not None else ():
                total += sum(float(step[i]) * (devices[i].power_active - devices[i].power_idle) for i in team.members)
        return total if move is None else total + self.weight_price(team, move.weights)

    def weight_price(self, team: DeviceTeam, weights: Floats) -> float:
        """The price of these bytes (n,)."""
        if not self.byte_prices:
            return 0.0
        devices = team.problem.platform.devices
        return sum(
            self.byte_prices.get(device.name, 0.0) * float(count)
            for device, count in zip(devices, weights, strict=True)
        )


@dataclass(frozen=True, eq=False)
class RunPath:
    """Moves one after another that cover all layers. cost: what the Pricing says, prices included; seconds,
    total_bytes: of the barrier model."""

    team: DeviceTeam
    cost: float
    seconds: float
    total_bytes: float
    runs: tuple[CandidateRun, ...]

    @property
    def weights(self) -> Floats:
        """(n,) bytes of weights on each device of the team's platform."""
        return np.asarray(sum(move.weights for move in self.runs), np.float64)


@dataclass(frozen=True, eq=False)
class _PathNode:
    cost: float
    seconds: float
    total_bytes: float
    run: CandidateRun | None
    previous: _PathNode | None

    def runs_so_far(self) -> tuple[CandidateRun, ...]:
        """The moves up to here."""
        result = []
        at: _PathNode | None = self
        while at is not None and at.run is not None:
            result.append(at.run)
            at = at.previous
        return tuple(reversed(result))


def find_cheapest_path(
    team: DeviceTeam,
    moves: Sequence[Sequence[CandidateRun]],
    pricing: RunPricing,
    allowance: WorkBudget | None = None,
    beam: int = 24,
) -> RunPath:
    """The cheapest path of moves: T_i = min over the moves that end with layer i of T_before + e(move).

    e depends on the forms in which the tensors lie that the move reads, so that T has a value for each State. At most
    `beam` states are kept at a place, the cheapest: in a chain there are never more than five, so that the result is
    optimal over the moves; where many branches are open at once it need not be. What several moves read of a tensor is
    counted for each of them, though a device gets nothing twice: with branches a plan may send less than is said here.
    Spent where the allowance is over before all is covered.
    """
    graph, allowance = team.layers, allowance or WorkBudget()
    last = _last_readers(graph)
    best: list[dict[FormState, _PathNode]] = [{} for _ in range(len(graph.layers) + 1)]
    opening: FormState = tuple((name, "source") for name in graph.inputs)
    best[0][_open_tensors(opening, last, 0)] = _PathNode(0.0, 0.0, 0.0, None, None)
    for place in range(len(graph.layers)):
        kept = sorted(best[place].items(), key=lambda entry: entry[1].cost)[:beam]
        allowance.spend_or_raise(len(kept) * len(moves[place]) / CANDIDATE_RUNS_PER_S)
        for state, node in kept:
            forms = dict(state)
            for move in moves[place]:
                seconds, count = move.cost_for_forms(team, forms)
                cost = node.cost + pricing.run_cost(team, seconds, count, move)
                left = [
                    (name, move.form)
                    for layer in graph.layers[move.start : move.stop]
                    for name in layer.outputs
                    if last.get(name, 0) > move.stop
                ]
                after = (*_open_tensors(state, last, move.stop), *left)
                known = best[move.stop].get(after)
                if known is None or cost < known.cost:
                    best[move.stop][after] = _PathNode(
                        cost, node.seconds + seconds, node.total_bytes + count, move, node
                    )
        best[place] = {}
    ends = [_deliver_outputs(team, pricing, dict(state), node) for state, node in best[-1].items()]
    end = min(ends, key=lambda node: (node.cost, node.total_bytes))
    return RunPath(team, end.cost, end.seconds, end.total_bytes, (end.previous or end).runs_so_far())


def _last_readers(graph: LayerGraph) -> dict[str, int]:
    """Tensor → the place behind its last reader; one behind all layers for the network's outputs."""
    last = {name: graph.position[readers[-1].name] + 1 for name, readers in graph.consumers.items()}
    return last | dict.fromkeys(graph.delivered_outputs, len(graph.layers) + 1)


def _open_tensors(state: FormState, last: Mapping[str, int], place: int) -> FormState:
    return tuple([entry for entry in state if last.get(entry[0], 0) > place])


def _deliver_outputs(
    team: DeviceTeam, pricing: RunPricing, forms: Mapping[str, TensorForm], node: _PathNode
) -> _PathNode:
    """The outputs travel to the sinks."""
    platform = team.problem.platform
    sinks = team.device_indices(team.problem.sink)
    total = np.zeros((len(platform.devices),) * 2)
    for name in team.layers.delivered_outputs:
        shape = team.layers.tensors[name].shape
        if shape is not None:
            need = DeviceBoxes.from_regions(shape, team.boxes_on(full_region(shape), sinks))
            form = forms[name]
            lack = missing_elements(need, team.held_boxes(name, form), form in ("source", "everywhere"))
            total += lack * bytes_per_element(team.layers, name)
    seconds, count = float(team.link_loads.transfer_seconds(total)), float(total.sum())
    cost = node.cost + pricing.run_cost(team, seconds, count, None)
    return _PathNode(cost, node.seconds + seconds, node.total_bytes + count, None, node)
