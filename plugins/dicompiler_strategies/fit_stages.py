"""Stages: a network as a row of runs of layers, each whole on a device, or in fused tiles, or cut by output channels.

LayerGraph + Boards + how many tiles at most → the cheapest row of stages that fits by the estimate of `fit_memory`.
A stage ends where one tensor alone goes on, so that between two stages nothing else is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dicompiler.plugin_api import (
    Layer,
    LayerGraph,
    Part,
    Region,
    Share,
    aligned_cuts,
    cut_axis,
    full,
    fused_regions,
    output_shape,
    share_task,
    with_interval,
)
from dicompiler_strategies.fit_memory import MemoryNeed, memory_need
from dicompiler_strategies.named_axis import named_axis

Kind = Literal["whole", "rows", "channels"]
MODELS = 3
"""Of tiles one after another at the top, in between and at the bottom: each of them is a model."""
STAGE = 1e-3
"""What a further stage counts, as a share of the network's multiplications: fewer where it makes no difference."""


@dataclass(frozen=True)
class Board:
    """A device. ram, flash: bytes that are left for the network; flash 0: models lie in RAM."""

    device: str
    ram: int
    flash: int


@dataclass(frozen=True)
class Stage:
    """Layers first..last (last not included) on `devices`: whole on one, or in `tiles` dealt out over them."""

    first: int
    last: int
    kind: Kind
    devices: tuple[str, ...]
    tiles: int = 1


@dataclass(frozen=True)
class _Label:
    """A row of stages up to some layer. whole: the board that takes whole stages; used: its flash; shared: flash of
    every board that takes part in cut stages."""

    cost: float
    whole: int = 0
    used: int = 0
    shared: int = 0
    stages: tuple[Stage, ...] = ()


