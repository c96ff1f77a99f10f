"""The wire protocol: message headers and types, reading messages, and checks of the tensors that arrive.

A message is a header of fixed length and a payload. The payload of a tensor is its raw little-endian bytes, and the
plan determines their number. A value of unknown size begins with its shape, or is encoded by `value_codec`. The payload
of DONE is a sequence of structs. All other payloads are empty, or JSON objects of limited length.

A role is one plan by which the devices can compute a frame: the normal plan, a replica of it, or a failure plan. With
replicas, frames use several roles in turn. `RoleSchedule` returns the role of each frame, and the role determines which
tensors may arrive for the frame.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np


def role_manifests(manifest: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return a complete manifest for each role (normal plan, replica or failure plan) in a device's manifest.

    The entry `failed` of a returned manifest has the failed devices for which the role is made.
    """
    return (manifest, *({**manifest, **role} for role in manifest.get("other_roles", ())))


def active_roles(manifest: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return, for each role (normal plan, replica or failure plan), True if its frames are announced to the device.

    This is so if the device has work in this role, or in another role for the same failed devices.
    """
    work = [
        (role.get("failed", ()), role["inputs"] or role["steps"] or role["outputs"])
        for role in role_manifests(manifest)
    ]
    return tuple(any(works for other, works in work if other == failed) for failed, _ in work)


class RoleSchedule:
    """Maps each frame number to a role (the normal plan, a replica of it, or a failure plan).

    If there are n roles for the set of devices that are down, frame i uses number i mod n of them.

    Attributes:
        tolerates_failures: True if there are roles for frames after a failure.
    """

    def __init__(self, failed_by_role: Sequence[Collection[str]], active_by_role: Sequence[bool] = ()) -> None:
        """Create a schedule that begins without failed devices.

        Args:
            failed_by_role: For each role (plan), the failed devices for which it is made.
            active_by_role: For each role, True if its frames are announced to the device; by default, all are.
        """
        self._failed_sets = tuple(map(frozenset, failed_by_role))
        self._is_active = active_by_role or [True] * len(failed_by_role)
        self._changes = [(0, self._roles_for(frozenset()))]
        self.tolerates_failures = any(self._failed_sets)

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> RoleSchedule:
        return cls([role.get("failed", ()) for role in role_manifests(manifest)], active_roles(manifest))

    @property
    def covered_failures(self) -> tuple[frozenset[str], ...]:
        return tuple(dict.fromkeys(failed for failed in self._failed_sets if failed))

    @property
    def is_idle(self) -> bool:
        """True if the device has no work in frames after the last change to other plans."""
        return not self._is_active[self._changes[-1][1][0]]

    @property
    def last_change(self) -> int:
        return self._changes[-1][0]

    def find_failed_set(self, down: Collection[str]) -> frozenset[str] | None:
        """Return the smallest set of failed devices that includes `down` and for which there are plans, or None."""
        candidates = [failed for failed in self._failed_sets if failed.issuperset(down)]
        return min(candidates, key=len, default=None)

    def change(self, failed: Collection[str], first_frame: int, oldest_frame: int) -> None:
        """From frame `first_frame` on, use the roles (plans) for the failure of the devices `failed`.

        Args:
            failed: A result of `find_failed_set`, which may include devices that have not failed.
            first_frame: Number of the first frame that uses the new roles.
            oldest_frame: Number of the first frame for which `role_index` may still be called.

        Raises:
            ValueError: No role is made for exactly the devices `failed`.
        """
        chosen = self._roles_for(frozenset(failed))
        if not chosen:
            raise ValueError(
                f"the artifact has no plan for the failure of {sorted(failed)}: compile it with --tolerate-failures"
            )
        ends = [*(start for start, _ in self._changes[1:]), first_frame]
        needed = [change for change, end in zip(self._changes, ends, strict=True) if end > oldest_frame]
        # A new list replaces the old one, because other threads may be reading it.
        self._changes = [*needed, (first_frame, chosen)]

    def role_index(self, frame: int) -> int:
        first, chosen = self._changes[-1]
        if frame < first:
            chosen = next((roles for start, roles in reversed(self._changes) if frame >= start), chosen)
        return chosen[frame % len(chosen)]

    def _roles_for(self, failed: frozenset[str]) -> tuple[int, ...]:
        return tuple(index for index, other in enumerate(self._failed_sets) if other == failed)


MAGIC, PROTOCOL_VERSION = b"DICO", 7
HEADER_STRUCT = struct.Struct("<4sBBHIQQ")
"""Layout of a message header: magic, protocol version, message type, flags (0), index, frame number, payload length."""
DONE_FIELDS = struct.Struct("<dfI")
"""The start of the payload of DONE: computing seconds, board temperature in °C (or NaN) and throttling flags."""
RECEIVED_TENSORS = struct.Struct("<HQQd")
"""An entry in the payload of DONE, for a peer that has sent tensors since the previous DONE message.

Fields: index of the peer, payload bytes of its tensors, number of these bytes whose arrival was timed, and the seconds
in which the timed bytes arrived.
"""
MAX_JSON_BYTES = 1 << 20
MAX_GREETING_BYTES = 1 << 14
"""Maximum bytes of a JSON message from an end that has not proved its identity yet."""
MAX_UNPLANNED_BYTES = 1 << 31
"""Maximum bytes of a tensor of unknown shape. The plan determines the length of each other tensor."""
MAX_FRAMES_IN_FLIGHT = 1024
READ_BUFFER_BYTES = 1 << 14
"""Size of a reader's buffer, into which headers and short messages are read."""
CLOSED_IN_MESSAGE = "closed in the middle of a message"
EMPTY_PAYLOAD: Any = np.empty(0, np.uint8)


class MessageType(IntEnum):
    """The type of a message; the comments name the direction and the content.

    A transfer is a tensor that one device sends to another.
    """

    HELLO = 1  # Any direction: proves the sender's identity (JSON).
    PEERS = 2  # Coordinator to device: addresses of all devices, names of failed devices, credentials (JSON).
    READY = 3  # Device to coordinator: the device has created its onnxruntime sessions and is connected to all peers.
    BEGIN_FRAME = 4  # Coordinator to device: announces a frame. Header.index: the frame's time limit in milliseconds.
    INPUT = 5  # Coordinator to device: an input or an initial state of a frame.
    TENSOR = 6  # Device to device: a transfer (tensor for another device) of a frame.
    OUTPUT = 7  # Device to coordinator: an output of a frame.
    DONE = 8  # Device to coordinator: a frame is finished.
    # Header.index of DONE: microseconds since the device began the frame's first segment; 0 if it ran none. The
    # payload is DONE_FIELDS, followed by RECEIVED_TENSORS for each peer that has sent tensors.
    FINISH = 9  # Coordinator to device: there are no more frames.
    BYE = 10  # Device to device: the sender sends no more tensors.
    REPORT = 11  # Device to coordinator: measurements of the run (JSON).
    ERROR = 12  # Any direction: the reason why the sender ends the connection (JSON).
    HEARTBEAT = 13  # Any direction: the sender is alive.
    CHANGE_ROLES = 14  # Coordinator to device: failed devices, and the first frame that uses other plans (JSON).
    ROLES_CHANGED = 15  # Device to coordinator or device: the sender uses other plans, from frame Header.frame on.
    PEER_FAILED = 16  # Device to coordinator: the connection to a peer was lost, and the sender continues (JSON).
    RESET_STATES = 17  # Coordinator to device: sets a frame's states. Index 0: to zeros; 1: to the INPUT messages.
    TENSOR_OVERDUE = 18  # Device to coordinator: a tensor did not arrive in time; perhaps its sender has failed (JSON).


MESSAGE_TYPES = {int(message_type): message_type for message_type in MessageType}


class MessageHeader(NamedTuple):
    """The header of a message; `length` is the number of bytes of the payload, and `frame` the frame's number.

    `index` is the manifest's index of the transfer, input or output (types TENSOR, INPUT and OUTPUT). For other types,
    the comments in MessageType describe it.
    """

    type: MessageType
    index: int  # type: ignore[assignment]  # tuple has a method of this name
    frame: int
    length: int


class ProtocolError(Exception):
    """Error: the other end of a connection violated the protocol or could not prove its identity."""


class PeerRefused(Exception):
    """Error: the other end refused the connection; the text is the reason that the other end sent."""


class ConnectionClosed(ConnectionError):
    """Error: the other end closed the connection between two messages, so no message is incomplete."""


class ByteSource(Protocol):
    """The methods of a connection that MessageReader calls.

    Attributes:
        is_drained: True if the last `receive_into` returned all available bytes. The next call would return None and
            set it to false; a reader that omits this call must set it to false itself.
    """

    is_drained: bool

    def receive_into(self, view: memoryview) -> int | None:
        """Store received bytes in `view`; return their number, 0 after the last byte, None if none are available."""

    def expect_bytes(self, count: int) -> None:
        """Announce that `count` more bytes will arrive, so that the reader need not be woken for fewer bytes."""


def pack_header(header: MessageHeader) -> bytes:
    return HEADER_STRUCT.pack(MAGIC, PROTOCOL_VERSION, header.type, 0, header.index, header.frame, header.length)


def unpack_header(raw: bytes | bytearray, start: int = 0) -> MessageHeader:
    """Return the header that begins at offset `start` of `raw`; raise ProtocolError if it is invalid."""
    magic, version, number, flags, index, frame, length = HEADER_STRUCT.unpack_from(raw, start)
    message_type = MESSAGE_TYPES.get(number)
    if magic != MAGIC:
        raise ProtocolError("the other end does not use dicompiler's protocol")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other end uses protocol version {version}, expected {PROTOCOL_VERSION}: copy one artifact to both"
        )
    if flags or message_type is None:
        raise ProtocolError(f"received a message of unknown type {number} with flags {flags}")
    return MessageHeader(message_type, index, frame, length)


