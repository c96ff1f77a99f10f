"""A box of one tensor at its place in another, as the bytes that a runtime copies.

In: shapes, where the box begins in either, its extent. Out: a Copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dicompiler.plugin_api import Shape

BoxStart = tuple[Sequence[int], Sequence[int]]
"""Of a tensor that holds the box: its shape, and where the box begins."""


@dataclass(frozen=True)
class StridedCopy:
    """Bytes that go from one tensor to another: `run` in one piece, again and again in loops, the outermost first.
    source, target: a tensor that the device holds, by name, or the model's input or output of that number. start, to:
    the first byte in either; loops: (times, bytes from one to the next in the source, in the other), fewer than axes.
    """

    source: str | int
    target: str | int
    source_offset: int
    target_offset: int
    run_bytes: int
    loops: tuple[tuple[int, int, int], ...]

    @property
    def end_offsets(self) -> tuple[int, int]:
        """The first bytes behind all that is touched: (in the source, in the other)."""
        start, to = self.source_offset + self.run_bytes, self.target_offset + self.run_bytes
        for times, step, further in self.loops:
            start, to = start + (times - 1) * step, to + (times - 1) * further
        return start, to


def make_box_copy(
    source: str | int, target: str | int, ends: tuple[BoxStart, BoxStart], extent: Shape, itemsize: int
) -> StridedCopy:
    """The copy of a box of that extent between these tensors. itemsize: bytes of an element."""
    steps = [_get_strides(shape, itemsize) for shape, _ in ends]
    starts = [sum(map(int.__mul__, own, at)) for own, (_, at) in zip(steps, ends, strict=True)]
    loops = [(itemsize, 1, 1)]  # byte by byte; what continues the outermost loop on both sides lengthens it
    for count, step, further in reversed(list(zip(extent, *steps, strict=True))):
        times, *inner = loops[0]
        if count > 1 and [step, further] == [times * own for own in inner]:
            loops[0] = (times * count, *inner)
        elif count > 1:
            loops.insert(0, (count, step, further))
    *outer, (run, _, _) = loops
    return StridedCopy(source, target, starts[0], starts[1], run, tuple(outer))


def _get_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """Bytes from one element to the next along each axis."""
    return [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
