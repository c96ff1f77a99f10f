"""Failures of devices: how they are noticed, their root cause, the processes of failed devices, and the event log.

Two devices that cannot reach each other report each other, so only reports of several devices show which device is cut
off. A device whose process ends with an error is only suspected at first: its last message may still arrive and name
another device as the cause.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dicompiler.plugin_api.artifacts import RunEvent
from dicompiler.plugin_api.utilities import one_line
from dicompiler_targets.sockets.device_connections import DeviceEvent, DeviceProcess, end_all
from dicompiler_targets.sockets.runtime.channel import HeartbeatTimeout
from dicompiler_targets.sockets.runtime.protocol import MessageType, PeerRefused, ProtocolError

log = logging.getLogger("dicompiler")

RANK_CAUSE, RANK_EXIT, RANK_DISCONNECTED, RANK_SUSPECTED = range(4)
CAUSE_WAIT_S = 0.3
"""Seconds to wait for the cause of a failure: a process's end is noticed later than the end of its connections."""
EXIT_WAIT_S = 0.05
"""Seconds from the report that a device's connection ended until its process is killed, if it still runs."""


@dataclass(frozen=True)
class DeviceFailure:
    """An observation that a device has failed. One failure can cause several observations.

    Attributes:
        device: The device that has failed.
        message: The observation, as text for an error message.
        reporter: The device that observed the failure; `device` if no other device did.
        rank: How certain the cause is. RANK_CAUSE: no other failure can have caused this one. RANK_EXIT: the device's
            process ended. RANK_DISCONNECTED: its connection ended. RANK_SUSPECTED: another device suspects it.
        is_unreachable: True if the device is unreachable. Failure plans cover only such failures.
    """

    device: str
    message: str
    reporter: str
    rank: int
    is_unreachable: bool = False


def find_failure(event: DeviceEvent, devices: Mapping[str, DeviceProcess]) -> DeviceFailure | None:
    """Return the failure that an event (a message or the end of a connection) reports; None if there is none."""
    name, content = event.device, event.payload
    if event.header is None and isinstance(content, ProtocolError):
        return DeviceFailure(name, f"sent invalid data: {content}", name, RANK_CAUSE)
    if event.header is None and isinstance(content, HeartbeatTimeout):
        message = f"{content}: the device has stopped, or the network to the device is down"
        return DeviceFailure(name, message, name, RANK_CAUSE, is_unreachable=True)
    if event.header is None and not isinstance(content, OSError | PeerRefused):
        message = f"a message of the device cannot be processed: {type(content).__name__}: {one_line(str(content))}"
        return DeviceFailure(name, message, name, RANK_CAUSE)
    if event.header is None:
        return DeviceFailure(
            name, f"the connection to the device was lost: {content}", name, RANK_DISCONNECTED, is_unreachable=True
        )
    if event.header.type not in (MessageType.ERROR, MessageType.PEER_FAILED, MessageType.TENSOR_OVERDUE):
        return None
    message, peer = one_line(str(content.get("message"))), content.get("peer")
    if isinstance(peer, str) and peer in devices:
        is_unreachable = event.header.type is MessageType.PEER_FAILED
        return DeviceFailure(peer, f"device {name!r} reports: {message}", name, RANK_SUSPECTED, is_unreachable)
    return DeviceFailure(name, message, name, RANK_CAUSE)


def exit_failure(process: DeviceProcess) -> DeviceFailure | None:
    """Return the failure of a process that ended with an error, or None for all other processes."""
    code, message = process.exit_code(), process.describe_exit()
    if not code or message is None:
        return None
    # A process that no signal ended may have named another cause in an earlier message.
    rank = RANK_CAUSE if code < 0 else RANK_EXIT
    return DeviceFailure(process.device, message, process.device, rank, is_unreachable=True)


def exit_failures(processes: Iterable[DeviceProcess]) -> list[DeviceFailure]:
    """Return the failures of processes that ended with an error before they sent the report of the run."""
    failures = (exit_failure(process) for process in processes if process.report is None)
    return [failure for failure in failures if failure is not None]


