"""Is every number of a run exact? Runs a model with all its tensors as outputs and bounds the sums that made them.

In: a model and its inputs. Out: the tensor that comes nearest to what its type holds exactly, and how near.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dicompiler.base.bounding import available_memory, bounded_memory
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.structure import node_reads
from dicompiler.ir.onnx.weights import array_dtype
from dicompiler.verify.exact.calls import odd
from dicompiler.verify.exact.facts import FLOATS, Facts, attribute, stands_in
from dicompiler.verify.exact.patterns import unified, weight_index
from dicompiler.verify.executor import run_model

FRACTION = 10
"""Bits behind the binary point that exact means of powers of two may make; more is taken for rounding."""
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Mul")
_ADDED = ("Add", "BatchNormalization", "Div", "LRN", "LogSoftmax", "Pow", "Softmax", "Sub", "Sum")


@dataclass(frozen=True)
class Peak:
    """`magnitude`: the largest sum of absolute values that makes an element of `tensor`, in units of the last binary
    place in use; `share`: of what the tensor's type holds exactly (2^24 in float32); exact where below 1.
    """

    tensor: str
    magnitude: float
    share: float


@dataclass(frozen=True)
class _Spread:
    """The greatest absolute value of a tensor, and how many bits it has behind the binary point."""

    size: float
    fraction: int = 0

    @property
    def units(self) -> float:
        return math.ldexp(self.size, self.fraction)


def every_tensor(model: Model, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Each computed tensor of the graph by name, with onnxruntime's optimisations off. Other values are left out."""
    names = [name for node in model.proto.graph.node for name in node.output if name]
    with bounded_memory(available_memory() // 2):  # where sizes are computed, other numbers make tensors of other sizes
        results = run_model(model, inputs, names, "none", once=True)
    return {name: result for name, result in results.items() if isinstance(result, np.ndarray)}


def peak(known: Facts, inputs: Mapping[str, NDArray[Any]]) -> Peak:
    """The worst tensor of a run of the model that `known` is about."""
    found = (one for _, one in _peaks(known, inputs))
    return max((Peak("", 0.0, 0.0), *found), key=lambda one: one.share)


def inexact(known: Facts, inputs: Mapping[str, NDArray[Any]]) -> list[Peak]:
    """The tensors that are not exact in a run although all that they are made of is, of those that somebody reads."""
    found = [(index, one) for index, one in _peaks(known, inputs) if one.share >= 1]
    wrong = {one.tensor for _, one in found}
    read = [(index, one) for index, one in found if known.readers(one.tensor) != ()]
    return [one for index, one in read if wrong.isdisjoint(node_reads(known.nodes[index]))]


def _peaks(known: Facts, inputs: Mapping[str, NDArray[Any]]) -> Iterator[tuple[int, Peak]]:
    given = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray) and value.dtype != object}
    computed = every_tensor(known.model, inputs)
    tensors = given | {name: array for name, array in computed.items() if array.dtype != object}  # words are no numbers
    run = _Run(known, {name: array.shape for name, array in tensors.items()}, {})
    limits = {}
    for name, array in tensors.items():
        bits = FLOATS.get(array_dtype(array))
        if bits is not None:
            run.spreads[name], limits[name] = _spread(array), 2.0**bits
    for index, node in enumerate(known.nodes):
        for name in node.output:
            if name in limits:
                units = max(run.spreads[name].units, run.summed(node))
                yield index, Peak(name, units, units / limits[name])


@dataclass(frozen=True)
class _Run:
    """The spreads of all floating-point tensors of a run, and every computed tensor's shape."""

    known: Facts
    shapes: Mapping[str, tuple[int, ...]]
    spreads: dict[str, _Spread]

    def spread(self, name: str) -> _Spread:
        """Of a tensor or of a constant; nothing where it is absent or not of a floating-point type."""
        if name not in self.spreads and self.known.constants.get(name, (0,))[0] in FLOATS:
            self.spreads[name] = _spread(self.known.model.array(name))
        return self.spreads.get(name, _Spread(0.0))

    def summed(self, node: onnx.NodeProto) -> float:
        """The largest sum of absolute values that makes an element of the node's output, in units of the last binary
        place; 0 where nothing is summed.
        """
        index = weight_index(self.known, node)
        if node.name in self.known.treatment.left or (stands_in(node) and node.op_type not in _PRODUCTS):
            return 0.0
        if index is not None:
            data = self._bounded(node, self.spread(node.input[1 - index]))
            weight = unified(node, index, self.known.model.array(node.input[index]))
            bias = self.spread(node.input[2]).size if len(node.input) > 2 else 0.0
            return math.ldexp(float(np.abs(weight).sum((2, 3)).max()) * data.size + bias, data.fraction)
        spreads = [self._bounded(node, self.spread(name)) for name in node.input]
        if node.op_type in _PRODUCTS:
            return self._products(node) * math.prod(spread.units for spread in spreads[:2])
        fraction = max((spread.fraction for spread in spreads), default=0)
        if node.op_type == "AveragePool":
            return math.ldexp(spreads[0].size * math.prod(attribute(node, "kernel_shape", ())), fraction)
        if node.op_type.startswith("ReduceSum"):
            ratio = math.prod(self.shapes[node.input[0]]) / max(1, math.prod(self.shapes[node.output[0]]))
            return math.ldexp(spreads[0].size * ratio, fraction)
        return math.ldexp(sum(spread.size for spread in spreads), fraction) if node.op_type in _ADDED else 0.0

    def _bounded(self, node: onnx.NodeProto, spread: _Spread) -> _Spread:
        """What a stand-in makes of the spread of an input before it multiplies."""
        if not stands_in(node):
            return spread
        return _Spread(min(spread.size, odd(self.known.dtype(node.input[0])) / 2), spread.fraction)

    def _products(self, node: onnx.NodeProto) -> int:
        """How many products of two computed numbers make an element."""
        first, second = (self._shape(name) for name in node.input[:2])
        if node.op_type.startswith("Conv"):
            return math.prod(second) // max(1, second[0 if node.op_type == "Conv" else 1])
        return first[0 if attribute(node, "transA", 0) else -1] if node.op_type != "Mul" and first else 1

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name] if name in self.shapes else self.known.constants[name][1]


def _spread(array: NDArray[Any]) -> _Spread:
    if array.size == 0:
        return _Spread(0.0)
    size = float(np.abs(array).max())
    if not math.isfinite(size):
        return _Spread(math.inf)
    for fraction in range(FRACTION + 1):
        scaled = np.ldexp(array, fraction) if fraction else array
        if np.array_equal(scaled, np.rint(scaled)):
            return _Spread(size, fraction)
    return _Spread(math.inf)
