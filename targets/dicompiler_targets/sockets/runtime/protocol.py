"""What goes over the connections: frames of a fixed header and raw bytes, and which of them may come.

Tensors are raw little-endian bytes whose length the plan tells; all other messages are JSON of bounded length.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from .role_schedule import RoleSchedule

MAGIC, PROTOCOL_VERSION = b"DICO", 4
HEADER_STRUCT = struct.Struct("<4sBBHIQQ")
"""Magic, protocol version, kind, flags (0), index (of a transfer, an input or an output), frame, payload length."""
MAX_JSON_BYTES = 1 << 20
"""Bytes that a JSON message can have."""
MAX_GREETING_BYTES = 1 << 14
"""Bytes that it can have before the other end has shown who it is."""
MAX_UNPLANNED_BYTES = 1 << 31
"""Bytes that a tensor can have whose shape is not known before the run."""
MAX_FRAMES_IN_FLIGHT = 1024
"""Frames that a run can ask to be on their way at once."""
READ_BUFFER_BYTES = 1 << 14
"""Bytes that are read at once where frames begin."""
CLOSED_IN_MESSAGE = "closed in the middle of a frame"
EMPTY_PAYLOAD: Any = np.empty(0, np.uint8)
"""The payload of frames that have none."""


class MessageType(IntEnum):
    """What a frame is. PEERS, RUN, INPUT and FINISH come from the coordinator, READY, OUTPUT, DONE and REPORT go
    to it; TENSOR and BYE pass between devices; PING (a sign of life) goes everywhere. RUN opens a frame, its index is
    the milliseconds that the frame may take; DONE says that a device has finished it, its index is the
    microseconds since the device began to compute it (0: it computes nothing of it). CHANGE, of the coordinator, says
    who is away and from which frame on other roles are in force, CHANGED, also to peers, that a device goes by it; LOST
    that it has lost a peer, and goes on. ANEW, before RUN, says that states begin anew with that frame: as zeros, or
    with index 1 as INPUTs say. LATE says that what a peer was to send for a frame is overdue, where that may be for a
    loss that the coordinator has not handled yet."""

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


MESSAGE_TYPES = {int(kind): kind for kind in MessageType}


class MessageHeader(NamedTuple):
    """A frame's header; `length` in bytes."""

    type: MessageType
    index: int  # type: ignore[assignment]  # tuples have a method of that name
    frame: int
    length: int


class ProtocolError(Exception):
    """The other end sent what it must not send, or is not who it must be; nothing of it was stored."""


class PeerRefused(Exception):
    """The other end refused the connection; the message is in its words."""


class ConnectionClosed(ConnectionError):
    """The other end closed the connection where a frame could begin."""


class ByteSource(Protocol):
    """Where bytes come from: a connection. `is_drained`: the last call took all that was there; who asks no further
    takes that back."""

    is_drained: bool

    def receive_into(self, view: memoryview) -> int | None:
        """Stores at most as many bytes as fit; their number, 0 at the end, None where it would have to wait."""

    def expect_bytes(self, count: int) -> None:
        """So many bytes are still to come, at least: it need not tell of fewer."""


def pack_header(header: MessageHeader) -> bytes:
    """The header's bytes."""
    return HEADER_STRUCT.pack(MAGIC, PROTOCOL_VERSION, header.type, 0, header.index, header.frame, header.length)


def unpack_header(raw: bytes | bytearray, start: int = 0) -> MessageHeader:
    """The header in HEADER.size bytes from `start`. ProtocolError if it is none of this protocol."""
    magic, version, number, flags, index, frame, length = HEADER_STRUCT.unpack_from(raw, start)
    kind = MESSAGE_TYPES.get(number)
    if magic != MAGIC:
        raise ProtocolError("the other end does not speak this protocol")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the other end speaks version {version} of the protocol, this one {PROTOCOL_VERSION}")
    if flags or kind is None:
        raise ProtocolError(f"a frame of unknown kind {number} with flags {flags} came")
    return MessageHeader(kind, index, frame, length)


