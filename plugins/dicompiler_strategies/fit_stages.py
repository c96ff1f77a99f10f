"""Search for a sequence of stages that fits the memory of microcontroller boards.

A stage consists of consecutive layers, whole on one board or in fused tiles, or of a single layer that is split by
output channels. A stage ends at a position at which later layers read only a single tensor of the earlier layers.

    LayerGraph + boards + largest number of tiles → the cheapest sequence of stages that fits by the estimate
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dicompiler.plugin_api import Layer, LayerGraph, LayerShare, Part, Region
from dicompiler.plugin_api.regions import (
    align_cuts,
    full_region,
    fused_regions,
    make_share_task,
    output_shape,
    split_axis,
    with_interval,
)
from dicompiler_strategies.fit_memory import ArenaEstimate, estimate_arena
from dicompiler_strategies.tables.choices import find_cuttable_axis

StageKind = Literal["whole", "rows", "channels"]
MODELS_PER_TILED_STAGE = 3
"""Largest number of TFLite models that a board stores for fused height tiles of the same layers.

There is one model for the top tile, one for all tiles in between, and one for the bottom tile.
"""
STAGE_PENALTY = 1e-3
"""Cost of each stage (consecutive layers computed together), as a fraction of the network's multiplications.

If two plans need equally many multiplications, the one with fewer stages is therefore cheaper.
"""


@dataclass(frozen=True)
class FitBoard:
    """A device with the memory that is available to the network.

    Attributes:
        device: Name of the device.
        ram: Bytes of RAM.
        flash: Bytes of flash; 0 if models are stored in RAM.
    """

    device: str
    ram: int
    flash: int

    def has_room(self, tensors: int, models: int) -> bool:
        """Return True if `tensors` bytes of tensors and `models` bytes of model files fit the board."""
        return tensors <= self.ram and models <= (self.flash or self.ram - tensors)


@dataclass(frozen=True)
class FitStage:
    """Consecutive layers that are computed together, on one or more devices.

    Attributes:
        first: Position of the first layer in the layer graph.
        last: Position after the last layer.
        kind: "whole" (on one device), "rows" (fused height tiles) or "channels" (split by output channels).
        devices: Names of the devices.
        tiles: Number of tiles; each device computes about the same number, one after another.
    """

    first: int
    last: int
    kind: StageKind
    devices: tuple[str, ...]
    tiles: int = 1


@dataclass(frozen=True)
class _PartialPlan:
    """Stages for the first layers of the network, with the memory that they use.

    Attributes:
        cost: Multiply-accumulates, plus STAGE_PENALTY for each stage.
        board: Index of the board that computes the following stages of the kind "whole".
        used_flash: Bytes of flash that whole stages use on this board.
        shared_flash: Bytes of flash that tiled and split stages use on every board.
        stages: The stages.
    """

    cost: float
    board: int = 0
    used_flash: int = 0
    shared_flash: int = 0
    stages: tuple[FitStage, ...] = ()


@dataclass
class StageEstimates:
    """Memory estimates of all stages (consecutive layers computed together) of a network.

    Attributes:
        layers: The network.
        margin: Relative margin that is added to each arena (TFLite-micro's working memory).
        estimates: Cached estimates by (first layer, position after the last layer, kind, number of tiles).
    """

    layers: LayerGraph
    margin: float
    estimates: dict[tuple[int, int, StageKind, int], tuple[ArenaEstimate, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cuts = _stage_boundaries(self.layers)
        (self.network_estimate,) = self.estimate_stage(0, len(self.layers.layers), "whole", 1)
        self.macs = self.network_estimate.macs

    @property
    def heaviest_layer(self) -> Layer:
        layers = self.layers.layers
        return layers[max(range(len(layers)), key=lambda i: self.estimate_stage(i, i + 1, "whole", 1)[0].flash)]

    def estimate_stage(self, first: int, last: int, kind: StageKind, tiles: int) -> tuple[ArenaEstimate, ...]:
        """Return estimates of the first, a middle and the last tile of the layers at positions `first` to `last` - 1.

        The kinds "whole" and "channels" have only one estimate. The result is () if the layers cannot be split in this
        way.
        """
        key = first, last, kind, tiles
        if key not in self.estimates:
            self.estimates[key] = tuple(self._estimate_tiles(*key))
        return self.estimates[key]

    def _estimate_tiles(self, first: int, last: int, kind: StageKind, tiles: int) -> Iterator[ArenaEstimate]:
        chosen = self.layers.layers[first:last]
        if kind == "whole":
            yield estimate_arena(
                self.layers, [make_share_task(self.layers, x, LayerShare()) for x in chosen], self.margin
            )
        elif kind == "channels":
            if last == first + 1 and len(slices := self.channel_slices(chosen[0], tiles)) == tiles:
                yield estimate_arena(
                    self.layers, [make_share_task(self.layers, chosen[0], LayerShare(slices[0]))], self.margin
                )
        else:
            bands = self.row_bands(first, last, tiles)
            some = dict.fromkeys((0, len(bands) // 2, len(bands) - 1) if bands else ())
            for regions in fused_regions(self.layers, chosen, [bands[i] for i in some]):
                computed = [x for x in chosen if x.name in regions]
                tasks = [make_share_task(self.layers, x, LayerShare(regions[x.name])) for x in computed]
                yield estimate_arena(self.layers, tasks, self.margin)

    def row_bands(self, first: int, last: int, tiles: int) -> list[Region]:
        """Return `tiles` bands of rows of equal height of the output of layer `last` - 1.

        The result is [] if the layers at positions `first` to `last` - 1 cannot be split by rows.
        """
        chosen = self.layers.layers[first:last]
        along = [find_cuttable_axis(self.layers, layer, "height") for layer in chosen]
        axis, whole = along[-1], full_region(output_shape(self.layers, chosen[-1]))
        if axis is None or None in along:
            return []
        extent = whole[axis][1]
        height = -(-extent // tiles)
        ends = align_cuts(self.layers, chosen[-1], axis, [min(i * height, extent) for i in range(1, tiles + 1)])
        if any(start >= stop for start, stop in ends):
            return []
        return [with_interval(whole, axis, interval) for interval in ends]

    def channel_slices(self, layer: Layer, tiles: int) -> list[Region]:
        """Return the regions of a layer's output if its channels are split into `tiles` equal shares.

        The result is empty if the layer has no channels to split, and shorter if it has fewer channels than `tiles`.
        """
        axis = find_cuttable_axis(self.layers, layer, "channel")
        if axis is None:
            return []
        whole, cuts = full_region(output_shape(self.layers, layer)), split_axis(self.layers, layer, axis, [1.0] * tiles)
        return [with_interval(whole, axis, cut) for cut in cuts if cut[0] < cut[1]]

    def stage_parts(self, stages: Sequence[FitStage]) -> dict[str, list[Part]]:
        """Return the parts (device, region and lane) of every layer.

        Each tile has its own lane, so that a device computes its tiles one after another.
        """
        layer_parts: dict[str, list[Part]] = {layer.name: [] for layer in self.layers.layers}
        lanes = 0
        for stage in stages:
            chosen = self.layers.layers[stage.first : stage.last]
            if stage.kind == "rows":
                bands = self.row_bands(stage.first, stage.last, stage.tiles)
                each = math.ceil(stage.tiles / len(stage.devices))
                for i, regions in enumerate(fused_regions(self.layers, chosen, bands)):
                    for name, region in regions.items():
                        layer_parts[name].append(Part(stage.devices[i // each], region, lane=lanes + i))
            elif stage.kind == "channels":
                slices = self.channel_slices(chosen[0], len(stage.devices))
                layer_parts[chosen[0].name] += [
                    Part(device, region, lane=lanes) for device, region in zip(stage.devices, slices, strict=True)
                ]
            else:
                for layer in chosen:
                    layer_parts[layer.name].append(Part(stage.devices[0], lane=lanes))
            lanes += stage.tiles
        return layer_parts

    def find_stages(self, boards: Sequence[FitBoard], most: int) -> tuple[FitStage, ...] | None:
        """Return the stages (consecutive layers computed together) with the fewest multiplications that fit the boards.

        A board computes at most `most` tiles of a stage one after another. The result is None if nothing fits.
        """
        search = _StageSearch(self, boards, most)
        label = search.whole_network() or search.run()
        return None if label is None else label.stages

    def end_bytes(self, first: int, last: int) -> int:
        """Return the bytes of the inputs and outputs of the layers at positions `first` to `last` - 1."""
        ends = (first, _next_boundary(self.cuts, first)), (_previous_boundary(self.cuts, last), last)
        before, behind = (self.estimate_stage(a, b, "whole", 1)[0] for a, b in ends)
        return before.incoming + behind.outgoing

    def least_ram(self, most: int) -> tuple[int, Layer]:
        """Return the RAM that the network needs at least, and the layer that needs it.

        For each layer, the split that needs the least RAM counts. All splits that were estimated before are compared,
        and the smallest stages (between neighbouring boundaries), whole and in 2, 4, 8, … and `most` height tiles.

        Returns:
            The largest RAM of a layer in bytes, and the layer.
        """
        best: dict[int, int] = {}
        for first in self.cuts[:-1]:
            for tiles in (*(2**i for i in range(most.bit_length())), most):
                self.estimate_stage(first, _next_boundary(self.cuts, first), "whole" if tiles == 1 else "rows", tiles)
        for (first, last, _, _), needs in list(self.estimates.items()):
            if needs and first in self.cuts and last in self.cuts:
                ram = self.end_bytes(first, last) + max(estimate.arena for estimate in needs)
                best |= {i: min(best.get(i, ram), ram) for i in range(first, last)}
        worst = max(best, key=lambda i: best[i])
        return best[worst], self.layers.layers[worst]


@dataclass
class _StageSearch:
    """Dynamic program over the positions at which stages (consecutive layers computed together) may end.

    For each position and each board, it keeps the cheapest plan of the layers before the position. It assumes that this
    board computes the next stage of the kind "whole".
    """

    stages: StageEstimates
    boards: Sequence[FitBoard]
    max_tiles_per_board: int

    def whole_network(self) -> _PartialPlan | None:
        """Return the plan with the whole network on the first board, or None if it does not fit.

        No other plan needs fewer multiplications.
        """
        return self._add_whole_stage(_PartialPlan(0.0), 0, self.stages.cuts[-1])

    def run(self) -> _PartialPlan | None:
        cuts = self.stages.cuts
        best: dict[tuple[int, int], _PartialPlan] = {(0, i): _PartialPlan(0.0, i) for i in range(len(self.boards))}
        for start in cuts[:-1]:
            for i in range(len(self.boards)):
                partial = best.get((start, i))
                for extended, end in self._extensions(partial, start) if partial is not None else ():
                    for other in range(i, len(self.boards)):
                        moved = extended if other == i else self._move_to_board(extended, other)
                        known = best.get((end, other))
                        if known is None or (moved.cost, moved.used_flash) < (known.cost, known.used_flash):
                            best[end, other] = moved
        complete = [best[cuts[-1], i] for i in range(len(self.boards)) if (cuts[-1], i) in best]
        return min(complete, key=lambda partial: partial.cost, default=None)

    def _move_to_board(self, partial: _PartialPlan, board: int) -> _PartialPlan:
        return _PartialPlan(
            partial.cost + STAGE_PENALTY * self.stages.macs, board, 0, partial.shared_flash, partial.stages
        )

    def _extensions(self, partial: _PartialPlan, start: int) -> Iterator[tuple[_PartialPlan, int]]:
        """Yield plans with one more stage (layers computed together), from layer `start`, and the position after it."""
        ends = [cut for cut in self.stages.cuts if cut > start]
        for end in ends:
            stage = self._add_whole_stage(partial, start, end)
            if stage is None:
                break
            yield stage, end
        cut = self._add_channel_stage(partial, start, ends[0])
        if cut is not None:
            yield cut, ends[0]
        for end in ends:
            if not self.stages.row_bands(start, end, 2):
                break
            if all(self._has_ram_for_layer(layer) for layer in range(start, end)):
                continue
            tiled = self._add_row_stage(partial, start, end)
            if tiled is not None:
                yield tiled, end
            # No tiles of this stage fit, although its last layer would fit whole. Longer stages are not tried, because
            # their tiles have even larger halos.
            elif self._has_ram_for_layer(end - 1):
                break

    def _has_ram_for_layer(self, layer: int) -> bool:
        (need,) = self.stages.estimate_stage(layer, layer + 1, "whole", 1)
        return need.arena + need.incoming + need.outgoing <= self.boards[0].ram

    def _add_whole_stage(self, partial: _PartialPlan, start: int, end: int) -> _PartialPlan | None:
        (need,) = self.stages.estimate_stage(start, end, "whole", 1)
        board, used = self.boards[partial.board], partial.used_flash + need.flash
        if not board.has_room(need.arena + self.stages.end_bytes(start, end), used + partial.shared_flash):
            return None
        stage = FitStage(start, end, "whole", (board.device,))
        cost = partial.cost + need.macs + STAGE_PENALTY * self.stages.macs
        return _PartialPlan(cost, partial.board, used, partial.shared_flash, (*partial.stages, stage))

    def _add_channel_stage(self, partial: _PartialPlan, start: int, end: int) -> _PartialPlan | None:
        """Return the plan `partial` with one more layer, split by channels over all boards.

        The result is None if the layer fits one board, if the split does not fit, or if there are several layers
        between the positions `start` and `end`.
        """
        (whole,) = self.stages.estimate_stage(start, end, "whole", 1)
        board, count = self.boards[0], len(self.boards)
        end_bytes, used = self.stages.end_bytes(start, end), partial.used_flash + partial.shared_flash
        # If models are stored in flash, only the weights decide whether a layer is split by channels. If tensors are
        # too large for RAM, tiles of rows are better, because fewer bytes are sent.
        fits_one_board = board.has_room(0 if board.flash else whole.arena + end_bytes, used + whole.flash)
        if end != start + 1 or count < 2 or fits_one_board:
            return None
        needs = self.stages.estimate_stage(start, end, "channels", count)
        if not needs or not board.has_room(needs[0].arena + end_bytes, used + needs[0].flash):
            return None
        shared = partial.shared_flash + needs[0].flash
        stage = FitStage(start, end, "channels", tuple(board_used.device for board_used in self.boards))
        cost = partial.cost + whole.macs + 2 * STAGE_PENALTY * self.stages.macs
        return _PartialPlan(cost, partial.board, partial.used_flash, shared, (*partial.stages, stage))

    def _add_row_stage(self, partial: _PartialPlan, start: int, end: int) -> _PartialPlan | None:
        """Return the plan `partial` with the layers `start` to `end` - 1 in the fewest fused tiles that fit.

        The tiles are on all boards, or on all but the first, which then only stores inputs and outputs. The result is
        None if nothing fits.
        """
        groups = [self.boards] if len(self.boards) == 1 else [self.boards, self.boards[1:]]
        candidates = []
        for group in groups:
            for each in range(1, self.max_tiles_per_board + 1):
                extended = self._try_tiles(partial, start, end, group, each)
                if extended is not None:
                    candidates.append(extended)
                    break
        return min(candidates, key=lambda candidate: candidate.cost, default=None)

    def _try_tiles(
        self, partial: _PartialPlan, start: int, end: int, group: Sequence[FitBoard], each: int
    ) -> _PartialPlan | None:
        """Return the plan `partial` with the layers `start` to `end` - 1 in `each` tiles on every board of `group`.

        The first board stores their inputs and outputs, even if it computes no tile. The result is None if the boards
        are too small.
        """
        tiles = each * len(group)
        needs = self.stages.estimate_stage(start, end, "rows", tiles) if tiles > 1 else ()
        if not needs:
            return None
        end_bytes, passing_bytes = (
            self.stages.end_bytes(start, end),
            max(estimate.incoming + estimate.outgoing for estimate in needs) * each,
        )
        arena = max(estimate.arena for estimate in needs)
        flash = partial.shared_flash + sum(estimate.flash for estimate in needs[: min(each, MODELS_PER_TILED_STAGE)])
        for board in self.boards:
            takes_part = board in group
            tensors = (arena if takes_part else 0) + (
                end_bytes if board is self.boards[0] else passing_bytes if takes_part else 0
            )
            if not board.has_room(tensors, partial.used_flash + flash if takes_part else 0):
                return None
        macs = needs[0].macs + needs[-1].macs + (tiles - 2) * needs[len(needs) // 2].macs
        stage = FitStage(start, end, "rows", tuple(board.device for board in group), tiles)
        cost = partial.cost + macs + STAGE_PENALTY * self.stages.macs
        return _PartialPlan(cost, partial.board, partial.used_flash, flash, (*partial.stages, stage))


def _stage_boundaries(layers: LayerGraph) -> tuple[int, ...]:
    """Return the positions at which later layers read only one earlier tensor, with 0 and the number of layers."""
    last_reader: dict[str, int] = {}
    for i, layer in enumerate(layers.layers):
        last_reader |= dict.fromkeys(layer.inputs, i)
    last_reader |= {name: len(layers.layers) for name in layers.outputs}
    cuts, open_until = [0], max((last_reader.get(name, -1) for name in layers.inputs), default=-1)
    for i, layer in enumerate(layers.layers[:-1]):
        ends = [last_reader.get(name, i) for name in layer.outputs]
        if open_until <= i and sum(end > i for end in ends) <= 1:
            cuts.append(i + 1)
        open_until = max(open_until, *ends)
    return (*cuts, len(layers.layers))


def _next_boundary(cuts: Sequence[int], cut: int) -> int:
    return next(other for other in cuts if other > cut)


def _previous_boundary(cuts: Sequence[int], cut: int) -> int:
    return next(other for other in reversed(cuts) if other < cut)
