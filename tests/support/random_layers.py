"""Random layers and regions for property tests."""

from __future__ import annotations

from functools import cache
from random import Random

import onnx
from support.generators import random_model
from support.layer_graphs import formed

from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.regions import Region, full_region
from dicompiler.partition.bounds_inference import cuttable_axes, output_shape


@cache
def random_layers(seed: int) -> LayerGraph:
    """Return the layers of a random network."""
    return formed(onnx.shape_inference.infer_shapes(random_model(Random(seed))))


def cut_layers(layers: LayerGraph) -> list[Layer]:
    """Return the layers that can be cut along some axis."""
    return [layer for layer in layers.layers if cuttable_axes(layers, layer)]


def random_region(rng: Random, layers: LayerGraph, layer: Layer, within: Region | None = None) -> Region:
    """Return a random non-empty region of the layer's output, cut along allowed axes; inside `within` if given."""
    allowed = cuttable_axes(layers, layer)
    region = list(within or full_region(output_shape(layers, layer)))
    for axis in allowed:
        start, stop = region[axis]
        first, last = sorted((rng.randrange(start, stop), rng.randrange(start, stop)))
        region[axis] = (first, last + 1)
    return tuple(region)
