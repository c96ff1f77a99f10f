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

from dicompiler.exact.facts import attribute
from dicompiler.regions import Shape
from dicompiler.seeded import generator

SEEDS = 4
"""So many seeds at most (any run of consecutive ones) read every tap and every input channel of every layer."""

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True)
class Extent:
    """A layer's weight in one form for all operators: (groups, filters and input channels per group, taps)."""

    groups: int
    filters: int
    channels: int
    taps: int

    @property
    def covering(self) -> int:
        """How many elements each filter must have so that SEEDS seeds read everything: usually 1."""
        channels = math.ceil(self.channels / (self.filters * SEEDS))
        taps = math.ceil(self.taps / (self.groups * self.filters * SEEDS))
        return max(1, channels, taps)

    @property
    def seeds(self) -> int:
        """How many consecutive seeds read every tap and every input channel."""
        channels = math.ceil(self.channels / (self.filters * self.covering))
        taps = math.ceil(self.taps / (self.groups * self.filters * self.covering))
        return max(1, channels, taps)


def unified(node: onnx.NodeProto, index: int, array: NDArray[Any]) -> NDArray[Any]:
    """The weight at input `index` of a Conv, ConvTranspose, Gemm or MatMul as a view (groups, filters, channels, taps).

    Groups of a MatMul are the matrices of its stack. `array` must be contiguous; what is written to the view is in it.
    """
    shape = array.shape
    if node.op_type == "Conv":
        groups = attribute(node, "group", 1)
        return array.reshape(groups, shape[0] // groups, shape[1], math.prod(shape[2:]))
    if node.op_type == "ConvTranspose":
        groups = attribute(node, "group", 1)
        return array.reshape(groups, shape[0] // groups, shape[1], math.prod(shape[2:])).transpose(0, 2, 1, 3)
    if len(shape) == 1:
        return array.reshape(1, 1, shape[0], 1)
    stack = array.reshape(math.prod(shape[:-2]), *shape[-2:], 1)
    if node.op_type == "Gemm":
        rows = bool(attribute(node, "transB" if index == 1 else "transA", 0)) == (index == 1)
    else:
        rows = index == 0
    return stack if rows else stack.transpose(0, 2, 1, 3)


def extent(node: onnx.NodeProto, index: int, shape: Shape) -> Extent:
    """The extent of a weight of `shape` at input `index`, without an array of that size."""
    return Extent(*unified(node, index, np.broadcast_to(np.int8(0), shape)).shape)


def sparse(
    node: onnx.NodeProto, index: int, shape: Shape, dtype: np.dtype[Any], seed: int, taps: int, signs: NDArray[Any]
) -> NDArray[Any]:
    """A weight of `shape` with `taps` elements of ±1 in each filter, or more where its `Extent.covering` says so.

    The covering elements of all filters and of consecutive seeds are consecutive entries of a permutation of the
    channels, and of one of the taps, that belong to the layer (its name): so they read each in turn. The others are
    drawn. `signs`: the sign of each filter's first element, (groups * filters,); the others' are drawn.
    """
    array = np.zeros(shape, dtype)
    view = unified(node, index, array)
    size = Extent(*view.shape)
    fixed = generator(0, f"{node.name}/order")
    channel_order, tap_order = fixed.permutation(size.channels), fixed.permutation(size.taps)
    drawn = generator(seed, f"{node.name}/entries")
    filters = np.arange(size.groups * size.filters)
    group, within = np.divmod(filters, size.filters)
    for _ in range(min(taps, size.channels * size.taps) - size.covering):
        channel = drawn.integers(size.channels, size=filters.size)
        view[group, within, channel, drawn.integers(size.taps, size=filters.size)] = _signs(drawn, filters.size)
    for entry in reversed(range(size.covering)):
        channel = ((seed * size.filters + within) * size.covering + entry) % size.channels
        tap = ((seed * filters.size + filters) * size.covering + entry) % size.taps
        value = signs if entry == 0 else _signs(drawn, filters.size)
        view[group, within, channel_order[channel], tap_order[tap]] = value
    return array


def _signs(random: np.random.Generator, size: int) -> NDArray[Any]:
    return 1 - 2 * random.integers(2, size=size)
