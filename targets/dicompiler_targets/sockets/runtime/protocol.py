"""The wire protocol: message headers, message types, and filters that decide which messages may be received.

A message is a fixed header and a payload. Payloads of tensors are raw little-endian bytes, whose length follows from
the plan. All other payloads are JSON objects of bounded length.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from .role_schedule import RoleSchedule

MAGIC, PROTOCOL_VERSION = b"DICO", 5
HEADER_STRUCT = struct.Struct("<4sBBHIQQ")
"""Magic, protocol version, message type, flags (0), index (of a transfer, input or output), frame, payload length."""
MAX_JSON_BYTES = 1 << 20
MAX_GREETING_BYTES = 1 << 14
"""Limit for JSON messages of a peer that has not proved its identity yet."""
MAX_UNPLANNED_BYTES = 1 << 31
"""Limit for tensors whose shape is not known before the run."""
MAX_FRAMES_IN_FLIGHT = 1024
READ_BUFFER_BYTES = 1 << 14
"""Bytes that one call reads at the start of a message."""
CLOSED_IN_MESSAGE = "closed in the middle of a message"
EMPTY_PAYLOAD: Any = np.empty(0, np.uint8)


class MessageType(IntEnum):
    """The type of a message. "C" is the coordinator and "D" a device.

    Attributes:
        HELLO: Any direction: the sender's identity (JSON).
        PEERS: C to D: addresses of all devices, failed devices, credentials (JSON).
        READY: D to C: sessions are created and all peers are connected.
        BEGIN_FRAME: C to D: starts a frame; index: milliseconds that the frame may take.
        INPUT: C to D: an input or an initial state of a frame.
        TENSOR: D to D: a transfer of a frame.
        OUTPUT: D to C: an output of a frame.
        DONE: D to C: the device has finished the frame; index: microseconds since it started to compute (0: it computes
            nothing in this frame).
        FINISH: C to D: there are no more frames.
        BYE: D to D: the sender sends no more tensors.
        REPORT: D to C: measurements of the run (JSON).
        ERROR: Any direction: why the sender ends the connection (JSON).
        HEARTBEAT: Any direction: the sender is alive.
        CHANGE_ROLES: C to D: which devices are down, and from which frame on other roles are used (JSON).
        ROLES_CHANGED: D to C and D to D: the device has applied a CHANGE_ROLES.
        PEER_FAILED: D to C: the connection to a peer was lost; the sender continues (JSON).
        RESET_STATES: C to D, before BEGIN_FRAME: states start again with this frame, as zeros, or with index 1 as given
            by INPUT messages.
        TENSOR_OVERDUE: D to C: a tensor did not arrive in time, perhaps because of a failure that the coordinator has
            not handled yet (JSON).
    """

    HELLO = 1
    PEERS = 2
    READY = 3
    BEGIN_FRAME = 4
    INPUT = 5
    TENSOR = 6
    OUTPUT = 7
    DONE = 8
    FINISH = 9
    BYE = 10
    REPORT = 11
    ERROR = 12
    HEARTBEAT = 13
    CHANGE_ROLES = 14
    ROLES_CHANGED = 15
    PEER_FAILED = 16
    RESET_STATES = 17
    TENSOR_OVERDUE = 18


MESSAGE_TYPES = {int(message_type): message_type for message_type in MessageType}


class MessageHeader(NamedTuple):
    """The header of a message; `length` is the payload's size in bytes."""

    type: MessageType
    index: int  # type: ignore[assignment]  # tuple has a method of this name
    frame: int
    length: int


class ProtocolError(Exception):
    """The other end violated the protocol or could not prove its identity; nothing of its message was stored."""


class PeerRefused(Exception):
    """The other end refused the connection; the text is its own message."""


class ConnectionClosed(ConnectionError):
    """The other end closed the connection between two messages."""


class ByteSource(Protocol):
    """A stream of received bytes.

    Attributes:
        is_drained: The last call returned everything that was available. A reader that does not ask again resets it.
    """

    is_drained: bool

    def receive_into(self, view: memoryview) -> int | None:
        """Store received bytes in `view`; return their number, 0 at the end, None if none are available."""

    def expect_bytes(self, count: int) -> None:
        """Announce that at least `count` more bytes will arrive, so that fewer need not wake the reader."""


