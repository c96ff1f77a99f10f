"""Lost devices on their way back: when each is started again, who has come, and whose turn it is to be taken in.

In: what happens to them. Out: whom to start, whom to tell its peers. It does nothing by itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from dicompiler_targets.sockets.device_process import DeviceProcess

MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.2, 30.0
"""Seconds until a lost device is started again: twice as many after each try in vain, up to the last."""


class ReconnectQueue:
    """start: starts a device; foreign: those that are not ours to start and come by themselves.

    `coming`: the one that has been told its peers and is connecting to them, '' if there is none: one at a time, so
    that each finds all that came before.
    """

    def __init__(self, start: Callable[[str], DeviceProcess], foreign: set[str]) -> None:
        self.start_device, self._manually_started = start, foreign
        self.connecting = ""
        self._greeted: deque[str] = deque()
        self._delays_s: dict[str, float] = {}
        self._restart_at: dict[str, float] = {}
        self._returning: set[str] = set()

    def add_failed(self, name: str) -> None:
        """It may come back."""
        self._delays_s[name] = MIN_RESTART_DELAY_S
        self._schedule_restart(name)

    def retry_later(self, name: str) -> None:
        """A try was in vain."""
        self._delays_s[name] = min(2 * self._delays_s.get(name, MIN_RESTART_DELAY_S), MAX_RESTART_DELAY_S)
        self._schedule_restart(name)

    def pop_due(self) -> list[str]:
        """Those to be started now, each once."""
        found = [name for name, at in self._restart_at.items() if time.monotonic() >= at]
        for name in found:
            del self._restart_at[name]
            self._returning.add(name)
        return found

    def is_returning(self, name: str) -> bool:
        """Whether a process of it is on its way back, as far as we know."""
        return name in self._returning

    def add_greeted(self, name: str) -> None:
        """It has greeted."""
        self._returning.add(name)
        self._greeted.append(name)

    def pop_next(self) -> str:
        """Who may now be told its peers, and is `coming` from then on; '' if nobody, or somebody is."""
        if self.connecting or not self._greeted:
            return ""
        self.connecting = self._greeted.popleft()
        return self.connecting

    def mark_returned(self, name: str) -> None:
        """It is there again."""
        self._remove(name)

    def _schedule_restart(self, name: str) -> None:
        self._remove(name)
        if name not in self._manually_started:
            self._restart_at[name] = time.monotonic() + self._delays_s[name]

    def _remove(self, name: str) -> None:
        self._returning.discard(name)
        self.connecting = "" if self.connecting == name else self.connecting
        if name in self._greeted:
            self._greeted.remove(name)
