"""Products of tensors: Gemm, MatMul, Einsum. The letters of an equation say which interval of the output each axis of
each operand reads, and which axes are summed over.

RNN, GRU and LSTM, whose steps follow one on another, are computed whole: what that costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import helper

from dicompiler.base.remembering import remembered
from dicompiler.ir.regions import Interval, Region, Shape
from dicompiler.ir.rule import Effort, Operation, OperatorRule, Piece, counted, each, taken
from dicompiler.operators.elementwise import broadcast_need

BATCH = "."
"""Stands for the axes of an ellipsis."""


@dataclass(frozen=True)
class Equation:
    """The terms of the inputs and of the output, one letter an axis; BATCH where the ellipsis is."""

    inputs: tuple[str, ...]
    output: str

    @property
    def summed(self) -> str:
        """The letters that are summed over, in order of their first appearance."""
        return "".join(dict.fromkeys(letter for term in self.inputs for letter in term if letter not in self.output))

    def extent(self, letter: str, shapes: Sequence[Shape]) -> int:
        """The extent of a letter in inputs of those shapes, some of which can be broadcast."""
        terms = [(term, shape, term.find(letter)) for term, shape in zip(self.inputs, shapes, strict=False)]
        return max(shape[i - len(term) if BATCH in term[:i] else i] for term, shape, i in terms if i >= 0)


def parse(text: str) -> Equation:
    """ "bij, bjk -> bik" → its terms. Without an arrow the output has the ellipsis and then, in alphabetic order, the
    letters that appear once."""
    left, arrow, right = text.replace(" ", "").replace("...", BATCH).partition("->")
    counts = Counter(left.replace(",", "").replace(BATCH, ""))
    implicit = (BATCH if BATCH in left else "") + "".join(sorted(letter for letter in counts if counts[letter] == 1))
    return Equation(tuple(left.split(",")), right if arrow else implicit)


@remembered
def equation(operation: Operation) -> Equation:
    """The equation of an Einsum, of a Gemm without what it adds, or of a MatMul: a vector has neither batch nor rows
    (columns)."""
    if operation.node.op == "Einsum":
        return parse(operation.attribute("equation"))
    if operation.node.op == "Gemm":
        turned = operation.attribute("transA", 0), operation.attribute("transB", 0)
        return Equation(("ki" if turned[0] else "ik", "jk" if turned[1] else "kj"), "ij")
    rows, columns = (len(operation.shape(index)) > 1 for index in (0, 1))
    return Equation((".ik" if rows else "k", ".kj" if columns else "k"), "." + "i" * rows + "j" * columns)


def contraction(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """A letter of the output passes its interval to every operand; the others are read in full, or the first of them in
    the range of a partial sum. An axis of extent 1 that stands for more is read whole."""
    terms = equation(operation)
    batch = len(region) - len(terms.output.replace(BATCH, ""))
    at = terms.output.find(BATCH)
    named = region if at < 0 else (*region[:at], *region[at + batch :])
    intervals = dict(zip(terms.output.replace(BATCH, ""), named, strict=True))
    if reduce is not None:
        intervals[terms.summed[0]] = reduce
    needs = []
    for index, term in enumerate(terms.inputs):
        shape = operation.shape(index)
        hidden = len(shape) - len(term.replace(BATCH, ""))
        cuts: list[Interval | None] = []
        for letter in term:
            cuts += region[at + batch - hidden : at + batch] if letter == BATCH else [intervals.get(letter)]
        axes = zip(shape, cuts, strict=True)
        needs.append(tuple((0, extent) if extent == 1 or cut is None else cut for extent, cut in axes))
    return Piece(region, tuple(needs))


def gemm(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Gemm: c, which broadcasts, rides in the range of k that starts at 0."""
    piece, tensor = contraction(operation, region, reduce), operation.inputs[2] if operation.has(2) else None
    if tensor is None:
        return piece
    if reduce is None or reduce[0] == 0:
        return replace(piece, needs=(*piece.needs, broadcast_need(operation.shape(2), region)))
    # Before opset 11 the third input of Gemm is not optional: a zero stands for it.
    zero = {2: np.zeros((1,), helper.tensor_dtype_to_np_dtype(tensor.dtype))} if operation.node.opset < 11 else {}
    return replace(piece, needs=(*piece.needs, None), constants=zero)


def summed_extent(operation: Operation) -> int | None:
    """The extent of the first letter that is summed over."""
    terms = equation(operation)
    shapes = [operation.shape(index) for index in range(len(terms.inputs))]
    return terms.extent(terms.summed[0], shapes) if terms.summed else None


def contracted(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """A product of several tensors multiplies for each value of all letters; one tensor is summed, or just moved."""
    terms = equation(operation)
    if len(needs) == 1:
        return taken(operation, out, needs) if terms.summed else Effort()
    if not terms.summed:
        return each(operation, out, needs)
    return Effort(math.prod(out) * math.prod(terms.extent(letter, needs) for letter in terms.summed))


def product(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """Each output element sums over k, which the first operand has."""
    axis = 0 if operation.attribute("transBatchA", 0) else -2
    return Effort(math.prod(out) * needs[0][axis if operation.attribute("transA", 0) else -1])


def activated(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """A product with its activation."""
    return product(operation, out, needs)._replace(other=math.prod(out))


def stepped(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:  # noqa: ARG001
    """Each step of x (steps, batch, features) meets all of w (directions, gates, features) and of r; one FLOP for each
    element of each gate."""
    x, w, r = needs[:3]
    steps = x[0] * x[1]
    return Effort(steps * (math.prod(w) + math.prod(r)), other=steps * math.prod(w) // x[2])


RULES = (
    OperatorRule("Gemm", gemm, reduction=summed_extent, cost=product),
    OperatorRule("MatMul", contraction, reduction=summed_extent, cost=product),
    OperatorRule("Einsum", contraction, reduction=summed_extent, cost=contracted),
    *counted(product, "FusedMatMul TransposeMatMul QGemm DynamicQuantizeMatMul MatMulIntegerToFloat MatMulInteger16"),
    *counted(product, "MatMulNBits MatMulBnb4 MatMulFpQ4 GemmFloat8 CDist"),
    *counted(activated, "FusedGemm FusedMatMulActivation GemmFastGelu"),
    *counted(stepped, "RNN GRU LSTM", ""),
    *counted(stepped, "DynamicQuantizeLSTM"),
)
