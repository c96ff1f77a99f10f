"""Einsum: the letters of its equation say which interval of the output each axis of each input reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dicompiler.ir.regions import Interval, Region, Shape
from dicompiler.ir.rule import Effort, Operation, OperatorRule, Piece, each, taken

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


def parse(text: str) -> Equation:
    """ "bij, bjk -> bik" → its terms. Without an arrow the output has the ellipsis and then, in alphabetic order, the
    letters that appear once."""
    left, arrow, right = text.replace(" ", "").replace("...", BATCH).partition("->")
    counts = Counter(left.replace(",", "").replace(BATCH, ""))
    implicit = (BATCH if BATCH in left else "") + "".join(sorted(letter for letter in counts if counts[letter] == 1))
    return Equation(tuple(left.split(",")), right if arrow else implicit)


def einsum(operation: Operation, region: Region, reduce: Interval | None) -> Piece:
    """Einsum: a letter of the output passes its interval to every input; the others are read in full, or the first of
    them in the range of a partial sum. An axis of extent 1 that stands for more is read whole."""
    equation = parse(operation.attribute("equation"))
    batch = len(region) - len(equation.output.replace(BATCH, ""))
    at = equation.output.find(BATCH)
    named = region if at < 0 else (*region[:at], *region[at + batch :])
    intervals = dict(zip(equation.output.replace(BATCH, ""), named, strict=True))
    if reduce is not None:
        intervals[equation.summed[0]] = reduce
    needs = []
    for index, term in enumerate(equation.inputs):
        shape = operation.shape(index)
        hidden = len(shape) - len(term.replace(BATCH, ""))
        cuts: list[Interval | None] = []
        for letter in term:
            cuts += region[at + batch - hidden : at + batch] if letter == BATCH else [intervals.get(letter)]
        axes = zip(shape, cuts, strict=True)
        needs.append(tuple((0, extent) if extent == 1 or cut is None else cut for extent, cut in axes))
    return Piece(region, tuple(needs))


def reduction(operation: Operation) -> int | None:
    """The extent of the first letter that is summed over."""
    equation = parse(operation.attribute("equation"))
    if not equation.summed:
        return None
    return _extent(equation, equation.summed[0], [operation.shape(index) for index in range(len(equation.inputs))])


def _extent(equation: Equation, letter: str, shapes: Sequence[Shape]) -> int:
    """The extent of a letter in inputs of those shapes, some of which can be broadcast."""
    terms = [(term, shape, term.find(letter)) for term, shape in zip(equation.inputs, shapes, strict=True)]
    return max(shape[i - len(term) if BATCH in term[:i] else i] for term, shape, i in terms if i >= 0)


def contracted(operation: Operation, out: Shape, needs: Sequence[Shape]) -> Effort:
    """A product of several tensors multiplies for each value of all letters; one tensor is summed, or just moved."""
    equation = parse(operation.attribute("equation"))
    if len(needs) == 1:
        return taken(operation, out, needs) if equation.summed else Effort()
    if not equation.summed:
        return each(operation, out, needs)
    return Effort(math.prod(out) * math.prod(_extent(equation, letter, needs) for letter in equation.summed))


RULES = (OperatorRule("Einsum", einsum, reduction=reduction, cost=contracted),)