def find_root_cause(failures: Sequence[DeviceFailure]) -> DeviceFailure:
    """Return the failure that has caused all others; `failures` are in the order of observation."""
    # If device a suspects b, and b suspects c, then c is at fault, because c suspects no other device. If a and b
    # suspect each other, the device in the first report is at fault: it loses its connections first, and suspects the
    # others because of that.
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

    An event is reported (by a warning and a call of `on_event`) when its final reason is known. All events are reported
    in order, so later events wait for it.

    Attributes:
        events: The events that were reported so far.
    """

    def __init__(self, on_event: Callable[[RunEvent], object] | None) -> None:
        self.events: list[RunEvent] = []
        self._on_event = on_event
        self._pending: deque[tuple[RunEvent, bool]] = deque()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, event: RunEvent, is_final: bool = True) -> None:
        """Add an event. If the reason is not final, the event waits for a call of `set_reason` or `flush`."""
        self._pending.append((event, is_final))
        self._emit()

    def set_reason(self, device: str, reason: str) -> None:
        """Set the final reason of the device's oldest failure that has none, and report the failure."""
        for index, (event, is_final) in enumerate(self._pending):
            if not is_final and event.device == device:
                self._pending[index] = replace(event, reason=reason), True
                break
        self._emit()

    def flush(self) -> None:
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
        process: The process.
        failure: The failure, as it was first observed.
        kill_at: When the process is killed if it has not ended (time.monotonic).
        is_explained: True after the reason of the failure was reported.
    """

    process: DeviceProcess
    failure: DeviceFailure
    kill_at: float
    is_explained: bool = False


def _final_reason(observed_first: DeviceFailure, exit_observed: DeviceFailure | None) -> str:
    """Return the cause of a failure, from the first observation and from the end of the device's process, if it ended.

    A device that others suspect may have ended only because its connections were closed. The end of its process then
    shows the cause only if a signal ended it.
    """
    is_consequence = observed_first.rank == RANK_SUSPECTED and exit_observed and exit_observed.rank != RANK_CAUSE
    return observed_first.message if exit_observed is None or is_consequence else exit_observed.message


class FailedProcesses:
    """The processes of failed devices that have not ended yet.

    `on_reason(device, reason)` is called once for each failure, when the process has ended or is killed.
    """

    def __init__(self, on_reason: Callable[[str, str], None]) -> None:
        self._on_reason = on_reason
        self._processes: list[_FailedProcess] = []

    def __bool__(self) -> bool:
        """Return True if the reason of a failure has not been reported yet."""
        return any(not failed.is_explained for failed in self._processes)

    def add(self, process: DeviceProcess, failure: DeviceFailure) -> None:
        # Connections end before a process does, so other devices may report the failure first. The process gets time to
        # end, because its exit code may show the cause.
        wait_s = EXIT_WAIT_S if failure.rank in (RANK_DISCONNECTED, RANK_SUSPECTED) else 0.0
        self._processes.append(_FailedProcess(process, failure, time.monotonic() + wait_s))

    def poll(self) -> None:
        """Kill the processes that have not ended in time, and report the reason of each new end, without waiting."""
        now = time.monotonic()
        for failed in tuple(self._processes):
            process = failed.process
            has_ended = process.popen is None or process.exit_code() is not None
            if not has_ended and now < failed.kill_at:
                continue
            if not failed.is_explained:
                failed.is_explained = True
                self._on_reason(process.device, _final_reason(failed.failure, exit_failure(process)))
            if has_ended:
                self._processes.remove(failed)
                process.close()
            elif process.popen is not None:
                process.popen.kill()

    def end_all(self, others: Sequence[DeviceProcess]) -> None:
        end_all([*others, *(failed.process for failed in self._processes)])
        self._processes = []


LINK_WAIT_S, LINK_WAIT_HEARTBEATS, MAX_LINK_WAIT_S = 0.15, 1.25, 10.0
"""Time to wait for further reports, after a device has reported that it cannot reach another device.

