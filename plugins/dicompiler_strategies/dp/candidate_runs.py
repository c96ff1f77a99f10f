"""Candidate runs: ways in which a team (set of devices) can compute a run (sequence of consecutive layers).

A run is either a block (one or more layers in fused height tiles) or a single layer that is split in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dicompiler.plugin_api import Layer, LayerGraph, LayerShare, Part, Region
from dicompiler.plugin_api.costs import sent_nbytes
from dicompiler.plugin_api.regions import (
    TensorKey,
    bounding_region,
    full_region,
    make_share_task,
    named_axes,
    output_shape,
    reduction_length,
    volume,
    with_interval,
)
from dicompiler.plugin_api.search import WorkBudget
from dicompiler_strategies.dp.box_arrays import DeviceBoxes, missing_elements
from dicompiler_strategies.dp.device_team import DeviceTeam, TensorForm
from dicompiler_strategies.dp.row_maps import RowIntervals, bounding_rows, row_counts
from dicompiler_strategies.tables.choice_footprints import Floats

SplitKind = Literal["rows", "cut", "sums"]
"""How the layers of a run (consecutive layers) are split.

- "rows": into fused height tiles.
- "cut": one layer that is split by channels, or computed whole on one device or on each device.
- "sums": one layer into partial sums over ranges of its input channels.
"""
CANDIDATE_RUNS_PER_S = 15_000
"""Candidate runs (ways to compute some consecutive layers) that count as one second of the search's budget.