@dataclass
class Stages:
    """What is known of a network's stages; figures are kept between searches."""

    layers: LayerGraph
    margin: float
    needs: dict[tuple[int, int, Kind, int], tuple[MemoryNeed, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cuts = _cuts(self.layers)
        (self.whole,) = self.need(0, len(self.layers.layers), "whole", 1)
        self.macs = self.whole.macs

    @property
    def heaviest(self) -> Layer:
        """The layer that takes most of the flash."""
        layers = self.layers.layers
        return layers[max(range(len(layers)), key=lambda i: self.need(i, i + 1, "whole", 1)[0].flash)]

    def need(self, first: int, last: int, kind: Kind, tiles: int) -> tuple[MemoryNeed, ...]:
        """What the tiles take that stand for all: the first, one in between, the last; () where it cannot be cut so."""
        key = first, last, kind, tiles
        if key not in self.needs:
            self.needs[key] = tuple(self._needs(*key))
        return self.needs[key]

    def _needs(self, first: int, last: int, kind: Kind, tiles: int) -> Iterator[MemoryNeed]:
        chosen = self.layers.layers[first:last]
        if kind == "whole":
            yield memory_need(self.layers, [share_task(self.layers, x, Share()) for x in chosen], self.margin)
        elif kind == "channels":
            if last == first + 1 and len(slices := self.channels(chosen[0], tiles)) == tiles:
                yield memory_need(self.layers, [share_task(self.layers, chosen[0], Share(slices[0]))], self.margin)
        else:
            bands = self.rows(first, last, tiles)
            some = dict.fromkeys((0, len(bands) // 2, len(bands) - 1) if bands else ())
            for regions in fused_regions(self.layers, chosen, [bands[i] for i in some]):
                computed = [x for x in chosen if x.name in regions]
                tasks = [share_task(self.layers, x, Share(regions[x.name])) for x in computed]
                yield memory_need(self.layers, tasks, self.margin)

    def rows(self, first: int, last: int, tiles: int) -> list[Region]:
        """The output of the stage's last layer in bands of equal height, the last one of what is left; () where layers
        cannot be cut or there are too few rows."""
        chosen = self.layers.layers[first:last]
        along = [named_axis(self.layers, layer, "height") for layer in chosen]
        axis, whole = along[-1], full(output_shape(self.layers, chosen[-1]))
        if axis is None or None in along:
            return []
        extent = whole[axis][1]
        height = -(-extent // tiles)
        ends = aligned_cuts(self.layers, chosen[-1], axis, [min(i * height, extent) for i in range(1, tiles + 1)])
        if any(start >= stop for start, stop in ends):
            return []
        return [with_interval(whole, axis, interval) for interval in ends]

    def channels(self, layer: Layer, tiles: int) -> list[Region]:
        """The layer's output in equal shares of its channels; fewer, or none, where it cannot be cut so."""
        axis = named_axis(self.layers, layer, "channel")
        if axis is None:
            return []
        whole, cuts = full(output_shape(self.layers, layer)), cut_axis(self.layers, layer, axis, [1.0] * tiles)
        return [with_interval(whole, axis, cut) for cut in cuts if cut[0] < cut[1]]

    def parts(self, stages: Sequence[Stage]) -> dict[str, list[Part]]:
        """The parts of every layer. Each tile has a lane of its own, so that a model ends with its stage."""
        layer_parts: dict[str, list[Part]] = {layer.name: [] for layer in self.layers.layers}
        lanes = 0
        for stage in stages:
            chosen = self.layers.layers[stage.first : stage.last]
            if stage.kind == "rows":
                bands = self.rows(stage.first, stage.last, stage.tiles)
                each = math.ceil(stage.tiles / len(stage.devices))
                for i, regions in enumerate(fused_regions(self.layers, chosen, bands)):
                    for name, region in regions.items():
                        layer_parts[name].append(Part(stage.devices[i // each], region, lane=lanes + i))
            elif stage.kind == "channels":
                slices = self.channels(chosen[0], len(stage.devices))
                layer_parts[chosen[0].name] += [
                    Part(device, region, lane=lanes) for device, region in zip(stage.devices, slices, strict=True)
                ]
            else:
                for layer in chosen:
                    layer_parts[layer.name].append(Part(stage.devices[0], lane=lanes))
            lanes += stage.tiles
        return layer_parts

    def row(self, boards: Sequence[Board], most: int) -> tuple[Stage, ...] | None:
        """The row of stages with the fewest multiplications that fits `boards`, all of them or some, with at most
        `most` tiles one after another on a board; None where there is none."""
        search = _StageSearch(self, boards, most)
        label = search.uncut() or search.run()
        return None if label is None else label.stages

    def held(self, first: int, last: int) -> int:
        """Bytes of what comes into a stage and of what leaves it: they lie beside its arena."""
        ends = (first, _after(self.cuts, first)), (_before(self.cuts, last), last)
        before, behind = (self.need(a, b, "whole", 1)[0] for a, b in ends)
        return before.incoming + behind.outgoing

    def least(self, most: int) -> tuple[int, Layer]:
        """The RAM that the worst layer needs in the best stage that it is in, with up to `most` tiles, and that layer;
        of the stages tried and of the shortest ones there are."""
        best: dict[int, int] = {}
        for first in self.cuts[:-1]:
            for tiles in (*(2**i for i in range(most.bit_length())), most):
                self.need(first, _after(self.cuts, first), "whole" if tiles == 1 else "rows", tiles)
        for (first, last, _, _), needs in list(self.needs.items()):
            if needs and first in self.cuts and last in self.cuts:
                ram = self.held(first, last) + max(one.arena for one in needs)
                best |= {i: min(best.get(i, ram), ram) for i in range(first, last)}
        worst = max(best, key=lambda i: best[i])
        return best[worst], self.layers.layers[worst]


@dataclass
class _StageSearch:
    """Labels from cut to cut, each the cheapest that ends there with that board for whole stages."""

    stages: Stages
    boards: Sequence[Board]
    most: int

    def uncut(self) -> _Label | None:
        """The whole network on the first board, where it fits: nothing has fewer multiplications."""
        return self._whole(_Label(0.0), 0, self.stages.cuts[-1])

    def run(self) -> _Label | None:
        cuts = self.stages.cuts
        best: dict[tuple[int, int], _Label] = {(0, i): _Label(0.0, i) for i in range(len(self.boards))}
        for start in cuts[:-1]:
            for i in range(len(self.boards)):
                label = best.get((start, i))
                for next_one, end in self._next(label, start) if label is not None else ():
                    for further in range(i, len(self.boards)):
                        moved = next_one if further == i else self._moved(next_one, further)
                        known = best.get((end, further))
                        if known is None or (moved.cost, moved.used) < (known.cost, known.used):
                            best[end, further] = moved
        last = [best[cuts[-1], i] for i in range(len(self.boards)) if (cuts[-1], i) in best]
        return min(last, key=lambda label: label.cost, default=None)

    def _moved(self, label: _Label, board: int) -> _Label:
        """From here on another board takes the whole stages."""
        return _Label(label.cost + STAGE * self.stages.macs, board, 0, label.shared, label.stages)

    def _next(self, label: _Label, start: int) -> Iterator[tuple[_Label, int]]:
        """The label with one stage more, for every stage that starts there and fits."""
        ends = [cut for cut in self.stages.cuts if cut > start]
        for end in ends:
            stage = self._whole(label, start, end)
            if stage is None:
                break
            yield stage, end
        channels = self._channels(label, start, ends[0])
        if channels is not None:
            yield channels, ends[0]
        for end in ends:
            if not self.stages.rows(start, end, 2):
                break
            if all(self._alone(layer) for layer in range(start, end)):
                continue
            rows = self._rows(label, start, end)
            if rows is not None:
                yield rows, end
            elif self._alone(end - 1):  # a longer stage has larger halos
                break

    def _alone(self, layer: int) -> bool:
        """Whether the layer fits uncut, by what it reads and makes."""
        (need,) = self.stages.need(layer, layer + 1, "whole", 1)
        return need.arena + need.incoming + need.outgoing <= self.boards[0].ram

    def _whole(self, label: _Label, start: int, end: int) -> _Label | None:
        (need,) = self.stages.need(start, end, "whole", 1)
        board, used = self.boards[label.whole], label.used + need.flash
        ram = need.arena + self.stages.held(start, end)
        if ram > board.ram or used + label.shared > (board.flash or board.ram - ram):
            return None
        stage = Stage(start, end, "whole", (board.device,))
        cost = label.cost + need.macs + STAGE * self.stages.macs
        return _Label(cost, label.whole, used, label.shared, (*label.stages, stage))

    def _channels(self, label: _Label, start: int, end: int) -> _Label | None:
        """A layer whose weights are too large for one board."""
        (whole,) = self.stages.need(start, end, "whole", 1)
        board, count = self.boards[0], len(self.boards)
        if end != start + 1 or count < 2 or label.used + label.shared + whole.flash <= board.flash:
            return None
        needs = self.stages.need(start, end, "channels", count)
        if not needs or needs[0].arena + self.stages.held(start, end) > board.ram:
            return None
        shared = label.shared + needs[0].flash
        if board.flash and label.used + shared > board.flash:
            return None
        stage = Stage(start, end, "channels", tuple(one.device for one in self.boards))
        cost = label.cost + whole.macs + 2 * STAGE * self.stages.macs
        return _Label(cost, label.whole, label.used, shared, (*label.stages, stage))

    def _rows(self, label: _Label, start: int, end: int) -> _Label | None:
        """The coarsest fused tiles that fit: on the first board, on all others, or on all."""
        groups = [self.boards] if len(self.boards) == 1 else [self.boards, self.boards[1:]]
        labels = []
        for group in groups:
            for each in range(1, self.most + 1):
                rows = self._tiles(label, start, end, group, each)
                if rows is not None:
                    labels.append(rows)
                    break
        return min(labels, key=lambda one: one.cost, default=None)

    def _tiles(self, label: _Label, start: int, end: int, group: Sequence[Board], each: int) -> _Label | None:
        """`each` tiles one after another on every board of the group; where the first board takes part, or not, it
        holds what comes in and what is made."""
        tiles = each * len(group)
        needs = self.stages.need(start, end, "rows", tiles) if tiles > 1 else ()
        if not needs:
            return None
        held, passing = self.stages.held(start, end), max(one.incoming + one.outgoing for one in needs) * each
        arena = max(one.arena for one in needs)
        flash = label.shared + sum(one.flash for one in needs[: min(each, MODELS)])
        for board in self.boards:
            taking = board in group
            ram = (arena if taking else 0) + (held if board is self.boards[0] else passing if taking else 0)
            if ram > board.ram or (taking and label.used + flash > (board.flash or board.ram - ram)):
                return None
        macs = needs[0].macs + needs[-1].macs + (tiles - 2) * needs[len(needs) // 2].macs
        stage = Stage(start, end, "rows", tuple(board.device for board in group), tiles)
        cost = label.cost + macs + STAGE * self.stages.macs
        return _Label(cost, label.whole, label.used, flash, (*label.stages, stage))


def _cuts(layers: LayerGraph) -> tuple[int, ...]:
    """Where a stage can end: 0, and behind every layer whose output alone is read later, and the end."""
    last: dict[str, int] = {}
    for i, layer in enumerate(layers.layers):
        last |= dict.fromkeys(layer.inputs, i)
    last |= {name: len(layers.layers) for name in layers.outputs}
    cuts, open_until = [0], max((last.get(name, -1) for name in layers.inputs), default=-1)
    for i, layer in enumerate(layers.layers[:-1]):
        ends = [last.get(name, i) for name in layer.outputs]
        if open_until <= i and sum(end > i for end in ends) <= 1:
            cuts.append(i + 1)
        open_until = max(open_until, *ends)
    return (*cuts, len(layers.layers))


def _after(cuts: Sequence[int], cut: int) -> int:
    return next(other for other in cuts if other > cut)


def _before(cuts: Sequence[int], cut: int) -> int:
    return next(other for other in reversed(cuts) if other < cut)
