"""Reduce-scatter and all-gather: each device adds up one slice of the partial sums, and sends it to all others.

    sums of channels 0:8 on every device  ⇒  sums of channels 0:4 on one device, and 4:8 on the other

With n devices and sums of b bytes, each device then sends 2 · b · (n - 1) / n bytes in two exchanges. Otherwise, it
sends b · (n - 1) bytes in one exchange. A ring would send the same bytes in 2 · (n - 1) exchanges.
"""

from __future__ import annotations

from dataclasses import replace

from dicompiler.plugin_api import Layer, LayerGraph, Part, Plan
from dicompiler.plugin_api.regions import full_region, output_shape, split_axis, with_interval
from dicompiler_strategies.tables.choices import find_cuttable_axis

MIN_DEVICES = 3
"""Fewest devices for which slices save bytes. Two devices send the same bytes in either case."""


def slice_sums(layers: LayerGraph, plan: Plan) -> Plan:
    """Return the plan with partial sums that are added up in slices.

    In `plan`, several devices may each add up the partial sums of a layer in all channels. In the result, each of them
    adds up a slice of the channels instead, and the layers that read the sum gather the slices. Layers that cannot be
    split by channels, and layers on fewer than MIN_DEVICES devices, do not change.
    """
    return replace(
        plan, layers={name: _slice_layer(layers, layers.layer_by_name[name], plan.layers[name]) for name in plan.layers}
    )


def _slice_layer(layers: LayerGraph, layer: Layer, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    partial_sums = tuple(part for part in parts if part.reduce is not None)
    mergers = [part for part in parts if part.reduce is None]
    devices = {part.device for part in mergers}
    is_whole_on_each = len(devices) == len(mergers) and all(part.region is None for part in mergers)
    if not partial_sums or not is_whole_on_each or len(mergers) < MIN_DEVICES:
        return parts
    axis = find_cuttable_axis(layers, layer, "channel")
    if axis is None:
        return parts
    whole = full_region(output_shape(layers, layer))
    cuts = zip(mergers, split_axis(layers, layer, axis, [1.0] * len(mergers)), strict=True)
    slices = (replace(part, region=with_interval(whole, axis, cut)) for part, cut in cuts if cut[0] < cut[1])
    return (*partial_sums, *slices)
