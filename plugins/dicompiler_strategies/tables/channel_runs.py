"""Channel runs: layers that are cut by channels together, so that nothing is exchanged between them.

In two consecutive matrix products, a device gets some columns of the first weight matrix and the same rows of the
second. In an attention, it gets some heads.

A run ends with a layer that sums over channels. The other layers are found backwards from it: a range of the channels
needs only a piece of the layer before, and so on. The operator rules give these regions.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dicompiler.plugin_api import Interval, Layer, LayerGraph, LayerShare, Region
from dicompiler.plugin_api.costs import count_macs
from dicompiler.plugin_api.regions import (
    TensorKey,
    bounding_region,
    full_region,
    make_share_task,
    output_shape,
    reduction_length,
    split_proportionally,
)
from dicompiler.plugin_api.utilities import memoized

MAX_LOAD_RATIO = 1.05
"""Largest acceptable load of the busiest device, as a multiple of its load in the most even cut.

Layers that are cut by channels together can be cut into different numbers of equal units, such as heads of an
attention. Among the acceptable cuts, the one that computes the fewest elements twice is used.
"""


@dataclass(frozen=True)
class ChannelRun:
    """Layers that are cut by channels together. Runs with equal keys have the same structure and get the same cuts.

    Attributes:
        summing_layer: The layer that ends the run with a sum over channels.
        cut_layers: The other layers, backwards from the summing layer.
        reduction_length: Length of the axis that is summed over.
        unit_counts: Numbers of equal pieces that this axis can be cut into, ascending.
        key: Key of the run's structure.
    """

    summing_layer: Layer = field(compare=False)
    cut_layers: tuple[Layer, ...] = field(compare=False)
    reduction_length: int = field(compare=False)
    unit_counts: tuple[int, ...] = field(compare=False)
    key: Hashable


@dataclass(frozen=True)
class ChannelRunCut:
    """The ranges and regions that a run (layers that are cut by channels together) has on each of several devices.

    Attributes:
        ranges: For each device, the range of the summing layer's reduction axis.
        regions: For each device, the output region of each of the run's `cut_layers`; None if the device computes
            nothing of that layer.
    """

    ranges: tuple[Interval, ...]
    regions: tuple[tuple[Region | None, ...], ...]


@memoized
def find_run_of(layers: LayerGraph, layer: Layer) -> tuple[ChannelRun, int] | None:
    """Return the first run of layers that must be cut by channels together and has `layer` before its last layer.

    The second result is the layer's index in `cut_layers`. The result is None if the layer can be cut at every channel.
    """
    return _runs_by_layer(layers).get(layer.name)


@memoized
def find_run_before(layers: LayerGraph, last: Layer) -> ChannelRun | None:
    """Return the layers that are cut by channels together and end with `last`, which sums over these channels.

    The result is None if `last` does not sum over an axis, or if two computed tensors have this axis (as in QKᵀ).
    """
    if not (length := summed_length(layers, last)):
        return None
    # A layer belongs to the run if the channels of `last` divide its whole output. It is enough to look at the regions
    # that the first and the last channel need: together they must span the output. If only one of them needs the layer,
    # the layer contributes only to some channels (for example, before a Concat).
    ends = ((0, 1), (length - 1, length))
    demands = [_demanded_regions(layers, last, end) if length > 1 else {} for end in ends]
    whole = frozenset(
        name
        for name in demands[0].keys() & demands[1].keys()
        if bounding_region(demand[name] for demand in demands)
        == full_region(output_shape(layers, layers.layer_by_name[name]))
    )
    first_end, last_end = (_demanded_regions(layers, last, end, whole) for end in ends)
    chosen = tuple(layers.layer_by_name[name] for name in first_end if name in last_end)
    extents = {length}
    for layer in chosen:
        cuts = zip(output_shape(layers, layer), first_end[layer.name], strict=True)
        # If the first channel needs start..stop of an axis of length n, the axis has n / (stop - start) equal pieces,
        # between which it can be cut. In an attention, the pieces are the heads.
        pieces = {n // (stop - start) for n, (start, stop) in cuts if n % (stop - start) == 0}
        extents.update(n for n in pieces if length % n == 0)
    positions = {layer.output: i for i, layer in enumerate(chosen)}
    key = [
        (layer_signature(layers, layer), tuple(positions.get(name, -1) for name in layer.inputs))
        for layer in (last, *chosen)
    ]
    return ChannelRun(last, chosen, length, tuple(sorted(extents - {1})), tuple(key))


def cut_channel_run(layers: LayerGraph, run: ChannelRun, weights: Sequence[float]) -> ChannelRunCut:
    """Cut the layers of a run, which are cut by channels together, into shares proportional to `weights`.

    Units that cannot be cut further, such as heads of an attention, stay whole.
    """
    largest = max(weights)
    return _cut_run(layers, run, tuple(weight / largest for weight in weights))


@memoized
def _cut_run(layers: LayerGraph, run: ChannelRun, weights: tuple[float, ...]) -> ChannelRunCut:
    cuts = [_cut_into_units(layers, run, weights, units) for units in run.unit_counts or (run.reduction_length,)]
    if len(cuts) == 1:
        return cuts[0]
    loads = [_device_loads(layers, run, weights, cut) for cut in cuts]
    max_load = MAX_LOAD_RATIO * min(max(load) for load in loads)
    acceptable = [i for i, load in enumerate(loads) if max(load) <= max_load]
    total_macs = [sum(load * weight for load, weight in zip(of_cut, weights, strict=True)) for of_cut in loads]
    return cuts[min(acceptable, key=lambda i: total_macs[i])]


def _cut_into_units(layers: LayerGraph, run: ChannelRun, weights: Sequence[float], units: int) -> ChannelRunCut:
    size = run.reduction_length // units
    ranges = tuple((start * size, stop * size) for start, stop in split_proportionally(units, weights))
    inside = frozenset(layer.name for layer in run.cut_layers)
    demands = [_demanded_regions(layers, run.summing_layer, cut, inside) if cut[0] < cut[1] else {} for cut in ranges]
    return ChannelRunCut(ranges, tuple(tuple(demand.get(layer.name) for layer in run.cut_layers) for demand in demands))


def _device_loads(layers: LayerGraph, run: ChannelRun, weights: Sequence[float], cut: ChannelRunCut) -> list[float]:
    """Return the load of each device for a cut: its multiply-accumulates divided by its weight."""
    loads = []
    for weight, interval, regions in zip(weights, cut.ranges, cut.regions, strict=True):
        macs = count_macs(layers, run.summing_layer, None, interval) if interval[0] < interval[1] else 0
        for layer, region in zip(run.cut_layers, regions, strict=True):
            macs += count_macs(layers, layer, region) if region else 0
        loads.append(macs / weight)
    return loads


def summed_length(layers: LayerGraph, layer: Layer) -> int:
    """Return the length of the axis that a layer sums over; 0 if there is none, or if two computed inputs have it."""
    length = None if layer.whole_reason else reduction_length(layers, layer)
    return length if length and len(_needed_regions(layers, layer, (0, length))) == 1 else 0


def _needed_regions(layers: LayerGraph, last: Layer, interval: Interval) -> Mapping[TensorKey, Region]:
    return make_share_task(layers, last, LayerShare(None, interval)).needs


def _demanded_regions(
    layers: LayerGraph, last: Layer, interval: Interval, inside: Collection[str] | None = None
) -> dict[str, Region]:
    """Return, by layer name, the output region that a partial sum of the layer `last` over `interval` needs.

    Regions are followed backwards through the layers named in `inside`, or else through every layer of which only a
    piece is needed.
    """
    demands: dict[str, Region] = {}
    open_positions: list[int] = []

    def demand(needs: Mapping[TensorKey, Region]) -> None:
        for key, need in needs.items():
            producer = layers.producer.get(key.tensor)
            if producer is not None:
                if key.tensor not in demands:
                    heapq.heappush(open_positions, -layers.position[producer.name])
                demands[key.tensor] = bounding_region((demands.get(key.tensor), need)) or need

    demand(_needed_regions(layers, last, interval))
    found: dict[str, Region] = {}
    while open_positions:
        layer = layers.layers[-heapq.heappop(open_positions)]
        need = demands.get(layer.output)
        if layer.whole_reason or need is None or (inside is not None and layer.name not in inside):
            continue
        task = make_share_task(layers, layer, LayerShare(need))
        region = task.outputs[TensorKey(layer.output)]
        if region is not None and (inside is not None or region != full_region(output_shape(layers, layer))):
            found[layer.name] = region
            # A layer that sums over channels needs all channels of its inputs, so its inputs are not followed further.
            if not summed_length(layers, layer):
                demand(task.needs)
    return found


@memoized
def _runs_by_layer(layers: LayerGraph) -> dict[str, tuple[ChannelRun, int]]:
    inside: dict[str, tuple[ChannelRun, int]] = {}
    for last in layers.layers:
        run = find_run_before(layers, last)
        if run is not None and run.unit_counts != (run.reduction_length,):
            for i, layer in enumerate(run.cut_layers):
                inside.setdefault(layer.name, (run, i))
    return inside


@memoized
def layer_signature(layers: LayerGraph, layer: Layer) -> Hashable:
    """Return a key of a layer's structure, without names. Layers with equal keys have equal regions and costs."""
    numbers: dict[str, int] = {}
    rows: list[Hashable] = [layer.anchor, bool(layer.whole_reason)]
    for node in layer.nodes:
        names = tuple(numbers.setdefault(name, len(numbers)) if name else -1 for name in (*node.inputs, *node.outputs))
        attributes = tuple((key, _hashable(node.attributes[key])) for key in sorted(node.attributes))
        rows.append((node.op, node.domain, node.opset, attributes, names, len(node.inputs)))
    rows.extend(numbers.setdefault(name, len(numbers)) for name in (*layer.inputs, *layer.outputs))
    for name in numbers:
        tensor = layers.tensors[name]
        rows.append((tensor.dtype, tensor.shape, tensor.is_constant, _hashable(tensor.value)))
    return tuple(rows)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return repr(value)