A run counts when it is built, and for each distribution of its inputs for which its cost is computed. The measured
number was 20 000 per second.
"""
# A block of fused layers that is this many times slower than its layers one by one is not extended further.
_HOPELESS_RATIO = 2.0
_RowDemand = RowIntervals | None
"""The rows of a tensor that each device of a team needs; None if every device needs the whole tensor."""


@dataclass(frozen=True)
class CandidateRules:
    """Rules for the candidate runs (ways to compute some consecutive layers) of a search.

    Attributes:
        allow_blocks: Allow fused blocks with more than one layer with weights, and layers that are split into partial
            sums. CoopAI's method MLS allows both, its baseline SLS neither.
        max_block_layers: Largest number of layers in a block.
        allow_channels: Also allow splits by channels for layers that can be split by rows.
    """

    allow_blocks: bool = True
    max_block_layers: int = 32
    allow_channels: bool = False


@dataclass(frozen=True, eq=False)
class LayerRun:
    """Consecutive layers that the devices compute in one way.

    Attributes:
        start: Position of the first layer.
        stop: Position after the last layer.
        kind: How the layers are split.
        form: How the outputs are distributed over the devices afterwards.
    """

    start: int
    stop: int
    kind: SplitKind
    form: TensorForm


@dataclass(frozen=True, eq=False)
class CandidateRun(LayerRun):
    """A run of consecutive layers that the search may choose, with its costs.

    n is the number of devices of the platform.

    Attributes:
        steps: For each step of computing, the seconds of each device, shape (n,). Adding up partial sums is a second
            step.
        needs: For each tensor that the run reads and does not compute, the region that each device needs.
        weights: Bytes of weights on each device, shape (n,).
        partial_sums: Bytes of partial sums from each sender to each receiver, shape (n, n).
    """

    steps: tuple[Floats, ...]
    needs: Mapping[str, DeviceBoxes]
    weights: Floats
    partial_sums: Floats | None = None
    _time_by_forms: dict[tuple[TensorForm, ...], tuple[float, float]] = field(default_factory=dict, repr=False)
    _missing_by_form: dict[tuple[str, TensorForm], Floats] = field(default_factory=dict, repr=False)
    # Cache: empty, or one array with the bytes that each device needs of all tensors in `needs`, shape (n,).
    _needed_bytes: list[Floats] = field(default_factory=list, repr=False)

    def cost_for_forms(self, team: DeviceTeam, forms: Mapping[str, TensorForm]) -> tuple[float, float]:
        """Return the seconds of this run of layers and the bytes that are sent.

        Devices first send missing elements, then compute, then send and add up partial sums. Each step begins when all
        devices have ended the step before.

        Args:
            team: The devices that compute the run.
            forms: How each tensor that the run reads is distributed over the devices, by tensor name.
        """
        key = tuple([forms[name] for name in self.needs])
        if key not in self._time_by_forms:
            missing = [self._missing_bytes(team, name, form) for name, form in zip(self.needs, key, strict=True)]
            seconds = sum(float(step.max()) for step in self.steps)
            sent_bytes = 0.0
            if missing and not self._needed_bytes:
                sizes = [boxes.sizes * bytes_per_element(team.layers, name) for name, boxes in self.needs.items()]
                self._needed_bytes.append(np.sum(sizes, axis=0))
            steps = [(np.sum(missing, axis=0), self._needed_bytes[0])] if missing else []
            for sent, needed in (*steps, *([] if self.partial_sums is None else [(self.partial_sums, None)])):
                seconds += float(team.link_loads.transfer_seconds(sent, needed))
                sent_bytes += float(sent.sum())
            self._time_by_forms[key] = (seconds, sent_bytes)
        return self._time_by_forms[key]

    def _missing_bytes(self, team: DeviceTeam, name: str, form: TensorForm) -> Floats:
        """Return the bytes of tensor `name` that are sent before this run of layers, shape (n senders, n receivers).

        At first, the tensor is distributed over the devices as `form`.
        """
        if (name, form) not in self._missing_by_form:
            elements = missing_elements(
                self.needs[name], team.stored_boxes(name, form), form in ("source", "everywhere")
            )
            self._missing_by_form[name, form] = elements * bytes_per_element(team.layers, name)
        return self._missing_by_form[name, form]


def bytes_per_element(layers: LayerGraph, tensor: str) -> float:
    """Return the bytes that are sent per element of a tensor, as an average over 32 elements.

    Elements may be smaller than a byte or share a scale, so the result may be a fraction.
    """
    return sent_nbytes(layers, tensor, (32,)) / 32


def build_candidate_runs(
    team: DeviceTeam, rules: CandidateRules, budget: WorkBudget | None = None
) -> list[list[CandidateRun]]:
    """Return, for each layer, the candidate runs (ways to compute consecutive layers) that begin with it.

    Raises:
        BudgetExceeded: The budget is exceeded before all runs are built.
    """
    weight_bytes, budget = team.facts.weight_bytes, budget or WorkBudget()
    beginning: list[list[CandidateRun]] = [[] for _ in team.layers.layers]
    singles: dict[int, tuple[float, float]] = {}
    for stop, layer in enumerate(team.layers.layers, 1):
        whole = _single_layer_run(
            team, layer, "whole", [LayerShare() if i == team.leader else None for i in team.members], weight_bytes
        )
        is_single = len(team.members) == 1
        for run in (
            whole,
            *(() if is_single else _channel_runs(team, layer, rules, weight_bytes)),
            *_row_blocks(team, stop, rules, weight_bytes, singles),
        ):
            budget.spend_or_raise(1 / CANDIDATE_RUNS_PER_S)
            beginning[run.start].append(run)
    return beginning


def _channel_runs(
    team: DeviceTeam, layer: Layer, rules: CandidateRules, weight_bytes: Mapping[str, int]
) -> Iterator[CandidateRun]:
    """Yield the ways to compute a single layer that do not split its rows.

    The layer is split by channels, computed whole on each device, or split into partial sums over input channels.
    """
    rows = team.cut_axis_of(layer, "rows") is not None
    if layer.whole_reason or (rows and not rules.allow_channels):
        return
    shares = team.member_regions(layer, "channels") if team.cut_axis_of(layer, "channels") is not None else None
    if shares is not None:
        cut = [None if region is None else LayerShare(region) for region in shares]
        yield _single_layer_run(team, layer, "channels", cut, weight_bytes)
    multiplies = team.facts.macs[layer.name] > 0
    if not multiplies and not rows:
        yield _single_layer_run(team, layer, "everywhere", [LayerShare()] * len(team.members), weight_bytes)
    if multiplies and rules.allow_blocks and reduction_length(team.layers, layer) is not None:
        whole: list[Region | None] = [full_region(output_shape(team.layers, layer))] * len(team.members)
        lead = [region if i == team.leader else None for i, region in zip(team.members, whole, strict=True)]
        yield _partial_sum_run(team, layer, "whole", lead, weight_bytes)
        yield _partial_sum_run(team, layer, "everywhere", whole, weight_bytes)
        if shares is not None:
            yield _partial_sum_run(team, layer, "channels", shares, weight_bytes)


def _single_layer_run(
    team: DeviceTeam,
    layer: Layer,
    form: TensorForm,
    shares: Sequence[LayerShare | None],
    weight_bytes: Mapping[str, int],
) -> CandidateRun:
    """Return the run that consists of one layer, of which each member of the team (set of devices) computes a piece.

    A run is a sequence of consecutive layers that the team computes in one way.

    Args:
        team: The devices.
        layer: The layer.
        form: How the output is distributed over the devices afterwards.
        shares: The piece of each member; None if the member computes nothing.
        weight_bytes: Bytes of weights by layer name.
    """
    at = team.layers.position[layer.name]
    elements = volume(full_region(team.layers.tensors[layer.output].shape or ()))
    fractions = [
        0.0 if share is None else 1.0 if share.region is None else volume(share.region) / max(elements, 1)
        for share in shares
    ]
    return CandidateRun(
        at,
        at + 1,
        "cut",
        form,
        (team.share_seconds(layer, shares),),
        team.needed_boxes(layer, shares),
        _spread_over_devices(team, fractions) * weight_bytes[layer.name],
    )


def _partial_sum_run(
    team: DeviceTeam, layer: Layer, form: TensorForm, merged: Sequence[Region | None], weight_bytes: Mapping[str, int]
) -> CandidateRun:
    """Return the run of one layer in which each member of the team sums over a range of the input channels.

    A run is a sequence of consecutive layers that the team (set of devices) computes in one way.

    Args:
        team: The devices.
        layer: The layer.
        form: How the sums are distributed over the devices afterwards.
        merged: The region in which each member adds up the partial sums; None if it adds up nothing.
        weight_bytes: Bytes of weights by layer name.
    """
    at = team.layers.position[layer.name]
    ranges = [cut if cut[0] < cut[1] else None for cut in team.reduction_ranges(layer)]
    is_maker = np.array([cut is not None for cut in ranges], np.float64)
    partials = [None if cut is None else LayerShare(None, cut) for cut in ranges]
    mergers = [None if region is None else LayerShare(region, None, int(is_maker.sum())) for region in merged]
    needs = team.needed_boxes(layer, partials)
    for name, need in team.needed_boxes(layer, mergers).items():
        needs[name] = _bound_both(needs[name], need) if name in needs else need
    tensor = team.layers.cut_output(layer.nodes[layer.anchor])
    sizes = np.array([0.0 if region is None else volume(region) for region in merged])
    sums = np.outer(_spread_over_devices(team, is_maker), _spread_over_devices(team, sizes)) * bytes_per_element(
        team.layers, tensor
    )
    np.fill_diagonal(sums, 0.0)
    counts = [0 if cut is None else cut[1] - cut[0] for cut in ranges]
    steps = (team.share_seconds(layer, partials), team.share_seconds(layer, mergers))
    weights = _spread_over_devices(team, [count / max(sum(counts), 1) for count in counts]) * weight_bytes[layer.name]
    return CandidateRun(at, at + 1, "sums", form, steps, needs, weights, sums)


def _bound_both(a: DeviceBoxes, b: DeviceBoxes) -> DeviceBoxes:
    """Return, for each device, the smallest region that contains its regions in `a` and `b`."""

    def region(boxes: DeviceBoxes, i: int) -> Region | None:
        cuts = [boxes.cuts.get(axis) for axis in range(len(boxes.shape))]
        if not boxes.present[i]:
            return None
        return tuple(
            (0, extent) if cut is None else (int(cut[i, 0]), int(cut[i, 1]))
            for extent, cut in zip(boxes.shape, cuts, strict=True)
        )

    return DeviceBoxes.from_regions(
        a.shape, [bounding_region((region(a, i), region(b, i))) for i in range(len(a.present))]
    )


def _spread_over_devices(team: DeviceTeam, values: Sequence[float] | Floats) -> Floats:
    """Return one number for each device of the platform: the values of the team's members, and 0 for all others."""
    result = np.zeros(len(team.problem.platform.devices))
    result[list(team.members)] = values
    return result


