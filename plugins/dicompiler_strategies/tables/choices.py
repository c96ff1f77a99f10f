"""The choices of a layer: the ways of splitting it that a search picks from.

Problem + Layer + ChoiceSet → Choices, each valid by the operator rules
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
"""How much each device gets: equal shares, or in proportion to its compute rate or to the memory of its host."""
SOURCE_SHARE = "source"
"""An additional kind of share: more rows for the device that holds the network's input, see `rows_for_source`."""
ROW_CUTS = ("balanced", "nearest", "coarser")
"""Ways to place the borders between rows, see `ChoiceSet`."""
MERGE_KINDS = ("one", "channels", "rows", "all")
"""Ways to add up partial sums (LIP), see `ChoiceSet`."""
MIN_LAYER_S = 1e-12
"""Least seconds that a layer is assumed to take."""


@dataclass(frozen=True)
class Choice:
    """One way to split one layer.

    Attributes:
        kind: One of SPLIT_KINDS.
        label: Short text for people. "height 4 +1" means rows on 4 devices and one extra row on each side.
        parts: The parts. A device has at most one part that computes output, and at most one partial sum.
        shares: For each part, the region that no other part has as well; None for a partial sum. They decide which
            device sends elements that several devices hold. Empty if the regions of the parts are disjoint.
    """

    kind: str
    label: str
    parts: tuple[Part, ...]
    shares: tuple[Region | None, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class ChoiceSet:
    """The set of choices that a search may use.

    Attributes:
        kinds: Kinds of splits, of SPLIT_KINDS.
        device_counts: Numbers of devices to split over; the fastest devices are used, the first of equal ones. Empty
            means every number from 2 on.
        extra_rows: Largest number of rows (for grids also columns) that a tile computes beyond its share on each side.
            With extra rows several layers in a row need no exchange.
        shares: Kinds of shares, of SHARE_KINDS or SOURCE_SHARE. A host's memory is shared by its devices.
        row_cuts: How borders between rows and columns are placed. "balanced": every share has the same number of rows,
            the first ones one more. "nearest": at the row nearest to the exact border, so that the borders of layers of
            different sizes lie within a row of each other. "coarser": at the borders of the next smaller layer, with
            its extra rows (twice as many before a pool of stride two).
        merges: How partial sums (LIP) are added up: on one device ("one"), in shares of the channels ("channels") or
            rows ("rows"), or on all devices ("all", for sequences and vectors only). With "all", layers without
            multiplications may also be computed whole on all devices.
        each_device: Layers may be whole on any device; otherwise only on the fastest one.

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

    def __post_init__(self) -> None:
        for field_name, names, known in (
            ("kinds", self.kinds, SPLIT_KINDS),
            ("shares", self.shares, (*SHARE_KINDS, SOURCE_SHARE)),
            ("row_cuts", self.row_cuts, ROW_CUTS),
            ("merges", self.merges, MERGE_KINDS),
        ):
            for name in names:
                if name not in known:
                    raise UsageError(f"choices: {field_name}: unknown {name!r}{did_you_mean(name, known)}")
        if self.extra_rows < 0 or any(count < 2 for count in self.device_counts):
            raise UsageError("choices: extra_rows must be at least 0, and each of device_counts at least 2")

    def describe(self) -> str:
        """Return the set in one line, to be printed next to a bound that holds for it."""
        counts = ",".join(map(str, self.device_counts)) or "2.."
        text = f"{'+'.join(self.kinds)} on {counts} devices, 0..{self.extra_rows} extra rows, "
        text += f"{'+'.join(self.shares)} shares ({'+'.join(self.row_cuts)} cuts)"
        return text + (f", LIP merged in {'+'.join(self.merges)}" if "lip" in self.kinds else "")


def find_cuttable_axis(layers: LayerGraph, layer: Layer, label: str) -> int | None:
    """Return the output axis labelled height, width or channel; None if it cannot be cut."""
    axis = named_axes(layers).get(layer.output, {}).get(label)
    return axis if axis in cuttable_axes(layers, layer) else None


def list_choices(
    problem: Problem, layer: Layer, options: ChoiceSet = ChoiceSet(), max_choices: int | None = None
) -> tuple[Choice, ...]:
    """Return the choices of a layer, whole layers first and the fastest device's first of all.

    Choices that the operator rule does not allow are left out, and so are choices with the parts of an earlier one. At
    most `max_choices` are returned.
    """
    by_parts: dict[tuple[Part, ...], Choice] = {}
    for choice in _generate_choices(problem, layer, options):
        by_parts.setdefault(choice.parts, choice)
        if len(by_parts) == max_choices:
            break
    return tuple(by_parts.values())


def devices_by_rate(problem: Problem) -> tuple[Device, ...]:
    """Return the devices that compute, the fastest first; equal ones in platform order."""
    return tuple(sorted(problem.platform.computing_devices, key=lambda device: -device.rate))


def _generate_choices(problem: Problem, layer: Layer, options: ChoiceSet) -> Iterator[Choice]:
    devices = devices_by_rate(problem)
    # The fastest device is always a choice. Without any whole layer there might be no choice at all.
    whole_devices = devices if options.each_device and "whole" in options.kinds else devices[:1]
    for device in whole_devices:
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


def rows_for_source(problem: Problem, layer: Layer, devices: Sequence[Device]) -> list[float] | None:
    """Return rows for each device so that all devices finish the input's first layer together.

    The source computes its rows at once. The other devices receive their inputs one after another, and then compute
    rows in proportion to their speed. Layers that only reshape the first layer's rows get the same shares. The result
    is None for other layers, and if the source is not exactly one of several devices.
    """
    first, source = (
        find_first_layers(problem.layers).get(layer.name),
        problem.source or (problem.platform.devices[0].name,),
    )
    sources = [device for device in devices if (device.name,) == source]
    axis = None if first is None else find_cuttable_axis(problem.layers, first, "height")
    if first is None or axis is None or not sources or len(devices) < 2:
        return None
    rows = output_shape(problem.layers, first)[axis]
    others = [device for device in devices if device is not sources[0]]
    source_s, rates = (
        _layer_seconds(problem, first, sources[0]),
        [1 / _layer_seconds(problem, first, device) for device in others],
    )
    link = problem.platform.link(sources[0].name, others[0].name)
    sending_s = (
        0.0 if link is None else sum(link.transfer_s(_tensor_bytes(problem.layers, name), 0.0) for name in first.inputs)
    )
    arrival_s = sending_s + 1 / sum(rates)
    source_rows = min(rows, round(rows * arrival_s / (source_s + arrival_s)))
    rest = iter([stop - start for start, stop in split_proportionally(rows - source_rows, rates)])
    return [float(source_rows) if device is sources[0] else float(next(rest)) for device in devices]


@memoized
def find_first_layers(layers: LayerGraph) -> dict[str, Layer]:
    """Return layer name → the first layer with multiplications behind a network input.

    The keys are that layer itself and the layers that follow it one after another and pass on all its elements.
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
    """Return the seconds of a whole layer, above 0 even if a profile says 0."""
    seconds = problem.cost_model.seconds(
        problem.layers, layer, LayerShare(full_region(output_shape(problem.layers, layer))), device
    )
    return max(seconds, MIN_LAYER_S)


def _tensor_bytes(layers: LayerGraph, name: str) -> int:
    return sent_nbytes(layers, name, layers.tensors[name].shape or ())


def _share_weights(problem: Problem, devices: Sequence[Device], share: str) -> list[float]:
    if share == "rate":
        return [device.rate for device in devices]
    if share == "memory":
        sharing = [sum(other.host == device.host for other in problem.platform.computing_devices) for device in devices]
        return [problem.platform.host(d.host).memory / n for d, n in zip(devices, sharing, strict=True)]
    return [1.0] * len(devices)


@dataclass(frozen=True)
class _SplitInputs:
    """Inputs of all kinds of splits: a layer, and devices with their weights.

    Attributes:
        weights: Relative share of each device.
        note: Suffix of the choice's label that names the kind of share.
    """

    problem: Problem
    layer: Layer
    options: ChoiceSet
    devices: tuple[Device, ...]
    weights: Sequence[float]
    note: str

    def find_axis(self, label: str) -> int | None:
        """Return the output axis with this label, or None if it cannot be cut.

        An axis that holds rows and channels, after a Flatten, counts as channels only.
        """
        layers, layer = self.problem.layers, self.layer
        axis = find_cuttable_axis(layers, layer, label)
        channel = named_axes(layers).get(layer.output, {}).get("channel")
        return None if label != "channel" and axis == channel else axis

    def axis_length(self, label: str) -> int:
        axis = self.find_axis(label)
        assert axis is not None
        return self.full_region()[axis][1]

    def full_region(self) -> Region:
        return full_region(output_shape(self.problem.layers, self.layer))

    def cut_axis(self, axis: int, weights: Sequence[float]) -> tuple[Interval, ...]:
        return split_axis(self.problem.layers, self.layer, axis, weights)

    def device_slices(self, label: str) -> list[tuple[Device, Region]]:
        """Return a slice of the output for each device that gets one; empty if the axis cannot be cut.

        Channels are cut like the run of layers that contains this layer.
        """
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
        """True if the output is no larger than a sequence, so that copies of it may be worthwhile."""
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
    """Yield the tiles with 0, 1, 2, … extra rows (and columns) on each side."""
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


_CutFunction = Callable[[str, Sequence[float]], Sequence[Interval]]
"""(label of an axis, weights) → one interval for each weight."""


def _row_cut_functions(split: _SplitInputs) -> Iterator[tuple[_CutFunction, str, range]]:
    """Yield for each kind of row cut its function, a note for the label, and the numbers of extra rows.

    If the next smaller layer makes one row of many (patches of an image become a sequence), the numbers of extra rows
    grow by a quarter of that, because single rows make no useful halo.
    """
    layers, layer = split.problem.layers, split.layer

    def cut(label: str, weights: Sequence[float], coarse: bool) -> Sequence[Interval]:
        axis, extent = split.find_axis(label), split.axis_length(label)
        assert axis is not None
        # Strides such as [2, 1] make only one of the axes smaller.
        rows = (next_smaller_extent(layers, layer, label) if coarse else 0) or extent
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
    """Return the extent of the first smaller layer along the first readers; 0 if there is none."""
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
    """Yield grids of (m/2) × 2 tiles, and the squarest other grid of m tiles."""
    height, width = split.find_axis("height"), split.find_axis("width")
    count = len(split.devices)
    if height is None or width is None or height == width:  # Height and width coincide in a sequence of image patches.
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
    """Return the tiles of a grid.

    The height of each row of tiles is proportional to the sum of its devices' weights. The row is then cut into columns
    by these weights.
    """
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
    """Yield the choice that computes a small layer without multiplications whole on every device."""
    known = split.problem.layers.tensors[split.layer.output].shape is not None
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
    """Return the regions without the elements of earlier ones; empty if they are disjoint already."""
    if not regions[0]:  # A scalar has no axes.
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
    # Without a run, a product of two computed tensors sums over an axis that no earlier layer can cut.
    if length is None or (run is None and count_macs(layers, layer)):
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
    for merge in split.options.merges:
        mergers = _merging_parts(split, merge)
        if mergers:
            own_regions = _make_disjoint([part.region or split.full_region() for part in mergers])
            label = f"lip {len(split.devices)} > {merge}{split.note}"
            yield Choice("lip", label, partials + mergers, (None,) * len(partials) + own_regions if own_regions else ())


def _table_is_small(layers: LayerGraph, layer: Layer) -> bool:
    """Return True if the layer picks rows of a table that is no larger than the layer's output.

    Cutting such a table saves less than sending the partial results costs.
    """
    if count_macs(layers, layer):
        return False
    output = output_shape(layers, layer)
    table_bytes = sum(weight_regions(layers, make_share_task(layers, layer, LayerShare(full_region(output)))).values())
    return 0 < table_bytes <= sent_nbytes(layers, layer.output, output)


def _merging_parts(split: _SplitInputs, merge: str) -> tuple[Part, ...]:
    if merge == "one":
        return (Part(split.devices[0].name),)
    if merge == "all":
        return tuple(Part(device.name) for device in split.devices if split.is_sequence_or_vector)
    slices = split.device_slices("channel" if merge == "channels" else "height")
    return tuple(Part(device.name, region) for device, region in slices)


_CHOICE_GENERATORS = {
    "whole": _copy_choices,
    "height": _height_choices,
    "grid": _grid_choices,
    "lop": _lop_choices,
    "lip": _lip_choices,
}
