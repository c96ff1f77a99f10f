"""Failures of devices: how they are noticed, their root cause, the processes of failed devices, and the event log.

Ended processes, lost connections and error messages ⇒ a line that names the device at fault and the cause.
`ClusterState` decides whether the run continues.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dicompiler.plugin_api.artifacts import RunEvent
from dicompiler.plugin_api.utilities import one_line
from dicompiler_targets.sockets.device_connections import DeviceEvent
from dicompiler_targets.sockets.device_process import DeviceProcess, end_all
from dicompiler_targets.sockets.runtime.channel import HeartbeatTimeout
from dicompiler_targets.sockets.runtime.protocol import MessageType, PeerRefused, ProtocolError

log = logging.getLogger("dicompiler")

RANK_CAUSE, RANK_EXIT, RANK_DISCONNECTED, RANK_SUSPECTED = range(4)
CAUSE_WAIT_S = 0.3
"""Seconds to wait for the cause of a failure. A process that crashes loses its connections before its end is seen."""
EXIT_WAIT_S = 0.05
"""Seconds that a process gets to end after its connection has ended, before it is killed."""


@dataclass(frozen=True)
class DeviceFailure:
    """An observation that a device fails. One failure can cause several observations.

    Attributes:
        device: The device that fails.
        message: The observation, as text for a message.
        reporter: The device that reported the failure, or else the failing device itself.
        rank: How certain the cause is. RANK_CAUSE: no other failure can have caused this one. RANK_EXIT: the device's
            process ended. RANK_DISCONNECTED: its connection ended. RANK_SUSPECTED: another device suspects it.
        is_gone: Whether the device is unreachable. A failure plan covers only unreachable devices, and no other errors.
    """

    device: str
    message: str
    reporter: str
    rank: int
    is_gone: bool = False


def find_failure(event: DeviceEvent, devices: Mapping[str, DeviceProcess]) -> DeviceFailure | None:
    """Return the failure that an event reports, or None if the event does not report a failure."""
    name, content = event.device, event.payload
    if event.header is None and isinstance(content, ProtocolError):
        return DeviceFailure(name, f"sent invalid data: {content}", name, RANK_CAUSE)
    if event.header is None and isinstance(content, HeartbeatTimeout):
        message = f"{content}: the device has stopped, or the network to the device is down"
        return DeviceFailure(name, message, name, RANK_CAUSE, is_gone=True)
    if event.header is None and not isinstance(content, OSError | PeerRefused):
        message = f"a message of the device cannot be processed: {type(content).__name__}: {one_line(str(content))}"
        return DeviceFailure(name, message, name, RANK_CAUSE)
    if event.header is None:
        return DeviceFailure(
            name, f"the connection to the device was lost: {content}", name, RANK_DISCONNECTED, is_gone=True
        )
    if event.header.type not in (MessageType.ERROR, MessageType.PEER_FAILED, MessageType.TENSOR_OVERDUE):
        return None
    message, peer = one_line(str(content.get("message"))), content.get("peer")
    if isinstance(peer, str) and peer in devices:
        is_gone = event.header.type is MessageType.PEER_FAILED
        return DeviceFailure(peer, f"device {name!r} reports: {message}", name, RANK_SUSPECTED, is_gone)
    return DeviceFailure(name, message, name, RANK_CAUSE)


def exit_failure(process: DeviceProcess) -> DeviceFailure | None:
    """Return the failure of a process that ended with an error, or None for all other processes.

    If a signal ended the process, the signal is the cause. Otherwise the process may have reported the cause before.
    """
    code, message = process.exit_code(), process.describe_exit()
    if not code or message is None:
        return None
    rank = RANK_CAUSE if code < 0 else RANK_EXIT
    return DeviceFailure(process.device, message, process.device, rank, is_gone=True)


def exit_failures(processes: Iterable[DeviceProcess]) -> list[DeviceFailure]:
    """Return the failures of those processes that ended with an error before they sent their report."""
    failures = (exit_failure(process) for process in processes if process.report is None)
    return [failure for failure in failures if failure is not None]


def find_root_cause(failures: Sequence[DeviceFailure]) -> DeviceFailure:
    """Return the failure that has caused all others. `failures` are in the order in which they were observed."""
    # If device a suspects b, and b suspects c, then c, which suspects no other device, is at fault. If a and b suspect
    # each other, the first report counts: the device that is suspected first loses its connections, and then suspects
    # the others.
    suspecting = {failure.reporter for failure in failures if failure.rank == RANK_SUSPECTED}
    # A device that suspects another one ends because of that, so its own end is a consequence and not the cause.
    unexplained = [
        failure
        for failure in failures
        if failure.device not in suspecting or failure.rank not in (RANK_EXIT, RANK_DISCONNECTED)
    ]
    return min(unexplained, key=lambda failure: (failure.rank > RANK_CAUSE, failure.device in suspecting, failure.rank))


class EventLog:
    """The events of a run: failures, takeovers (the other devices use a failure plan) and returns of devices.

    Each event is written to the log, and `on_event` is called with it. `ClusterSession` creates the log. An event is
    reported when its final reason is known. Later events wait for it, because all events are reported in order.

    Attributes:
        events: The reported events.
    """

    def __init__(self, on_event: Callable[[RunEvent], object] | None) -> None:
        self.events: list[RunEvent] = []
        self._on_event = on_event
        self._pending: deque[tuple[RunEvent, bool]] = deque()

    def __bool__(self) -> bool:
        """Return True if some events have not been reported yet."""
        return bool(self._pending)

    def add(self, event: RunEvent, is_final: bool = True) -> None:
        """Add an event. If the reason is not final, the event waits for a call of `set_reason` or `flush`."""
        self._pending.append((event, is_final))
        self._emit()

    def set_reason(self, device: str, reason: str) -> None:
        """Set the reason of the device's oldest failure that waits for its final reason."""
        for index, (event, is_final) in enumerate(self._pending):
            if not is_final and event.device == device:
                self._pending[index] = replace(event, reason=reason), True
                break
        self._emit()

    def flush(self) -> None:
        """Report all events with the reasons that are known now."""
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
    """The process of a failed device. It is killed at `kill_at` (time.monotonic) unless it has ended.

    `is_explained` is True after the reason of the failure was reported.
    """

    process: DeviceProcess
    failure: DeviceFailure
    kill_at: float
    is_explained: bool = False


