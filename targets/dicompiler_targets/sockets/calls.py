"""What a runtime does for a segment, to be timed: what is left to the engine, and the copies at its ends.

In: a device of a Program. Out: a Call for each of its segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Call, Copying, DeviceProgram, Segment
from dicompiler_targets.moves import Peeled
from dicompiler_targets.seams import copies_document, seams
from dicompiler_targets.sockets.runtime.seams import Seam, copied


def calls(device: DeviceProgram) -> tuple[Call, ...]:
    """What a runtime does for each segment of the device."""
    both = zip(device.segments, seams(device), strict=True)
    return tuple(Call(one.segment, partial(_copies, own, one)) for own, one in both)


def _copies(segment: Segment, seam: Peeled, memory: Mapping[str, NDArray[Any]]) -> tuple[Copying, Copying]:
    """Those around a segment, all with numpy: those of C++ take as long but for a microsecond each."""
    ends = {"inputs": segment.inputs, "outputs": segment.outputs, **copies_document(seam)}
    before, after = Seam(ends, None).bound(lambda name: memory[name].reshape(-1).view(np.uint8))
    return partial(copied, before), partial(copied, after)
