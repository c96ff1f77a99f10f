"""What a runtime does for a segment, to be timed: what is left to the engine, and the copies at its ends.

In: a device of a Program. Out: a Call for each of its segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Call, Copying, DeviceProgram
from dicompiler_targets.boxes import Copy
from dicompiler_targets.moves import Peeled, copies
from dicompiler_targets.seams import seams

Views = tuple[NDArray[Any], NDArray[Any]]
"""Of memory, into the first of which the second is copied."""


def calls(device: DeviceProgram) -> tuple[Call, ...]:
    """What a runtime does for each segment of the device."""
    return tuple(Call(seam.segment, partial(_copies, seam)) for seam in seams(device))


def _copies(seam: Peeled, memory: Mapping[str, NDArray[Any]]) -> tuple[Copying, Copying]:
    """Those around a segment, all with numpy: those of C++ take as long but for a microsecond each."""
    before, after = (
        [_views(name, one, memory) for name, whole in ends.items() for one in copies(name, whole, seam.values)]
        for ends in (seam.joins, seam.cuts)
    )
    return partial(_copied, before), partial(_copied, after)


def _views(target: str, copy: Copy, memory: Mapping[str, NDArray[Any]]) -> Views:
    """Blocks of bytes that lie in one piece in both tensors, in rows at equal distances."""
    block = np.dtype(f"u{copy.run}" if copy.run in (1, 2, 4, 8) else f"V{copy.run}")
    counts, steps, further = zip(*copy.loops, strict=True) if copy.loops else ((), (), ())
    source, to = (memory[name].reshape(-1).view(np.uint8) for name in (str(copy.source), target))
    return np.ndarray(counts, block, to, copy.to, further), np.ndarray(counts, block, source, copy.start, steps)


def _copied(views: Sequence[Views]) -> None:
    for to, source in views:
        np.copyto(to, source)
