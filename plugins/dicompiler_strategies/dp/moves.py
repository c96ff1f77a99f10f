"""Moves: the ways to compute a run of layers on a team. What each costs, what it reads, what it leaves, its parts.

Team → for each layer the moves that begin there. A block of fused rows is a move; so is one layer in another form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dicompiler.plugin_api import (
    Allowance,
    Key,
    Layer,
    LayerGraph,
    Part,
    Region,
    Share,
    bounding,
    full,
    named_axes,
    output_shape,
    reduction,
    sent_nbytes,
    share_task,
    volume,
    with_interval,
)
from dicompiler_strategies.dp.boxes import Boxes, missing
from dicompiler_strategies.dp.rows import Rows, lengths, union
from dicompiler_strategies.dp.team import Form, Team
from dicompiler_strategies.tables.footprints import Floats
from dicompiler_strategies.work import MOVES

Way = Literal["rows", "cut", "sums"]
_HOPELESS = 2.0  # a block so many times slower than its layers one by one is not made longer
Demand = Rows | None  # rows of a tensor for each member; None: all of it


@dataclass(frozen=True)
class Rules:
    """Which moves there are. `blocks`: blocks of more than one layer with weights, and partial sums (MLS; else SLS);
    span: the most layers in a block; channels: layers that have rows may be cut by channels too."""

    blocks: bool = True
    span: int = 32
    channels: bool = False


@dataclass(frozen=True, eq=False)
class Run:
    """Layers `start` to `stop` (not included) in one way, which leaves what they make in the form `after`.

    way: `rows` fused height tiles; `cut` one layer, its parts as `after` says; `sums` one layer in partial sums, added
    up into `after`.
    """

    start: int
    stop: int
    way: Way
    after: Form


@dataclass(frozen=True, eq=False)
class Move(Run):
    """A run with what it costs. steps: (n,) seconds of each device, step by step; needs: what each device must hold of
    the tensors that come in; weights: bytes (n,); sums: bytes (n, n) of partial sums from device to device.
    """

    steps: tuple[Floats, ...]
    needs: Mapping[str, Boxes]
    weights: Floats
    sums: Floats | None = None
    _times: dict[tuple[Form, ...], tuple[float, float]] = field(default_factory=dict, repr=False)
    _lacks: dict[tuple[str, Form], Floats] = field(default_factory=dict, repr=False)
    _held: list[Floats] = field(default_factory=list, repr=False)  # bytes (n,) that each device must hold, once known

    def time(self, team: Team, forms: Mapping[str, Form]) -> tuple[float, float]:
        """(seconds, bytes that travel) where the tensors that come in lie in these forms: what is missing travels,
        then the slowest device computes; partial sums likewise. A barrier stands between each two of these."""
        key = tuple([forms[name] for name in self.needs])
        if key not in self._times:
            wanted = [self._missing(team, name, form) for name, form in zip(self.needs, key, strict=True)]
            seconds = sum(float(step.max()) for step in self.steps)
            count = 0.0
            if wanted and not self._held:
                held = [boxes.sizes * packed_element_bytes(team.layers, name) for name, boxes in self.needs.items()]
                self._held.append(np.sum(held, axis=0))
            steps = [(np.sum(wanted, axis=0), self._held[0])] if wanted else []
            for boxes, needed in (*steps, *([] if self.sums is None else [(self.sums, None)])):
                if boxes is not None:
                    seconds += float(team.lines.time(boxes, needed))
                    count += float(boxes.sum())
            self._times[key] = (seconds, count)
        return self._times[key]

    def _missing(self, team: Team, name: str, form: Form) -> Floats:
        """Bytes (n, n) of a tensor in this form that must travel."""
        if (name, form) not in self._lacks:
            lack = missing(self.needs[name], team.held(name, form), form in ("source", "everywhere"))
            self._lacks[name, form] = lack * packed_element_bytes(team.layers, name)
        return self._lacks[name, form]


def packed_element_bytes(layers: LayerGraph, tensor: str) -> float:
    """Bytes of one element that travels; a part of one for types below a byte."""
    return sent_nbytes(layers, tensor, (8,)) / 8


def moves(team: Team, rules: Rules, allowance: Allowance | None = None) -> list[list[Move]]:
    """For each layer the moves that begin with it; at least one, all of it on the leader. Spent where the allowance is
    over before all are made."""
    held, allowance = team.facts.weights, allowance or Allowance()
    beginning: list[list[Move]] = [[] for _ in team.layers.layers]
    singles: dict[int, tuple[float, float]] = {}
    for stop, layer in enumerate(team.layers.layers, 1):
        whole = _single(team, layer, "whole", [Share() if i == team.leader else None for i in team.members], held)
        alone = len(team.members) == 1
        for move in (
            whole,
            *(() if alone else _cut(team, layer, rules, held)),
            *_rows(team, stop, rules, held, singles),
        ):
            allowance.claim(1 / MOVES)
            beginning[move.start].append(move)
    return beginning


def _cut(team: Team, layer: Layer, rules: Rules, held: Mapping[str, int]) -> Iterator[Move]:
    """One layer by channels, on each device, or in partial sums."""
    rows = team.axis(layer, "rows") is not None
    if layer.reason or (rows and not rules.channels):
        return
    shares = team.shares(layer, "channels") if team.axis(layer, "channels") is not None else None
    if shares is not None:
        cut = [None if region is None else Share(region) for region in shares]
        yield _single(team, layer, "channels", cut, held)
    multiplies = team.facts.macs[layer.name] > 0
    if not multiplies and not rows:
        yield _single(team, layer, "everywhere", [Share()] * len(team.members), held)
    if multiplies and rules.blocks and reduction(team.layers, layer) is not None:
        whole: list[Region | None] = [full(output_shape(team.layers, layer))] * len(team.members)
        lead = [region if i == team.leader else None for i, region in zip(team.members, whole, strict=True)]
        yield _sums(team, layer, "whole", lead, held)
        yield _sums(team, layer, "everywhere", whole, held)
        if shares is not None:
            yield _sums(team, layer, "channels", shares, held)


def _single(team: Team, layer: Layer, after: Form, shares: Sequence[Share | None], held: Mapping[str, int]) -> Move:
    """One layer in shares without partial sums."""
    at = team.layers.position[layer.name]
    elements = volume(full(team.layers.tensors[layer.output].shape or ()))
    fractions = [
        0.0 if share is None else 1.0 if share.region is None else volume(share.region) / max(elements, 1)
        for share in shares
    ]
    return Move(
        at,
        at + 1,
        "cut",
        after,
        (team.seconds(layer, shares),),
        team.needs(layer, shares),
        _on_devices(team, fractions) * held[layer.name],
    )


def _sums(team: Team, layer: Layer, after: Form, merged: Sequence[Region | None], held: Mapping[str, int]) -> Move:
    """One layer in partial sums over each member's range; `merged`: the regions that members add up."""
    at = team.layers.position[layer.name]
    ranges = [cut if cut[0] < cut[1] else None for cut in team.ranges(layer)]
    makes = np.array([cut is not None for cut in ranges], np.float64)
    partials = [None if cut is None else Share(None, cut) for cut in ranges]
    mergers = [None if region is None else Share(region, None, int(makes.sum())) for region in merged]
    needs = team.needs(layer, partials)
    for name, need in team.needs(layer, mergers).items():
        needs[name] = _both(needs[name], need) if name in needs else need
    tensor = team.layers.cut_output(layer.nodes[layer.anchor])
    sizes = np.array([0.0 if region is None else volume(region) for region in merged])
    sums = np.outer(_on_devices(team, makes), _on_devices(team, sizes)) * packed_element_bytes(team.layers, tensor)
    np.fill_diagonal(sums, 0.0)
    counts = [0 if cut is None else cut[1] - cut[0] for cut in ranges]
    steps = (team.seconds(layer, partials), team.seconds(layer, mergers))
    weights = _on_devices(team, [count / max(sum(counts), 1) for count in counts]) * held[layer.name]
    return Move(at, at + 1, "sums", after, steps, needs, weights, sums)


