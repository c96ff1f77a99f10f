"""Regions of a tensor on each device, as arrays, and the missing elements.

n is the number of the team's devices in platform order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Region, Shape
from dicompiler.plugin_api.regions import full_region
from dicompiler_strategies.tables.choice_footprints import Floats, Ints

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class DeviceBoxes:
    """One region of a tensor for each device.

    Attributes:
        shape: Shape of the tensor.
        present: True (n,) for the devices that have a region.
        cuts: Axis → intervals (n, 2), for the axes along which a region is not the whole tensor.
    """

    shape: Shape
    present: Flags
    cuts: dict[int, Ints]

    @staticmethod
    def from_regions(shape: Shape, regions: Sequence[Region | None]) -> DeviceBoxes:
        """Return the boxes from one region, or None, for each device."""
        present = np.array([region is not None for region in regions])
        whole = full_region(shape)
        cuts = {}
        for axis, interval in enumerate(whole):
            intervals = [(0, 0) if region is None else region[axis] for region in regions]
            if any(region is not None and region[axis] != interval for region in regions):
                cuts[axis] = np.array(intervals, np.int64)
        return DeviceBoxes(shape, present, cuts)

    @cached_property
    def sizes(self) -> Floats:
        """Number of elements (n,) of each region."""
        elements = np.where(self.present, 1.0, 0.0)
        for axis, extent in enumerate(self.shape):
            cut = self.cuts.get(axis)
            elements = elements * (extent if cut is None else cut[:, 1] - cut[:, 0])
        return elements


def missing_elements(need: DeviceBoxes, held: DeviceBoxes, has_copies: bool = False) -> Floats:
    """Return the elements (n, n) that are sent from device (row) to device (column).

    The regions in `held` are disjoint. With `has_copies` they are all the same, and the first device sends them.
    """
    common: NDArray[Any] | float = 1.0
    for axis, extent in enumerate(need.shape):
        a, b = held.cuts.get(axis), need.cuts.get(axis)
        if a is not None and b is not None:
            stop = np.minimum(a[:, None, 1], b[None, :, 1])
            common = common * np.maximum(stop - np.maximum(a[:, None, 0], b[None, :, 0]), 0)
        elif a is not None:
            common = common * (a[:, 1] - a[:, 0])[:, None]
        elif b is not None:
            common = common * (b[:, 1] - b[:, 0])[None, :]
        else:
            common = common * extent
    # With cuts, the interval of an absent device is empty already.
    senders = np.ones_like(held.present)[:, None] if held.cuts else held.present[:, None]
    common = np.asarray(common * senders * need.present[None, :], np.float64)
    if has_copies:
        first = int(np.argmax(held.present))
        row = np.where(held.present, 0.0, common[first])
        common = np.zeros_like(common)
        common[first] = row
    common.flat[:: len(common) + 1] = 0.0
    return common
