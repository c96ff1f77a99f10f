"""Failures of a run: what was noticed, the root cause, the processes of failed devices, and the event log.

Ended processes, lost connections and error messages ⇒ one line that names the device at fault and the cause.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dicompiler.plugin_api.artifacts import RunEvent
from dicompiler.plugin_api.utilities import one_line
from dicompiler_targets.sockets.device_process import DeviceProcess, end_all
from dicompiler_targets.sockets.runtime.channel import HeartbeatTimeout
from dicompiler_targets.sockets.runtime.protocol import MessageHeader, MessageType, ProtocolError

log = logging.getLogger("dicompiler")

RANK_CAUSE, RANK_EXIT, RANK_DISCONNECTED, RANK_SUSPECTED = range(4)
EXIT_WAIT_S = 0.05
"""Seconds to wait for the end of a process after its connections ended."""


@dataclass(frozen=True)
class DeviceEvent:
    """A message that a device sent, or the end of its connection.

    Attributes:
        device: The device.
        header: The message's header; None for the end of the connection.
        payload: The payload (decoded for JSON messages), or the exception that ended the connection.
        received_at: When it arrived (time.perf_counter).
    """

    device: str
    header: MessageHeader | None
    payload: Any
    received_at: float = 0.0


@dataclass(frozen=True)
class DeviceFailure:
    """One observation of a failure.

    Attributes:
        device: The device that fails.
        message: What was observed.
        reporter: The device that reported it; the failing device itself for other observations.
        rank: How certain the cause is. RANK_CAUSE: nothing else can have caused it. RANK_EXIT: the device's process
            ended. RANK_DISCONNECTED: its connection ended. RANK_SUSPECTED: another device suspects it.
        is_gone: The device may have no other fault than that it is unreachable.
    """

    device: str
    message: str
    reporter: str
    rank: int
    is_gone: bool = False


def find_failure(event: DeviceEvent, devices: Mapping[str, DeviceProcess]) -> DeviceFailure | None:
    """Return the failure that an event reports; None for all other messages."""
    name, content = event.device, event.payload
    if event.header is None and isinstance(content, ProtocolError):
        return DeviceFailure(name, f"it sent invalid data: {content}", name, RANK_CAUSE)
    if event.header is None and isinstance(content, HeartbeatTimeout):
        message = f"{content}: it has stopped, or the network to it is down"
        return DeviceFailure(name, message, name, RANK_CAUSE, is_gone=True)
    if event.header is None:
        return DeviceFailure(name, f"its connection was lost: {content}", name, RANK_DISCONNECTED, is_gone=True)
    if event.header.type not in (MessageType.ERROR, MessageType.PEER_FAILED, MessageType.TENSOR_OVERDUE):
        return None
    message, peer = one_line(str(content.get("message"))), content.get("peer")
    if isinstance(peer, str) and peer in devices:
        is_gone = event.header.type is MessageType.PEER_FAILED
        return DeviceFailure(peer, f"device {name!r} reports: {message}", name, RANK_SUSPECTED, is_gone)
    return DeviceFailure(name, message, name, RANK_CAUSE)


def exit_failure(process: DeviceProcess) -> DeviceFailure | None:
    """Return the failure of a process that ended with an error; None otherwise.

    A signal is a cause. A process that ended by itself has reported the cause, if it could.
    """
    code, message = process.exit_code(), process.describe_exit()
    if not code or message is None:
        return None
    rank = RANK_CAUSE if code < 0 else RANK_EXIT
    return DeviceFailure(process.device, message, process.device, rank, is_gone=True)


def exit_failures(processes: Iterable[DeviceProcess]) -> list[DeviceFailure]:
    """Return the failures of processes that ended with an error before they sent their report."""
    failures = (exit_failure(process) for process in processes if process.report is None)
    return [failure for failure in failures if failure is not None]


def format_root_cause(failures: Sequence[DeviceFailure], devices: Mapping[str, DeviceProcess]) -> str:
    """Return a line about the failure that caused all others."""
    # If devices suspect each other in a chain, the last one, which suspects nobody, blocks the others.
    suspecting = {failure.reporter for failure in failures if failure.rank == RANK_SUSPECTED}
    cause = min(failures, key=lambda failure: (failure.rank > RANK_CAUSE, failure.device in suspecting, failure.rank))
    return f"{devices[cause.device].title}: {cause.message}"


class EventLog:
    """The failures, takeovers and returns of a run, reported in order to the log and to `on_event`.

    An event without a known reason delays all later ones.

    Attributes:
        events: The reported events.
    """

    def __init__(self, on_event: Callable[[RunEvent], object] | None) -> None:
        self.events: list[RunEvent] = []
        self._on_event = on_event
        self._pending: deque[tuple[RunEvent, bool]] = deque()

    def __bool__(self) -> bool:
        """Return True if events are not reported yet."""
        return bool(self._pending)

    def add(self, event: RunEvent, is_final: bool = True) -> None:
        """Add an event; unless it is final, `set_reason` completes it."""
        self._pending.append((event, is_final))
        self._emit()

    def set_reason(self, device: str, reason: str) -> None:
        """Complete the first failure of that device that is not final."""
        for place, (event, is_final) in enumerate(self._pending):
            if not is_final and event.device == device:
                self._pending[place] = replace(event, reason=reason), True
                break
        self._emit()

    def flush(self) -> None:
        """Report all events with the reasons known so far."""
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
    """The process of a failed device.

    Attributes:
        process: The process; its connection is closed.
        failure: What was observed.
        kill_at: When it is killed if it has not ended (time.monotonic).
        is_explained: The reason of the failure was reported.
    """

    process: DeviceProcess
    failure: DeviceFailure
    kill_at: float
    is_explained: bool = False


class FailedProcesses:
    """The processes of failed devices, until they have ended. Frames never wait for them."""

    def __init__(self, on_reason: Callable[[str, str], None]) -> None:
        """Create an empty collection; `on_reason` is called once per failure: (device, reason)."""
        self._on_reason = on_reason
        self._processes: list[_FailedProcess] = []

    def __bool__(self) -> bool:
        """Return True if the reason of a failure is not known yet."""
        return any(not failed.is_explained for failed in self._processes)

    def add(self, process: DeviceProcess, failure: DeviceFailure) -> None:
        """Add the process of a failed device.

        If only its connection ended, its exit may tell more, so it gets time to end. All others are killed at once.
        """
        wait_s = EXIT_WAIT_S if failure.rank == RANK_DISCONNECTED else 0.0
        self._processes.append(_FailedProcess(process, failure, time.monotonic() + wait_s))

    def poll(self) -> None:
        """Kill processes after their time limit, and remove those that have ended; never waits."""
        now = time.monotonic()
        for failed in tuple(self._processes):
            process = failed.process
            has_ended = process.popen is None or process.exit_code() is not None
            if not has_ended and now < failed.kill_at:
                continue
            if not failed.is_explained:
                failed.is_explained = True
                observed = exit_failure(process)
                self._on_reason(process.device, failed.failure.message if observed is None else observed.message)
            if has_ended:
                self._processes.remove(failed)
                process.close()
            elif process.popen is not None:
                process.popen.kill()

    def end_all(self, others: Sequence[DeviceProcess]) -> None:
        """Kill these and all other processes, and wait for them."""
        end_all([*others, *(failed.process for failed in self._processes)])
        self._processes = []
