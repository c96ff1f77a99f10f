"""Channels: connections with what is queued for them and what came; and the signs of life on them.

In: frames to send. Out: frames that came and were let through, and why no more will come.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from .event_loop import EventLoop
from .pace import SendPacing
from .protocol import (
    HEADER_STRUCT,
    MAX_GREETING_BYTES,
    MessageHeader,
    MessageReader,
    MessageType,
    PeerRefused,
    ProtocolError,
    check_json_length,
    decode_json,
    pack_header,
    read_messages,
)
from .transport import Connection

MAX_MESSAGES_PER_SEND = 32
"""Frames that are handed to the system at once, at most."""
MAX_MISSED_HEARTBEATS = 3
"""Intervals of signs of life without one after which the other end counts as lost."""

CheckHeader = Callable[[MessageHeader], None]
DeliverMessage = Callable[[MessageHeader, Any], object]
"""What returns something true has the channel held."""
HandleEnd = Callable[[Exception], None]
Buffer = bytes | memoryview


class HeartbeatTimeout(Exception):
    """Nothing came from the other end for so long that it must have stopped, or the network is down."""


class _QueuedMessage(NamedTuple):
    """A frame that is to leave. `keep`: what must stay alive until it has."""

    header: MessageHeader
    buffers: tuple[Buffer, Buffer]
    size: int
    keep: Any


class MessageChannel:
    """A connection. Its calls wait up to `start`; from then on none does, and any thread may call.

    `sent`: payload bytes of tensors by transfer index; `send_s`: the seconds that sending them took; `timeline`: from
    the first of the last frame on, the transfer's index, the frame, and when sending began and ended (of
    time.perf_counter).
    """

    def __init__(self, line: Connection) -> None:
        self._connection = line
        self._reader = MessageReader(line)
        self._pacing = SendPacing(line.unacknowledged_bytes)
        self.identity = line.identity
        self.sent: dict[int, int] = {}
        self.send_s = 0.0
        self.timeline: list[tuple[int, int, float, float]] = []
        self._loop: EventLoop | None = None
        self._queue: deque[_QueuedMessage] = deque()
        self._sent_of_first = 0  # bytes of the first in the queue that have left
        self._send_started_at = 0.0  # when it was its turn, 0 where none is queued
        self._is_reading = self._is_writing = True
        self._is_held = False
        self._watched_for = (False, False, False)  # what the lines know
        self._silence_s = self._since_heartbeat_s = 0.0

    # -- before the start

    def send_greeting(self, kind: MessageType, message: Any, deadline: float) -> None:
        """Sends a JSON message at once, before `start`."""
        self._connection.set_deadline(deadline)
        payload = json.dumps(message).encode()
        rest = memoryview(pack_header(MessageHeader(kind, 0, 0, len(payload))) + payload)
        while len(rest):
            rest = rest[self._connection.send([rest]) :]

    def receive_greeting(self, deadline: float) -> dict[str, Any]:
        """The other end's HELLO, before `start`. Refused, ProtocolError or OSError if another message or none comes."""
        self._connection.set_deadline(deadline)
        frame = self._reader.read_message(_check_greeting)
        assert frame is not None  # the line waits
        message = decode_json(frame[1])
        if frame[0].type is MessageType.ERROR:
            raise PeerRefused(str(message.get("message")))
        return message

    def refuse(self, words: str, deadline: float) -> None:
        """Tells the other end, before `start`, why it is sent away, and ends the connection when it can have read."""
        with contextlib.suppress(OSError):  # it may be gone already
            self.send_greeting(MessageType.ERROR, {"message": words}, deadline)
        self._connection.linger()
        self.close()

    def start(
        self, lines: EventLoop, admit: CheckHeader, deliver: DeliverMessage, lost: HandleEnd, at_once: bool = True
    ) -> None:
        """From now on `lines` moves what is sent and received. `admit` raises ProtocolError for a frame that must not
        come, before memory is taken for it; `deliver` gets each other frame with its payload, an array of bytes: where
        it returns something true, what follows waits for `release`; `lost` is told once why no more will come or go.
        They are called in whatever thread drives. at_once: the other end starts now too; else its silence counts from
        when it was first heard: it may be making its sessions.
        """
        with lines.lock:
            self._admit, self._deliver, self._lost = admit, deliver, lost
            self._loop, self._reader.has_received = lines, False
            self._silence_s = 0.0 if at_once else -math.inf
            self._connection.start()
            self._update_watch()
            self.receive()  # what came behind the greeting

    # -- what is sent

    def post(self, kind: MessageType, payload: Any = b"", index: int = 0, frame: int = 0, keep: Any = None) -> None:
        """Queues a frame, which leaves with the next push of the lines. `keep`: what must stay alive until it has."""
        header = MessageHeader(kind, index, frame, len(payload))
        queued = _QueuedMessage(
            header, (pack_header(header), memoryview(payload)), HEADER_STRUCT.size + header.length, keep
        )
        lines = self._get_loop()
        with lines.lock:
            if self._is_writing:
                self._enqueue(queued)
                lines.post(self)

    def send(self, kind: MessageType, payload: Any = b"", index: int = 0, frame: int = 0) -> None:
        """Sends a frame now, or as soon as there is room for it; also what was posted before."""
        with self._get_loop().lock:
            self.post(kind, payload, index, frame)
            self.push()

    def send_json(self, kind: MessageType, message: Any) -> None:
        """Sends a JSON message; before `start` it waits for a second at most."""
        if self._loop is None:
            with contextlib.suppress(OSError):
                self.send_greeting(kind, message, time.monotonic() + 1)
        else:
            with self._loop.lock:
                self.post_json(kind, message)
                self.push()

    def post_json(self, kind: MessageType, message: Any) -> None:
        """Queues a JSON message, as `post`."""
        self.post(kind, json.dumps(message).encode())

    def flush(self, deadline: float) -> None:
        """Waits until what was sent has been handed to the system, or cannot be."""
        if self._loop is not None:
            self._loop.run_until(
                lambda: not self._is_writing or not (self._queue or self._connection.has_unsent), deadline
            )

    def close(self) -> None:
        """Ends the connection."""
        if self._loop is None:
            self._connection.close()
        else:
            with self._loop.lock:
                self._is_reading = False
                self._stop_writing()
                self._connection.close()

    def _get_loop(self) -> EventLoop:
        assert self._loop is not None
        return self._loop

    # -- what the lines call

    def fileno(self) -> int:
        """See lines.Watched, as for what follows."""
        return self._connection.fileno()

    def pause_s(self) -> float:
        """The seconds until the line may be given more."""
        return self._pacing.pause_s

    def receive(self) -> None:
        """Takes the frames that are there."""
        if self._is_reading and not self._is_held:
            try:
                read_messages(self._reader, self._admit, self._deliver_message)
            except Exception as error:  # whatever it is must be told, or others wait for what does not come
                self._stop_reading(error)

    def release(self) -> None:
        """What follows is read again."""
        if self._is_held:
            self._is_held = False
            self._update_watch()
            self.receive()

    def push(self) -> None:
        """Hands over what the system takes of what is queued."""
        try:
            blocked, paused = self._send_queued()
        except OSError as error:
            self._stop_writing()
            self.receive()  # what came before may tell why
            self._stop_reading(error)
        else:
            self._update_watch(blocked, paused)

    def tick(self, tick_s: float, interval_s: float) -> None:
        """Gives a sign of life in each interval, and tells of a silent other end.

        Ticks are counted, not time: a process that was stopped itself must not blame the others when it goes on.
        """
        self._since_heartbeat_s += tick_s
        if self._since_heartbeat_s >= interval_s and not self._queue:  # what is being sent is a sign of life itself
            self._since_heartbeat_s = 0.0
            self.send(MessageType.HEARTBEAT)
        self.receive()  # less than was waited for is a sign of life too
        self._silence_s = 0.0 if self._reader.has_received or self._is_held else self._silence_s + tick_s
        self._reader.has_received = False
        if self._silence_s > MAX_MISSED_HEARTBEATS * interval_s:
            self._stop_reading(
                HeartbeatTimeout(f"nothing was heard of it for {MAX_MISSED_HEARTBEATS * interval_s:g} s")
            )

    # -- within

    def _enqueue(self, queued: _QueuedMessage) -> None:
        """Puts a frame behind all that is queued; a tensor before those of younger frames behind which nothing else is
        queued and of which nothing has left: devices compute for the oldest frame first."""
        queue, place = self._queue, len(self._queue)
        if queued.header.type is MessageType.TENSOR:
            first = 1 if self._sent_of_first else 0
            while place > first and _is_younger(queue[place - 1].header, queued.header.frame):
                place -= 1
        queue.insert(place, queued)

    def _update_watch(self, blocked: bool = False, paused: bool = False) -> None:
        if (waits := (self._is_reading and not self._is_held, blocked, paused)) != self._watched_for:
            self._watched_for = waits
            self._get_loop().watch(self, *waits)

    def _deliver_message(self, header: MessageHeader, payload: Any) -> bool:
        if self._deliver(header, payload):
            self._is_held = True
            self._update_watch()
        return self._is_held

    def _stop_writing(self) -> None:
        """Nothing is sent any more."""
        self._is_writing = False
        self._queue.clear()
        self._update_watch()

    def _stop_reading(self, error: Exception) -> None:
        """Nothing is read any more; that is told, the first time. Words may still be sent."""
        if self._is_reading:
            self._is_reading = False
            self._update_watch()
            self._lost(error)

    def _send_queued(self) -> tuple[bool, bool]:
        """Whether something is left that there is no room for, or that the line has enough for now."""
        queue, line, pace = self._queue, self._connection, self._pacing
        if queue and not self._send_started_at:
            self._send_started_at = time.perf_counter()
        while queue:
            buffers, size = self._next_buffers()
            free = pace.sendable_bytes(size)
            if not free:
                return False, True
            count = line.send(buffers if free >= size else _limit_buffers(buffers, free))
            if not count:
                return True, False
            pace.record_sent(count)
            self._record_sent(count)
        return line.has_unsent and not line.send(()) and line.has_unsent, False

    def _next_buffers(self) -> tuple[Sequence[Buffer], int]:
        """The rest of the first frame in the queue and what follows, and the bytes of it."""
        if len(self._queue) == 1 and not self._sent_of_first:
            return self._queue[0].buffers, self._queue[0].size
        buffers: list[Buffer] = []
        size = -self._sent_of_first
        for frame in islice(self._queue, MAX_MESSAGES_PER_SEND):
            buffers += frame.buffers
            size += frame.size
        if self._sent_of_first:
            skip = len(buffers[0])
            buffers[:2] = [buffers[0][self._sent_of_first :], buffers[1][max(0, self._sent_of_first - skip) :]]
        return buffers, size

    def _record_sent(self, count: int) -> None:
        """So many bytes more have left: frames that have wholly are counted and forgotten."""
        self._sent_of_first += count
        while self._queue and self._sent_of_first >= self._queue[0].size:
            frame = self._queue.popleft()
            self._sent_of_first -= frame.size
            self._record_message(frame.header)
        if not self._queue:
            self._send_started_at = 0.0

    def _record_message(self, header: MessageHeader) -> None:
        start, self._send_started_at = self._send_started_at, time.perf_counter()
        if header.type is MessageType.TENSOR:
            self.send_s += self._send_started_at - start
            _, index, frame, length = header
            if self.timeline and self.timeline[0][1] < frame:  # behind it are also older ones, which overtake
                self.timeline = []
            self.timeline.append((index, frame, start, self._send_started_at))
            self.sent[index] = self.sent.get(index, 0) + length


def _check_greeting(header: MessageHeader) -> None:
    if header.type not in (MessageType.HELLO, MessageType.ERROR):
        raise ProtocolError(f"{header.type.name} came before a greeting")
    check_json_length(header, MAX_GREETING_BYTES)


def _is_younger(header: MessageHeader, frame: int) -> bool:
    """Whether it is of a tensor of a frame after that one."""
    return header.type is MessageType.TENSOR and header.frame > frame


def _limit_buffers(buffers: Sequence[Buffer], size: int) -> list[Buffer]:
    """The first `size` bytes of what is in the buffers."""
    found = []
    for buffer in buffers:
        found.append(buffer[:size])
        size -= len(found[-1])
        if not size:
            break
    return found
