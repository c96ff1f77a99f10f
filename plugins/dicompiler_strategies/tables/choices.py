"""The choices of a layer: the ways to split it over devices. Each is valid by the operator rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product

from dicompiler.plugin_api import Device, Interval, Layer, LayerGraph, LayerShare, Part, Problem, Region, UsageError
from dicompiler.plugin_api.costs import count_macs, sent_nbytes, weight_regions
from dicompiler.plugin_api.regions import (
    align_cuts,
    cuttable_axes,
    full_region,
    make_share_task,
    named_axes,
    output_shape,
    reduction_length,
    split_axis,
    split_proportionally,
    volume,
    with_interval,
)
from dicompiler.plugin_api.utilities import did_you_mean, memoized
from dicompiler_strategies.tables.channel_runs import cut_channel_run, find_run_before, find_run_of

SPLIT_KINDS = ("whole", "height", "grid", "lop", "lip")
"""Kinds of splits: whole layers, height tiles, grid tiles, output channels (LOP), input channels (LIP)."""
SHARE_KINDS = ("equal", "rate", "memory")
"""How much each device computes: equal shares, or shares proportional to its compute rate or to its host's memory."""
SOURCE_SHARE = "source"
"""An additional kind of share: all devices finish the network's first layer at the same time.

The device that has the network's input gets more rows, because it need not receive them.
"""
ROW_CUTS = ("balanced", "nearest", "coarser")
"""Ways to place the borders between the rows of neighbouring devices.

- "balanced": each device has as many rows as its share requires, rounded to whole rows.
- "nearest": at the row nearest to the exact border.
- "coarser": at the borders of the next layer that has fewer rows, scaled to the rows of this layer.
"""
MERGE_KINDS = ("one", "channels", "rows", "all")
"""Ways to add up partial sums.

- "one": on one device.
- "channels", "rows": each device adds up a range of the channels or rows.
- "all": all devices add up all of them.
"""
MIN_LAYER_S = 1e-12
"""Least assumed seconds of a layer, so that its speed is finite."""


