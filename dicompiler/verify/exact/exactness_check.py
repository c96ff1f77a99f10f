"""Check that every number of a check model's run is exact.

The model is run with all of its tensors as outputs. If an element of a tensor is a sum, the sum of the absolute values
of its terms bounds all partial sums, in any order. Each type represents all integers up to a limit exactly (2^24 in
float32). The largest bound of a tensor is compared with the limit of its type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.base.process import available_memory, memory_limit
from dicompiler.ir.onnx.graph_structure import tensors_read
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import array_dtype
from dicompiler.verify.exact.function_builder import modulus_for
from dicompiler.verify.exact.graph_facts import SIGNIFICAND_BITS, GraphFacts, get_attribute, is_stand_in
from dicompiler.verify.exact.sparse_filters import unified_view, weight_index
from dicompiler.verify.executor import run_model

MAX_FRACTION_BITS = 10
"""Largest number of binary places after the point of an exact value. A value with more places was probably rounded."""
_PRODUCT_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Mul")
_SUM_OPS = ("Add", "BatchNormalization", "Div", "LRN", "LogSoftmax", "Pow", "Softmax", "Sub", "Sum")


@dataclass(frozen=True)
class Peak:
    """Upper bound of all numbers from which the elements of a tensor are computed, partial sums included.

    Attributes:
        tensor: Name of the tensor.
        magnitude: The bound in units of 2^-n, if the numbers have n binary places after the point.
        share: The magnitude divided by the limit of the tensor's type (2^24 in float32). Below 1, the tensor is exact.
    """

    tensor: str
    magnitude: float
    share: float


@dataclass(frozen=True)
class _ValueRange:
    """The range of a tensor's values.

    Attributes:
        size: Largest absolute value.
        fraction_bits: Number of binary places after the point.
    """

    size: float
    fraction_bits: int = 0

    @property
    def units(self) -> float:
        """The largest absolute value as a multiple of 2^-`fraction_bits`."""
        return math.ldexp(self.size, self.fraction_bits)


def compute_all_tensors(model: Model, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return every tensor that the nodes of a model compute, by name; sequences and maps are omitted.

    onnxruntime's optimizations are off, because they remove tensors.
    """
    names = [name for node in model.proto.graph.node for name in node.output if name]
    # The memory is limited, because random inputs can make a tensor huge if its shape is computed from them.
    with memory_limit(available_memory() // 2):
        results = run_model(model, inputs, names, "none", is_single_use=True)
    return {name: result for name, result in results.items() if isinstance(result, np.ndarray)}


def largest_peak(facts: GraphFacts, inputs: Mapping[str, NDArray[Any]]) -> Peak:
    """Return the Peak (upper bound of a tensor's numbers) with the largest share of the limit of exact integers."""
    peaks = (peak for _, peak in _iterate_peaks(facts, inputs))
    return max((Peak("", 0.0, 0.0), *peaks), key=lambda peak: peak.share)


def first_inexact_peaks(facts: GraphFacts, inputs: Mapping[str, NDArray[Any]]) -> list[Peak]:
    """Return the Peaks of the tensors that may be rounded although they are computed from exact tensors only.

    Tensors that nothing reads are omitted.
    """
    peaks = [(index, peak) for index, peak in _iterate_peaks(facts, inputs) if peak.share >= 1]
    inexact = {peak.tensor for _, peak in peaks}
    read = [(index, peak) for index, peak in peaks if facts.readers(peak.tensor) != ()]
    return [peak for index, peak in read if inexact.isdisjoint(tensors_read(facts.nodes[index]))]


def _iterate_peaks(facts: GraphFacts, inputs: Mapping[str, NDArray[Any]]) -> Iterator[tuple[int, Peak]]:
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray) and value.dtype != object}
    computed = compute_all_tensors(facts.model, inputs)
    tensors = arrays | {name: array for name, array in computed.items() if array.dtype != object}
    run = _RunRanges(facts, {name: array.shape for name, array in tensors.items()}, {})
    limits = {}
    for name, array in tensors.items():
        bits = SIGNIFICAND_BITS.get(array_dtype(array))
        if bits is not None:
            run.ranges[name], limits[name] = _value_range(array), 2.0**bits
    for index, node in enumerate(facts.nodes):
        for name in node.output:
            if name in limits:
                units = max(run.ranges[name].units, run.largest_sum(node))
                yield index, Peak(name, units, units / limits[name])