def _both(a: Boxes, b: Boxes) -> Boxes:
    """For each device the smallest region that holds both."""

    def region(boxes: Boxes, i: int) -> Region | None:
        cuts = [boxes.cuts.get(axis) for axis in range(len(boxes.shape))]
        if not boxes.present[i]:
            return None
        return tuple(
            (0, extent) if cut is None else (int(cut[i, 0]), int(cut[i, 1]))
            for extent, cut in zip(boxes.shape, cuts, strict=True)
        )

    return Boxes.of(a.shape, [bounding((region(a, i), region(b, i))) for i in range(len(a.present))])


def _on_devices(team: Team, values: Sequence[float] | Floats) -> Floats:
    """A number for each member → one for each device of the platform."""
    result = np.zeros(len(team.problem.platform.devices))
    result[list(team.members)] = values
    return result


def _rows(
    team: Team, stop: int, rules: Rules, held: Mapping[str, int], singles: dict[int, tuple[float, float]]
) -> Iterator[Move]:
    """Blocks of fused rows that end before layer `stop`, each a layer longer than the one before (data prefetching).

    A block that takes no less time than its layers one by one is left out: nothing is lost. The walk ends where it
    takes twice as long, or as long as on one device. singles: layer → seconds of (its rows, their exchange), filled.
    """
    block = RowBlock(team, stop)
    seconds = np.zeros(len(team.members))
    leader = team.problem.platform.devices[team.leader]
    alone = weights = parted = 0.0
    multiply = 0
    while block.start > max(0, stop - rules.span):
        layer = team.layers.layers[block.start - 1]
        if layer.name not in team.maps or layer.reason or (multiply and not rules.blocks):
            return
        of_layer = team.row_seconds(layer, block.grow(layer))
        seconds = seconds + of_layer
        alone += float(team.facts.rows(layer, leader)[-1])
        if stop - block.start == 1:
            singles[block.start] = (float(of_layer.max()), _exchange(team, block.needs()))
        parted += singles[block.start][0]  # what the block's layers come to one by one, once they have their input
        if stop - block.start > 1 and seconds.max() >= min(alone, _HOPELESS * parted):
            return
        multiply += team.facts.macs[layer.name] > 0
        weights += held[layer.name]
        if stop - block.start == 1 or seconds.max() < parted:
            yield Move(
                block.start,
                stop,
                "rows",
                "rows",
                (_on_devices(team, seconds),),
                block.needs(),
                _on_devices(team, np.where(seconds > 0, weights, 0.0)),
            )
        parted += singles[block.start][1]


