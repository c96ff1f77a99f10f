"""Boxes: which region of a tensor each device holds or needs, and the bytes and seconds of what is missing.

Boxes that are needed + boxes that are held → bytes from device to device (n, n);   … + Platform → seconds.
n counts the platform's devices, in platform order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Platform, Region, Shape, full
from dicompiler_strategies.tables.footprints import Floats, Ints

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Boxes:
    """One region of a tensor of `shape` for each device that is `present` (n,).

    cuts: axis → (n, 2) intervals, for the axes along which some region is not all of the tensor.
    """

    shape: Shape
    present: Flags
    cuts: dict[int, Ints]

    @staticmethod
    def of(shape: Shape, regions: Sequence[Region | None]) -> Boxes:
        """From a region, or None, for each device."""
        present = np.array([region is not None for region in regions])
        whole = full(shape)
        cuts = {}
        for axis, interval in enumerate(whole):
            intervals = [(0, 0) if region is None else region[axis] for region in regions]
            if any(region is not None and region[axis] != interval for region in regions):
                cuts[axis] = np.array(intervals, np.int64)
        return Boxes(shape, present, cuts)


def missing(need: Boxes, held: Boxes, copies: bool = False) -> Floats:
    """(n, n): elements that go from device (row) to device (column): what the column needs and does not hold.

    The held regions are disjoint; or, with `copies`, all the same, and the first device that holds it sends it.
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
    # where there are cuts, an absent device's is empty already
    senders = np.ones_like(held.present)[:, None] if held.cuts else held.present[:, None]
    common = np.asarray(common * senders * need.present[None, :], np.float64)
    if copies:
        first = int(np.argmax(held.present))
        row = np.where(held.present, 0.0, common[first])
        common = np.zeros_like(common)
        common[first] = row
    common.flat[:: len(common) + 1] = 0.0
    return common


@dataclass(frozen=True, eq=False)
class Wire:
    """The platform's network, asked for the time of many boxes at once."""

    platform: Platform

    @cached_property
    def _hosts(self) -> Ints:
        """(n,): the number of each device's host."""
        names = [host.name for host in self.platform.hosts]
        return np.array([names.index(device.host) for device in self.platform.devices], np.int64)

    @cached_property
    def _rate(self) -> float | None:
        """Seconds for a byte where every device has a host of its own, all links are alike, and nothing else takes
        time; else None."""
        rate, message, wait = self.platform.times
        between = rate[~np.eye(len(rate), dtype=np.bool_)]
        if message.any() or wait.any() or not between.size or (between != between[0]).any() or not between[0]:
            return None
        return float(between[0])

    def seconds(self, count: Floats) -> float:
        """Until the network has carried `count` bytes (n, n; none from a device to itself), all of them ready at the
        start and one message for each pair: one after another on a shared medium or a gateway, all lines of a switch
        at once. The latency is waited for once."""
        switch = self.platform.network.kind == "switch"
        if self._rate is not None:
            most = max(count.sum(axis=0).max(), count.sum(axis=1).max()) if switch else count.sum()
            return float(most) * self._rate
        rate, message, wait = self.platform.times
        sent = count > 0
        times = count * rate + sent * message
        if switch:
            ends = np.zeros((2, len(self.platform.hosts)))
            np.add.at(ends[0], self._hosts, times.sum(axis=1))
            np.add.at(ends[1], self._hosts, times.sum(axis=0))
            busy = float(ends.max())
        else:
            busy = float(times.sum())
        return busy + float(wait[sent].max(initial=0.0))