def _row_blocks(
    team: DeviceTeam,
    stop: int,
    rules: CandidateRules,
    weight_bytes: Mapping[str, int],
    singles: dict[int, tuple[float, float]],
) -> Iterator[CandidateRun]:
    """Yield blocks of 1, 2, 3, … consecutive layers in fused height tiles that all end before layer `stop`.

    A block is skipped if it is not faster than its layers one by one. `singles` caches, for each layer, the seconds to
    compute its rows on all devices, and the seconds to send missing rows before that.
    """
    block = RowBlock(team, stop)
    seconds = np.zeros(len(team.members))
    leader = team.problem.platform.devices[team.leader]
    single_device_s = weights = separate_s = 0.0
    multiply = 0
    while block.start > max(0, stop - rules.max_block_layers):
        layer = team.layers.layers[block.start - 1]
        if layer.name not in team.row_maps or layer.whole_reason or (multiply and not rules.allow_blocks):
            return
        of_layer = team.member_row_seconds(layer, block.prepend_layer(layer))
        seconds = seconds + of_layer
        single_device_s += float(team.facts.row_seconds_of(layer, leader)[-1])
        if stop - block.start == 1:
            singles[block.start] = (float(of_layer.max()), _exchange_seconds(team, block.needed_boxes()))
        # The seconds of the block (`seconds`) are compared with those of its layers one by one (`separate_s`). In both
        # cases, missing rows are sent before the first layer, so this time is not counted here. It is added to
        # `separate_s` below, before the loop puts another layer in front of this one.
        separate_s += singles[block.start][0]
        if stop - block.start > 1 and seconds.max() >= min(single_device_s, _HOPELESS_RATIO * separate_s):
            return
        multiply += team.facts.macs[layer.name] > 0
        weights += weight_bytes[layer.name]
        if stop - block.start == 1 or seconds.max() < separate_s:
            yield CandidateRun(
                block.start,
                stop,
                "rows",
                "rows",
                (_spread_over_devices(team, seconds),),
                block.needed_boxes(),
                _spread_over_devices(team, np.where(seconds > 0, weights, 0.0)),
            )
        separate_s += singles[block.start][1]


