"""Lost devices' processes, and what is told of losses: nobody waits for the one or the other while frames go on.

In: processes whose connections are closed already, events as they happen. Out: why each device was lost, as soon as it
is known; the events in order, told to the user once nothing of them is missing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dicompiler.plugin_api import RunEvent
from dicompiler_targets.sockets.processes import Process, end
from dicompiler_targets.sockets.root_cause import LOSS, Failure, ending

log = logging.getLogger("dicompiler")

ENDING_S = 0.05
"""Seconds that a process takes to end after its connections, at most, if it ends."""


class Telling:
    """`events`: those that were told, in order, to the log and to `on_event`. One whose reason is still open keeps all
    that come after it waiting."""

    def __init__(self, on_event: Callable[[RunEvent], object] | None) -> None:
        self.events: list[RunEvent] = []
        self._on_event = on_event
        self._waiting: deque[tuple[RunEvent, bool]] = deque()

    def __bool__(self) -> bool:
        """Whether something is still to be told."""
        return bool(self._waiting)

    def add(self, event: RunEvent, known: bool = True) -> None:
        """It has happened; known: its reason will not change."""
        self._waiting.append((event, known))
        self._tell()

    def explain(self, device: str, why: str) -> None:
        """The reason of the first loss of that device that is still open."""
        for place, (event, known) in enumerate(self._waiting):
            if not known and event.device == device:
                self._waiting[place] = replace(event, why=why), True
                break
        self._tell()

    def end(self) -> None:
        """Tells what is left with what is known."""
        self._waiting = deque((event, True) for event, _ in self._waiting)
        self._tell()

    def _tell(self) -> None:
        while self._waiting and self._waiting[0][1]:
            event, _ = self._waiting.popleft()
            self.events.append(event)
            log.warning("%s", event.line)
            if self._on_event is not None:
                self._on_event(event)


@dataclass
class _Lost:
    """A process that ends or is ended. known: how it ended was told, or does not matter; until: when it is ended."""

    process: Process
    failure: Failure
    until: float
    known: bool = False


class Leaving:
    """Processes of lost devices until they have ended. explained: called with a device and why it was lost."""

    def __init__(self, explained: Callable[[str, str], None]) -> None:
        self._explained = explained
        self._lost: list[_Lost] = []

    def __bool__(self) -> bool:
        """Whether it is still open why one was lost."""
        return any(not one.known for one in self._lost)

    def add(self, process: Process, failure: Failure) -> None:
        """A lost device's process. Only where no more is known than that its connection ended may it tell more by
        ending itself: all others are ended now."""
        last = failure.rank == LOSS
        self._lost.append(_Lost(process, failure, time.monotonic() + ENDING_S * last))

    def look(self) -> None:
        """Ends those whose time is up, and lets go of those that have ended; never waits."""
        now = time.monotonic()
        for one in tuple(self._lost):
            ended = one.process.popen is None or one.process.exit_code() is not None
            if not ended and now < one.until:
                continue
            if not one.known:
                one.known = True
                found = ending(one.process)
                self._explained(one.process.device, one.failure.message if found is None else found.message)
            if ended:
                self._lost.remove(one)
                one.process.close()
            elif one.process.popen is not None:
                one.process.popen.kill()

    def end(self, others: Sequence[Process]) -> None:
        """Ends these and all others, and waits for them."""
        end([*others, *(one.process for one in self._lost)])
        self._lost = []
