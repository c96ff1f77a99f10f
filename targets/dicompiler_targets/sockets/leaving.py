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

from dicompiler.plugin_api.artifacts import RunEvent
from dicompiler_targets.sockets.device_process import DeviceProcess, end_all
from dicompiler_targets.sockets.failures import RANK_DISCONNECTED, DeviceFailure, exit_failure

log = logging.getLogger("dicompiler")

EXIT_WAIT_S = 0.05
"""Seconds that a process takes to end after its connections, at most, if it ends."""


class EventLog:
    """`events`: those that were told, in order, to the log and to `on_event`. One whose reason is still open keeps all
    that come after it waiting."""

    def __init__(self, on_event: Callable[[RunEvent], object] | None) -> None:
        self.events: list[RunEvent] = []
        self._on_event = on_event
        self._pending: deque[tuple[RunEvent, bool]] = deque()

    def __bool__(self) -> bool:
        """Whether something is still to be told."""
        return bool(self._pending)

    def add(self, event: RunEvent, known: bool = True) -> None:
        """It has happened; known: its reason will not change."""
        self._pending.append((event, known))
        self._emit()

    def set_reason(self, device: str, why: str) -> None:
        """The reason of the first loss of that device that is still open."""
        for place, (event, known) in enumerate(self._pending):
            if not known and event.device == device:
                self._pending[place] = replace(event, reason=why), True
                break
        self._emit()

    def flush(self) -> None:
        """Tells what is left with what is known."""
        self._pending = deque((event, True) for event, _ in self._pending)
        self._emit()

    def _emit(self) -> None:
        while self._pending and self._pending[0][1]:
            event, _ = self._pending.popleft()
            self.events.append(event)
            log.warning("%s", event.message)
            if self._on_event is not None:
                self._on_event(event)


@dataclass
class _FailedProcess:
    """A process that ends or is ended. known: how it ended was told, or does not matter; until: when it is ended."""

    process: DeviceProcess
    failure: DeviceFailure
    kill_at: float
    is_explained: bool = False


class FailedProcesses:
    """Processes of lost devices until they have ended. explained: called with a device and why it was lost."""

    def __init__(self, explained: Callable[[str, str], None]) -> None:
        self._on_reason = explained
        self._processes: list[_FailedProcess] = []

    def __bool__(self) -> bool:
        """Whether it is still open why one was lost."""
        return any(not one.is_explained for one in self._processes)

    def add(self, process: DeviceProcess, failure: DeviceFailure) -> None:
        """A lost device's process. Only where no more is known than that its connection ended may it tell more by
        ending itself: all others are ended now."""
        last = failure.rank == RANK_DISCONNECTED
        self._processes.append(_FailedProcess(process, failure, time.monotonic() + EXIT_WAIT_S * last))

    def poll(self) -> None:
        """Ends those whose time is up, and lets go of those that have ended; never waits."""
        now = time.monotonic()
        for one in tuple(self._processes):
            ended = one.process.popen is None or one.process.exit_code() is not None
            if not ended and now < one.kill_at:
                continue
            if not one.is_explained:
                one.is_explained = True
                found = exit_failure(one.process)
                self._on_reason(one.process.device, one.failure.message if found is None else found.message)
            if ended:
                self._processes.remove(one)
                one.process.close()
            elif one.process.popen is not None:
                one.process.popen.kill()

    def end_all(self, others: Sequence[DeviceProcess]) -> None:
        """Ends these and all others, and waits for them."""
        end_all([*others, *(one.process for one in self._processes)])
        self._processes = []