def _exchange_seconds(team: DeviceTeam, needs: Mapping[str, DeviceBoxes]) -> float:
    """Return the seconds to send the rows that devices need and do not store.

    `needs` has, for each tensor, the region that each device needs. Tensors that are not split by rows are ignored.
    """
    rows = [name for name in needs if name in team.layers.producer and team.layers.producer[name].name in team.row_maps]
    missing = [
        missing_elements(needs[name], team.stored_boxes(name, "rows")) * bytes_per_element(team.layers, name)
        for name in rows
    ]
    needed = [needs[name].sizes * bytes_per_element(team.layers, name) for name in rows]
    return float(team.link_loads.transfer_seconds(np.sum(missing, axis=0), np.sum(needed, axis=0))) if missing else 0.0


class RowBlock:
    """A block of consecutive layers in fused height tiles. Layers are added at the front.

    Attributes:
        team: The devices (members) that compute the block.
        stop: Position after the last layer.
        start: Position of the first layer.
        rows: For each layer of the block, the rows that each member computes.
        demands: For each tensor that the block reads, the rows that each member needs; None if they need all rows.
    """

    def __init__(self, team: DeviceTeam, stop: int) -> None:
        self.team, self.stop, self.start = team, stop, stop
        self.rows: dict[str, RowIntervals] = {}
        self.demands: dict[str, _RowDemand] = {}
        self._full_needs: dict[str, Region | None] = {}

    def prepend_layer(self, layer: Layer) -> Sequence[int]:
        """Add the layer before the block; return how many of its rows each member of the team computes."""
        team, row_map = self.team, self.team.row_maps[layer.name]
        self.start -= 1
        nothing = [(0, 0)] * len(team.members)
        rows: RowIntervals = nothing
        if layer.output in self.demands:
            demand = self.demands.pop(layer.output)
            rows = [(0, row_map.height)] * len(team.members) if demand is None else demand
        readers = team.layers.consumers.get(layer.output, ())
        if layer.output in team.layers.outputs or any(team.layers.position[r.name] >= self.stop for r in readers):
            rows = bounding_rows(rows, row_map.proportional_rows(team.weights))
        rows = self.rows[layer.name] = row_map.align_rows(rows)
        template = make_share_task(team.layers, layer, LayerShare()).needs
        for name in layer.inputs:
            need = row_map.read_rows(name, rows)
            known = self.demands.get(name, nothing)
            self.demands[name] = None if need is None or known is None else bounding_rows(known, need)
            self._full_needs[name] = bounding_region((self._full_needs.get(name), template.get(TensorKey(name))))
        return row_counts(rows)

    def needed_boxes(self) -> dict[str, DeviceBoxes]:
        """Return, for each tensor that the block reads and does not compute, the region that each device reads."""
        team, labels = self.team, named_axes(self.team.layers)
        count = len(team.problem.platform.devices)
        result = {}
        for name, demand in self.demands.items():
            template = self._full_needs[name]
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
            result[name] = DeviceBoxes(shape, present, cuts)
        return result