class FailedProcesses:
    """The processes of failed devices, until they have ended. The run continues meanwhile.

    `ClusterState` creates the collection. `on_reason(device, reason)` is called once for each failure, when the reason
    of the failure is final.
    """

    def __init__(self, on_reason: Callable[[str, str], None]) -> None:
        self._on_reason = on_reason
        self._processes: list[_FailedProcess] = []

    def __bool__(self) -> bool:
        """Return True if a process has failed for a reason that is not known yet."""
        return any(not failed.is_explained for failed in self._processes)

    def add(self, process: DeviceProcess, failure: DeviceFailure) -> None:
        """Add the process of a failed device.

        If only the connection of the process ended, the process gets EXIT_WAIT_S to end, because its exit code may show
        the cause. All other processes are killed at once.
        """
        wait_s = EXIT_WAIT_S if failure.rank == RANK_DISCONNECTED else 0.0
        self._processes.append(_FailedProcess(process, failure, time.monotonic() + wait_s))

    def poll(self) -> None:
        """Kill the processes that have not ended in time, and remove those that have ended.

        Do not wait for any of them.
        """
        now = time.monotonic()
        for failed in tuple(self._processes):
            process = failed.process
            has_ended = process.popen is None or process.exit_code() is not None
            if not has_ended and now < failed.kill_at:
                continue
            if not failed.is_explained:
                failed.is_explained = True
                # After other devices suspect a device, its process ends because its connections are closed. Its exit
                # code then does not show the cause.
                observed = None if failed.failure.rank == RANK_SUSPECTED else exit_failure(process)
                self._on_reason(process.device, failed.failure.message if observed is None else observed.message)
            if has_ended:
                self._processes.remove(failed)
                process.close()
            elif process.popen is not None:
                process.popen.kill()

    def end_all(self, others: Sequence[DeviceProcess]) -> None:
        """Kill the processes of failed devices and those in `others`, and wait until all have ended."""
        end_all([*others, *(failed.process for failed in self._processes)])
        self._processes = []
