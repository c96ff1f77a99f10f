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


class Pace:
    """`waiting`: the bytes that are not acknowledged. `allowed`: how many they may be."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._waiting = waiting
        self.allowed = FIRST
        self._given, self._at = 0, time.monotonic()

    def room(self, size: int) -> bool:
        """Whether so many bytes more may be handed over at once."""
        waiting = self._measured()
        if waiting + size > self.allowed:
            return False
        self._hand_over(waiting + size)
        return True

    def wait(self, size: int) -> int:
        """Waits for room; how many of that many bytes may be handed over."""
        pause_s = 5e-5
        while (free := self.allowed - (waiting := self._measured())) < min(size, self.allowed // 2):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        count = min(size, free)
        self._hand_over(waiting + count)
        return count

    def _hand_over(self, waiting: int) -> None:
        self._given, self._at = waiting, time.monotonic()

    def _measured(self) -> int:
        """What is waiting; what became of what was handed over last tells how fast the line is."""
        waiting, seconds = self._waiting(), max(1e-6, time.monotonic() - self._at)
        carried = int((self._given - waiting) / seconds * AHEAD_S)
        if carried > self.allowed < 2 * self._given:  # no more than twice: lines let a little through at once
            self.allowed = min(carried, 2 * self.allowed, MOST)
        elif waiting and self._given > LEAST and seconds > AHEAD_S / 2:  # it was never idle: it is just so fast
            self.allowed = max(LEAST, carried)
        return waiting
