"""The regions of a tensor that the n devices of a platform store or read, as arrays."""

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
    """One region of a tensor for each of the n devices of the platform.

    Attributes:
        shape: Shape of the tensor.
        present: True for the devices that have a region, shape (n,).
        cuts: For each axis along which at least one region is shorter than the tensor, the interval of each device,
            shape (n, 2).
    """

    shape: Shape
    present: Flags
    cuts: dict[int, Ints]

    @staticmethod
    def from_regions(shape: Shape, regions: Sequence[Region | None]) -> DeviceBoxes:
        """Return the boxes for a list with the region of each device; None means no region."""
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
        elements = np.where(self.present, 1.0, 0.0)
        for axis, extent in enumerate(self.shape):
            cut = self.cuts.get(axis)
            elements = elements * (extent if cut is None else cut[:, 1] - cut[:, 0])
        return elements


def missing_elements(need: DeviceBoxes, stored: DeviceBoxes, has_copies: bool = False) -> Floats:
    """Return how many elements each device sends to each other device, shape (n senders, n receivers).

    Args:
        need: The regions that devices read.
        stored: The regions that devices store. They must be disjoint, unless `has_copies` is True.
        has_copies: True if all devices that store a region store the same one. The first of them then sends to all
            devices that store none.
    """
    common: NDArray[Any] | float = 1.0
    for axis, extent in enumerate(need.shape):
        a, b = stored.cuts.get(axis), need.cuts.get(axis)
        if a is not None and b is not None:
            stop = np.minimum(a[:, None, 1], b[None, :, 1])
            common = common * np.maximum(stop - np.maximum(a[:, None, 0], b[None, :, 0]), 0)
        elif a is not None:
            common = common * (a[:, 1] - a[:, 0])[:, None]
        elif b is not None:
            common = common * (b[:, 1] - b[:, 0])[None, :]
        else:
            common = common * extent
    # Senders without a region must send 0 elements. If an axis is cut, they do, because their interval is empty.
    # Otherwise they are masked here.
    senders = np.ones_like(stored.present)[:, None] if stored.cuts else stored.present[:, None]
    common = np.asarray(common * senders * need.present[None, :], np.float64)
    if has_copies:
        first = int(np.argmax(stored.present))
        row = np.where(stored.present, 0.0, common[first])
        common = np.zeros_like(common)
        common[first] = row
    common.flat[:: len(common) + 1] = 0.0
    return common