def pack_header(header: MessageHeader) -> bytes:
    """Return the bytes of a header."""
    return HEADER_STRUCT.pack(MAGIC, PROTOCOL_VERSION, header.type, 0, header.index, header.frame, header.length)


def unpack_header(raw: bytes | bytearray, start: int = 0) -> MessageHeader:
    """Return the header in the HEADER_STRUCT.size bytes from `start`; raise ProtocolError if it is invalid."""
    magic, version, number, flags, index, frame, length = HEADER_STRUCT.unpack_from(raw, start)
    message_type = MESSAGE_TYPES.get(number)
    if magic != MAGIC:
        raise ProtocolError("the other end does not use dicompiler's protocol")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the other end uses protocol version {version}, expected {PROTOCOL_VERSION}")
    if flags or message_type is None:
        raise ProtocolError(f"received a message of unknown type {number} with flags {flags}")
    return MessageHeader(message_type, index, frame, length)


class MessageReader:
    """Reads messages from a byte source without blocking.

    Small messages that arrive together are read with one call. A large payload is read directly into its own memory.

    Attributes:
        has_received: Set to true whenever a byte arrives; the user resets it.
    """

    def __init__(self, source: ByteSource, allocate: Callable[[int], Any] | None = None) -> None:
        self._source = source
        self._allocate: Callable[[int], Any] = allocate or (lambda length: np.empty(length, np.uint8))
        self._buffer = bytearray(READ_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # The unread part of the buffer.
        self._expects_payload = False  # The source was told to expect more than one byte.
        self._header: MessageHeader | None = None  # Header of the message that is being read.
        self._payload: Any = None
        self._filled = 0
        self.has_received = True

    def read_message(self, check: Callable[[MessageHeader], None]) -> tuple[MessageHeader, Any] | None:
        """Return the next message and its payload, or None if it is incomplete (call again later to continue).

        Args:
            check: Called with each header, except for HEARTBEAT, before memory for the payload is allocated; may raise.

        Raises:
            ProtocolError: The header is invalid, or the payload does not fit into memory.
            ConnectionClosed: The connection was closed between two messages.
            OSError: The connection was closed or failed within a message.
        """
        if self._header is not None:
            return self._continue_payload()
        while self._end - self._start < HEADER_STRUCT.size:
            if self._source.is_drained and self._start == self._end:
                self._source.is_drained = False
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
            self._source.expect_bytes(1)

    def _fill_buffer(self) -> bool:
        """Read into the buffer; return True if bytes arrived."""
        free = self._view
        if self._start == self._end:
            self._start = self._end = 0
        else:
            if len(free) - self._end < HEADER_STRUCT.size:
                unread = self._end - self._start
                free[:unread] = bytes(free[self._start : self._end])
                self._start, self._end = 0, unread
            free = free[self._end :]
        count = self._source.receive_into(free)
        if count is None:
            self._expect_any_byte()
            return False
        if count == 0:
            if self._start == self._end:
                raise ConnectionClosed("closed by the other end")
            raise ConnectionError(CLOSED_IN_MESSAGE)
        self.has_received = True
        self._end += count
        # A TLS record starts with its type (20 to 22) and the major version 3.
        if 20 <= self._buffer[self._start] <= 22 and self._end - self._start > 1 and self._buffer[self._start + 1] == 3:
            raise ProtocolError("the other end uses TLS but this end does not: give keys to both (--keys)")
        return True

    def _begin_payload(self, header: MessageHeader) -> tuple[MessageHeader, Any] | None:
        """Allocate the payload and copy the part of it that is in the buffer."""
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
        """Read more of the payload; return the message if it is complete."""
        header, payload = self._header, self._payload
        assert header is not None
        while self._filled < header.length:
            count = self._source.receive_into(memoryview(payload)[self._filled :])
            if count is None:
                self._expects_payload = True
                self._source.expect_bytes(header.length - self._filled)
                return None
            if count == 0:
                raise ConnectionError(CLOSED_IN_MESSAGE)
            self.has_received = True
            self._filled += count
        self._header = self._payload = None
        return header, payload


def read_messages(
    reader: MessageReader,
    check: Callable[[MessageHeader], None],
    deliver: Callable[[MessageHeader, Any], object],
) -> None:
    """Deliver all available messages, until `deliver` returns something true; errors: see read_message."""
    while (message := reader.read_message(check)) is not None:
        if message[0].type is not MessageType.HEARTBEAT and deliver(*message):
            return


class FrameWindow:
    """The frames that may be in flight: from the oldest unfinished one to before `end`.

    Attributes:
        oldest: The oldest unfinished frame.
        end: The frame after the last one that may be in flight. It moves with `oldest` if the window has a size;
            otherwise `open` moves it.
        first: Frames before this one were dropped; messages for them are late.
    """

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._finished: set[int] = set()
        self.oldest = self.first = 0
        self.end = size or 0

    def __len__(self) -> int:
        """Return the number of frames from the oldest unfinished one to the end."""
        return self.end - self.oldest

    def open(self) -> int:
        """Admit one more frame and return its number."""
        self.end += 1
        return self.end - 1

    def finish(self, frame: int) -> None:
        """Mark a frame as finished; frames may finish in any order."""
        if frame >= self.oldest:
            self._finished.add(frame)
        while self.oldest in self._finished:
            self._finished.remove(self.oldest)
            self.oldest += 1
        if self._size is not None:
            self.end = self.oldest + self._size

    def drop(self, first: int) -> None:
        """Drop all frames before `first`."""
        self._finished.clear()
        self.first = self.oldest = first
        self.end = first + (self._size or 0)

    def skip(self, first: int, end: int) -> None:
        """Skip the frames from `first`, the next one, to before `end`: this device takes no part in them."""
        if self.oldest < first:
            self._finished.update(range(first, end))
        else:
            self.oldest, self.end = end, end + (self._size or 0)

    def is_in_flight(self, frame: int) -> bool:
        return self.oldest <= frame < self.end and frame not in self._finished

    def check(self, frame: int, place: str) -> None:
        """Raise ProtocolError if the frame is not in flight."""
        if not self.is_in_flight(frame):
            raise ProtocolError(
                f"{place} is for frame {frame}, but frames {self.oldest} to {self.end - 1} are in flight"
            )


class ReceiveFilter:
    """Decides which tensors may arrive on a connection: each expected one once per frame in flight.

    So the stored bytes never exceed the expected bytes of the frames in flight. Late tensors are not stored.
    """

    def __init__(
        self,
        expected: Mapping[int, Mapping[str, Any]],
        window: FrameWindow,
        others: Sequence[Mapping[int, Mapping[str, Any]]] = (),
        schedule: RoleSchedule | None = None,
    ) -> None:
        """Create the filter.

        Args:
            expected: Values by index, in frames of the first role.
            window: The frames in flight.
            others: The same for the other roles.
            schedule: The role of each frame. Default: all roles in turn.
        """
        self._roles, self._window = (expected, *others), window
        self._schedule = schedule or RoleSchedule([()] * len(self._roles))
        self._max_values = max(map(len, self._roles))
        self._seen: set[tuple[int, int]] = set()

    def check(self, header: MessageHeader) -> None:
        """Raise ProtocolError, before memory is allocated, if this tensor must not arrive now or in this length."""
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
        """Check a tensor that was sent before its frame was dropped; it is read and then discarded."""
        known = [role[header.index]["bytes"] for role in self._roles if header.index in role]
        if header.length not in known and not (None in known and header.length <= MAX_UNPLANNED_BYTES):
            raise ProtocolError(
                f"received {header.type.name} {header.index} of {header.length} bytes, late and not in the plan"
            )

    def _refuse(self, header: MessageHeader, value: Mapping[str, Any] | None) -> None:
        """Raise a ProtocolError that names the violation; return if only the length was unknown and is allowed."""
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
    """Raise ProtocolError if a JSON message is too long."""
    if header.length > limit:
        raise ProtocolError(f"{header.type.name} has {header.length} bytes, the limit is {limit}")


def check_no_payload(header: MessageHeader) -> None:
    """Raise ProtocolError if the message has a payload."""
    if header.length:
        raise ProtocolError(f"{header.type.name} has {header.length} bytes, expected none")


def decode_json(payload: Any) -> dict[str, Any]:
    """Return the JSON object in a payload; raise ProtocolError if it is not one."""
    try:
        message = json.loads(payload.tobytes())
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ProtocolError("received a message that is not a JSON object")
    return message