class MessageReader:
    """Reads the messages that arrive on a connection.

    Short messages that arrive together are read with one call. A long payload is read directly into the array of bytes
    that `allocate(length)` returns, by default a new NumPy array.

    Attributes:
        has_received: Set to true when a byte arrives. The channel sets it to false at intervals, to notice silence.
        received_bytes: Number of bytes that were read so far.
    """

    def __init__(self, connection: ByteSource, allocate: Callable[[int], Any] | None = None) -> None:
        self._connection = connection
        self._allocate: Callable[[int], Any] = allocate or (lambda length: np.empty(length, np.uint8))
        self._buffer = bytearray(READ_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # Start and end of the unread bytes in the buffer.
        self._expects_payload = False  # True if `expect_bytes` has announced the rest of a payload.
        self._header: MessageHeader | None = None  # Header of the message that is being read.
        self._payload: Any = None
        self._filled = 0
        self.has_received = True
        self.received_bytes = 0

    @property
    def is_within_tensor(self) -> bool:
        """True if the first bytes of a tensor have arrived, and the others have not."""
        return self._header is not None and self._header.type is MessageType.TENSOR

    def read_message(self, check: Callable[[MessageHeader], None]) -> tuple[MessageHeader, Any] | None:
        """Return the next message as header and payload, or None if it has not arrived completely.

        `check` is called with each header (except those of heartbeats), before memory for the payload is allocated.

        Raises:
            ProtocolError: The header is invalid, or the payload does not fit into memory.
            ConnectionClosed: The connection was closed between two messages.
            OSError: The connection was closed or failed within a message.
        """
        if self._header is not None:
            return self._continue_payload()
        while self._end - self._start < HEADER_STRUCT.size:
            if self._connection.is_drained and self._start == self._end:
                self._connection.is_drained = False
                self._expect_any_byte()
                return None
            if not self._fill_buffer():
                return None
        header = unpack_header(self._buffer, self._start)
        self._start += HEADER_STRUCT.size
        check_no_payload(header) if header.type is MessageType.HEARTBEAT else check(header)
        return self._begin_payload(header)

    def _expect_any_byte(self) -> None:
        if self._expects_payload:
            self._expects_payload = False
            self._connection.expect_bytes(1)

    def _fill_buffer(self) -> bool:
        free = self._view
        if self._start == self._end:
            self._start = self._end = 0
        else:
            if len(free) - self._end < HEADER_STRUCT.size:
                unread = self._end - self._start
                free[:unread] = bytes(free[self._start : self._end])
                self._start, self._end = 0, unread
            free = free[self._end :]
        count = self._connection.receive_into(free)
        if count is None:
            self._expect_any_byte()
            return False
        if count == 0:
            if self._start == self._end:
                raise ConnectionClosed("closed by the other end")
            raise ConnectionError(CLOSED_IN_MESSAGE)
        self.has_received = True
        self.received_bytes += count
        self._end += count
        # A TLS record starts with its type (20 to 22) and the major version 3; a message starts with other bytes.
        if 20 <= self._buffer[self._start] <= 22 and self._end - self._start > 1 and self._buffer[self._start + 1] == 3:
            raise ProtocolError("the other end uses TLS but this end does not: give keys to both (--keys)")
        return True

    def _begin_payload(self, header: MessageHeader) -> tuple[MessageHeader, Any] | None:
        if not header.length:
            return header, EMPTY_PAYLOAD
        try:
            payload = self._allocate(header.length)
        except (MemoryError, ValueError):
            raise ProtocolError(f"not enough memory for a message of {header.length} bytes") from None
        start, stop = self._start, self._start + header.length
        if stop <= self._end:
            memoryview(payload)[:] = self._view[start:stop]
            self._start = stop
            return header, payload
        if count := self._end - start:
            memoryview(payload)[:count] = self._view[start : self._end]
            self._start = self._end
        self._header, self._payload, self._filled = header, payload, count
        return self._continue_payload()

    def _continue_payload(self) -> tuple[MessageHeader, Any] | None:
        header, payload = self._header, self._payload
        assert header is not None
        while self._filled < header.length:
            count = self._connection.receive_into(memoryview(payload)[self._filled :])
            if count is None:
                self._expects_payload = True
                self._connection.expect_bytes(header.length - self._filled)
                return None
            if count == 0:
                raise ConnectionError(CLOSED_IN_MESSAGE)
            self.has_received = True
            self.received_bytes += count
            self._filled += count
        self._header = self._payload = None
        return header, payload


class FrameWindow:
    """The frames that may be in flight (announced, not finished): numbers from `oldest` to before `end`.

    If the window has a size, `end` is always `oldest` plus this size. Otherwise, each call of `admit_frame` increases
    `end` by 1.

    Attributes:
        oldest: Number of the oldest unfinished frame.
        end: The number of the last frame that may be in flight, plus 1.
        first: Number of the first frame that was not dropped. Messages for dropped frames may still arrive.
    """

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._finished: set[int] = set()
        self.oldest = self.first = 0
        self.end = size or 0

    def __len__(self) -> int:
        """Return the number of frames from `oldest` to before `end`, including finished ones between them."""
        return self.end - self.oldest

    def admit_frame(self) -> int:
        self.end += 1
        return self.end - 1

    def finish(self, frame: int) -> None:
        if frame >= self.oldest:
            self._finished.add(frame)
        while self.oldest in self._finished:
            self._finished.remove(self.oldest)
            self.oldest += 1
        if self._size is not None:
            self.end = self.oldest + self._size

    def drop(self, first: int) -> None:
        self._finished.clear()
        self.first = self.oldest = first
        self.end = first + (self._size or 0)

    def skip(self, first: int, end: int) -> None:
        """Mark the frames from `first` to before `end` as finished, because this device has no work in them."""
        if self.oldest < first:
            self._finished.update(range(first, end))
        else:
            self.oldest, self.end = end, end + (self._size or 0)

    def is_in_flight(self, frame: int) -> bool:
        return self.oldest <= frame < self.end and frame not in self._finished

    def check(self, frame: int, message: str) -> None:
        """Raise ProtocolError if the frame is not in flight; `message` names the received message in the error."""
        if not self.is_in_flight(frame):
            raise ProtocolError(
                f"{message} is for frame {frame}, but frames {self.oldest} to {self.end - 1} are in flight"
            )


class ReceiveFilter:
    """Decides which tensors may arrive on a connection: each expected tensor once in each frame in flight.

    A tensor's header is checked before its payload is read, so the stored bytes never exceed those that the plan
    expects.
    """

    def __init__(
        self,
        expected_by_role: Sequence[Mapping[int, Mapping[str, Any]]],
        window: FrameWindow,
        schedule: RoleSchedule | None = None,
    ) -> None:
        """Create a filter for the frames in a window.

        `expected_by_role` has, for each role (plan), the manifest's entries of the tensors that may arrive, by index.
        `schedule` maps frames to roles; by default, frames use all roles in turn.
        """
        self._roles, self._window = expected_by_role, window
        self._schedule = schedule or RoleSchedule([()] * len(self._roles))
        self._max_values = max(map(len, self._roles))
        self._seen: set[tuple[int, int]] = set()

    def check(self, header: MessageHeader) -> None:
        """Raise ProtocolError if the tensor may not arrive now, or has another length than the plan says."""
        if header.frame < self._window.first:
            self._check_late(header)
            return
        _, index, frame, length = header
        value = self._roles[self._schedule.role_index(frame)].get(index)
        key, seen, window = (frame, index), self._seen, self._window
        if value is None or length != value["bytes"] or not window.is_in_flight(frame) or key in seen:
            self._refuse(header, value)
        if len(seen) > 2 * self._max_values * (window.end - window.oldest):
            self._seen = seen = {entry for entry in seen if entry[0] >= window.oldest}
        seen.add(key)

    def _check_late(self, header: MessageHeader) -> None:
        """Raise ProtocolError for a tensor of a dropped frame if no plan has a tensor of this index and length.

        Otherwise, the receiver will discard the tensor.
        """
        lengths = [role[header.index]["bytes"] for role in self._roles if header.index in role]
        if header.length not in lengths and not (None in lengths and header.length <= MAX_UNPLANNED_BYTES):
            raise ProtocolError(
                f"received {header.type.name} {header.index} of {header.length} bytes for a dropped frame, but no plan "
                "has such a tensor"
            )

    def _refuse(self, header: MessageHeader, value: Mapping[str, Any] | None) -> None:
        """Raise ProtocolError with the reason why a tensor failed the fast test in `check`.

        Return if the tensor may arrive nevertheless: a tensor of unknown shape always fails this test.
        """
        if value is None:
            raise ProtocolError(f"received {header.type.name} {header.index}, which is not in the plan")
        place, wanted = f"{header.type.name} {header.index} ({value['name']!r})", value["bytes"]
        if wanted is not None and header.length != wanted:
            raise ProtocolError(f"{place} has {header.length} bytes, expected {wanted}")
        if wanted is None and header.length > MAX_UNPLANNED_BYTES:
            raise ProtocolError(f"{place} has {header.length} bytes, the limit is {MAX_UNPLANNED_BYTES}")
        self._window.check(header.frame, place)
        if (header.frame, header.index) in self._seen:
            raise ProtocolError(f"received {place} twice for frame {header.frame}")


def check_json_length(header: MessageHeader, limit: int = MAX_JSON_BYTES) -> None:
    if header.length > limit:
        raise ProtocolError(f"{header.type.name} has {header.length} bytes, the limit is {limit}")


def check_no_payload(header: MessageHeader) -> None:
    if header.length:
        raise ProtocolError(f"{header.type.name} has {header.length} bytes, expected none")


def decode_json(payload: Any) -> dict[str, Any]:
    try:
        message = json.loads(payload.tobytes())
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ProtocolError("received a message that is not a JSON object")
    return message
