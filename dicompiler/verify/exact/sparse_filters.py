"""Sparse integer filters: where each filter of a layer reads, by seed, so that few seeds read everything.

In: the shape of a layer's weight, a seed, how many taps a filter may read. Out: the weight, all zeros but for some ±1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.base.rng import named_generator
from dicompiler.ir.regions import Shape
from dicompiler.verify.exact.graph_facts import GraphFacts, get_attribute, original_domain

MAX_SEEDS = 4
"""So many seeds at most (any run of consecutive ones) read every tap and every input channel of every layer."""

WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def weight_index(known: GraphFacts, node: onnx.NodeProto) -> int | None:
    """Which input of `node` is its weight: a constant operand of a Conv, ConvTranspose, Gemm or MatMul, or None."""
    if original_domain(node) or node.op_type not in WEIGHTED_OPS:
        return None
    candidates = (1,) if node.op_type.startswith("Conv") else (1, 0)
    return next((index for index in candidates if known.has_float_constant(node, index)), None)


@dataclass(frozen=True)
class FilterExtent:
    """A layer's weight in one form for all operators: (groups, filters and input channels per group, taps)."""

    groups: int
    filters: int
    channels: int
    taps: int

    def min_elements(self, seeds: int = MAX_SEEDS) -> int:
        """How many elements each filter must have so that `seeds` seeds read everything."""
        channels = math.ceil(self.channels / (self.filters * seeds))
        taps = math.ceil(self.taps / (self.groups * self.filters * seeds))
        return max(1, channels, taps)

    @property
    def seeds_needed(self) -> int:
        """How many consecutive seeds read every tap and every input channel: at most SEEDS."""
        channels = math.ceil(self.channels / (self.filters * self.min_elements()))
        taps = math.ceil(self.taps / (self.groups * self.filters * self.min_elements()))
        return max(1, channels, taps)


def unified_view(node: onnx.NodeProto, index: int, array: NDArray[Any]) -> NDArray[Any]:
    """The weight at input `index` of a convolution or product as a view (groups, filters, channels, taps).

    Groups of a MatMul are the matrices of its stack. `array` must be contiguous; what is written to the view is in it.
    """
    shape = array.shape
    if node.op_type in ("Conv", "ConvInteger", "QLinearConv"):
        groups = get_attribute(node, "group", 1)
        return array.reshape(groups, shape[0] // groups, shape[1], math.prod(shape[2:]))
    if node.op_type == "ConvTranspose":
        groups = get_attribute(node, "group", 1)
        return array.reshape(groups, shape[0] // groups, shape[1], math.prod(shape[2:])).transpose(0, 2, 1, 3)
    if len(shape) == 1:
        return array.reshape(1, 1, shape[0], 1)
    if node.op_type == "MatMulNBits":
        return array.reshape(1, *shape, 1)
    stack = array.reshape(math.prod(shape[:-2]), *shape[-2:], 1)
    if node.op_type == "Gemm":
        rows = bool(get_attribute(node, "transB" if index == 1 else "transA", 0)) == (index == 1)
    else:
        rows = index == 0
    return stack if rows else stack.transpose(0, 2, 1, 3)


def filter_extent(node: onnx.NodeProto, index: int, shape: Shape) -> FilterExtent:
    """The extent of a weight of `shape` at input `index`, without an array of that size."""
    return FilterExtent(*unified_view(node, index, np.broadcast_to(np.int8(0), shape)).shape)


def sparse_filters(
    node: onnx.NodeProto, index: int, shape: Shape, dtype: np.dtype[Any], seed: int, taps: int, signs: NDArray[Any]
) -> NDArray[Any]:
    """A weight of `shape` with `taps` elements of ±1 in each filter, or as many as its `Extent.covering()` wants.

    The elements of a layer's filters are consecutive entries of a permutation of the channels, and of one of the taps,
    that belong to the layer (its name). The next seed starts where this one ends, if each filter has but the covering
    elements: so consecutive seeds read each entry in turn, however many elements each of them gives a filter.
    `signs`: the sign of each filter's first element, (groups * filters,); the others' are drawn.
    """
    array = np.zeros(shape, dtype)
    view = unified_view(node, index, array)
    size = FilterExtent(*view.shape)
    least = size.min_elements()
    count = max(least, min(taps, size.channels * size.taps))
    order = named_generator(0, f"{node.name}/order")
    channel_order, tap_order = order.permutation(size.channels), order.permutation(size.taps)
    drawn = named_generator(seed, f"{node.name}/entries")
    filters = np.arange(size.groups * size.filters)
    group, within = np.divmod(filters, size.filters)
    for entry in reversed(range(count)):
        channel = (seed * size.filters * least + within * count + entry) % size.channels
        tap = (seed * filters.size * least + filters * count + entry) % size.taps
        value = signs if entry == 0 else 1 - 2 * drawn.integers(2, size=filters.size)
        view[group, within, channel_order[channel], tap_order[tap]] = value
    return array
