"""What goes over the connections: frames of a fixed header and raw bytes, and the threads that send and read them.

Tensors are raw little-endian bytes whose length the plan tells; all other messages are JSON of bounded length.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

MAGIC, PROTOCOL = b"DICO", 1
HEADER = struct.Struct("<4sBBHIIQ")
"""Magic, protocol version, kind, flags (0), index (of a transfer, an input or an output), frame, payload length."""
JSON_LIMIT = 1 << 20
"""Bytes that a JSON message can have."""
UNKNOWN_LIMIT = 1 << 31
"""Bytes that a tensor can have whose shape is not known before the run."""
SMALL = 1 << 16
"""Bytes up to which a payload goes out at once where the system can take it, which saves waking a thread."""
IN_FLIGHT = 1
"""Frames that may be on their way at once."""


class Kind(IntEnum):
    """What a frame is. PEERS, RUN, INPUT and FINISH come from the coordinator, READY, OUTPUT, DONE and REPORT go
    to it; TENSOR and BYE pass between devices. RUN opens a frame, DONE says that a device has finished it."""

    HELLO = 1
    PEERS = 2
    READY = 3
    RUN = 4
    INPUT = 5
    TENSOR = 6
    OUTPUT = 7
    DONE = 8
    FINISH = 9
    BYE = 10
    REPORT = 11
    ERROR = 12


@dataclass(frozen=True)
class Header:
    """A frame's header; `length` in bytes."""

    kind: Kind
    index: int
    frame: int
    length: int


class ProtocolError(Exception):
    """The other end sent what it must not send; nothing of it was stored."""


class Refused(Exception):
    """The other end refused the connection; the message is in its words."""


Admit = Callable[[Header], None]
Deliver = Callable[[Header, Any], None]
Lost = Callable[[Exception], None]


def left(deadline: float) -> float:
    """Seconds until `deadline` (of time.monotonic), more than 0: for a socket 0 means not to wait at all."""
    return max(0.001, deadline - time.monotonic())