The time is LINK_WAIT_S plus LINK_WAIT_HEARTBEATS heartbeat intervals, but at most MAX_LINK_WAIT_S seconds. The two ends
of a cut link notice the cut at different times, because their last heartbeats arrived at different times.
"""
MAX_CANDIDATES, MAX_EXCLUDED_DEVICES = 12, 3
"""Limits of the search for devices without which a run continues: suspected devices, and devices that are excluded."""


class Suspicions:
    """The reports of a run that a device may have failed.

    A report is due after a short time, in which other devices may report too. `ClusterState` then decides which devices
    have failed.
    """

    def __init__(self, heartbeat_s: float, peers: Mapping[str, Collection[str]]) -> None:
        """Create a collection without suspicions.

        `heartbeat_s` is the interval of heartbeats in seconds. `peers` has, by device, those with which it exchanges
        tensors.
        """
        self._peers = peers
        self._link_wait_s = min(LINK_WAIT_S + LINK_WAIT_HEARTBEATS * heartbeat_s, MAX_LINK_WAIT_S)
        self._exits: dict[str, tuple[DeviceFailure, float]] = {}
        self._links: dict[tuple[str, str], DeviceFailure] = {}
        self._links_due_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._exits or self._links)

    def add(self, failure: DeviceFailure) -> None:
        """Add a suspicion. Later reports of the same device about the same other device are ignored."""
        if failure.device == failure.reporter:
            self._exits.setdefault(failure.device, (failure, time.monotonic() + CAUSE_WAIT_S))
            return
        if not self._links:
            self._links_due_at = time.monotonic() + self._link_wait_s
        self._links.setdefault((failure.reporter, failure.device), failure)

    def forget(self, name: str) -> None:
        """Remove all suspicions that a device has reported, and all suspicions about this device."""
        self._exits.pop(name, None)
        self._links = {pair: failure for pair, failure in self._links.items() if name not in pair}

    def find_due(self, up: Collection[str]) -> list[DeviceFailure]:
        """Return the suspicions that must be resolved now, in the order of their arrival.

        The suspicion about an ended process is due after CAUSE_WAIT_S. If any of these is due, only they are returned.
        Otherwise, all reports that one device cannot reach another are returned if the first is old enough, or if all
        peers of one device report that they cannot reach this device.

        Args:
            up: Names of the devices that are up.
        """
        now = time.monotonic()
        if due_exits := [failure for failure, due_at in self._exits.values() if now > due_at]:
            return due_exits
        is_due = now > self._links_due_at or any(self._is_cut_off(name, up) for name in up)
        return list(self._links.values()) if is_due else []

    def _is_cut_off(self, name: str, up: Collection[str]) -> bool:
        reporters = {reporter for reporter, device in self._links if device == name}
        return len(reporters) > 1 and reporters.issuperset(set(self._peers[name]) & set(up))


def choose_excluded_devices(
    suspicions: Sequence[DeviceFailure], is_covered: Callable[[Collection[str]], bool]
) -> tuple[str, ...]:
    """Return the fewest devices without which the run can continue, because all others can reach each other.

    Args:
        suspicions: Reports that one device cannot reach another.
        is_covered: Returns True if a failure plan covers the failure of the given devices.

    Returns:
        At most MAX_EXCLUDED_DEVICES names; () if no such set of devices is covered.
    """
    links = {frozenset((suspicion.device, suspicion.reporter)) for suspicion in suspicions}
    candidates = rank_suspects(suspicions)[:MAX_CANDIDATES]
    for count in range(1, MAX_EXCLUDED_DEVICES + 1):
        for chosen in itertools.combinations(candidates, count):
            if all(link.intersection(chosen) for link in links) and is_covered(chosen):
                return chosen
    return ()


def rank_suspects(suspicions: Sequence[DeviceFailure]) -> list[str]:
    """Return all reporting and reported devices; the device that is cut off from the most others is first.

    Among equal devices, the one that is reported most often is first.
    """
    links = {frozenset((suspicion.device, suspicion.reporter)) for suspicion in suspicions}
    link_counts = Counter(name for link in links for name in link)
    report_counts = Counter(suspicion.device for suspicion in suspicions)
    names = dict.fromkeys(name for suspicion in suspicions for name in (suspicion.device, suspicion.reporter))
    return sorted(names, key=lambda name: (-link_counts[name], -report_counts[name]))