@dataclass(frozen=True)
class _RunRanges:
    """The value ranges of all floating-point tensors in a run of a check model, and the shapes of all tensors."""

    facts: GraphFacts
    shapes: Mapping[str, tuple[int, ...]]
    ranges: dict[str, _ValueRange]

    def range_of(self, name: str) -> _ValueRange:
        """Return the range of a tensor or constant; integers, which are always exact, have the range 0."""
        if name not in self.ranges and self.facts.constants.get(name, (0,))[0] in SIGNIFICAND_BITS:
            self.ranges[name] = _value_range(self.facts.model.array(name))
        return self.ranges.get(name, _ValueRange(0.0))

    def largest_sum(self, node: onnx.NodeProto) -> float:
        """Return an upper bound of Σ |term| over the summands of an output element; 0 if the operator does not add."""
        index = weight_index(self.facts, node)
        if node.name in self.facts.relaxation.excluded or (is_stand_in(node) and node.op_type not in _PRODUCT_OPS):
            return 0.0
        if index is not None:
            data = self._range_after_bounding(node, self.range_of(node.input[1 - index]))
            weight = unified_view(node, index, self.facts.model.array(node.input[index]))
            bias = self.range_of(node.input[2]).size if len(node.input) > 2 else 0.0
            return math.ldexp(float(np.abs(weight).sum((2, 3)).max()) * data.size + bias, data.fraction_bits)
        value_ranges = [self._range_after_bounding(node, self.range_of(name)) for name in node.input]
        if node.op_type in _PRODUCT_OPS:
            return self._product_count(node) * math.prod(value_range.units for value_range in value_ranges[:2])
        fraction = max((value_range.fraction_bits for value_range in value_ranges), default=0)
        if node.op_type == "AveragePool":
            return math.ldexp(value_ranges[0].size * math.prod(get_attribute(node, "kernel_shape", ())), fraction)
        if node.op_type.startswith("ReduceSum"):
            ratio = math.prod(self.shapes[node.input[0]]) / max(1, math.prod(self.shapes[node.output[0]]))
            return math.ldexp(value_ranges[0].size * ratio, fraction)
        return (
            math.ldexp(sum(value_range.size for value_range in value_ranges), fraction)
            if node.op_type in _SUM_OPS
            else 0.0
        )

    def _range_after_bounding(self, node: onnx.NodeProto, value_range: _ValueRange) -> _ValueRange:
        """Return the range of a node's input after the node has reduced it modulo 15 (3 in 16-bit types).

        Only functions that replace an operator do so. For other nodes, `value_range` is returned unchanged.
        """
        if not is_stand_in(node):
            return value_range
        return _ValueRange(
            min(value_range.size, modulus_for(self.facts.dtype(node.input[0])) / 2), value_range.fraction_bits
        )

    def _product_count(self, node: onnx.NodeProto) -> int:
        """Return the number of products that a node of two computed inputs adds up for each output element."""
        first, second = (self._shape(name) for name in node.input[:2])
        if node.op_type.startswith("Conv"):
            return math.prod(second) // max(1, second[0 if node.op_type == "Conv" else 1])
        return first[0 if get_attribute(node, "transA", 0) else -1] if node.op_type != "Mul" and first else 1

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name] if name in self.shapes else self.facts.constants[name][1]


def _value_range(array: NDArray[Any]) -> _ValueRange:
    if array.size == 0:
        return _ValueRange(0.0)
    size = float(np.abs(array).max())
    if not math.isfinite(size):
        return _ValueRange(math.inf)
    for fraction in range(MAX_FRACTION_BITS + 1):
        scaled = np.ldexp(array, fraction) if fraction else array
        if np.array_equal(scaled, np.rint(scaled)):
            return _ValueRange(size, fraction)
    return _ValueRange(math.inf)