def _exchange(team: Team, needs: Mapping[str, Boxes]) -> float:
    """Seconds until missing rows have travelled, of the tensors that lie in rows."""
    rows = [name for name in needs if name in team.layers.producer and team.layers.producer[name].name in team.maps]
    wanted = [missing(needs[name], team.held(name, "rows")) * packed_element_bytes(team.layers, name) for name in rows]
    held = [needs[name].sizes * packed_element_bytes(team.layers, name) for name in rows]
    return float(team.lines.time(np.sum(wanted, axis=0), np.sum(held, axis=0))) if wanted else 0.0


class RowBlock:
    """Grows a block of fused rows backwards, layer by layer; keeps which rows each member must hold of what it reads.

    Every layer of it that is read behind the block, however many there are, is computed in the team's shares at least.
    """

    def __init__(self, team: Team, stop: int) -> None:
        self.team, self.stop, self.start = team, stop, stop
        self.rows: dict[str, Rows] = {}
        self.demands: dict[str, Demand] = {}
        self._templates: dict[str, Region | None] = {}

    def grow(self, layer: Layer) -> Sequence[int]:
        """Takes in the layer before the block; the number of rows of it that each member computes."""
        team, row_map = self.team, self.team.maps[layer.name]
        self.start -= 1
        nothing = [(0, 0)] * len(team.members)
        rows: Rows = nothing
        if layer.output in self.demands:
            demand = self.demands.pop(layer.output)
            rows = [(0, row_map.height)] * len(team.members) if demand is None else demand
        readers = team.layers.consumers.get(layer.output, ())
        if layer.output in team.layers.outputs or any(team.layers.position[r.name] >= self.stop for r in readers):
            rows = union(rows, row_map.shares(team.weights))
        rows = self.rows[layer.name] = row_map.aligned(rows)
        template = share_task(team.layers, layer, Share()).needs
        for name in layer.inputs:
            need = row_map.need(name, rows)
            known = self.demands.get(name, nothing)
            self.demands[name] = None if need is None or known is None else union(known, need)
            self._templates[name] = bounding((self._templates.get(name), template.get(Key(name))))
        return lengths(rows)

    def needs(self) -> dict[str, Boxes]:
        """What the members read from before the block."""
        team, labels = self.team, named_axes(self.team.layers)
        count = len(team.problem.platform.devices)
        result = {}
        for name, demand in self.demands.items():
            template = self._templates[name]
            shape = team.layers.tensors[name].shape
            if template is None or shape is None:
                continue
            present = np.zeros(count, np.bool_)
            present[list(team.members)] = True if demand is None else [start < stop for start, stop in demand]
            cuts = {
                axis: np.where(present[:, None], np.array([interval], np.int64), 0)
                for axis, interval in enumerate(template)
                if interval != (0, shape[axis])
            }
            if demand is not None:
                cuts[labels[name]["height"]] = intervals = np.zeros((count, 2), np.int64)
                intervals[list(team.members)] = demand
            result[name] = Boxes(shape, present, cuts)
        return result


def parts(team: Team, move: Run) -> dict[str, tuple[Part, ...]]:
    """Layer name → its parts in a plan."""
    if move.way == "rows":
        return _row_parts(team, move)
    layer = team.layers.layers[move.start]
    leader = team.problem.platform.devices[team.leader].name
    done: list[Part]
    if move.after == "whole":
        done = [Part(leader)]
    elif move.after == "everywhere":
        done = [Part(name) for name in team.names]
    else:
        shares = team.shares(layer, move.after)
        done = [Part(name, region) for name, region in zip(team.names, shares, strict=True) if region is not None]
    if move.way == "sums":
        ranges = zip(team.names, team.ranges(layer), strict=True)
        done = [*(Part(name, None, cut) for name, cut in ranges if cut[0] < cut[1]), *done]
    return {layer.name: tuple(done)}


def _row_parts(team: Team, move: Run) -> dict[str, tuple[Part, ...]]:
    block = RowBlock(team, move.stop)
    result = {}
    while block.start > move.start:
        layer = team.layers.layers[block.start - 1]
        block.grow(layer)
        whole, axis = full(output_shape(team.layers, layer)), team.maps[layer.name].axis
        tiles = [
            Part(name, with_interval(whole, axis, (first, last)))
            for name, (first, last) in zip(team.names, block.rows[layer.name], strict=True)
            if first < last
        ]
        result[layer.name] = tuple(tiles) or (Part(team.names[0]),)  # what nobody reads must still have a part
    return result
