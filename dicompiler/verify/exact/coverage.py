"""Coverage: how much of a network's weights is read by the check models of several seeds.

In: check models of one network. Out: how many taps and input channels of its layers some filter reads.
"""

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
"""Operator on integers → its weight, that one's zero point, the axis along which there may be many."""
MATMUL_NBITS = (ORT_DOMAIN, "MatMulNBits")


@dataclass(frozen=True)
class Coverage:
    """Over all weighted layers: taps of the kernels, and input channels (of each group), that some filter reads."""

    taps_read: int
    taps: int
    channels_read: int
    channels: int

    def __str__(self) -> str:
        return f"{self.taps_read} of {self.taps} taps and {self.channels_read} of {self.channels} input channels read"


def seeds_needed(model: Model) -> int:
    """So many check models of consecutive seeds read every tap and every input channel of every layer of `model`."""
    known = gather_facts(model)
    needed = 1
    for node in known.nodes:
        index = weight_index(known, node)
        if index is not None:
            needed = max(needed, filter_extent(node, index, known.constants[node.input[index]][1]).seeds_needed)
    return needed


def _find_weight(
    known: GraphFacts, node: NodeProto, makers: Mapping[str, NodeProto]
) -> tuple[int, NDArray[Any]] | None:
    """Which input of `node` is its weight, and what it multiplies with: an initializer, or integers that are
    dequantised, modulo an odd number then. makers: by their results, nodes that read constants alone."""
    index = weight_index(known, node)
    if index is not None:
        return index, known.model.array(node.input[index])
    if (original_domain(node), node.op_type) == MATMUL_NBITS and all(
        name in known.constants for name in node.input[1:4] if name
    ):
        return 1, _unpack_weight(known, node)
    if original_domain(node) or len(node.input) < 2:
        return None
    if node.op_type in INTEGER_WEIGHTS:
        place, zero, axis = INTEGER_WEIGHTS[node.op_type]
        fixed = node.input[place] in known.constants
        return (place, _subtract_zero_point(known, node, place, zero, axis)) if fixed else None
    if node.op_type not in WEIGHTED_OPS or node.input[1] not in makers:
        return None
    maker = makers[node.input[1]]
    if maker.op_type != DEQUANTIZE_OP or not np.issubdtype(known.model.array(maker.input[0]).dtype, np.integer):
        return None
    return 1, _subtract_zero_point(known, maker, 0, 2, get_attribute(maker, "axis", 1)) % modulus_for(
        known.dtype(node.input[1])
    )


def _unpack_weight(known: GraphFacts, node: NodeProto) -> NDArray[Any]:
    """The numbers of few bits that a MatMulNBits multiplies with, less their blocks' zero points: (N, K)."""
    bits, (columns, blocks, _) = get_attribute(node, "bits", 4), known.constants[node.input[1]][1]

    def numbers(packed: NDArray[Any]) -> NDArray[Any]:
        each = packed.reshape(columns, -1, 1) >> np.arange(0, 8, bits, dtype=np.uint8)
        return np.asarray(each & (2**bits - 1), np.float32).reshape(columns, -1)

    weight = numbers(known.model.array(node.input[1]))
    points: NDArray[Any] = np.full((1, 1, 1), 2 ** (bits - 1), np.float32)
    if len(node.input) > 3 and node.input[3]:
        given = known.model.array(node.input[3])
        rows = numbers(given) if given.dtype == np.uint8 else given.reshape(columns, -1)
        points = rows[:, :blocks, None]
    centred = weight.reshape(columns, blocks, -1) - points
    return np.ascontiguousarray(centred.reshape(columns, -1)[:, : get_attribute(node, "K", 0)])


def _subtract_zero_point(known: GraphFacts, node: NodeProto, place: int, zero: int, axis: int) -> NDArray[Any]:
    """The integers at an input of `node` less their zero point, where that is a constant."""
    numbers, point = known.model.array(node.input[place]).astype(np.int64), np.zeros(1, np.int64)
    if len(node.input) > zero and node.input[zero] in known.constants:
        point, shape = known.model.array(node.input[zero]).astype(np.int64), [1] * numbers.ndim
        if point.ndim == 1 and point.size > 1:
            shape[axis] = point.size
            point = point.reshape(shape)
    return np.ascontiguousarray(numbers - point)


@dataclass(frozen=True)
class ReadMasks:
    """Which taps and which input channels check models read, by the name of the layer's node: what is kept of a model
    that is given back."""

    taps: Mapping[str, Mask] = field(default_factory=dict)
    channels: Mapping[str, Mask] = field(default_factory=dict)

    def including(self, model: Model) -> ReadMasks:
        """These, and what the check model `model` reads."""
        known, taps, channels = gather_facts(model), dict(self.taps), dict(self.channels)
        makers = {node.output[0]: node for node in known.nodes if known.computed_input_count(node) == 0}
        for node in known.nodes:
            weight = _find_weight(known, node, makers)
            if weight is not None:
                read = unified_view(node, *weight) != 0
                taps[node.name] = taps.get(node.name, False) | read.any((0, 1, 2))
                channels[node.name] = channels.get(node.name, False) | read.any((1, 3))
        return ReadMasks(taps, channels)

    @property
    def coverage(self) -> Coverage:
        """How many of all."""
        taps, channels = self.taps.values(), self.channels.values()
        read = (sum(int(mask.sum()) for mask in masks) for masks in (taps, channels))
        return Coverage(next(read), sum(mask.size for mask in taps), next(read), sum(mask.size for mask in channels))


def measure_coverage(models: Iterable[Model]) -> Coverage:
    """What the check models of several seeds read together. They are taken one at a time: a generator saves memory."""
    return reduce(ReadMasks.including, models, ReadMasks()).coverage