class MessageReader:
    """Reads frames from a source. `heard` becomes true with every byte. `allocate`: bytes → an array of as many.

    Small frames that come together are read at once; what is large is read into its own memory.
    """

    def __init__(self, source: ByteSource, allocate: Callable[[int], Any] | None = None) -> None:
        self._source = source
        self._allocate: Callable[[int], Any] = allocate or (lambda length: np.empty(length, np.uint8))
        self._buffer = bytearray(READ_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what was read into the buffer and not looked at
        self._expects_payload = False  # more bytes than one
        self._header: MessageHeader | None = None  # of the frame whose payload is being read
        self._payload: Any = None
        self._filled = 0
        self.has_received = True

    def read_message(self, admit: Callable[[MessageHeader], None]) -> tuple[MessageHeader, Any] | None:
        """The next frame and its payload; None where its rest is not there yet: ask again, it is kept.

        `admit` may raise for a header (PING needs no leave) before memory is taken for the payload. ProtocolError if it
        is none of this protocol, or there is no memory for it; Closed at the end, OSError in the middle of a frame.
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
        check_no_payload(header) if header.type is MessageType.HEARTBEAT else admit(header)
        return self._begin_payload(header)

    def _expect_any_byte(self) -> None:
        if self._expects_payload:
            self._expects_payload = False
            self._source.expect_bytes(1)

    def _fill_buffer(self) -> bool:
        """Reads into the buffer; whether there was something."""
        room = self._view
        if self._start == self._end:
            self._start = self._end = 0
        else:
            if len(room) - self._end < HEADER_STRUCT.size:
                rest = self._end - self._start
                room[:rest] = bytes(room[self._start : self._end])
                self._start, self._end = 0, rest
            room = room[self._end :]
        count = self._source.receive_into(room)
        if count is None:
            self._expect_any_byte()
            return False
        if count == 0:
            raise (
                ConnectionClosed("closed by the other end")
                if self._start == self._end
                else ConnectionError(CLOSED_IN_MESSAGE)
            )
        self.has_received = True
        self._end += count
        # A TLS record: its type, then the major version.
        if 20 <= self._buffer[self._start] <= 22 and self._end - self._start > 1 and self._buffer[self._start + 1] == 3:
            raise ProtocolError("the other end uses TLS, this one does not: give both of them keys (--keys)")
        return True

    def _begin_payload(self, header: MessageHeader) -> tuple[MessageHeader, Any] | None:
        """Takes memory for the payload, and what of it is in the buffer."""
        if not header.length:
            return header, EMPTY_PAYLOAD
        try:
            payload = self._allocate(header.length)
        except (MemoryError, ValueError):
            raise ProtocolError(f"there is no memory for a frame of {header.length} bytes") from None
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
        """Reads on in the payload; the frame, where it is whole."""
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
    reader: MessageReader, admit: Callable[[MessageHeader], None], deliver: Callable[[MessageHeader, Any], object]
) -> None:
    """Takes the frames that are there: `deliver` gets each that `admit` has let through, until it returns something
    true. Errors: as Reader.next."""
    while (frame := reader.read_message(admit)) is not None:
        if frame[0].type is not MessageType.HEARTBEAT and deliver(*frame):
            return


class FrameWindow:
    """The frames that may be on their way here: from the oldest unfinished one (`oldest`) to before `end`.

    `size`: how many, where `end` moves with the oldest; None where `end` is moved by `open`. `first`: frames before it
    were dropped, and what still comes of them is late.
    """

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._finished: set[int] = set()
        self.oldest = self.first = 0
        self.end = size or 0

    def __len__(self) -> int:
        """How many frames may be unfinished: those from the oldest one on."""
        return self.end - self.oldest

    def open(self) -> int:
        """Lets the next frame come; its number."""
        self.end += 1
        return self.end - 1

    def finish(self, frame: int) -> None:
        """Frames may be finished in any order."""
        if frame >= self.oldest:
            self._finished.add(frame)
        while self.oldest in self._finished:
            self._finished.remove(self.oldest)
            self.oldest += 1
        if self._size is not None:
            self.end = self.oldest + self._size

    def drop(self, first: int) -> None:
        """No frame before `first` is on its way any more."""
        self._finished.clear()
        self.first = self.oldest = first
        self.end = first + (self._size or 0)

    def skip(self, first: int, end: int) -> None:
        """The frames from `first`, which would be the next, to before `end` do not come here."""
        if self.oldest < first:
            self._finished.update(range(first, end))
        else:
            self.oldest, self.end = end, end + (self._size or 0)

    def is_in_flight(self, frame: int) -> bool:
        """Whether that frame is on its way."""
        return self.oldest <= frame < self.end and frame not in self._finished

    def check(self, frame: int, place: str) -> None:
        """ProtocolError for a frame outside."""
        if not self.is_in_flight(frame):
            raise ProtocolError(
                f"{place} is for frame {frame}, those from {self.oldest} to {self.end - 1} are on their way"
            )


class ReceiveFilter:
    """Which tensors may come over one connection: `expected` (values by index), each once in each frame of the window.

    others: what is expected instead in the frames of the other roles, in turn unless `schedule` says otherwise. So what
    is stored never exceeds the bytes of what is expected in the frames of the window; what is late is not stored.
    """

    def __init__(
        self,
        expected: Mapping[int, Mapping[str, Any]],
        window: FrameWindow,
        others: Sequence[Mapping[int, Mapping[str, Any]]] = (),
        schedule: RoleSchedule | None = None,
    ) -> None:
        self._roles, self._window = (expected, *others), window
        self._schedule = schedule or RoleSchedule([()] * len(self._roles))
        self._max_values = max(map(len, self._roles))
        self._seen: set[tuple[int, int]] = set()

    def check(self, header: MessageHeader) -> None:
        """ProtocolError, before memory is taken, for a tensor that must not come now or not in this length."""
        if header.frame < self._window.first:
            self._check_late(header)
            return
        _, index, frame, length = header
        value = self._roles[self._schedule.role_index(frame)].get(index)
        key, seen, window = (frame, index), self._seen, self._window
        if value is None or length != value["bytes"] or not window.is_in_flight(frame) or key in seen:
            self._refuse(header, value)
        if len(seen) > 2 * self._max_values * (window.end - window.oldest):
            self._seen = seen = {one for one in seen if one[0] >= window.oldest}
        seen.add(key)

    def _check_late(self, header: MessageHeader) -> None:
        """What was under way when its frame was dropped is read, and thrown away where it is delivered."""
        known = [role[header.index]["bytes"] for role in self._roles if header.index in role]
        if header.length not in known and not (None in known and header.length <= MAX_UNPLANNED_BYTES):
            raise ProtocolError(f"{header.type.name} {header.index} of {header.length} bytes came, late and unplanned")

    def _refuse(self, header: MessageHeader, value: Mapping[str, Any] | None) -> None:
        """Says what is wrong, if anything is: the length of a tensor may not be known before the run."""
        if value is None:
            raise ProtocolError(f"{header.type.name} {header.index} came, which the plan does not send there")
        place, wanted = f"{header.type.name} {header.index} ({value['name']!r})", value["bytes"]
        if wanted is not None and header.length != wanted:
            raise ProtocolError(f"{place} has {header.length} bytes, the plan says {wanted}")
        if wanted is None and header.length > MAX_UNPLANNED_BYTES:
            raise ProtocolError(f"{place} has {header.length} bytes, allowed are {MAX_UNPLANNED_BYTES}")
        self._window.check(header.frame, place)
        if (header.frame, header.index) in self._seen:
            raise ProtocolError(f"{place} came twice for frame {header.frame}")


def check_json_length(header: MessageHeader, limit: int = MAX_JSON_BYTES) -> None:
    """ProtocolError if a JSON message is too long."""
    if header.length > limit:
        raise ProtocolError(f"{header.type.name} has {header.length} bytes, allowed are {limit}")


def check_no_payload(header: MessageHeader) -> None:
    """ProtocolError if a frame without payload has one."""
    if header.length:
        raise ProtocolError(f"{header.type.name} of {header.length} bytes came, it has none")


def decode_json(payload: Any) -> dict[str, Any]:
    """The JSON object in an array of bytes. ProtocolError if it is none."""
    try:
        message = json.loads(payload.tobytes())
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ProtocolError("a message is not a JSON object")
    return message
