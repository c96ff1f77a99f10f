"""Message channels: connections with a send queue, send pacing and heartbeats.

Messages to send ⇒ checked messages that arrived, and the reason when no more will arrive.
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
MAX_MISSED_HEARTBEATS = 3
"""Heartbeat intervals without any data, after which the other end counts as failed."""
MAX_UNACKED_S = 0.5
"""The kernel is given the data that a link carries in this time.

Data on other connections of the same link queues behind it. With more, heartbeats would arrive late on a slow link, and
a healthy device would count as failed.
"""
MIN_UNACKED_BYTES = 2048
"""Bytes that may always be unacknowledged: one or two packets."""
INITIAL_UNACKED_BYTES = 2 * MIN_UNACKED_BYTES
"""Limit at first, until the link's speed is measured."""
MAX_UNACKED_BYTES = 1 << 30
MIN_PAUSE_S, MAX_PAUSE_S = 5e-5, 0.02
"""Seconds between two checks of a link that has enough data."""

CheckHeader = Callable[[MessageHeader], None]
DeliverMessage = Callable[[MessageHeader, Any], object]
"""Called with a message; a true result stops reading until `MessageChannel.release`."""
HandleEnd = Callable[[Exception], None]
Buffer = bytes | memoryview


class HeartbeatTimeout(Exception):
    """Nothing arrived for so long that the other end must have stopped, or the network is down."""


class SendPacing:
    """Limits the unacknowledged bytes of a connection, so that urgent messages need not wait long in the kernel.

    Attributes:
        allowed: Current limit of unacknowledged bytes.
        pause_s: Seconds until the next check, when the limit is reached.
    """

    def __init__(self, unacknowledged_bytes: Callable[[], int]) -> None:
        self._unacknowledged_bytes = unacknowledged_bytes
        self.allowed = INITIAL_UNACKED_BYTES
        self.pause_s = MIN_PAUSE_S
        self._unacked_before_send, self._unacked_after_send, self._sent_at = 0, 0, time.monotonic()

    def sendable_bytes(self, size: int) -> int:
        """Return how many of `size` bytes may be sent now; 0: none, ask again after `pause_s`."""
        if self._unacked_after_send + size <= MIN_UNACKED_BYTES:  # So few bytes need no measurement.
            self._unacked_before_send = self._unacked_after_send
            return size
        self._unacked_before_send = self._update_rate()
        free = self.allowed - self._unacked_before_send
        if free < min(size, self.allowed // 2):
            self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)
            return 0
        self.pause_s = MIN_PAUSE_S
        return min(size, free)

    def record_sent(self, count: int) -> None:
        """Record that `count` bytes of those allowed were sent."""
        self._unacked_after_send, self._sent_at = self._unacked_before_send + count, time.monotonic()

    def _update_rate(self) -> int:
        """Update the limit from the bytes acknowledged since the last send; return the unacknowledged bytes."""
        unacknowledged, seconds = self._unacknowledged_bytes(), max(1e-6, time.monotonic() - self._sent_at)
        carried = int((self._unacked_after_send - unacknowledged) / seconds * MAX_UNACKED_S)
        if carried > self.allowed < 2 * self._unacked_after_send:
            # Links accept a burst at once, so the limit is at most doubled.
            self.allowed = min(carried, 2 * self.allowed, MAX_UNACKED_BYTES)
        elif unacknowledged and self._unacked_after_send > MIN_UNACKED_BYTES and seconds > MAX_UNACKED_S / 2:
            # The link was never idle, so this is its speed.
            self.allowed = max(MIN_UNACKED_BYTES, carried)
        return unacknowledged


class _QueuedMessage(NamedTuple):
    """A message in the send queue; `keep` is kept alive until it was sent."""

    header: MessageHeader
    buffers: tuple[Buffer, Buffer]
    size: int
    keep: Any


