"""The root cause of a failed run, of all that was noticed of it: ended processes, lost connections, words.

In: events and processes. Out: one line that names the device at fault and the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dicompiler.plugin_api.utilities import one_line
from dicompiler_targets.sockets.device_process import DeviceProcess
from dicompiler_targets.sockets.runtime.channel import HeartbeatTimeout
from dicompiler_targets.sockets.runtime.protocol import MessageHeader, MessageType, ProtocolError

RANK_CAUSE, RANK_EXIT, RANK_DISCONNECTED, RANK_SUSPECTED = range(4)


@dataclass(frozen=True)
class DeviceEvent:
    """A frame that a device sent, with its payload (an object for messages); or the end of its connection, with the
    error. `at`: when, of time.perf_counter."""

    device: str
    header: MessageHeader | None
    payload: Any
    received_at: float = 0.0


@dataclass(frozen=True)
class DeviceFailure:
    """What was noticed of a failure: which `device` fails, who says so, and how much that tells: CAUSE (nothing else
    can be behind it), ENDING (how its process ended), LOSS (its connection ended) or SUSPICION (another device suspects
    it). gone: the device may have nothing wrong with it but that it is not there any more.
    """

    device: str
    message: str
    reporter: str
    rank: int
    is_gone: bool = False


def find_failure(event: DeviceEvent, devices: Mapping[str, DeviceProcess]) -> DeviceFailure | None:
    """What a device's error message, or the end of its connection, tells; None for all other frames."""
    name, error = event.device, event.payload
    if event.header is None and isinstance(error, ProtocolError):
        return DeviceFailure(name, f"it sent what it must not: {error}", name, RANK_CAUSE)
    if event.header is None and isinstance(error, HeartbeatTimeout):
        return DeviceFailure(
            name, f"{error}: it has stopped, or the network to it is down", name, RANK_CAUSE, is_gone=True
        )
    if event.header is None:
        return DeviceFailure(name, f"its connection was lost: {error}", name, RANK_DISCONNECTED, is_gone=True)
    if event.header.type not in (MessageType.ERROR, MessageType.PEER_FAILED, MessageType.TENSOR_OVERDUE):
        return None
    message, peer = one_line(str(error.get("message"))), error.get("peer")
    if isinstance(peer, str) and peer in devices:
        return DeviceFailure(
            peer, f"device {name!r} says: {message}", name, RANK_SUSPECTED, event.header.type is MessageType.PEER_FAILED
        )
    return DeviceFailure(name, message, name, RANK_CAUSE)


def exit_failure(process: DeviceProcess) -> DeviceFailure | None:
    """How a process ended that has ended badly. A signal is a cause: what ends by itself has told why, if it could."""
    code, words = process.exit_code(), process.describe_exit()
    if not code or words is None:
        return None
    return DeviceFailure(process.device, words, process.device, RANK_CAUSE if code < 0 else RANK_EXIT, is_gone=True)


def exit_failures(processes: Iterable[DeviceProcess]) -> list[DeviceFailure]:
    """The failures of processes that have ended badly before they reported."""
    failures = (exit_failure(process) for process in processes if process.report is None)
    return [one for one in failures if one is not None]


def format_root_cause(failures: Sequence[DeviceFailure], devices: Mapping[str, DeviceProcess]) -> str:
    """The line for the failure that is behind all of them."""
    # Of devices that suspect each other in a row the last one, which suspects nobody, holds the others up.
    suspecting = {one.reporter for one in failures if one.rank == RANK_SUSPECTED}
    cause = min(failures, key=lambda one: (one.rank > RANK_CAUSE, one.device in suspecting, one.rank))
    return f"{devices[cause.device].title}: {cause.message}"
