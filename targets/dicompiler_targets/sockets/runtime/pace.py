"""How much of what is sent may be on its way at once, so that nothing waits long for the line.

In: bytes that the system has taken and the other end has not acknowledged. Out: bytes that may be handed to it now.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_UNACKED_S = 0.5
"""Seconds for which a line is given what it carries. What goes over others of the same line waits behind it, so that
with more, a sign of life comes late on a slow line, and a healthy device is taken for lost."""
MIN_UNACKED_BYTES = 2048
"""Bytes that may always be on their way, in one or two packets."""
INITIAL_UNACKED_BYTES = 2 * MIN_UNACKED_BYTES
"""Bytes that may be at first: they are measured."""
MAX_UNACKED_BYTES = 1 << 30
MIN_PAUSE_S, MAX_PAUSE_S = 5e-5, 0.02
"""Seconds between two looks at a line that has enough."""


class SendPacing:
    """`waiting`: tells the bytes that are not acknowledged. `allowed`: how many they may be."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._unacknowledged_bytes = waiting
        self.allowed = INITIAL_UNACKED_BYTES
        self.pause_s = MIN_PAUSE_S
        self._before, self._given, self._at = 0, 0, time.monotonic()

    def sendable_bytes(self, size: int) -> int:
        """How many of that many bytes may be handed over; 0: none yet, to be asked again after `pause_s`."""
        if self._given + size <= MIN_UNACKED_BYTES:  # it need not be asked for
            self._before = self._given
            return size
        self._before = self._update_rate()
        free = self.allowed - self._before
        if free < min(size, self.allowed // 2):
            self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)
            return 0
        self.pause_s = MIN_PAUSE_S
        return min(size, free)

    def record_sent(self, count: int) -> None:
        """So many bytes were handed over, of those that were free."""
        self._given, self._at = self._before + count, time.monotonic()

    def _update_rate(self) -> int:
        """What is waiting; what became of what was handed over last tells how fast the line is."""
        waiting, seconds = self._unacknowledged_bytes(), max(1e-6, time.monotonic() - self._at)
        carried = int((self._given - waiting) / seconds * MAX_UNACKED_S)
        if carried > self.allowed < 2 * self._given:  # no more than twice: lines let a little through at once
            self.allowed = min(carried, 2 * self.allowed, MAX_UNACKED_BYTES)
        elif (
            waiting and self._given > MIN_UNACKED_BYTES and seconds > MAX_UNACKED_S / 2
        ):  # it was never idle: it is just so fast
            self.allowed = max(MIN_UNACKED_BYTES, carried)
        return waiting
