"""Lost devices on their way back: when each is started again, who has come, and whose turn it is to be taken in.

In: what happens to them. Out: whom to start, whom to tell its peers. It does nothing by itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from dicompiler_targets.sockets.processes import Process

SHORTEST_S, LONGEST_S = 0.2, 30.0
"""Seconds until a lost device is started again: twice as many after each try in vain, up to the last."""


class Returns:
    """start: starts a device; foreign: those that are not ours to start and come by themselves.

    `coming`: the one that has been told its peers and is connecting to them, '' if there is none: one at a time, so
    that each finds all that came before.
    """

    def __init__(self, start: Callable[[str], Process], foreign: set[str]) -> None:
        self.start, self._foreign = start, foreign
        self.coming = ""
        self._waiting: deque[str] = deque()
        self._pauses: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._begun: set[str] = set()

    def lost(self, name: str) -> None:
        """It may come back."""
        self._pauses[name] = SHORTEST_S
        self._again(name)

    def failed(self, name: str) -> None:
        """A try was in vain."""
        self._pauses[name] = min(2 * self._pauses.get(name, SHORTEST_S), LONGEST_S)
        self._again(name)

    def due(self) -> list[str]:
        """Those to be started now, each once."""
        found = [name for name, at in self._due.items() if time.monotonic() >= at]
        for name in found:
            del self._due[name]
            self._begun.add(name)
        return found

    def awaits(self, name: str) -> bool:
        """Whether a process of it is on its way back, as far as we know."""
        return name in self._begun

    def arrived(self, name: str) -> None:
        """It has greeted."""
        self._begun.add(name)
        self._waiting.append(name)

    def next(self) -> str:
        """Who may now be told its peers, and is `coming` from then on; '' if nobody, or somebody is."""
        if self.coming or not self._waiting:
            return ""
        self.coming = self._waiting.popleft()
        return self.coming

    def back(self, name: str) -> None:
        """It is there again."""
        self._forget(name)

    def _again(self, name: str) -> None:
        self._forget(name)
        if name not in self._foreign:
            self._due[name] = time.monotonic() + self._pauses[name]

    def _forget(self, name: str) -> None:
        self._begun.discard(name)
        self.coming = "" if self.coming == name else self.coming
        if name in self._waiting:
            self._waiting.remove(name)
