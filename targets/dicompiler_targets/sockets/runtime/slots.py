"""Memory that frames use one after another: the tensors of segments that have small ones only, bound to them once.

In: sessions and a role's manifest. Out: slots. To make, look up and bind a small tensor takes longer than to compute
it; large ones come and go with their frames, as what a device is said to need counts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .segments import MemoryCopy, SegmentIO
from .values import TENSOR_TYPES, make_value

MAX_BUFFERED_BYTES = 1 << 14
"""Bytes that a tensor in a slot may have."""
MAX_BUFFER_SETS = 8
"""Slots of a role at most; further frames on their way do without."""


class BufferSet:
    """`values`: onnxruntime's value of each small tensor by name, `views`: its bytes. `bindings`: by segment, of those
    that have no other tensors, the binding, the outputs, and what is copied before and after it. Empty without
    `small`."""

    def __init__(
        self,
        small: Mapping[str, tuple[str, Sequence[int]]],
        seams: Sequence[SegmentIO],
        sessions: Sequence[Any],
    ) -> None:
        self.values: dict[str, Any] = {}
        self.views: dict[str, memoryview] = {}
        for name, (dtype, shape) in small.items():
            raw: Any = np.zeros(math.prod(shape) * TENSOR_TYPES[dtype][1], np.uint8)
            self.values[name], self.views[name] = make_value(raw, dtype, shape), memoryview(raw)
        self.bindings: dict[int, tuple[Any, dict[str, Any], list[MemoryCopy], list[MemoryCopy]]] = {}
        for number, (seam, session) in enumerate(zip(seams, sessions, strict=True)):
            if all(name in small for name in seam.names):
                binding = None if session is None else session.io_binding()
                made = {name: self.values[name] for name in seam.outputs}
                self.bindings[number] = binding, made, *seam.bind_copies(self.views.__getitem__)
                if binding is None:
                    continue
                for name in seam.inner["inputs"]:
                    binding.bind_ortvalue_input(name, self.values[name])
                for name in seam.inner["outputs"]:
                    binding.bind_ortvalue_output(name, self.values[name])


class BufferPool:
    """The slots of a role. `sessions`, `seams`: of its segments."""

    def __init__(self, manifest: Mapping[str, Any], sessions: Sequence[Any], seams: Sequence[SegmentIO]) -> None:
        self._seams, self._sessions = seams, sessions
        small = _find_small_tensors(manifest, sessions)
        bound = {name for seam in seams if all(name in small for name in seam.names) for name in seam.names}
        self._small_tensors = {name: value for name, value in small.items() if name in bound}
        self._empty_set = BufferSet({}, (), ())
        self._free = [
            BufferSet(self._small_tensors, self._seams, self._sessions)
        ]  # a role that takes over has no time for it
        self._set_count = 1

    def take(self) -> BufferSet:
        """A slot for a frame that begins, an empty one where there are enough."""
        if self._free:
            return self._free.pop()
        if self._set_count == MAX_BUFFER_SETS:
            return self._empty_set
        self._set_count += 1
        return BufferSet(self._small_tensors, self._seams, self._sessions)

    def give_back(self, slot: BufferSet, unused: bool) -> None:
        """The frame is finished. unused: nothing that is in the slot is still to be sent; else it is let go."""
        if slot is not self._empty_set:
            self._free += [slot] * unused
            self._set_count -= not unused


def _find_small_tensors(manifest: Mapping[str, Any], sessions: Sequence[Any]) -> dict[str, tuple[str, Sequence[int]]]:
    """Type and shape of the small tensors that segments read and make, whose shape is known."""
    found: dict[str, tuple[str, Sequence[int]]] = {}
    known = [(v["name"], v["dtype"], v["shape"]) for v in (*manifest["inputs"], *manifest["transfers"])]
    known += [(value["tensor"], value["dtype"], value["shape"]) for value in manifest["outputs"]]
    for session in filter(None, sessions):
        for value in (*session.get_outputs(), *session.get_inputs()):
            known.append((value.name, value.type[7:-1].upper(), value.shape))  # tensor(float)
    unfit = {name for name, dtype, shape in known if not _is_small(dtype, shape)}
    for name, dtype, shape in known:
        if name not in unfit and found.setdefault(name, (dtype, list(shape))) != (dtype, list(shape)):
            unfit.add(name)  # what is wrong is told where it is made
    return {name: value for name, value in found.items() if name not in unfit}


def _is_small(dtype: str, shape: Sequence[Any] | None) -> bool:
    if dtype not in TENSOR_TYPES or shape is None or not all(isinstance(size, int) and size > 0 for size in shape):
        return False
    return bool(math.prod(shape) * TENSOR_TYPES[dtype][1] <= MAX_BUFFERED_BYTES)
