"""The choices of a layer: the ways of splitting it that a search picks from, each with its parts on named devices.

Problem + Layer + ChoiceSet → Choices, every one legal by the layer's rule.   Tables and strategies read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from dicompiler.plugin_api import (
    Device,
    Interval,
    Layer,
    LayerGraph,
    Part,
    Problem,
    Region,
    Share,
    UsageError,
    aligned_cuts,
    cut_axis,
    full,
    macs,
    named_axes,
    nearest,
    output_shape,
    reduction,
    remembered,
    sent_nbytes,
    share_task,
    shares,
    weight_regions,
    with_interval,
)
from dicompiler_strategies.named_axis import named_axis
from dicompiler_strategies.tables.near import rows_near_source
from dicompiler_strategies.tables.runs import cut_run, run_before, run_of

KINDS = ("whole", "height", "grid", "lop", "lip")
SHARES = ("equal", "rate", "memory")
NEAR = "source"
BASES = ("balanced", "nearest", "coarser")
FINISHES = ("one", "channels", "rows", "all")


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

    kinds: tuple[str, ...] = KINDS
    counts: tuple[int, ...] = ()
    extra: int = 4
    shares: tuple[str, ...] = SHARES
    bases: tuple[str, ...] = BASES
    finishes: tuple[str, ...] = FINISHES
    each: bool = True

    def __post_init__(self) -> None:
        for field_name, given, known in (
            ("kinds", self.kinds, KINDS),
            ("shares", self.shares, (*SHARES, NEAR)),
            ("bases", self.bases, BASES),
            ("finishes", self.finishes, FINISHES),
        ):
            for name in given:
                if name not in known:
                    raise UsageError(f"choices: {field_name}: unknown {name!r}{nearest(name, known)}")
        if self.extra < 0 or any(count < 2 for count in self.counts):
            raise UsageError("choices: extra must be at least 0 and each of counts at least 2")

    def text(self) -> str:
        """The set in one line, for printing beside a bound that holds for it."""
        counts = ",".join(map(str, self.counts)) or "2.."
        rest = f"{'+'.join(self.kinds)} on {counts} devices, 0..{self.extra} extra rows, {'+'.join(self.shares)} shares"
        rest += f" ({'+'.join(self.bases)} cuts)"
        return rest + (f", LIP finished in {'+'.join(self.finishes)}" if "lip" in self.kinds else "")


def choices(
    problem: Problem, layer: Layer, options: ChoiceSet = ChoiceSet(), most: int | None = None
) -> tuple[Choice, ...]:
    """The choices of `layer` on the platform of `problem`, whole layers first (the fastest device's is the first of
    all); what the layer's rule does not allow is left out, and so is what has the parts of an earlier one. most: so
    many are enough."""
    by_parts: dict[tuple[Part, ...], Choice] = {}
    for choice in _all(problem, layer, options):
        by_parts.setdefault(choice.parts, choice)
        if len(by_parts) == most:
            break
    return tuple(by_parts.values())


def ranked(problem: Problem) -> tuple[Device, ...]:
    """The computing devices, the fastest first, of equals the first of the platform."""
    return tuple(sorted(problem.platform.computing, key=lambda device: -device.rate))


def _all(problem: Problem, layer: Layer, options: ChoiceSet) -> Iterator[Choice]:
    devices = ranked(problem)
    # Without any way to compute a layer whole there may be no choice at all: the fastest device is always one.
    each = devices if options.each and "whole" in options.kinds else devices[:1]
    for device in each:
        yield Choice("whole", f"whole {device.name}", (Part(device.name),))
    if layer.reason:
        return
    splitters = [make for kind, make in _SPLITS.items() if kind in options.kinds]
    for count in options.counts or range(2, len(devices) + 1):
        chosen = devices[:count]
        if len(chosen) < count:
            continue
        for share in options.shares:
            weights = rows_near_source(problem, layer, chosen) if share == NEAR else _weights(problem, chosen, share)
            if weights is None:
                continue
            note = "" if share == "equal" else f" {share}"
            for split in splitters if share != NEAR else (_height,):
                yield from split(_Split(problem, layer, options, chosen, weights, note))


def _weights(problem: Problem, devices: Sequence[Device], share: str) -> list[float]:
    if share == "rate":
        return [device.rate for device in devices]
    if share == "memory":
        together = [sum(other.host == device.host for other in problem.platform.computing) for device in devices]
        return [problem.platform.host(d.host).memory / n for d, n in zip(devices, together, strict=True)]
    return [1.0] * len(devices)


@dataclass(frozen=True)
class _Split:
    """What every kind of split is made from: a layer, and devices with their weights."""

    problem: Problem
    layer: Layer
    options: ChoiceSet
    devices: tuple[Device, ...]
    weights: Sequence[float]
    note: str

    def axis(self, label: str) -> int | None:
        """The output axis of that name, None where it cannot be cut. Behind a Flatten rows are no axis of their own."""
        layers, layer = self.problem.layers, self.layer
        axis = named_axis(layers, layer, label)
        channel = named_axes(layers).get(layer.output, {}).get("channel")
        return None if label != "channel" and axis == channel else axis

    def extent(self, label: str) -> int:
        """The length of a named output axis that can be cut."""
        axis = self.axis(label)
        assert axis is not None
        return self.whole()[axis][1]

    def whole(self) -> Region:
        return full(output_shape(self.problem.layers, self.layer))

    def cut(self, axis: int, weights: Sequence[float]) -> tuple[Interval, ...]:
        return cut_axis(self.problem.layers, self.layer, axis, weights)

    def slices(self, label: str) -> list[tuple[Device, Region]]:
        """A slice of the output for each device that gets one; empty where the axis cannot be cut. Channels are cut as
        the run is that the layer is in."""
        layers, layer = self.problem.layers, self.layer
        found = run_of(layers, layer) if label == "channel" else None
        if found is not None:
            regions = (own[found[1]] for own in cut_run(layers, found[0], self.weights).regions)
            return [(device, region) for device, region in zip(self.devices, regions, strict=True) if region]
        axis = self.axis(label)
        if axis is None:
            return []
        pairs = zip(self.devices, self.cut(axis, self.weights), strict=True)
        return [(device, with_interval(self.whole(), axis, cut)) for device, cut in pairs if cut[0] < cut[1]]

    @property
    def alike(self) -> bool:
        """Whether the output is a sequence or a vector, and no map: then all of it on each device can be worth its
        computing."""
        labels = named_axes(self.problem.layers).get(self.layer.output, {})
        return labels.get("width", labels.get("height")) == labels.get("height")


def _grown(
    split: _Split, kind: str, name: str, tiles: Sequence[tuple[Device, Region]], along: Sequence[int], extras: range
) -> Iterator[Choice]:
    """The tiles with 0, 1, 2, … more rows (and columns) on each side."""
    whole = split.whole()
    for extra in extras if tiles else ():
        parts = []
        for device, region in tiles:
            for axis in along:
                start, stop = region[axis]
                region = with_interval(region, axis, (max(0, start - extra), min(whole[axis][1], stop + extra)))
            parts.append(Part(device.name, region))
        label = f"{name}{f' +{extra}' if extra else ''}{split.note}"
        yield Choice(kind, label, tuple(parts), tuple(region for _, region in tiles))


_Cut = Callable[[str, Sequence[float]], Sequence[Interval]]  # label of an axis, weights → intervals


def _cuts(split: _Split) -> Iterator[tuple[_Cut, str, range]]:
    """For each of the bases: how it cuts rows and columns, a note for the label, the numbers of extra rows. Where many
    rows become one (a sequence that is an image's), they grow by a quarter of that: each single row makes no halo."""
    layers, layer = split.problem.layers, split.layer

    def cut(label: str, weights: Sequence[float], coarse: bool) -> Sequence[Interval]:
        axis, extent = split.axis(label), split.extent(label)
        assert axis is not None
        rows = (coarser(layers, layer, label) if coarse else 0) or extent  # strides of [2, 1] make one axis smaller
        ends = [math.floor(rows * part / sum(weights) + 0.5) for part in accumulate(weights)]
        return aligned_cuts(layers, layer, axis, [round(end * extent / rows) for end in ends])

    most = range(split.options.extra + 1)
    for base in split.options.bases:
        if base == "balanced":
            yield lambda label, weights: split.cut(split.axis(label) or 0, weights), "", most
        elif base == "nearest":
            yield lambda label, weights: cut(label, weights, False), " near", most
        elif coarser(layers, layer, "height"):
            stride = round(split.extent("height") / coarser(layers, layer, "height"))
            extras = range(0, stride * split.options.extra + 1, max(1, stride // 4))
            yield lambda label, weights: cut(label, weights, True), f" of {stride}", extras


@remembered
def coarser(layers: LayerGraph, layer: Layer, label: str) -> int:
    """The height or width of the first smaller map along the first readers of the layer's output; 0: there is none."""
    labels = named_axes(layers)
    longest = output_shape(layers, layer)[labels[layer.output][label]]
    while True:
        readers = layers.consumers.get(layer.output, ())
        if not readers or readers[0].reason or label not in labels.get(readers[0].output, {}):
            return 0
        layer = readers[0]
        extent = output_shape(layers, layer)[labels[layer.output][label]]
        if extent != longest:
            return extent if 1 < extent < longest else 0


def _height(split: _Split) -> Iterator[Choice]:
    axis = split.axis("height")
    if axis is None:
        return
    for cut, note, most in _cuts(split):
        pairs = zip(split.devices, cut("height", split.weights), strict=True)
        tiles = [(device, with_interval(split.whole(), axis, rows)) for device, rows in pairs if rows[0] < rows[1]]
        yield from _grown(split, "height", f"height {len(split.devices)}{note}", tiles, (axis,), most)


def _grid(split: _Split) -> Iterator[Choice]:
    """(m/2) × 2 tiles, and the squarest other grid of m tiles."""
    height, width = split.axis("height"), split.axis("width")
    count = len(split.devices)
    if height is None or width is None or height == width:  # a sequence that is an image's
        return
    squarest = max((c for c in range(2, int(count**0.5) + 1) if count % c == 0), default=0)
    for columns in dict.fromkeys(c for c in (2, squarest) if c and count % c == 0 and count >= 4):
        for cut, note, most in _cuts(split):
            tiles = _tiles(split, cut, (height, width), columns)
            name = f"grid {count // columns}x{columns}{note}"
            yield from _grown(split, "grid", name, tiles, (height, width), most)


def _tiles(split: _Split, cut: _Cut, along: tuple[int, int], columns: int) -> list[tuple[Device, Region]]:
    """Each row of tiles is as high as its devices are heavy together, and cut into columns by their weights."""
    weights = split.weights
    starts = range(0, len(weights), columns)
    tiles = []
    for start, rows in zip(starts, cut("height", [sum(weights[s : s + columns]) for s in starts]), strict=True):
        row = with_interval(split.whole(), along[0], rows)
        for i, interval in enumerate(cut("width", weights[start : start + columns])):
            if rows[0] < rows[1] and interval[0] < interval[1]:
                tiles.append((split.devices[start + i], with_interval(row, along[1], interval)))
    return tiles


def _copies(split: _Split) -> Iterator[Choice]:
    """All of a layer that multiplies nothing on each device: quicker than sending it where it is small."""
    known = split.problem.layers.tensors[split.layer.output].shape is not None  # else nobody else reads it
    if known and "all" in split.options.finishes and split.alike and not macs(split.problem.layers, split.layer):
        parts = tuple(Part(device.name) for device in split.devices)
        yield Choice("whole", f"whole on {len(parts)}", parts, _apart([split.whole()] * len(parts)))


def _lop(split: _Split) -> Iterator[Choice]:
    slices = split.slices("channel")
    if slices:
        parts = tuple(Part(device.name, region) for device, region in slices)
        yield Choice("lop", f"lop {len(split.devices)}{split.note}", parts, _apart([region for _, region in slices]))


def _apart(regions: Sequence[Region]) -> tuple[Region, ...]:
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


def _lip(split: _Split) -> Iterator[Choice]:
    layers, layer = split.problem.layers, split.layer
    length, run = reduction(layers, layer), run_before(layers, layer)
    if length is None or (run is None and macs(layers, layer)):  # a product of two tensors sums what neither layer cuts
        return
    if _picks_little(layers, layer):
        return
    ranges = shares(length, split.weights) if run is None else cut_run(layers, run, split.weights).ranges
    cuts = zip(split.devices, ranges, strict=True)
    partials = tuple(Part(device.name, None, cut) for device, cut in cuts if cut[0] < cut[1])
    for finish in split.options.finishes:
        mergers = _mergers(split, finish)
        if mergers:
            apart = _apart([part.region or split.whole() for part in mergers])
            label = f"lip {len(split.devices)} > {finish}{split.note}"
            yield Choice("lip", label, partials + mergers, (None,) * len(partials) + apart if apart else ())


def _picks_little(layers: LayerGraph, layer: Layer) -> bool:
    """Whether a layer takes rows of a table that is no larger than what it makes of it: then to share the table out
    saves less than the partial results take."""
    if macs(layers, layer):
        return False
    made = output_shape(layers, layer)
    held = sum(weight_regions(layers, share_task(layers, layer, Share(full(made)))).values())
    return 0 < held <= sent_nbytes(layers, layer.output, made)


def _mergers(split: _Split, finish: str) -> tuple[Part, ...]:
    if finish == "one":
        return (Part(split.devices[0].name),)
    if finish == "all":
        return tuple(Part(device.name) for device in split.devices if split.alike)
    slices = split.slices("channel" if finish == "channels" else "height")
    return tuple(Part(device.name, region) for device, region in slices)


_SPLITS = {"whole": _copies, "height": _height, "grid": _grid, "lop": _lop, "lip": _lip}
