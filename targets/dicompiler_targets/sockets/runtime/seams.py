"""What is copied where segments meet: pieces that have come go straight to their place in the tensor that a segment
reads, and what is for other devices is cut out of the memory in which it was made.

In: a segment of the manifest, tensors by name. Out: arrays of bytes; numpy copies, block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .values import TYPES, to_bytes, wrapped

Ends = tuple[Sequence[int], Sequence[Sequence[int]]]
Copy = tuple[Any, Any]
"""Two views of memory, into the first of which the second is copied."""


class Move:
    """Where a region of one tensor becomes a region of another: blocks of bytes that lie in one piece in both, in rows
    at equal distances. source, target: shape and region of each; size: bytes of an element."""

    def __init__(self, source: Ends, target: Ends, size: int) -> None:
        counts = [end - begin for begin, end in source[1]]
        axis = max(_first(shape, counts) for shape, _ in (source, target))
        block = size * math.prod(counts[axis:])
        self._counts = tuple(counts[:axis])
        self._type = np.dtype(f"u{block}" if block in (1, 2, 4, 8) else f"V{block}")
        self._from, self._from_rows = _rows(*source, axis, size)
        self._to, self._to_rows = _rows(*target, axis, size)
        self.nbytes = size * math.prod(target[0])

    def views(self, source: Any, target: Any) -> Copy:
        """Of the memory of both tensors."""
        to = np.ndarray(self._counts, self._type, target, self._to, self._to_rows)
        return to, np.ndarray(self._counts, self._type, source, self._from, self._from_rows)


def _first(shape: Sequence[int], counts: Sequence[int]) -> int:
    """The axis from which on a region of that many elements lies in one piece."""
    axis = len(shape) - 1
    while axis > 0 and counts[axis] == shape[axis]:
        axis -= 1
    return axis


def _rows(shape: Sequence[int], region: Sequence[Sequence[int]], axis: int, size: int) -> tuple[int, tuple[int, ...]]:
    """Bytes before the region, and between its rows along each axis before `axis`."""
    strides = tuple(size * math.prod(shape[one + 1 :]) for one in range(len(shape)))
    return sum(begin * stride for (begin, _), stride in zip(region, strides, strict=True)), strides[:axis]


class Seam:
    """The ends of a segment. `inner`: the segment as its session has it; `pieces`: inputs that its joins alone read;
    `outputs`: all that leaves it; `names`: all that is read and made."""

    def __init__(self, segment: Mapping[str, Any], session: Any) -> None:
        self._joins = [(join, [_piece(join, piece) for piece in join["pieces"]]) for join in segment.get("joins", ())]
        self._cuts = [(cut["name"], cut["whole"], _cut(cut["whole"], cut["region"])) for cut in segment.get("cuts", ())]
        gone = {name for name, *_ in self._cuts}
        self.inner, self.outputs = segment, segment["outputs"]
        if self._joins or self._cuts:
            inputs = [value.name for value in session.get_inputs()]
            self.inner = {**segment, "inputs": inputs, "outputs": [n for n in self.outputs if n not in gone]}
        self.pieces = {*segment["inputs"]} - {*self.inner["inputs"]}
        self.names = {*segment["inputs"], *segment["outputs"], *self.inner["inputs"]}

    def joined(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`values` and the tensors that are joined of them. ValueError where a session made another piece than
        planned."""
        if not self._joins:
            return values
        made = dict(values)
        for join, pieces in self._joins:
            raw = np.empty(join["bytes"], np.uint8)
            for name, value, move in pieces:
                np.copyto(*move.views(to_bytes(values[name], value), raw))
            made[join["name"]] = wrapped(raw, join["dtype"], join["shape"])
        return made

    def cut(self, made: dict[str, Any]) -> dict[str, Any]:
        """`made` and the bytes of what is cut out of it. ValueError where the session made another tensor than
        planned."""
        memories: dict[str, Any] = {}
        for name, whole, move in self._cuts:
            if (memory := memories.get(whole["name"])) is None:
                memory = memories[whole["name"]] = to_bytes(made[whole["name"]], whole)
            raw = made[name] = np.empty(move.nbytes, np.uint8)
            np.copyto(*move.views(memory, raw))
        return made

    def bound(self, view: Callable[[str], Any]) -> tuple[list[Copy], list[Copy]]:
        """What is copied before and after the segment, where each tensor has its memory for good."""
        before = [move.views(view(name), view(join["name"])) for join, own in self._joins for name, _, move in own]
        return before, [move.views(view(whole["name"]), view(name)) for name, whole, move in self._cuts]


def copied(copies: Sequence[Copy]) -> None:
    """Copies all of them."""
    for to, source in copies:
        np.copyto(to, source)


def _piece(join: Mapping[str, Any], piece: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Move]:
    """The name of a piece, what it must be, and how it gets into its place."""
    target = join["shape"], piece["region"]
    move = Move((piece["shape"], piece["cut"]), target, TYPES[join["dtype"]][1])
    return piece["name"], {"name": piece["name"], "dtype": join["dtype"], "shape": piece["shape"]}, move


def _cut(whole: Mapping[str, Any], region: Sequence[Sequence[int]]) -> Move:
    shape = [end - begin for begin, end in region]
    return Move((whole["shape"], region), (shape, [(0, count) for count in shape]), TYPES[whole["dtype"]][1])
