"""Coverage of check models: which kernel positions (taps) and input channels of a network their filters read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import ORT_DOMAIN
from dicompiler.verify.exact.function_builder import modulus_for
from dicompiler.verify.exact.graph_facts import GraphFacts, gather_facts, get_attribute, original_domain
from dicompiler.verify.exact.sparse_filters import WEIGHTED_OPS, filter_extent, unified_view, weight_index

Mask = NDArray[np.bool_]
DEQUANTIZE_OP = "DequantizeLinear"
INTEGER_WEIGHTS = {
    "ConvInteger": (1, 3, 0), "QLinearConv": (3, 5, 0), "MatMulInteger": (1, 3, -1), "QLinearMatMul": (3, 5, -1),
}  # fmt: skip
"""Inputs of operators on integers: (index of the weight, index of its zero point, axis of a zero-point vector)."""
MATMUL_NBITS = (ORT_DOMAIN, "MatMulNBits")


@dataclass(frozen=True)
class Coverage:
    """Numbers of kernel positions (taps) and input channels that check models read, summed over all layers.

    Check models are the copies of the network with integer weights that `verify` computes. A filter does not read a tap
    at which its weight is 0.

    Attributes:
        taps_read: Number of taps that at least one filter of their layer reads.
        taps: Number of all taps.
        channels_read: Number of input channels that at least one filter of their group reads.
        channels: Number of all input channels.
    """

    taps_read: int
    taps: int
    channels_read: int
    channels: int

    def __str__(self) -> str:
        return f"{self.taps_read} of {self.taps} taps and {self.channels_read} of {self.channels} input channels read"


def seeds_needed(model: Model) -> int:
    """Return how many consecutive seeds read every kernel position and input channel of every layer."""
    facts = gather_facts(model)
    needed = 1
    for node in facts.nodes:
        index = weight_index(facts, node)
        if index is not None:
            needed = max(needed, filter_extent(node, index, facts.constants[node.input[index]][1]).seeds_needed)
    return needed


def _find_weight(
    facts: GraphFacts, node: NodeProto, makers: Mapping[str, NodeProto]
) -> tuple[int, NDArray[Any]] | None:
    """Return the input index and the values of a node's constant weight; None if it has none.

    `makers` are the nodes that read only constants, by their first output.
    """
    index = weight_index(facts, node)
    if index is not None:
        return index, facts.model.array(node.input[index])
    if (original_domain(node), node.op_type) == MATMUL_NBITS and all(
        name in facts.constants for name in node.input[1:4] if name
    ):
        return 1, _unpack_weight(facts, node)
    if original_domain(node) or len(node.input) < 2:
        return None
    if node.op_type in INTEGER_WEIGHTS:
        index, zero_point, axis = INTEGER_WEIGHTS[node.op_type]
        is_constant = node.input[index] in facts.constants
        return (index, _subtract_zero_point(facts, node, index, zero_point, axis)) if is_constant else None
    if node.op_type not in WEIGHTED_OPS or node.input[1] not in makers:
        return None
    maker = makers[node.input[1]]
    if maker.op_type != DEQUANTIZE_OP or not np.issubdtype(facts.model.array(maker.input[0]).dtype, np.integer):
        return None
    return 1, _subtract_zero_point(facts, maker, 0, 2, get_attribute(maker, "axis", 1)) % modulus_for(
        facts.dtype(node.input[1])
    )


def _unpack_weight(facts: GraphFacts, node: NodeProto) -> NDArray[Any]:
    bits, (columns, blocks, _) = get_attribute(node, "bits", 4), facts.constants[node.input[1]][1]

    def numbers(packed: NDArray[Any]) -> NDArray[Any]:
        unpacked = packed.reshape(columns, -1, 1) >> np.arange(0, 8, bits, dtype=np.uint8)
        return np.asarray(unpacked & (2**bits - 1), np.float32).reshape(columns, -1)

    weight = numbers(facts.model.array(node.input[1]))
    points: NDArray[Any] = np.full((1, 1, 1), 2 ** (bits - 1), np.float32)
    if len(node.input) > 3 and node.input[3]:
        zero_points = facts.model.array(node.input[3])
        rows = numbers(zero_points) if zero_points.dtype == np.uint8 else zero_points.reshape(columns, -1)
        points = rows[:, :blocks, None]
    centred = weight.reshape(columns, blocks, -1) - points
    return np.ascontiguousarray(centred.reshape(columns, -1)[:, : get_attribute(node, "K", 0)])


def _subtract_zero_point(facts: GraphFacts, node: NodeProto, index: int, zero_point: int, axis: int) -> NDArray[Any]:
    """Return the integers of input `index` minus their zero point, if it is constant.

    `zero_point` is the index of the zero point's input. If it is a vector, it varies along `axis`.
    """
    numbers, points = facts.model.array(node.input[index]).astype(np.int64), np.zeros(1, np.int64)
    if len(node.input) > zero_point and node.input[zero_point] in facts.constants:
        points, shape = facts.model.array(node.input[zero_point]).astype(np.int64), [1] * numbers.ndim
        if points.ndim == 1 and points.size > 1:
            shape[axis] = points.size
            points = points.reshape(shape)
    return np.ascontiguousarray(numbers - points)


@dataclass(frozen=True)
class ReadMasks:
    """Masks of kernel positions (taps) and input channels that the sparse filters of check models read.

    Attributes:
        taps: By node name, an array with True for each tap that was read.
        channels: By node name, an array of shape (groups, input channels) with True for each channel that was read.
    """

    taps: Mapping[str, Mask] = field(default_factory=dict)
    channels: Mapping[str, Mask] = field(default_factory=dict)

    def including(self, model: Model) -> ReadMasks:
        """Return these masks joined with those of the check model `model`."""
        facts, taps, channels = gather_facts(model), dict(self.taps), dict(self.channels)
        makers = {node.output[0]: node for node in facts.nodes if facts.computed_input_count(node) == 0}
        for node in facts.nodes:
            weight = _find_weight(facts, node, makers)
            if weight is not None:
                read = unified_view(node, *weight) != 0
                taps[node.name] = taps.get(node.name, False) | read.any((0, 1, 2))
                channels[node.name] = channels.get(node.name, False) | read.any((1, 3))
        return ReadMasks(taps, channels)

    @property
    def coverage(self) -> Coverage:
        taps, channels = self.taps.values(), self.channels.values()
        read = (sum(int(mask.sum()) for mask in masks) for masks in (taps, channels))
        return Coverage(next(read), sum(mask.size for mask in taps), next(read), sum(mask.size for mask in channels))


def measure_coverage(models: Iterable[Model]) -> Coverage:
    return reduce(ReadMasks.including, models, ReadMasks()).coverage
