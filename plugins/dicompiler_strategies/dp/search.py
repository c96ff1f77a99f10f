"""The dynamic programme over a team's moves: eq. (2) of CoopAI, generalised to any layer graph and to several forms.

Moves + Pricing → the cheapest path of moves that covers all layers, in layer order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dicompiler.plugin_api import Allowance, LayerGraph, Problem, full
from dicompiler_strategies.dp.boxes import Boxes, missing
from dicompiler_strategies.dp.moves import Move, packed_element_bytes
from dicompiler_strategies.dp.team import Form, Team
from dicompiler_strategies.tables.footprints import Floats
from dicompiler_strategies.work import MOVES

SUMMED_OBJECTIVES = ("latency", "energy", "communication")
"""Of dicompiler.base.objectives those that are sums over the moves; throughput and memory are maxima, which this search
cannot add up."""

State = tuple[tuple[str, Form], ...]  # the tensors that are still read, in the order of their making, and their forms


@dataclass(frozen=True, eq=False)
class Pricing:
    """What a move costs: `objective`, and `price`: device → for each byte of weights there, where memory is short."""

    problem: Problem
    price: Mapping[str, float] = field(default_factory=dict)

    def cost(self, team: Team, seconds: float, count: float, move: Move | None) -> float:
        """Seconds, bytes or Joule (without the energy of sending) of one move, and the price of its weights."""
        devices = team.problem.platform.devices
        total = {"latency": seconds, "communication": count}.get(self.problem.objective)
        if total is None:
            total = seconds * sum(devices[i].power_idle for i in team.members)
            for step in move.steps if move is not None else ():
                total += sum(float(step[i]) * (devices[i].power_active - devices[i].power_idle) for i in team.members)
        return total if move is None else total + self.weights_cost(team, move.weights)

    def weights_cost(self, team: Team, weights: Floats) -> float:
        """The price of these bytes (n,)."""
        if not self.price:
            return 0.0
        devices = team.problem.platform.devices
        return sum(
            self.price.get(device.name, 0.0) * float(count) for device, count in zip(devices, weights, strict=True)
        )


@dataclass(frozen=True, eq=False)
class MovePath:
    """Moves one after another that cover all layers. cost: what the Pricing says, prices included; seconds,
    total_bytes: of the barrier model."""

    team: Team
    cost: float
    seconds: float
    total_bytes: float
    moves: tuple[Move, ...]

    @property
    def weights(self) -> Floats:
        """(n,) bytes of weights on each device of the team's platform."""
        return np.asarray(sum(move.weights for move in self.moves), np.float64)


@dataclass(frozen=True, eq=False)
class _Node:
    cost: float
    seconds: float
    total_bytes: float
    move: Move | None
    before: _Node | None

    def row(self) -> tuple[Move, ...]:
        """The moves up to here."""
        result = []
        at: _Node | None = self
        while at is not None and at.move is not None:
            result.append(at.move)
            at = at.before
        return tuple(reversed(result))


def cheapest_path(
    team: Team, moves: Sequence[Sequence[Move]], pricing: Pricing, allowance: Allowance | None = None, beam: int = 24
) -> MovePath:
    """The cheapest path of moves: T_i = min over the moves that end with layer i of T_before + e(move).

    e depends on the forms in which the tensors lie that the move reads, so that T has a value for each State. At most
    `beam` states are kept at a place, the cheapest: in a chain there are never more than five, so that the result is
    optimal over the moves; where many branches are open at once it need not be. What several moves read of a tensor is
    counted for each of them, though a device gets nothing twice: with branches a plan may send less than is said here.
    Spent where the allowance is over before all is covered.
    """
    graph, allowance = team.layers, allowance or Allowance()
    last = _last_readers(graph)
    best: list[dict[State, _Node]] = [{} for _ in range(len(graph.layers) + 1)]
    opening: State = tuple((name, "source") for name in graph.inputs)
    best[0][_still_read(opening, last, 0)] = _Node(0.0, 0.0, 0.0, None, None)
    for place in range(len(graph.layers)):
        kept = sorted(best[place].items(), key=lambda entry: entry[1].cost)[:beam]
        allowance.claim(len(kept) * len(moves[place]) / MOVES)
        for state, node in kept:
            forms = dict(state)
            for move in moves[place]:
                seconds, count = move.time(team, forms)
                cost = node.cost + pricing.cost(team, seconds, count, move)
                left = [
                    (name, move.after)
                    for layer in graph.layers[move.start : move.stop]
                    for name in layer.outputs
                    if last.get(name, 0) > move.stop
                ]
                after = (*_still_read(state, last, move.stop), *left)
                known = best[move.stop].get(after)
                if known is None or cost < known.cost:
                    best[move.stop][after] = _Node(cost, node.seconds + seconds, node.total_bytes + count, move, node)
        best[place] = {}
    ends = [_delivered(team, pricing, dict(state), node) for state, node in best[-1].items()]
    end = min(ends, key=lambda node: (node.cost, node.total_bytes))
    return MovePath(team, end.cost, end.seconds, end.total_bytes, (end.before or end).row())


def _last_readers(graph: LayerGraph) -> dict[str, int]:
    """Tensor → the place behind its last reader; one behind all layers for the network's outputs."""
    last = {name: graph.position[readers[-1].name] + 1 for name, readers in graph.consumers.items()}
    return last | dict.fromkeys(graph.delivered, len(graph.layers) + 1)


def _still_read(state: State, last: Mapping[str, int], place: int) -> State:
    return tuple([entry for entry in state if last.get(entry[0], 0) > place])


def _delivered(team: Team, pricing: Pricing, forms: Mapping[str, Form], node: _Node) -> _Node:
    """The outputs travel to the sinks."""
    platform = team.problem.platform
    sinks = team.indices(team.problem.sink)
    total = np.zeros((len(platform.devices),) * 2)
    for name in team.layers.delivered:
        shape = team.layers.tensors[name].shape
        if shape is not None:
            need = Boxes.of(shape, team.alone(full(shape), sinks))
            form = forms[name]
            lack = missing(need, team.held(name, form), form in ("source", "everywhere"))
            total += lack * packed_element_bytes(team.layers, name)
    seconds, count = float(team.lines.time(total)), float(total.sum())
    cost = node.cost + pricing.cost(team, seconds, count, None)
    return _Node(cost, node.seconds + seconds, node.total_bytes + count, None, node)
