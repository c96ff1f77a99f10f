"""Sparse integer filters: zeros except for a few ±1, placed so that few seeds read every weight position."""

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
"""Number of consecutive seeds with which sparse filters read every kernel position and input channel of all layers."""

WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def weight_index(facts: GraphFacts, node: onnx.NodeProto) -> int | None:
    """Return the input index of the constant weight of a Conv, ConvTranspose, Gemm or MatMul.

    The result is None for other operators, and if the weight is not constant or has no elements.
    """
    if original_domain(node) or node.op_type not in WEIGHTED_OPS:
        return None
    candidates = (1,) if node.op_type.startswith("Conv") else (1, 0)
    constants = (index for index in candidates if facts.has_float_constant(node, index))
    return next((index for index in constants if math.prod(facts.constants[node.input[index]][1])), None)


@dataclass(frozen=True)
class FilterExtent:
    """The size of a layer's weight, in one form for convolutions and matrix products.

    Attributes:
        groups: Number of groups of channels.
        filters: Number of filters (output channels) per group.
        channels: Number of input channels per group.
        taps: Number of kernel positions.
    """

    groups: int
    filters: int
    channels: int
    taps: int

    def min_elements(self, seeds: int = MAX_SEEDS) -> int:
        """Return the number of nonzero elements that each filter needs.

        With them, `seeds` consecutive seeds together read all input channels and kernel positions of the layer.
        """
        channels = math.ceil(self.channels / (self.filters * seeds))
        taps = math.ceil(self.taps / (self.groups * self.filters * seeds))
        return max(1, channels, taps)

    @property
    def seeds_needed(self) -> int:
        """Number of consecutive seeds, at most MAX_SEEDS, that read every kernel position and input channel."""
        channels = math.ceil(self.channels / (self.filters * self.min_elements()))
        taps = math.ceil(self.taps / (self.groups * self.filters * self.min_elements()))
        return max(1, channels, taps)


def unified_view(node: onnx.NodeProto, index: int, array: NDArray[Any]) -> NDArray[Any]:
    """Return a node's contiguous weight `array` as a view of shape (groups, filters, channels, kernel positions).

    `index` is the input index of the weight. Each matrix in a batched MatMul is a group.
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
    return FilterExtent(*unified_view(node, index, np.broadcast_to(np.int8(0), shape)).shape)


def sparse_filters(
    node: onnx.NodeProto, index: int, shape: Shape, dtype: np.dtype[Any], seed: int, taps: int, signs: NDArray[Any]
) -> NDArray[Any]:
    """Return a weight with at least `taps` elements of ±1 in each filter; all other elements are 0.

    The nonzero positions are consecutive entries of two permutations, one of the channels and one of the kernel
    positions. The permutations depend only on the layer's name. Each seed continues at the entry at which the previous
    seed ends.

    Args:
        node: The node that reads the weight.
        index: Index of the weight among the node's inputs.
        shape: Shape of the weight.
        dtype: Type of the weight.
        seed: Number of the check model.
        taps: Minimum number of nonzero elements in each filter. More are used if the seeds would not read all
            positions.
        signs: Sign of the first element of each filter, of shape (groups · filters,). All other signs are random.
    """
    array = np.zeros(shape, dtype)
    view = unified_view(node, index, array)
    extent = FilterExtent(*view.shape)
    min_elements = extent.min_elements()
    count = max(min_elements, min(taps, extent.channels * extent.taps))
    order = named_generator(0, f"{node.name}/order")
    channel_order, tap_order = order.permutation(extent.channels), order.permutation(extent.taps)
    generator = named_generator(seed, f"{node.name}/entries")
    filters = np.arange(extent.groups * extent.filters)
    group, within = np.divmod(filters, extent.filters)
    for entry in reversed(range(count)):
        channel = (seed * extent.filters * min_elements + within * count + entry) % extent.channels
        tap = (seed * filters.size * min_elements + filters * count + entry) % extent.taps
        value = signs if entry == 0 else 1 - 2 * generator.integers(2, size=filters.size)
        view[group, within, channel_order[channel], tap_order[tap]] = value
    return array
