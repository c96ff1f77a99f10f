"""The choices of a layer: the ways of splitting it that a search picks from, each with its parts on named devices.

Problem + Layer + ChoiceSet → Choices, every one legal by the layer's rule.   Tables and strategies read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from dicompiler.plugin_api import Device, Interval, Layer, LayerGraph, LayerShare, Part, Problem, Region, UsageError
from dicompiler.plugin_api.costs import count_macs, sent_nbytes, weight_regions
from dicompiler.plugin_api.regions import (
    align_cuts,
    full_region,
    make_share_task,
    named_axes,
    output_shape,
    reduction_length,
    split_axis,
    split_proportionally,
    with_interval,
)
from dicompiler.plugin_api.utilities import did_you_mean, memoized
from dicompiler_strategies.named_axis import find_cuttable_axis
from dicompiler_strategies.tables.channel_runs import cut_channel_run, find_run_before, find_run_of
from dicompiler_strategies.tables.source_bias import rows_for_source

SPLIT_KINDS = ("whole", "height", "grid", "lop", "lip")
SHARE_KINDS = ("equal", "rate", "memory")
SOURCE_SHARE = "source"
ROW_CUTS = ("balanced", "nearest", "coarser")
MERGE_KINDS = ("one", "channels", "rows", "all")


@dataclass(frozen=True)
class Choice:
    """One way to split one layer.

    kind: one of KINDS. label: short, for people: "height 4 +1" are rows on 4 devices and one more on each side.
    parts: at most one that makes the layer's output, and one partial sum, on a device.
    shares: for each of `parts` the region that nobody else has as well, None for a partial sum; () where the parts'
    own regions are disjoint. They decide who sends what several devices hold.
    """

    kind: str
    label: str
    parts: tuple[Part, ...]
    shares: tuple[Region | None, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class ChoiceSet:
    """Which choices there are.

    kinds: of KINDS. counts: numbers of devices to split over, the fastest ones (of equals the first); () is every
    number from 2 on. extra: rows (and, of a grid, columns) that each tile computes beyond its share on each side, at
    most; they let a run of layers go without an exchange. shares: of SHARES: equal, in proportion to the compute rate,
    or to the memory of the device's host (shared by the host's devices); or NEAR, rows of layers near the network's
    input, of which its source computes more while the others' parts travel. bases: of BASES, where rows and columns are
    cut: "balanced" gives whole shares, the first ones one more; "nearest" cuts at the nearest row to the exact place,
    so that the cuts of maps of different sizes lie within a row of each other; "coarser" cuts where the next smaller
    map after the layer is cut (and takes its extra rows: twice as many before a pool of two). finishes: of FINISHES,
    the ways in which partial sums (LIP) are merged: on one device, in channel shares, in row shares, or, of sequences
    and vectors, on all devices (then what multiplies nothing can be whole on all of them, too). each: whole layers on
    each device or on the fastest alone. Raises UsageError for what is none of these.
    """

    kinds: tuple[str, ...] = SPLIT_KINDS
    device_counts: tuple[int, ...] = ()
    extra_rows: int = 4
    shares: tuple[str, ...] = SHARE_KINDS
    row_cuts: tuple[str, ...] = ROW_CUTS
    merges: tuple[str, ...] = MERGE_KINDS
    each_device: bool = True

    def __post_init__(self) -> None:
        for field_name, given, known in (
            ("kinds", self.kinds, SPLIT_KINDS),
            ("shares", self.shares, (*SHARE_KINDS, SOURCE_SHARE)),
            ("bases", self.row_cuts, ROW_CUTS),
            ("finishes", self.merges, MERGE_KINDS),
        ):
            for name in given:
                if name not in known:
                    raise UsageError(f"choices: {field_name}: unknown {name!r}{did_you_mean(name, known)}")
        if self.extra_rows < 0 or any(count < 2 for count in self.device_counts):
            raise UsageError("choices: extra must be at least 0 and each of counts at least 2")

    def describe(self) -> str:
        """The set in one line, for printing beside a bound that holds for it."""
        counts = ",".join(map(str, self.device_counts)) or "2.."
        rest = f"{'+'.join(self.kinds)} on {counts} devices, 0..{self.extra_rows} extra rows, {'+'.join(self.shares)} shares"
        rest += f" ({'+'.join(self.row_cuts)} cuts)"
        return rest + (f", LIP finished in {'+'.join(self.merges)}" if "lip" in self.kinds else "")


def list_choices(
    problem: Problem, layer: Layer, options: ChoiceSet = ChoiceSet(), max_choices: int | None = None
) -> tuple[Choice, ...]:
    """The choices of `layer` on the platform of `problem`, whole layers first (the fastest device's is the first of
    all); what the layer's rule does not allow is left out, and so is what has the parts of an earlier one. most: so
    many are enough."""
    by_parts: dict[tuple[Part, ...], Choice] = {}
    for choice in _generate_choices(problem, layer, options):
        by_parts.setdefault(choice.parts, choice)
        if len(by_parts) == max_choices:
            break
    return tuple(by_parts.values())


def devices_by_rate(problem: Problem) -> tuple[Device, ...]:
    """The computing devices, the fastest first, of equals the first of the platform."""
    return tuple(sorted(problem.platform.computing_devices, key=lambda device: -device.rate))


def _generate_choices(problem: Problem, layer: Layer, options: ChoiceSet) -> Iterator[Choice]:
    devices = devices_by_rate(problem)
    # Without any way to compute a layer whole there may be no choice at all: the fastest device is always one.
    each = devices if options.each_device and "whole" in options.kinds else devices[:1]
    for device in each:
        yield Choice("whole", f"whole {device.name}", (Part(device.name),))
    if layer.whole_reason:
        return
    splitters = [make for kind, make in _CHOICE_GENERATORS.items() if kind in options.kinds]
    for count in options.device_counts or range(2, len(devices) + 1):
        chosen = devices[:count]
        if len(chosen) < count:
            continue
        for share in options.shares:
            weights = (
                rows_for_source(problem, layer, chosen)
                if share == SOURCE_SHARE
                else _share_weights(problem, chosen, share)
            )
            if weights is None:
                continue
            note = "" if share == "equal" else f" {share}"
            for split in splitters if share != SOURCE_SHARE else (_height_choices,):
                yield from split(_SplitInputs(problem, layer, options, chosen, weights, note))


def _share_weights(problem: Problem, devices: Sequence[Device], share: str) -> list[float]:
    if share == "rate":
        return [device.rate for device in devices]
    if share == "memory":
        together = [
            sum(other.host == device.host for other in problem.platform.computing_devices) for device in devices
        ]
        return [problem.platform.host(d.host).memory / n for d, n in zip(devices, together, strict=True)]
    return [1.0] * len(devices)


@dataclass(frozen=True)
class _SplitInputs:
    """What every kind of split is made from: a layer, and devices with their weights."""

    problem: Problem
    layer: Layer
    options: ChoiceSet
    devices: tuple[Device, ...]
    weights: Sequence[float]
    note: str

    def find_axis(self, label: str) -> int | None:
        """The output axis of that name, None where it cannot be cut. Behind a Flatten rows are no axis of their own."""
        layers, layer = self.problem.layers, self.layer
        axis = find_cuttable_axis(layers, layer, label)
        channel = named_axes(layers).get(layer.output, {}).get("channel")
        return None if label != "channel" and axis == channel else axis

    def axis_length(self, label: str) -> int:
        """The length of a named output axis that can be cut."""
        axis = self.find_axis(label)
        assert axis is not None
        return self.full_region()[axis][1]

    def full_region(self) -> Region:
        return full_region(output_shape(self.problem.layers, self.layer))

    def cut_axis(self, axis: int, weights: Sequence[float]) -> tuple[Interval, ...]:
        return split_axis(self.problem.layers, self.layer, axis, weights)

    def device_slices(self, label: str) -> list[tuple[Device, Region]]:
        """A slice of the output for each device that gets one; empty where the axis cannot be cut. Channels are cut as
        the run is that the layer is in."""
        layers, layer = self.problem.layers, self.layer
        found = find_run_of(layers, layer) if label == "channel" else None
        if found is not None:
            regions = (own[found[1]] for own in cut_channel_run(layers, found[0], self.weights).regions)
            return [(device, region) for device, region in zip(self.devices, regions, strict=True) if region]
        axis = self.find_axis(label)
        if axis is None:
            return []
        pairs = zip(self.devices, self.cut_axis(axis, self.weights), strict=True)
        return [(device, with_interval(self.full_region(), axis, cut)) for device, cut in pairs if cut[0] < cut[1]]

    @property
    def is_sequence_or_vector(self) -> bool:
        """Whether the output is a sequence or a vector, and no map: then all of it on each device can be worth its
        computing."""
        labels = named_axes(self.problem.layers).get(self.layer.output, {})
        return labels.get("width", labels.get("height")) == labels.get("height")


def _grow_tiles(
    split: _SplitInputs,
    kind: str,
    name: str,
    tiles: Sequence[tuple[Device, Region]],
    along: Sequence[int],
    extras: range,
) -> Iterator[Choice]:
    """The tiles with 0, 1, 2, … more rows (and columns) on each side."""
    whole = split.full_region()
    for extra in extras if tiles else ():
        parts = []
        for device, region in tiles:
            for axis in along:
                start, stop = region[axis]
                region = with_interval(region, axis, (max(0, start - extra), min(whole[axis][1], stop + extra)))
            parts.append(Part(device.name, region))
        label = f"{name}{f' +{extra}' if extra else ''}{split.note}"
        yield Choice(kind, label, tuple(parts), tuple(region for _, region in tiles))


_CutFunction = Callable[[str, Sequence[float]], Sequence[Interval]]  # label of an axis, weights → intervals


def _row_cut_functions(split: _SplitInputs) -> Iterator[tuple[_CutFunction, str, range]]:
    """For each of the bases: how it cuts rows and columns, a note for the label, the numbers of extra rows. Where many
    rows become one (a sequence that is an image's), they grow by a quarter of that: each single row makes no halo."""
    layers, layer = split.problem.layers, split.layer

    def cut(label: str, weights: Sequence[float], coarse: bool) -> Sequence[Interval]:
        axis, extent = split.find_axis(label), split.axis_length(label)
        assert axis is not None
        rows = (
            next_smaller_extent(layers, layer, label) if coarse else 0
        ) or extent  # strides of [2, 1] make one axis smaller
        ends = [math.floor(rows * part / sum(weights) + 0.5) for part in accumulate(weights)]
        return align_cuts(layers, layer, axis, [round(end * extent / rows) for end in ends])

    most = range(split.options.extra_rows + 1)
    for base in split.options.row_cuts:
        if base == "balanced":
            yield lambda label, weights: split.cut_axis(split.find_axis(label) or 0, weights), "", most
        elif base == "nearest":
            yield lambda label, weights: cut(label, weights, False), " near", most
        elif next_smaller_extent(layers, layer, "height"):
            stride = round(split.axis_length("height") / next_smaller_extent(layers, layer, "height"))
            extras = range(0, stride * split.options.extra_rows + 1, max(1, stride // 4))
            yield lambda label, weights: cut(label, weights, True), f" of {stride}", extras


@memoized
def next_smaller_extent(layers: LayerGraph, layer: Layer, label: str) -> int:
    """The height or width of the first smaller map along the first readers of the layer's output; 0: there is none."""
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
    if axis is None:
        return
    for cut, note, most in _row_cut_functions(split):
        pairs = zip(split.devices, cut("height", split.weights), strict=True)
        tiles = [
            (device, with_interval(split.full_region(), axis, rows)) for device, rows in pairs if rows[0] < rows[1]
        ]
        yield from _grow_tiles(split, "height", f"height {len(split.devices)}{note}", tiles, (axis,), most)


def _grid_choices(split: _SplitInputs) -> Iterator[Choice]:
    """(m/2) × 2 tiles, and the squarest other grid of m tiles."""
    height, width = split.find_axis("height"), split.find_axis("width")
    count = len(split.devices)
    if height is None or width is None or height == width:  # a sequence that is an image's
        return
    squarest = max((c for c in range(2, int(count**0.5) + 1) if count % c == 0), default=0)
    for columns in dict.fromkeys(c for c in (2, squarest) if c and count % c == 0 and count >= 4):
        for cut, note, most in _row_cut_functions(split):
            tiles = _grid_tiles(split, cut, (height, width), columns)
            name = f"grid {count // columns}x{columns}{note}"
            yield from _grow_tiles(split, "grid", name, tiles, (height, width), most)


def _grid_tiles(
    split: _SplitInputs, cut: _CutFunction, along: tuple[int, int], columns: int
) -> list[tuple[Device, Region]]:
    """Each row of tiles is as high as its devices are heavy together, and cut into columns by their weights."""
    weights = split.weights
    starts = range(0, len(weights), columns)
    tiles = []
    for start, rows in zip(starts, cut("height", [sum(weights[s : s + columns]) for s in starts]), strict=True):
        row = with_interval(split.full_region(), along[0], rows)
        for i, interval in enumerate(cut("width", weights[start : start + columns])):
            if rows[0] < rows[1] and interval[0] < interval[1]:
                tiles.append((split.devices[start + i], with_interval(row, along[1], interval)))
    return tiles


def _copy_choices(split: _SplitInputs) -> Iterator[Choice]:
    """All of a layer that multiplies nothing on each device: quicker than sending it where it is small."""
    known = split.problem.layers.tensors[split.layer.output].shape is not None  # else nobody else reads it
    if (
        known
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
        yield Choice(
            "lop", f"lop {len(split.devices)}{split.note}", parts, _make_disjoint([region for _, region in slices])
        )


def _make_disjoint(regions: Sequence[Region]) -> tuple[Region, ...]:
    """The regions without what earlier ones have, along the first axis that is cut; () where they are disjoint."""
    if not regions[0]:  # a number is one element
        return ()
    bounds = tuple(zip(*regions, strict=True))
    axis = next((axis for axis, cuts in enumerate(bounds) if len(set(cuts)) > 1), 0)
    end, own = 0, list[Region]()
    for region in regions:
        start, stop = region[axis]
        own.append(with_interval(region, axis, (min(max(start, end), stop), stop)))
        end = max(end, stop)
    return () if own == list(regions) else tuple(own)


def _lip_choices(split: _SplitInputs) -> Iterator[Choice]:
    layers, layer = split.problem.layers, split.layer
    length, run = reduction_length(layers, layer), find_run_before(layers, layer)
    if length is None or (
        run is None and count_macs(layers, layer)
    ):  # a product of two tensors sums what neither layer cuts
        return
    if _table_is_small(layers, layer):
        return
    ranges = (
        split_proportionally(length, split.weights)
        if run is None
        else cut_channel_run(layers, run, split.weights).ranges
    )
    cuts = zip(split.devices, ranges, strict=True)
    partials = tuple(Part(device.name, None, cut) for device, cut in cuts if cut[0] < cut[1])
    for finish in split.options.merges:
        mergers = _merging_parts(split, finish)
        if mergers:
            apart = _make_disjoint([part.region or split.full_region() for part in mergers])
            label = f"lip {len(split.devices)} > {finish}{split.note}"
            yield Choice("lip", label, partials + mergers, (None,) * len(partials) + apart if apart else ())


def _table_is_small(layers: LayerGraph, layer: Layer) -> bool:
    """Whether a layer takes rows of a table that is no larger than what it makes of it: then to share the table out
    saves less than the partial results take."""
    if count_macs(layers, layer):
        return False
    made = output_shape(layers, layer)
    held = sum(weight_regions(layers, make_share_task(layers, layer, LayerShare(full_region(made)))).values())
    return 0 < held <= sent_nbytes(layers, layer.output, made)


def _merging_parts(split: _SplitInputs, finish: str) -> tuple[Part, ...]:
    if finish == "one":
        return (Part(split.devices[0].name),)
    if finish == "all":
        return tuple(Part(device.name) for device in split.devices if split.is_sequence_or_vector)
    slices = split.device_slices("channel" if finish == "channels" else "height")
    return tuple(Part(device.name, region) for device, region in slices)


_CHOICE_GENERATORS = {
    "whole": _copy_choices,
    "height": _height_choices,
    "grid": _grid_choices,
    "lop": _lop_choices,
    "lip": _lip_choices,
}