class Channel:
    """A connection. One thread sends what is queued and another reads, so that no two ends can wait for each other.

    `sent`: payload bytes of tensors by transfer index; `send_s`: the seconds that sending them took.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.sent: dict[int, int] = {}
        self.send_s = 0.0
        self._queue: queue.SimpleQueue[tuple[Header, Any, Any, int] | None] = queue.SimpleQueue()
        self._queued = 0  # frames in the queue or being sent from it
        self._turn = threading.Lock()  # for `_queued`, and that frames leave in order
        self._sending: threading.Thread | None = None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self, kind: Kind, message: Any, deadline: float) -> None:
        """Sends a JSON message at once, before `start`."""
        self._socket.settimeout(left(deadline))
        self._write(_buffers(Header(kind, 0, 0, 0), json.dumps(message).encode()), 0)

    def greeting(self, deadline: float) -> dict[str, Any]:
        """The other end's HELLO, before `start`. Refused, ProtocolError or OSError if another message or none comes."""
        self._socket.settimeout(left(deadline))
        header = self._read_header()
        if header is None:
            raise ConnectionError("closed before a greeting")
        if header.kind not in (Kind.HELLO, Kind.ERROR):
            raise ProtocolError(f"{header.kind.name} came before a greeting")
        check_message(header)
        message = decode(self._read(header.length))
        if header.kind is Kind.ERROR:
            raise Refused(str(message.get("message")))
        return message

    def start(self, admit: Admit, deliver: Deliver, lost: Lost) -> None:
        """Starts the threads. `admit` raises ProtocolError for a frame that must not come, before memory is taken for
        it; `deliver` gets each other frame with its payload, an array of bytes; `lost` why no more will come or go.
        """
        self._socket.settimeout(None)
        self._sending = threading.Thread(target=self._send_all, args=(lost,), daemon=True)
        self._sending.start()
        threading.Thread(target=self._read_all, args=(admit, deliver, lost), daemon=True).start()

    def send(self, kind: Kind, payload: Any = b"", index: int = 0, frame: int = 0, keep: Any = None) -> None:
        """Sends a frame, or queues it. `keep`: what must stay alive until the payload has left."""
        header = Header(kind, index, frame, len(payload))
        with self._turn:
            start = time.perf_counter()
            small = len(payload) <= SMALL and self._queued == 0
            done = self._write_now(_buffers(header, payload)) if small else 0
            if done == HEADER.size + len(payload):
                self._count(header, start)
            else:
                self._queued += 1
                self._queue.put((header, payload, keep, done))

    def send_json(self, kind: Kind, message: Any) -> None:
        """Queues a JSON message."""
        self.send(kind, json.dumps(message).encode())

    def flush(self, deadline: float) -> None:
        """Waits until what was queued has been handed to the system; what is queued later is not sent."""
        self._queue.put(None)
        if self._sending is not None:
            self._sending.join(left(deadline))

    def close(self) -> None:
        """Ends the connection, and with it the threads."""
        with contextlib.suppress(OSError):  # the other end may have closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_all(self, lost: Lost) -> None:
        try:
            while self._send_next():
                continue
        except OSError as error:
            lost(error)

    def _send_next(self) -> bool:
        item = self._queue.get()
        if item is None:
            return False
        header, payload, _, done = item
        start = time.perf_counter()
        self._write(_buffers(header, payload), done)
        with self._turn:
            self._queued -= 1
            self._count(header, start)
        return True

    def _count(self, header: Header, start: float) -> None:
        if header.kind is Kind.TENSOR:
            self.send_s += time.perf_counter() - start
            self.sent[header.index] = self.sent.get(header.index, 0) + header.length

    def _write_now(self, buffers: list[memoryview]) -> int:
        """Writes what the system takes without waiting; the number of bytes."""
        try:
            return self._socket.sendmsg(buffers, [], socket.MSG_DONTWAIT)
        except OSError:  # no room, or an error that the sending thread will meet and tell
            return 0

    def _write(self, buffers: list[memoryview], done: int) -> None:
        """Writes all but the first `done` bytes. Header and payload go in one call: a small frame is one packet."""
        total = sum(map(len, buffers))
        while done < total:
            head, payload = buffers
            done += self._socket.sendmsg([head[done:], payload[max(0, done - len(head)) :]])

    def _read_all(self, admit: Admit, deliver: Deliver, lost: Lost) -> None:
        try:
            while (header := self._read_header()) is not None:
                admit(header)
                deliver(header, self._read(header.length))
            raise ConnectionError("closed by the other end")
        except (OSError, ProtocolError) as error:
            lost(error)

    def _read_header(self) -> Header | None:
        """None at the end of the stream."""
        first = self._socket.recv(HEADER.size)
        if not first:
            return None
        raw = first + self._read(HEADER.size - len(first)).tobytes()
        magic, version, kind, flags, index, frame, length = HEADER.unpack(raw)
        if magic != MAGIC:
            raise ProtocolError("the other end does not speak this protocol")
        if version != PROTOCOL:
            raise ProtocolError(f"the other end speaks version {version} of the protocol, this one {PROTOCOL}")
        if flags or kind not in Kind._value2member_map_:
            raise ProtocolError(f"a frame of unknown kind {kind} with flags {flags} came")
        return Header(Kind(kind), index, frame, length)

    def _read(self, length: int) -> Any:
        payload: Any = np.empty(length, np.uint8)
        view, done = memoryview(payload), 0
        while done < length:
            count = self._socket.recv_into(view[done:])
            if count == 0:
                raise ConnectionError("closed in the middle of a frame")
            done += count
        return payload


def _buffers(header: Header, payload: Any) -> list[memoryview]:
    head = HEADER.pack(MAGIC, PROTOCOL, header.kind, 0, header.index, header.frame, len(payload))
    return [memoryview(head), memoryview(payload)]


def decode(payload: Any) -> dict[str, Any]:
    """The JSON object in an array of bytes. ProtocolError if it is none."""
    try:
        message = json.loads(payload.tobytes())
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ProtocolError("a message is not a JSON object")
    return message


def check_message(header: Header) -> None:
    """ProtocolError if a message that is no tensor is too long."""
    if header.length > JSON_LIMIT:
        raise ProtocolError(f"{header.kind.name} has {header.length} bytes, allowed are {JSON_LIMIT}")


def check_tensor(header: Header, expected: Mapping[int, Mapping[str, Any]], frame: int) -> None:
    """ProtocolError unless `expected` (values by index) has this tensor in this length, and its frame is `frame` or
    one of the next that may be on their way.
    """
    value = expected.get(header.index)
    if value is None:
        raise ProtocolError(f"{header.kind.name} {header.index} came, which the plan does not send there")
    place, wanted = f"{header.kind.name} {header.index} ({value['name']!r})", value["bytes"]
    if wanted is not None and header.length != wanted:
        raise ProtocolError(f"{place} has {header.length} bytes, the plan says {wanted}")
    if wanted is None and header.length > UNKNOWN_LIMIT:
        raise ProtocolError(f"{place} has {header.length} bytes, allowed are {UNKNOWN_LIMIT}")
    if not frame <= header.frame < frame + IN_FLIGHT:
        raise ProtocolError(f"{place} is for frame {header.frame} while frame {frame} is computed")
