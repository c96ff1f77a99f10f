"""Which axis of a layer's output strategies can cut by name: height, width or channel."""

from __future__ import annotations

from dicompiler.plugin_api import Layer, LayerGraph
from dicompiler.plugin_api.regions import cuttable_axes, named_axes


def find_cuttable_axis(layers: LayerGraph, layer: Layer, label: str) -> int | None:
    """The axis of the layer's output that `label` names; None where it has none that can be cut."""
    axis = named_axes(layers).get(layer.output, {}).get(label)
    return axis if axis in cuttable_axes(layers, layer) else None
