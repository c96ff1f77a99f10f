"""Shares of the first layer that favour the device that holds the network's input.

That device can compute while the inputs of the other devices are being sent to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicompiler.plugin_api import Device, Layer, LayerGraph, LayerShare, Problem
from dicompiler.plugin_api.costs import count_macs, sent_nbytes
from dicompiler.plugin_api.regions import full_region, output_shape, split_proportionally, volume
from dicompiler.plugin_api.utilities import memoized
from dicompiler_strategies.named_axis import find_cuttable_axis

MIN_LAYER_S = 1e-12
"""Least seconds that a layer is assumed to take."""


def rows_for_source(problem: Problem, layer: Layer, devices: Sequence[Device]) -> list[float] | None:
    """Return the rows of the input's first layer for each device so that all devices finish at the same time.

    The source computes its rows at once. The other devices receive their inputs one after another, and then compute
    rows in proportion to their speed. Layers that only reshape the first layer's rows get the same shares.

    Args:
        problem: The problem.
        layer: The layer to cut.
        devices: The devices to cut it for.

    Returns:
        Rows of each device. None for other layers, and if the source is not exactly one of several devices.
    """
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
            sizes = {volume(full_region(output_shape(layers, one))) for one in (layer, before)}
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