@dataclass(frozen=True)
class Choice:
    """One way to split one layer.

    Attributes:
        kind: One of SPLIT_KINDS.
        label: Short name. "height 4 +1" means height tiles on 4 devices, with one extra row on each side.
        parts: The parts of the layer. A device computes at most one output region and one partial sum.
        sent_regions: For each part, the region that its device sends to others; None for a partial sum. These regions
            do not overlap, even if several devices compute the same elements. Empty if the parts do not overlap.
    """

    kind: str
    label: str
    parts: tuple[Part, ...]
    sent_regions: tuple[Region | None, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class ChoiceSet:
    """The set of choices (ways to split a layer over devices) that a search may use.

    Attributes:
        kinds: Kinds of splits, from SPLIT_KINDS.
        device_counts: Numbers of devices to split over, the fastest ones. Empty means every number from 2 on.
        extra_rows: Largest number of rows (for grids also columns) that a tile computes beyond its share on each side.
            With extra rows, several consecutive layers need no exchange.
        shares: How much each device computes. "equal": the same amount. "rate": in proportion to its compute rate.
            "memory": in proportion to its host's memory. "source": more rows of the first layers on the device that has
            the network's input.
        row_cuts: How borders between rows and columns are placed. "balanced": equal shares differ by at most one row.
            "nearest": at the row nearest to the exact border. "coarser": at the borders of the next layer that has
            fewer rows, multiplied by the stride (the ratio of the numbers of rows), as is `extra_rows`.
        merges: How partial sums are added up: on one device ("one"), in shares of the channels ("channels") or rows
            ("rows"), or on all devices ("all", for sequences and vectors only). With "all", layers without
            multiplications may also be computed whole on all devices.
        each_device: True if a whole layer may be on any device; False for the fastest device only.
        teams: Sets of devices to split over, by name. Empty means the sets that `device_counts` describes.

    Raises:
        UsageError: A value is unknown or out of range.
    """

    kinds: tuple[str, ...] = SPLIT_KINDS
    device_counts: tuple[int, ...] = ()
    extra_rows: int = 4
    shares: tuple[str, ...] = SHARE_KINDS
    row_cuts: tuple[str, ...] = ROW_CUTS
    merges: tuple[str, ...] = MERGE_KINDS
    each_device: bool = True
    teams: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for field_name, names, allowed in (
            ("kinds", self.kinds, SPLIT_KINDS),
            ("shares", self.shares, (*SHARE_KINDS, SOURCE_SHARE)),
            ("row_cuts", self.row_cuts, ROW_CUTS),
            ("merges", self.merges, MERGE_KINDS),
        ):
            for name in names:
                if name not in allowed:
                    raise UsageError(f"choices: {field_name}: unknown {name!r}{did_you_mean(name, allowed)}")
        if self.extra_rows < 0 or any(count < 2 for count in self.device_counts):
            raise UsageError("choices: extra_rows must be at least 0, and each of device_counts at least 2")

    def describe(self) -> str:
        counts = ",".join(map(str, self.device_counts)) or "2.."
        text = f"{'+'.join(self.kinds)} on {counts} devices, 0..{self.extra_rows} extra rows, "
        text += f"{'+'.join(self.shares)} shares ({'+'.join(self.row_cuts)} cuts)"
        return text + (f", LIP merged in {'+'.join(self.merges)}" if "lip" in self.kinds else "")


def find_cuttable_axis(layers: LayerGraph, layer: Layer, label: str) -> int | None:
    """Return the output axis with the label "height", "width" or "channel"; None if the axis cannot be cut."""
    axis = named_axes(layers).get(layer.output, {}).get(label)
    return axis if axis in cuttable_axes(layers, layer) else None


def list_choices(
    problem: Problem, layer: Layer, options: ChoiceSet = ChoiceSet(), max_choices: int | None = None
) -> tuple[Choice, ...]:
    """Return the different ways to split a layer, at most `max_choices` of them; None means all.

    Whole layers come first, beginning with the fastest device.
    """
    by_parts: dict[tuple[Part, ...], Choice] = {}
    for choice in _generate_choices(problem, layer, options):
        by_parts.setdefault(choice.parts, choice)
        if len(by_parts) == max_choices:
            break
    return tuple(by_parts.values())


def devices_by_rate(problem: Problem) -> tuple[Device, ...]:
    """Return the devices that compute, the fastest first; devices of equal rate are in platform order."""
    return tuple(sorted(problem.platform.computing_devices, key=lambda device: -device.rate))


def _generate_choices(problem: Problem, layer: Layer, options: ChoiceSet) -> Iterator[Choice]:
    devices = devices_by_rate(problem)
    # The whole layer on the fastest device is always a choice, because some layers cannot be split.
    whole_devices = devices if options.each_device and "whole" in options.kinds else devices[:1]
    for device in whole_devices:
        yield Choice("whole", f"whole {device.name}", (Part(device.name),))
    if layer.whole_reason:
        return
    generators = [generate for kind, generate in _CHOICE_GENERATORS.items() if kind in options.kinds]
    for team, share in product(_list_teams(devices, options), options.shares):
        weights = _share_weights(problem, layer, team, share)
        if weights is not None:
            suffix = "" if share == "equal" else f" {share}"
            if options.teams:
                suffix += f" on {' '.join(device.name for device in team)}"
            split = _SplitInputs(problem, layer, options, team, weights, suffix)
            for generate in generators if share != SOURCE_SHARE else (_height_choices,):
                yield from generate(split)


def _list_teams(fastest_first: tuple[Device, ...], options: ChoiceSet) -> list[tuple[Device, ...]]:
    if options.teams:
        by_name = {device.name: device for device in fastest_first}
        return [tuple(by_name[name] for name in team) for team in options.teams]
    every = range(2, len(fastest_first) + 1)
    return [fastest_first[:count] for count in options.device_counts or every if count in every]


def rows_for_source(problem: Problem, layer: Layer, devices: Sequence[Device]) -> list[float] | None:
    """Return the rows of each device such that all devices finish the network's first layer at the same time.

    The source, which has the network's input, computes at once. The other devices first receive their inputs. The
    result is None for all layers but the first and those that only reshape its output, and if there is not exactly one
    source.
    """
    layers, source_names = problem.layers, problem.source or (problem.platform.devices[0].name,)
    first = find_first_layers(layers).get(layer.name)
    source = next((device for device in devices if (device.name,) == source_names), None)
    axis = None if first is None else find_cuttable_axis(layers, first, "height")
    if first is None or axis is None or source is None or len(devices) < 2:
        return None
    rows = output_shape(layers, first)[axis]
    others = [device for device in devices if device is not source]
    source_s, rates = _layer_seconds(problem, first, source), [1 / _layer_seconds(problem, first, d) for d in others]
    link = problem.platform.link(source.name, others[0].name)
    sizes = [sent_nbytes(layers, name, layers.tensors[name].shape or ()) for name in first.inputs]
    sending_s = 0.0 if link is None else sum(link.transfer_s(nbytes, 0.0) for nbytes in sizes)
    others_s = sending_s + 1 / sum(rates)
    source_rows = min(rows, round(rows * others_s / (source_s + others_s)))
    other_rows = iter([stop - start for start, stop in split_proportionally(rows - source_rows, rates)])
    return [float(source_rows) if device is source else float(next(other_rows)) for device in devices]


@memoized
def find_first_layers(layers: LayerGraph) -> dict[str, Layer]:
    """Return the layers with multiplications that read only a network input, and the layers that reshape their output.

    Keys are layer names, and values are the layers with multiplications.
    """
    found: dict[str, Layer] = {}
    for layer in layers.layers:
        if layer.whole_reason or len(layer.inputs) != 1:
            continue
        (read,) = layer.inputs
        before = layers.producer.get(read)
        if before is None and count_macs(layers, layer):
            found[layer.name] = layer
        elif before is not None and before.name in found and not count_macs(layers, layer):
            sizes = {volume(full_region(output_shape(layers, same))) for same in (layer, before)}
            if len(sizes) == 1 and len(layers.consumers.get(read, ())) == 1:
                found[layer.name] = found[before.name]
    return found


def _layer_seconds(problem: Problem, layer: Layer, device: Device) -> float:
    """Return the seconds of a whole layer on a device: at least MIN_LAYER_S, even if a profile says 0."""
    seconds = problem.cost_model.seconds(
        problem.layers, layer, LayerShare(full_region(output_shape(problem.layers, layer))), device
    )
    return max(seconds, MIN_LAYER_S)


def _share_weights(problem: Problem, layer: Layer, devices: Sequence[Device], share: str) -> list[float] | None:
    if share == SOURCE_SHARE:
        return rows_for_source(problem, layer, devices)
    if share == "rate":
        return [device.rate for device in devices]
    if share == "memory":
        users = Counter(device.host for device in problem.platform.computing_devices)
        return [problem.platform.host(device.host).memory / users[device.host] for device in devices]
    return [1.0] * len(devices)


@dataclass(frozen=True)
class _SplitInputs:
    """Common arguments of the functions that generate ways to split a layer.

    Attributes:
        problem: The problem.
        layer: The layer to split.
        options: The ways to split layers that the search may use.
        devices: The devices to split over.
        weights: Weight of each device; the device's share of the layer is proportional to it.
        label_suffix: Text at the end of a choice's label.
    """

    problem: Problem
    layer: Layer
    options: ChoiceSet
    devices: tuple[Device, ...]
    weights: Sequence[float]
    label_suffix: str

    def find_axis(self, label: str) -> int | None:
        """Return the output axis with the label "height", "width" or "channel"; None if the axis cannot be cut.

        After a Flatten, one axis has both rows and channels; it counts only as "channel".
        """
        layers, layer = self.problem.layers, self.layer
        axis = find_cuttable_axis(layers, layer, label)
        channel = named_axes(layers).get(layer.output, {}).get("channel")
        return None if label != "channel" and axis == channel else axis

    def full_region(self) -> Region:
        return full_region(output_shape(self.problem.layers, self.layer))

    def device_slices(self, label: str) -> list[tuple[Device, Region]]:
        """Return pairs of a device and its slice of the output along the axis `label`; [] if it cannot be cut.

        Channels are cut at the same places as in other layers that must be cut together, such as those of an attention.
        """
        layers, layer = self.problem.layers, self.layer
        run_and_position = find_run_of(layers, layer) if label == "channel" else None
        if run_and_position is not None:
            run, position = run_and_position
            regions = [of_device[position] for of_device in cut_channel_run(layers, run, self.weights).regions]
            return [(device, region) for device, region in zip(self.devices, regions, strict=True) if region]
        axis = self.find_axis(label)
        return [] if axis is None else self.cut_axis(axis, split_axis(layers, layer, axis, self.weights))

    def cut_axis(self, axis: int, intervals: Sequence[Interval]) -> list[tuple[Device, Region]]:
        """Return pairs of a device and its region: an interval of one output axis, and the other axes whole.

        Devices with an empty interval are omitted.
        """
        pairs = zip(self.devices, intervals, strict=True)
        whole = self.full_region()
        return [(device, with_interval(whole, axis, cut)) for device, cut in pairs if cut[0] < cut[1]]

    @property
    def is_sequence_or_vector(self) -> bool:
        """True if the output has no separate width axis.

        Such outputs are often so small that all devices should compute all of them, instead of exchanging parts.
        """
        labels = named_axes(self.problem.layers).get(self.layer.output, {})
        return labels.get("width", labels.get("height")) == labels.get("height")


def _grow_tiles(
    split: _SplitInputs,
    name: str,
    tiles: Sequence[tuple[Device, Region]],
    grown_axes: Sequence[int],
    extra_counts: range,
) -> Iterator[Choice]:
    """Yield one choice (way to split the layer) for each number of extra rows in `extra_counts`.

    Args:
        split: The layer and the devices.
        name: Beginning of the choices' labels.
        tiles: Devices with disjoint regions.
        grown_axes: Axes on which each tile is extended by the extra rows at both ends.
        extra_counts: Numbers of extra rows. With extra rows, consecutive layers need no exchange.
    """
    whole = split.full_region()
    for extra in extra_counts if tiles else ():
        parts = []
        for device, region in tiles:
            for axis in grown_axes:
                start, stop = region[axis]
                region = with_interval(region, axis, (max(0, start - extra), min(whole[axis][1], stop + extra)))
            parts.append(Part(device.name, region))
        label = f"{name}{f' +{extra}' if extra else ''}{split.label_suffix}"
        yield Choice(name.split()[0], label, tuple(parts), tuple(region for _, region in tiles))


_CutFunction = Callable[[str, Sequence[float]], Sequence[Interval]]
"""A function that cuts the output axis with a label ("height" or "width") into one interval for each weight."""


def _row_cut_functions(split: _SplitInputs) -> Iterator[tuple[_CutFunction, str, range]]:
    """Yield the ways to place borders between devices: function to cut an axis, label suffix, numbers of extra rows."""
    layers, layer = split.problem.layers, split.layer

    def cut(cut_kind: str, label: str, weights: Sequence[float]) -> Sequence[Interval]:
        axis = split.find_axis(label)
        assert axis is not None
        if cut_kind == "balanced":
            return split_axis(layers, layer, axis, weights)
        extent = split.full_region()[axis][1]
        # Strides such as [2, 1] reduce only the height. The width is then the same in all later layers.
        rows = (next_smaller_extent(layers, layer, label) if cut_kind == "coarser" else 0) or extent
        ends = [math.floor(rows * part / sum(weights) + 0.5) for part in accumulate(weights)]
        return align_cuts(layers, layer, axis, [round(end * extent / rows) for end in ends])

    height_axis, smaller_height = split.find_axis("height"), next_smaller_extent(layers, layer, "height")
    assert height_axis is not None
    for cut_kind in split.options.row_cuts:
        label_suffix, extra_counts = "" if cut_kind == "balanced" else " near", range(split.options.extra_rows + 1)
        if cut_kind == "coarser":
            if not smaller_height:
                continue
            stride = round(split.full_region()[height_axis][1] / smaller_height)
            label_suffix = f" of {stride}"
            # A later layer may merge many rows into one (patches of an image become a sequence). A halo of a few rows
            # is then useless, so the number of extra rows grows in steps of a quarter of `stride`.
            extra_counts = range(0, stride * split.options.extra_rows + 1, max(1, stride // 4))
        yield partial(cut, cut_kind), label_suffix, extra_counts


@memoized
def next_smaller_extent(layers: LayerGraph, layer: Layer, label: str) -> int:
    """Return the length of the axis `label` in the next layer in which it is shorter; 0 if there is none.

    The search follows the first reader of each layer's output.
    """
    labels = named_axes(layers)
    longest = output_shape(layers, layer)[labels[layer.output][label]]
    while True:
        readers = layers.consumers.get(layer.output, ())
        if not readers or readers[0].whole_reason or label not in labels.get(readers[0].output, {}):
            return 0
        layer = readers[0]
        extent = output_shape(layers, layer)[labels[layer.output][label]]
        if extent != longest:
            return extent if 1 < extent < longest else 0


def _height_choices(split: _SplitInputs) -> Iterator[Choice]:
    axis = split.find_axis("height")
    if axis is not None:
        for cut, label_suffix, extra_counts in _row_cut_functions(split):
            tiles = split.cut_axis(axis, cut("height", split.weights))
            yield from _grow_tiles(split, f"height {len(split.devices)}{label_suffix}", tiles, (axis,), extra_counts)


def _grid_choices(split: _SplitInputs) -> Iterator[Choice]:
    """Yield the splits into grid tiles, in two columns and in the squarest grid."""
    height, width = split.find_axis("height"), split.find_axis("width")
    count = len(split.devices)
    # If an image was converted to a sequence of patches, one axis is both height and width.
    if height is None or width is None or height == width:
        return
    squarest = max((c for c in range(2, int(count**0.5) + 1) if count % c == 0), default=0)
    for columns in dict.fromkeys(c for c in (2, squarest) if c and count % c == 0 and count >= 4):
        for cut, label_suffix, extra_counts in _row_cut_functions(split):
            tiles = _grid_tiles(split, cut, height, width, columns)
            name = f"grid {count // columns}x{columns}{label_suffix}"
            yield from _grow_tiles(split, name, tiles, (height, width), extra_counts)


def _grid_tiles(
    split: _SplitInputs, cut: _CutFunction, height_axis: int, width_axis: int, columns: int
) -> list[tuple[Device, Region]]:
    """Return the tiles of a grid with this number of columns, each with its device.

    The height of each row of tiles is proportional to the sum of its devices' weights.
    """
    weights = split.weights
    starts = range(0, len(weights), columns)
    tiles = []
    for start, rows in zip(starts, cut("height", [sum(weights[s : s + columns]) for s in starts]), strict=True):
        row = with_interval(split.full_region(), height_axis, rows)
        for i, interval in enumerate(cut("width", weights[start : start + columns])):
            if rows[0] < rows[1] and interval[0] < interval[1]:
                tiles.append((split.devices[start + i], with_interval(row, width_axis, interval)))
    return tiles


def _copy_choices(split: _SplitInputs) -> Iterator[Choice]:
    """Yield the choice in which every device computes the whole layer, so that its output is not sent.

    It exists only for layers without multiplications, with a sequence or a vector as output.
    """
    if (
        split.problem.layers.tensors[split.layer.output].shape is not None
        and "all" in split.options.merges
        and split.is_sequence_or_vector
        and not count_macs(split.problem.layers, split.layer)
    ):
        parts = tuple(Part(device.name) for device in split.devices)
        yield Choice("whole", f"whole on {len(parts)}", parts, _make_disjoint([split.full_region()] * len(parts)))


def _lop_choices(split: _SplitInputs) -> Iterator[Choice]:
    slices = split.device_slices("channel")
    if slices:
        parts = tuple(Part(device.name, region) for device, region in slices)
        label = f"lop {len(split.devices)}{split.label_suffix}"
        yield Choice("lop", label, parts, _make_disjoint([region for _, region in slices]))


def _make_disjoint(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Return each region without the elements of earlier regions; empty if the regions are disjoint already."""
    if not regions[0]:  # The output is a scalar, which has no axes and cannot be cut, so no regions overlap.
        return ()
    bounds = tuple(zip(*regions, strict=True))
    axis = next((axis for axis, cuts in enumerate(bounds) if len(set(cuts)) > 1), 0)
    end, disjoint = 0, list[Region]()
    for region in regions:
        start, stop = region[axis]
        disjoint.append(with_interval(region, axis, (min(max(start, end), stop), stop)))
        end = max(end, stop)
    return () if disjoint == list(regions) else tuple(disjoint)


def _lip_choices(split: _SplitInputs) -> Iterator[Choice]:
    layers, layer = split.problem.layers, split.layer
    length, run = reduction_length(layers, layer), find_run_before(layers, layer)
    # A product of two computed tensors (as in QKᵀ) cannot be cut together with earlier layers, so it is not split into
    # partial sums.
    if length is None or (run is None and count_macs(layers, layer)) or _is_small_table(layers, layer):
        return
    ranges = cut_channel_run(layers, run, split.weights).ranges if run else split_proportionally(length, split.weights)
    cuts = zip(split.devices, ranges, strict=True)
    partial_sums = tuple(Part(device.name, None, cut) for device, cut in cuts if cut[0] < cut[1])
    for merge_kind in split.options.merges:
        if mergers := _merging_parts(split, merge_kind):
            merged = _make_disjoint([part.region or split.full_region() for part in mergers])
            label = f"lip {len(split.devices)} > {merge_kind}{split.label_suffix}"
            sent_regions = (None,) * len(partial_sums) + merged if merged else ()
            yield Choice("lip", label, partial_sums + mergers, sent_regions)


def _is_small_table(layers: LayerGraph, layer: Layer) -> bool:
    """Return True if the layer picks rows of a table that is no larger than the layer's output.

    Sending partial results of the size of the output would cost more than a cut of the table saves.
    """
    if count_macs(layers, layer):
        return False
    output = output_shape(layers, layer)
    table_bytes = sum(weight_regions(layers, make_share_task(layers, layer, LayerShare(full_region(output)))).values())
    return 0 < table_bytes <= sent_nbytes(layers, layer.output, output)


def _merging_parts(split: _SplitInputs, merge_kind: str) -> tuple[Part, ...]:
    if merge_kind == "one":
        return (Part(split.devices[0].name),)
    if merge_kind == "all":
        return tuple(Part(device.name) for device in split.devices if split.is_sequence_or_vector)
    slices = split.device_slices("channel" if merge_kind == "channels" else "height")
    return tuple(Part(device.name, region) for device, region in slices)


_CHOICE_GENERATORS = {
    "whole": _copy_choices,
    "height": _height_choices,
    "grid": _grid_choices,
    "lop": _lop_choices,
    "lip": _lip_choices,
}
