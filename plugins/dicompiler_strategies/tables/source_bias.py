"""Near the source: who holds the network's input computes more of the first layer, while the others' parts travel.

Problem + a layer behind an input → rows of that input's first layer, for each device.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicompiler.plugin_api import Device, Layer, LayerGraph, LayerShare, Problem
from dicompiler.plugin_api.costs import count_macs, sent_nbytes
from dicompiler.plugin_api.regions import full_region, output_shape, split_proportionally, volume
from dicompiler.plugin_api.utilities import memoized
from dicompiler_strategies.named_axis import find_cuttable_axis

MIN_LAYER_S = 1e-12
"""Seconds of a layer."""


def rows_for_source(problem: Problem, layer: Layer, devices: Sequence[Device]) -> list[float] | None:
    """How many rows each of the devices computes of the first layer that multiplies behind the network's input: all
    are done at once, if those of the others, shared out by how fast they are, are sent one after another and then
    computed. The same for what only puts that layer's rows into another shape. None for other layers, and where not
    one of several devices is the source."""
    first, source = (
        find_first_layers(problem.layers).get(layer.name),
        problem.source or (problem.platform.devices[0].name,),
    )
    own = [device for device in devices if (device.name,) == source]
    axis = None if first is None else find_cuttable_axis(problem.layers, first, "height")
    if first is None or axis is None or not own or len(devices) < 2:
        return None
    rows = output_shape(problem.layers, first)[axis]
    others = [device for device in devices if device is not own[0]]
    computed, rates = (
        _layer_seconds(problem, first, own[0]),
        [1 / _layer_seconds(problem, first, device) for device in others],
    )
    link = problem.platform.link(own[0].name, others[0].name)
    sent = (
        0.0 if link is None else sum(link.transfer_s(_tensor_bytes(problem.layers, name), 0.0) for name in first.inputs)
    )
    there = sent + 1 / sum(rates)
    kept = min(rows, round(rows * there / (computed + there)))
    rest = iter([stop - start for start, stop in split_proportionally(rows - kept, rates)])
    return [float(kept) if device is own[0] else float(next(rest)) for device in devices]


@memoized
def find_first_layers(layers: LayerGraph) -> dict[str, Layer]:
    """Layer → the first layer that multiplies behind an input of the network: that layer itself, and those that take
    over its elements, all of them, one after another."""
    found: dict[str, Layer] = {}
    for layer in layers.layers:
        if layer.whole_reason or len(layer.inputs) != 1:
            continue
        (read,) = layer.inputs
        before = layers.producer.get(read)
        if before is None and count_macs(layers, layer):
            found[layer.name] = layer
        elif before is not None and before.name in found and not count_macs(layers, layer):
            sizes = {volume(full_region(output_shape(layers, one))) for one in (layer, before)}
            if len(sizes) == 1 and len(layers.consumers.get(read, ())) == 1:
                found[layer.name] = found[before.name]
    return found


def _layer_seconds(problem: Problem, layer: Layer, device: Device) -> float:
    """More than 0, whatever a profile says."""
    seconds = problem.cost_model.seconds(
        problem.layers, layer, LayerShare(full_region(output_shape(problem.layers, layer))), device
    )
    return max(seconds, MIN_LAYER_S)


def _tensor_bytes(layers: LayerGraph, name: str) -> int:
    return sent_nbytes(layers, name, layers.tensors[name].shape or ())