def run_parts(team: DeviceTeam, run: LayerRun) -> dict[str, tuple[Part, ...]]:
    """Return the parts (device and region) of each layer of a run (consecutive layers), by layer name."""
    if run.kind == "rows":
        return _row_parts(team, run)
    layer = team.layers.layers[run.start]
    leader = team.problem.platform.devices[team.leader].name
    layer_parts: list[Part]
    if run.form == "whole":
        layer_parts = [Part(leader)]
    elif run.form == "everywhere":
        layer_parts = [Part(name) for name in team.member_names]
    else:
        shares = team.member_regions(layer, run.form)
        layer_parts = [
            Part(name, region) for name, region in zip(team.member_names, shares, strict=True) if region is not None
        ]
    if run.kind == "sums":
        ranges = zip(team.member_names, team.reduction_ranges(layer), strict=True)
        layer_parts = [*(Part(name, None, cut) for name, cut in ranges if cut[0] < cut[1]), *layer_parts]
    return {layer.name: tuple(layer_parts)}


def _row_parts(team: DeviceTeam, run: LayerRun) -> dict[str, tuple[Part, ...]]:
    block = RowBlock(team, run.stop)
    result = {}
    while block.start > run.start:
        layer = team.layers.layers[block.start - 1]
        block.prepend_layer(layer)
        whole, axis = full_region(output_shape(team.layers, layer)), team.row_maps[layer.name].axis
        tiles = [
            Part(name, with_interval(whole, axis, (first, last)))
            for name, (first, last) in zip(team.member_names, block.rows[layer.name], strict=True)
            if first < last
        ]
        # Nothing reads the layer's output if it has no tiles. A plan must assign it to a device nevertheless.
        result[layer.name] = tuple(tiles) or (Part(team.member_names[0]),)
    return result
