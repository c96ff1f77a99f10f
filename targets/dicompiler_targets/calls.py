"""What a runtime does for a segment, to be timed: what is left to the engine, and the copies at its ends.

In: a device of a Program. Out: a Call for each of its segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import DeviceProgram
from dicompiler.plugin_api.artifacts import CopyFunction, SegmentCall
from dicompiler_targets.boxes import StridedCopy
from dicompiler_targets.copy_hoisting import HoistedSegment, make_copies
from dicompiler_targets.segment_io import hoist_device_copies

CopyViews = tuple[NDArray[Any], NDArray[Any]]
"""Of memory, into the first of which the second is copied."""


def make_segment_calls(device: DeviceProgram) -> tuple[SegmentCall, ...]:
    """What a runtime does for each segment of the device."""
    return tuple(SegmentCall(seam.segment, partial(_make_copy_functions, seam)) for seam in hoist_device_copies(device))


def _make_copy_functions(seam: HoistedSegment, memory: Mapping[str, NDArray[Any]]) -> tuple[CopyFunction, CopyFunction]:
    """Those around a segment, all with numpy: those of C++ take as long but for a microsecond each."""
    before, after = (
        [
            _make_copy_views(name, one, memory)
            for name, whole in ends.items()
            for one in make_copies(name, whole, seam.values)
        ]
        for ends in (seam.assembled_inputs, seam.assembled_outputs)
    )
    return partial(_copy_views, before), partial(_copy_views, after)


def _make_copy_views(target: str, copy: StridedCopy, memory: Mapping[str, NDArray[Any]]) -> CopyViews:
    """Blocks of bytes that lie in one piece in both tensors, in rows at equal distances."""
    block = np.dtype(f"u{copy.run_bytes}" if copy.run_bytes in (1, 2, 4, 8) else f"V{copy.run_bytes}")
    counts, steps, further = zip(*copy.loops, strict=True) if copy.loops else ((), (), ())
    source, to = (memory[name].reshape(-1).view(np.uint8) for name in (str(copy.source), target))
    return np.ndarray(counts, block, to, copy.target_offset, further), np.ndarray(
        counts, block, source, copy.source_offset, steps
    )


def _copy_views(views: Sequence[CopyViews]) -> None:
    for to, source in views:
        np.copyto(to, source)
