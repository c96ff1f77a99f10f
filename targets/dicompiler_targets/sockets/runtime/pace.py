"""How much of what is sent may be on its way at once, so that nothing waits long for the line.

In: bytes that the system has taken and the other end has not acknowledged. Out: bytes that may be handed to it now.
"""

from __future__ import annotations

import time
from collections.abc import Callable

AHEAD_S = 0.5
"""Seconds for which a line is given what it carries. What goes over others of the same line waits behind it, so that
with more, a sign of life comes late on a slow line, and a healthy device is taken for lost."""
LEAST = 2048
"""Bytes that may always be on their way, in one or two packets."""
FIRST = 2 * LEAST
"""Bytes that may be at first: they are measured."""
MOST = 1 << 30
SHORTEST_S, LONGEST_S = 5e-5, 0.02
"""Seconds between two looks at a line that has enough."""


class Pace:
    """`waiting`: tells the bytes that are not acknowledged. `allowed`: how many they may be."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._waiting = waiting
        self.allowed = FIRST
        self.pause_s = SHORTEST_S
        self._before, self._given, self._at = 0, 0, time.monotonic()

    def free(self, size: int) -> int:
        """How many of that many bytes may be handed over; 0: none yet, to be asked again after `pause_s`."""
        if self._given + size <= LEAST:  # it need not be asked for
            self._before = self._given
            return size
        self._before = self._measured()
        free = self.allowed - self._before
        if free < min(size, self.allowed // 2):
            self.pause_s = min(2 * self.pause_s, LONGEST_S)
            return 0
        self.pause_s = SHORTEST_S
        return min(size, free)

    def gave(self, count: int) -> None:
        """So many bytes were handed over, of those that were free."""
        self._given, self._at = self._before + count, time.monotonic()

    def _measured(self) -> int:
        """What is waiting; what became of what was handed over last tells how fast the line is."""
        waiting, seconds = self._waiting(), max(1e-6, time.monotonic() - self._at)
        carried = int((self._given - waiting) / seconds * AHEAD_S)
        if carried > self.allowed < 2 * self._given:  # no more than twice: lines let a little through at once
            self.allowed = min(carried, 2 * self.allowed, MOST)
        elif waiting and self._given > LEAST and seconds > AHEAD_S / 2:  # it was never idle: it is just so fast
            self.allowed = max(LEAST, carried)
        return waiting
