"""The root cause of a failed run, of all that was noticed of it: ended processes, lost connections, words.

In: events and processes. Out: one line that names the device at fault and the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dicompiler.plugin_api import one_line
from dicompiler_targets.sockets.processes import Process
from dicompiler_targets.sockets.runtime.frames import Header, Kind, ProtocolError
from dicompiler_targets.sockets.runtime.wire import Silence

CAUSE, ENDING, LOSS, SUSPICION = range(4)


@dataclass(frozen=True)
class Event:
    """A frame that a device sent, with its payload (an object for messages); or the end of its connection, with the
    error. `at`: when, of time.perf_counter."""

    device: str
    header: Header | None
    payload: Any
    at: float = 0.0


@dataclass(frozen=True)
class Failure:
    """What was noticed of a failure: which `device` fails, who says so, and how much that tells: CAUSE (nothing else
    can be behind it), ENDING (how its process ended), LOSS (its connection ended) or SUSPICION (another device suspects
    it). gone: the device may have nothing wrong with it but that it is not there any more.
    """

    device: str
    message: str
    says: str
    rank: int
    gone: bool = False


def failure_of(event: Event, devices: Mapping[str, Process]) -> Failure | None:
    """What a device's error message, or the end of its connection, tells; None for all other frames."""
    name, error = event.device, event.payload
    if event.header is None and isinstance(error, ProtocolError):
        return Failure(name, f"it sent what it must not: {error}", name, CAUSE)
    if event.header is None and isinstance(error, Silence):
        return Failure(name, f"{error}: it has stopped, or the network to it is down", name, CAUSE, gone=True)
    if event.header is None:
        return Failure(name, f"its connection was lost: {error}", name, LOSS, gone=True)
    if event.header.kind not in (Kind.ERROR, Kind.LOST, Kind.LATE):
        return None
    message, peer = one_line(str(error.get("message"))), error.get("peer")
    if isinstance(peer, str) and peer in devices:
        return Failure(peer, f"device {name!r} says: {message}", name, SUSPICION, event.header.kind is Kind.LOST)
    return Failure(name, message, name, CAUSE)


def ending(process: Process) -> Failure | None:
    """How a process ended that has ended badly. A signal is a cause: what ends by itself has told why, if it could."""
    code, words = process.exit_code(), process.ending()
    if not code or words is None:
        return None
    return Failure(process.device, words, process.device, CAUSE if code < 0 else ENDING, gone=True)


def endings(processes: Iterable[Process]) -> list[Failure]:
    """The failures of processes that have ended badly before they reported."""
    failures = (ending(process) for process in processes if process.report is None)
    return [one for one in failures if one is not None]


def root_cause(failures: Sequence[Failure], devices: Mapping[str, Process]) -> str:
    """The line for the failure that is behind all of them."""
    # Of devices that suspect each other in a row the last one, which suspects nobody, holds the others up.
    suspecting = {one.says for one in failures if one.rank == SUSPICION}
    cause = min(failures, key=lambda one: (one.rank > CAUSE, one.device in suspecting, one.rank))
    return f"{devices[cause.device].title}: {cause.message}"