class MessageChannel:
    """A connection that sends and receives messages.

    Calls block before `start`. Afterwards none blocks, and any thread may call.

    Attributes:
        identity: The identity in the other end's certificate; None without TLS.
        sent: Payload bytes of sent tensors by transfer index.
        send_s: Seconds spent on sending tensors.
        timeline: From the first tensor of the last frame on: transfer index, frame, start and end of sending
            (time.perf_counter).
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reader = MessageReader(connection)
        self._pacing = SendPacing(connection.unacknowledged_bytes)
        self.identity = connection.identity
        self.sent: dict[int, int] = {}
        self.send_s = 0.0
        self.timeline: list[tuple[int, int, float, float]] = []
        self._loop: EventLoop | None = None
        self._queue: deque[_QueuedMessage] = deque()
        self._sent_of_first = 0  # Bytes of the first queued message that were sent.
        self._send_started_at = 0.0  # When the first queued message became the first; 0 if the queue is empty.
        self._is_reading = self._is_writing = True
        self._is_held = False
        self._watched_for = (False, False, False)  # The last arguments of EventLoop.watch.
        self._silence_s = self._since_heartbeat_s = 0.0

    # -- before the start

    def send_greeting(self, message_type: MessageType, message: Any, deadline: float) -> None:
        """Send a JSON message and wait until it was sent; only before `start`."""
        self._connection.set_deadline(deadline)
        payload = json.dumps(message).encode()
        unsent = memoryview(pack_header(MessageHeader(message_type, 0, 0, len(payload))) + payload)
        while len(unsent):
            unsent = unsent[self._connection.send([unsent]) :]

    def receive_greeting(self, deadline: float) -> dict[str, Any]:
        """Wait for the other end's HELLO and return it; only before `start`.

        Raise PeerRefused for an ERROR, ProtocolError for another message, and OSError if nothing arrives.
        """
        self._connection.set_deadline(deadline)
        message = self._reader.read_message(_check_greeting)
        assert message is not None  # The connection blocks.
        header, content = message[0], decode_json(message[1])
        if header.type is MessageType.ERROR:
            raise PeerRefused(str(content.get("message")))
        return content

    def refuse(self, reason: str, deadline: float) -> None:
        """Tell the other end why it is refused, and close when it had time to read that; only before `start`."""
        with contextlib.suppress(OSError):  # It may be gone already.
            self.send_greeting(MessageType.ERROR, {"message": reason}, deadline)
        self._connection.linger()
        self.close()

    def start(
        self, loop: EventLoop, check: CheckHeader, deliver: DeliverMessage, handle_end: HandleEnd, at_once: bool = True
    ) -> None:
        """Let the event loop send and receive from now on.

        The callbacks run in the thread that runs the loop.

        Args:
            loop: The event loop.
            check: Raises ProtocolError for a message that must not arrive, before memory for it is allocated.
            deliver: Gets all other messages, with the payload as an array of bytes. If it returns something true,
                reading stops until `release`.
            handle_end: Gets the reason, once, why no more messages will arrive or be sent.
            at_once: The other end starts now too. Otherwise its silence counts only after its first message, because
                it may be creating its sessions.
        """
        with loop.lock:
            self._check, self._deliver, self._handle_end = check, deliver, handle_end
            self._loop, self._reader.has_received = loop, False
            self._silence_s = 0.0 if at_once else -math.inf
            self._connection.start()
            self._update_watch()
            self.receive()  # Messages may have arrived together with the greeting.

    # -- sending

    def post(
        self, message_type: MessageType, payload: Any = b"", index: int = 0, frame: int = 0, keep: Any = None
    ) -> None:
        """Queue a message for the loop's next push; `keep` is kept alive until it was sent."""
        header = MessageHeader(message_type, index, frame, len(payload))
        size = HEADER_STRUCT.size + header.length
        queued = _QueuedMessage(header, (pack_header(header), memoryview(payload)), size, keep)
        loop = self._get_loop()
        with loop.lock:
            if self._is_writing:
                self._enqueue(queued)
                loop.post(self)

    def send(self, message_type: MessageType, payload: Any = b"", index: int = 0, frame: int = 0) -> None:
        """Send a message, and all queued ones, as soon as there is space for it."""
        with self._get_loop().lock:
            self.post(message_type, payload, index, frame)
            self.push()

    def send_json(self, message_type: MessageType, message: Any) -> None:
        """Send a JSON message; before `start` it may block for a second."""
        if self._loop is None:
            with contextlib.suppress(OSError):
                self.send_greeting(message_type, message, time.monotonic() + 1)
        else:
            with self._loop.lock:
                self.post_json(message_type, message)
                self.push()

    def post_json(self, message_type: MessageType, message: Any) -> None:
        """Queue a JSON message for the loop's next push."""
        self.post(message_type, json.dumps(message).encode())

    def flush(self, deadline: float) -> None:
        """Wait until all sent messages were passed to the kernel, or cannot be."""
        if self._loop is not None:
            self._loop.run_until(
                lambda: not self._is_writing or not (self._queue or self._connection.has_unsent), deadline
            )

    def close(self) -> None:
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

    # -- called by the event loop: see EventSource

    def fileno(self) -> int:
        return self._connection.fileno()

    def pause_s(self) -> float:
        return self._pacing.pause_s

    def receive(self) -> None:
        if self._is_reading and not self._is_held:
            try:
                read_messages(self._reader, self._check, self._deliver_message)
            except Exception as error:  # Any error must be reported, or others would wait for messages in vain.
                self._stop_reading(error)

    def release(self) -> None:
        """Continue reading after `deliver` stopped it."""
        if self._is_held:
            self._is_held = False
            self._update_watch()
            self.receive()

    def push(self) -> None:
        try:
            is_blocked, is_paused = self._send_queued()
        except OSError as error:
            self._stop_writing()
            self.receive()  # A message that arrived before may tell the reason.
            self._stop_reading(error)
        else:
            self._update_watch(is_blocked, is_paused)

    def tick(self, tick_s: float, interval_s: float) -> None:
        """Send a heartbeat in each interval, and end the connection if the other end is silent for too long.

        Ticks are counted instead of time, because a process that was stopped must not blame others when it continues.
        """
        self._since_heartbeat_s += tick_s
        if self._since_heartbeat_s >= interval_s and not self._queue:  # Data in the queue is a heartbeat itself.
            self._since_heartbeat_s = 0.0
            self.send(MessageType.HEARTBEAT)
        self.receive()  # Fewer bytes than the low-water mark count as a heartbeat too.
        self._silence_s = 0.0 if self._reader.has_received or self._is_held else self._silence_s + tick_s
        self._reader.has_received = False
        if self._silence_s > MAX_MISSED_HEARTBEATS * interval_s:
            self._stop_reading(HeartbeatTimeout(f"no data received for {MAX_MISSED_HEARTBEATS * interval_s:g} s"))

    # -- internal

    def _enqueue(self, queued: _QueuedMessage) -> None:
        """Append a message; insert a tensor before unsent tensors of later frames at the end of the queue.

        Devices compute the oldest frame first, so its tensors are needed first.
        """
        queue, place = self._queue, len(self._queue)
        if queued.header.type is MessageType.TENSOR:
            first = 1 if self._sent_of_first else 0
            while place > first and _is_later_tensor(queue[place - 1].header, queued.header.frame):
                place -= 1
        queue.insert(place, queued)

    def _update_watch(self, is_blocked: bool = False, is_paused: bool = False) -> None:
        if (watch_for := (self._is_reading and not self._is_held, is_blocked, is_paused)) != self._watched_for:
            self._watched_for = watch_for
            self._get_loop().watch(self, *watch_for)

    def _deliver_message(self, header: MessageHeader, payload: Any) -> bool:
        if self._deliver(header, payload):
            self._is_held = True
            self._update_watch()
        return self._is_held

    def _stop_writing(self) -> None:
        self._is_writing = False
        self._queue.clear()
        self._update_watch()

    def _stop_reading(self, error: Exception) -> None:
        """Stop reading and report the reason, once. Messages can still be sent."""
        if self._is_reading:
            self._is_reading = False
            self._update_watch()
            self._handle_end(error)

    def _send_queued(self) -> tuple[bool, bool]:
        """Send the queue; return True, False if the kernel's buffer is full, False, True if pacing pauses it."""
        queue, connection, pacing = self._queue, self._connection, self._pacing
        if queue and not self._send_started_at:
            self._send_started_at = time.perf_counter()
        while queue:
            buffers, size = self._next_buffers()
            sendable = pacing.sendable_bytes(size)
            if not sendable:
                return False, True
            count = connection.send(buffers if sendable >= size else _limit_buffers(buffers, sendable))
            if not count:
                return True, False
            pacing.record_sent(count)
            self._record_sent(count)
        return connection.has_unsent and not connection.send(()) and connection.has_unsent, False

    def _next_buffers(self) -> tuple[Sequence[Buffer], int]:
        """Return the unsent rest of the first queued message and the following ones, and their size in bytes."""
        if len(self._queue) == 1 and not self._sent_of_first:
            return self._queue[0].buffers, self._queue[0].size
        buffers: list[Buffer] = []
        size = -self._sent_of_first
        for message in islice(self._queue, MAX_MESSAGES_PER_SEND):
            buffers += message.buffers
            size += message.size
        if self._sent_of_first:
            header_size = len(buffers[0])
            buffers[:2] = [
                buffers[0][self._sent_of_first :],
                buffers[1][max(0, self._sent_of_first - header_size) :],
            ]
        return buffers, size

    def _record_sent(self, count: int) -> None:
        """Remove messages that were sent completely, after `count` more bytes were sent."""
        self._sent_of_first += count
        while self._queue and self._sent_of_first >= self._queue[0].size:
            message = self._queue.popleft()
            self._sent_of_first -= message.size
            self._record_message(message.header)
        if not self._queue:
            self._send_started_at = 0.0

    def _record_message(self, header: MessageHeader) -> None:
        start, self._send_started_at = self._send_started_at, time.perf_counter()
        if header.type is MessageType.TENSOR:
            self.send_s += self._send_started_at - start
            _, index, frame, length = header
            if self.timeline and self.timeline[0][1] < frame:  # Later entries can be of older frames, which overtook.
                self.timeline = []
            self.timeline.append((index, frame, start, self._send_started_at))
            self.sent[index] = self.sent.get(index, 0) + length


def _check_greeting(header: MessageHeader) -> None:
    if header.type not in (MessageType.HELLO, MessageType.ERROR):
        raise ProtocolError(f"received {header.type.name} before a greeting")
    check_json_length(header, MAX_GREETING_BYTES)


def _is_later_tensor(header: MessageHeader, frame: int) -> bool:
    return header.type is MessageType.TENSOR and header.frame > frame


def _limit_buffers(buffers: Sequence[Buffer], size: int) -> list[Buffer]:
    """Return the first `size` bytes of the buffers."""
    limited = []
    for buffer in buffers:
        limited.append(buffer[:size])
        size -= len(limited[-1])
        if not size:
            break
    return limited
