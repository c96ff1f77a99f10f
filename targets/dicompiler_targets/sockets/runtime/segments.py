"""What is copied where segments meet: pieces that have come go straight to their place in the tensor that a segment
reads, and what is for other devices is cut out of the memory in which it was made.

In: a segment of the manifest, tensors by name. Out: arrays of bytes; numpy copies, block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .values import TENSOR_TYPES, make_value, value_to_bytes

RegionOfShape = tuple[Sequence[int], Sequence[Sequence[int]]]
MemoryCopy = tuple[Any, Any]
"""Two views of memory, into the first of which the second is copied."""


class RegionCopy:
    """Where a region of one tensor becomes a region of another: blocks of bytes that lie in one piece in both, in rows
    at equal distances. source, target: shape and region of each; size: bytes of an element."""

    def __init__(self, source: RegionOfShape, target: RegionOfShape, size: int) -> None:
        counts = [end - begin for begin, end in source[1]]
        axis = max(_first_contiguous_axis(shape, counts) for shape, _ in (source, target))
        block = size * math.prod(counts[axis:])
        self._counts = tuple(counts[:axis])
        self._type = np.dtype(f"u{block}" if block in (1, 2, 4, 8) else f"V{block}")
        self._source_offset, self._source_strides = _offset_and_strides(*source, axis, size)
        self._target_offset, self._target_strides = _offset_and_strides(*target, axis, size)

    def views(self, source: Any, target: Any) -> MemoryCopy:
        """Of the memory of both tensors."""
        to = np.ndarray(self._counts, self._type, target, self._target_offset, self._target_strides)
        return to, np.ndarray(self._counts, self._type, source, self._source_offset, self._source_strides)


def _first_contiguous_axis(shape: Sequence[int], counts: Sequence[int]) -> int:
    """The axis from which on a region of that many elements lies in one piece."""
    axis = len(shape) - 1
    while axis > 0 and counts[axis] == shape[axis]:
        axis -= 1
    return axis


def _offset_and_strides(
    shape: Sequence[int], region: Sequence[Sequence[int]], axis: int, size: int
) -> tuple[int, tuple[int, ...]]:
    """Bytes before the region, and between its rows along each axis before `axis`."""
    strides = tuple(size * math.prod(shape[one + 1 :]) for one in range(len(shape)))
    return sum(begin * stride for (begin, _), stride in zip(region, strides, strict=True)), strides[:axis]


CopiedPiece = tuple[str, Mapping[str, Any], RegionCopy]
AssembledTensor = tuple[Mapping[str, Any], Sequence[CopiedPiece]]
"""A tensor of the manifest that is put together, and its pieces."""


class SegmentIO:
    """The ends of a segment. session: None where nothing is computed. `inner`: the segment as its session has it;
    `pieces`: inputs that are only copied; `outputs`: all that leaves it; `names`: all that is read and made."""

    def __init__(self, segment: Mapping[str, Any], session: Any) -> None:
        self._joins, self._cuts = (
            [(one, [_make_piece(one, piece) for piece in one["pieces"]]) for one in segment.get(key, ())]
            for key in ("joins", "cuts")
        )
        self.inner, self.outputs = segment, segment["outputs"]
        if self._joins or self._cuts:
            read, made = ([], []) if session is None else (session.get_inputs(), session.get_outputs())
            self.inner = {**segment, "inputs": [v.name for v in read], "outputs": [v.name for v in made]}
        self.copied_inputs = {*segment["inputs"]} - {*self.inner["inputs"]}
        self._inside = {*self.inner["outputs"]} - {*self.outputs}
        self.names = {*segment["inputs"], *segment["outputs"], *self.inner["inputs"], *self.inner["outputs"]}

    def join_inputs(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`values` and the tensors that are joined of them. ValueError where a session made another piece than
        planned."""
        if not self._joins:
            return values
        made = dict(values)
        for join, raw in _assemble(self._joins, values.__getitem__):
            made[join["name"]] = make_value(raw, join["dtype"], join["shape"])
        return made

    def cut_outputs(self, made: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """What leaves: `made`, and the bytes of what is cut out of it and of `values`. ValueError where the session
        made another tensor than planned."""
        found = _assemble(self._cuts, lambda name: made[name] if name in made else values[name])
        made |= {one["name"]: raw for one, raw in found}
        for name in self._inside:
            del made[name]
        return made

    def bind_copies(self, view: Callable[[str], Any]) -> tuple[list[MemoryCopy], list[MemoryCopy]]:
        """What is copied before and after the segment, where each tensor has its memory for good."""
        before, after = (
            [move.views(view(name), view(one["name"])) for one, own in ends for name, _, move in own]
            for ends in (self._joins, self._cuts)
        )
        return before, after


def run_copies(copies: Sequence[MemoryCopy]) -> None:
    """Copies all of them."""
    for to, source in copies:
        np.copyto(to, source)


def _assemble(ends: Sequence[AssembledTensor], tensor: Callable[[str], Any]) -> list[tuple[Mapping[str, Any], Any]]:
    """Each of these with its bytes, put together of tensors by name."""
    found, memories = list[tuple[Mapping[str, Any], Any]](), dict[str, Any]()
    for one, pieces in ends:
        raw = np.empty(one["bytes"], np.uint8)
        for name, value, move in pieces:
            if (memory := memories.get(name)) is None:
                memory = memories[name] = value_to_bytes(tensor(name), value)
            np.copyto(*move.views(memory, raw))
        found.append((one, raw))
    return found


def _make_piece(one: Mapping[str, Any], piece: Mapping[str, Any]) -> CopiedPiece:
    """A piece of that tensor: its name, what it must be, and how it gets into its place."""
    move = RegionCopy((piece["shape"], piece["cut"]), (one["shape"], piece["region"]), TENSOR_TYPES[one["dtype"]][1])
    return piece["name"], {"name": piece["name"], "dtype": one["dtype"], "shape": piece["shape"]}, move
