"""Message channels: connections with a send queue, a limit of unacknowledged bytes, and heartbeats.

One event loop polls all channels of a process. The main thread runs the loop while it waits, so that messages need not
be passed between threads. A helper thread runs the loop while the main thread computes for long, and sends heartbeats.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

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
)
from .transport import Connection, limit_buffers

HELPER_MIN_BUSY_S = 0.002
"""The helper thread runs the event loop only while the main thread computes for more than these seconds.

Waking the helper thread takes some hundredths of this time.
"""
MAX_SPIN_S = 0.0005
"""Seconds for which a waiting thread polls without blocking before it blocks.

On an idle processor, waking a blocked thread takes a tenth of this time. A thread whose previous wait was longer blocks
at once.
"""
READ, WRITE = select.POLLIN, select.POLLOUT


class EventSource(Protocol):
    """The methods of a channel that the event loop calls while it holds `EventLoop.lock`."""

    def fileno(self) -> int:
        """Return the connection's file descriptor, which the event loop polls."""

    def receive(self) -> None:
        """Read the data that has arrived, and deliver complete messages."""

    def push(self) -> None:
        """Send queued data, as far as the kernel accepts it."""

    def pause_s(self) -> float:
        """Return the seconds until `push` should be called again; only called while the channel has paused sending."""

    def tick(self, tick_s: float, interval_s: float) -> None:
        """Send a heartbeat every `interval_s` seconds, and end the connection if the other end has failed.

        It has failed if nothing arrived for MAX_MISSED_HEARTBEATS intervals. The loop calls this method every `tick_s`
        seconds.
        """


class EventLoop:
    """Sends and receives on all connections of a process, in the main thread or in a helper thread.

    The helper thread runs the loop at first. `run_until` moves it to the calling thread, and `let_helper_run` back.

    Attributes:
        lock: A thread holds this lock while it changes a channel.
        can_spin: True if a waiting thread may poll without blocking, because this host has more processor cores than
            device processes.
        running_since: Time (time.perf_counter) at which a thread began to run the loop. Data that arrives later is read
            at once.
    """

    def __init__(self, interval_s: float, local_processes: int = 0) -> None:
        """Start the helper thread, which sends a heartbeat every `interval_s` seconds.

        `local_processes` is the number of other device processes that share the processors of this process.
        """
        self.lock = threading.RLock()
        self.running_since = 0.0
        self._interval_s = interval_s
        self._poll = select.poll()
        self._sources: dict[int, EventSource] = {}
        self._blocked: set[EventSource] = set()
        self._posted: dict[EventSource, None] = {}
        self._paused: set[EventSource] = set()
        self._driver_lock = threading.Lock()  # Only a thread with this lock may run the loop.
        self._helper_drives, self._is_closed = True, False
        self._is_polling = False
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.can_spin, self._last_wait_s = cores > 1 + local_processes, 0.0
        self._helper_event = threading.Event()  # This event is set while the helper thread should run the loop.
        self._helper_event.set()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll.register(self._wake_read, READ)
        self._helper = threading.Thread(target=self._run_helper, daemon=True)
        self._helper.start()

    # -- methods that channels call

    def watch(self, channel: EventSource, waits_for_data: bool, is_blocked: bool, is_paused: bool) -> None:
        """Set the events for which a channel waits.

        If `waits_for_data`, it waits for data; if `is_blocked`, for space in the kernel's send buffer; if `is_paused`,
        for the seconds that its `pause_s` returns.
        """
        number, mask = channel.fileno(), (READ if waits_for_data else 0) | (WRITE if is_blocked else 0)
        if mask:
            self._poll.register(number, mask)
            self._sources[number] = channel
        elif self._sources.pop(number, None) is not None:
            self._poll.unregister(number)
        for is_waiting, channels in ((is_blocked, self._blocked), (is_paused, self._paused)):
            channels.add(channel) if is_waiting else channels.discard(channel)
        self.wake()

    def post(self, channel: EventSource) -> None:
        """Record that a channel has queued messages; the next `push` sends them."""
        self._posted[channel] = None

    # -- methods that the main thread calls

    def push(self) -> None:
        """Send the queued messages of all channels for which `post` was called."""
        if self._posted:
            with self.lock:
                posted, self._posted = self._posted, {}
                for channel in posted:
                    channel.push()

    def run_until(self, is_ready: Callable[[], object], deadline: float | None = None) -> bool:
        """Run the loop until `is_ready` returns a true value or the deadline (time.monotonic) passes.

        Return True if `is_ready` returned a true value.
        """
        if self._posted:
            self.push()
        if is_ready():
            return True
        if self._helper_drives:
            self._helper_drives = False
            self._helper_event.clear()
            self.wake()
        with self._driver_lock:
            self.running_since = time.perf_counter()
            while True:
                seconds = None if deadline is None else deadline - time.monotonic()
                if seconds is not None and seconds <= 0:
                    return bool(is_ready())
                self._run_once(is_ready, seconds)
                if is_ready():
                    return True

    def let_helper_run(self, seconds: float) -> None:
        """Send posted messages, and let the helper thread run the loop while the caller computes for about `seconds`.

        For short times, the helper thread runs only if some data could not be sent at once.
        """
        if self._posted:
            self.push()
        if not self._helper_drives and (seconds > HELPER_MIN_BUSY_S or self.has_backlog()):
            self._helper_drives = True
            self._helper_event.set()

    def spin_next(self) -> None:
        """Poll without blocking in the next wait, because data will arrive soon."""
        self._last_wait_s = 0.0

    def has_backlog(self) -> bool:
        return bool(self._blocked or self._paused)

    def wake(self) -> None:
        """Make the thread that runs the loop check the channels and the condition of `run_until` again."""
        if self._is_polling:
            # Errors need no reaction: if the pipe is full, the thread wakes anyway; if it is closed, the loop has
            # ended.
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"\0")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed, self._helper_drives = True, False
            self._helper_event.set()
            self.wake()
            self._helper.join()
            os.close(self._wake_read)
            os.close(self._wake_write)

    # -- running the loop

    def _run_once(self, should_stop: Callable[[], object], seconds: float | None) -> None:
        """Wait for events for at most `seconds`, and let the channels react to them.

        Return at once if `should_stop` returns a true value.
        """
        if self._paused:
            pause_s = min(channel.pause_s() for channel in tuple(self._paused))
            seconds = pause_s if seconds is None else min(seconds, pause_s)
        self._is_polling = True  # From now on, `wake` in another thread ends poll() in this thread.
        try:
            if should_stop():
                return
            if self._paused and seconds is not None and seconds < 0.001:
                time.sleep(seconds)  # poll() waits for at least 1 ms, which would be too long.
                seconds = 0.0
            events = self._wait(seconds)
        finally:
            self._is_polling = False
        for number, event in events:
            with self.lock:
                if (channel := self._sources.get(number)) is None:
                    if number == self._wake_read:
                        os.read(number, 4096)
                    continue
                if event != READ:  # There is space in the send buffer, or the connection ended; `push` detects which.
                    channel.push()
                if event != WRITE:
                    channel.receive()
        if self._paused:
            with self.lock:
                for channel in tuple(self._paused):
                    channel.push()

    def _wait(self, seconds: float | None) -> list[tuple[int, int]]:
        """Wait for events of the connections for at most `seconds`; return (file descriptor, event mask) pairs."""
        events: list[tuple[int, int]] = []
        start = time.perf_counter()
        if self.can_spin and self._last_wait_s < MAX_SPIN_S:
            poll, end = self._poll.poll, start + (MAX_SPIN_S if seconds is None else min(MAX_SPIN_S, seconds))
            while not (events := poll(0)) and time.perf_counter() < end:
                os.sched_yield()
        if not events:
            events = self._poll.poll(None if seconds is None else 1000 * seconds)
        self._last_wait_s = time.perf_counter() - start
        return events

    def _run_helper(self) -> None:
        tick_s = self._interval_s / 4
        due = time.monotonic() + tick_s
        while not self._is_closed:
            self._helper_event.wait(max(0.0, due - time.monotonic()))
            if self._driver_lock.acquire(blocking=False):  # The result is False while another thread runs the loop.
                try:
                    self.running_since = time.perf_counter()
                    while self._helper_drives and (left_s := due - time.monotonic()) > 0:
                        self._run_once(lambda: not self._helper_drives, left_s)
                    if time.monotonic() >= due:
                        # Data that has arrived is read first: otherwise `tick` would find the other end silent.
                        self._run_once(lambda: False, 0.0)
                finally:
                    self._driver_lock.release()
            if time.monotonic() >= due and not self._is_closed:
                # The next due time is computed from the present due time, so that small delays do not add up.
                due = max(due, time.monotonic() - tick_s / 2) + tick_s
                for channel in tuple(self._sources.values()):
                    with self.lock:
                        channel.tick(tick_s, self._interval_s)
                self.wake()  # The main thread may be waiting for a channel that `tick` has just ended.


MAX_MESSAGES_PER_SEND = 32
MAX_MISSED_HEARTBEATS = 3
"""Number of heartbeat intervals without any data, after which the other end is considered failed."""
MAX_UNACKED_S = 0.5
"""Limit of a connection's unacknowledged data, in seconds that the network link needs to carry it.

With more data on a slow link, heartbeats of other connections would be late, and a healthy device considered failed.
"""
MIN_UNACKED_BYTES = 2048
"""Number of bytes that may always be unacknowledged: one or two packets."""
INITIAL_UNACKED_BYTES = 2 * MIN_UNACKED_BYTES
"""Limit of unacknowledged bytes until the speed of the link is measured."""
MAX_UNACKED_BYTES = 1 << 30
MIN_PAUSE_S, MAX_PAUSE_S = 5e-5, 0.02
"""Shortest and longest seconds between two checks whether the other end has acknowledged more bytes."""

CheckHeader = Callable[[MessageHeader], None]
DeliverMessage = Callable[[MessageHeader, Any], object]
"""Callback for a message's header and payload; after a true result, the channel stops reading until `release`."""
HandleEnd = Callable[[Exception], None]
Buffer = bytes | memoryview


class HeartbeatTimeout(Exception):
    """Error: no data and no heartbeats arrive, because the other end has stopped or the network is down."""


class SendPacing:
    """Limits the unacknowledged bytes of a connection, so that urgent messages need not wait in the kernel.

    The limit follows the speed of the network link, which is measured with `unacknowledged_bytes`: this function
    returns the number of bytes that were sent and not yet acknowledged.

    Attributes:
        allowed: Current limit of unacknowledged bytes.
        pause_s: Seconds after which to call `sendable_bytes` again, when the limit is reached.
    """

    def __init__(self, unacknowledged_bytes: Callable[[], int]) -> None:
        self._unacknowledged_bytes = unacknowledged_bytes
        self.allowed = INITIAL_UNACKED_BYTES
        self.pause_s = MIN_PAUSE_S
        self._unacked_before_send, self._unacked_after_send, self._sent_at = 0, 0, time.monotonic()

    def sendable_bytes(self, size: int) -> int:
        """Return how many of `size` bytes may be sent now; if none, call again after `pause_s` seconds."""
        if self._unacked_after_send + size <= MIN_UNACKED_BYTES:
            # The limit is never below MIN_UNACKED_BYTES, so no measurement is necessary.
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
        """Record that `count` bytes were sent; `sendable_bytes` must have allowed them."""
        self._unacked_after_send, self._sent_at = self._unacked_before_send + count, time.monotonic()

    def _update_rate(self) -> int:
        """Measure the link's speed since the last send, and update the limit; return the unacknowledged bytes."""
        unacknowledged, seconds = self._unacknowledged_bytes(), max(1e-6, time.monotonic() - self._sent_at)
        carried = int((self._unacked_after_send - unacknowledged) / seconds * MAX_UNACKED_S)
        if carried > self.allowed < 2 * self._unacked_after_send:
            # The limit grows by at most a factor of 2, because a link may accept a burst faster than its lasting speed.
            self.allowed = min(carried, 2 * self.allowed, MAX_UNACKED_BYTES)
        elif unacknowledged and self._unacked_after_send > MIN_UNACKED_BYTES and seconds > MAX_UNACKED_S / 2:
            # Bytes are still unacknowledged, so the link was never idle and `carried` measures its speed.
            self.allowed = max(MIN_UNACKED_BYTES, carried)
        return unacknowledged


class ReceivedTensors(NamedTuple):
    """Number of tensor bytes that arrived on a channel, and the time in which they arrived.

    Attributes:
        nbytes: Payload bytes of the tensors.
        timed_bytes: Number of bytes whose arrival was timed. A tensor's first bytes are not: their time would include
            waiting for the sender.
        timed_s: Seconds in which the timed bytes arrived.
    """

    nbytes: int
    timed_bytes: int
    timed_s: float


class _QueuedMessage(NamedTuple):
    """A message in the send queue; `keep` owns the payload's memory, so it must live until the message is sent."""

    header: MessageHeader
    buffers: tuple[Buffer, Buffer]
    size: int
    keep: Any


class MessageChannel:
    """A connection that sends and receives messages.

    Before `start`, both ends exchange greetings (messages that prove their identities), and calls block. Afterwards,
    the event loop sends and receives, no call blocks, and any thread may call.

    Attributes:
        identity: The identity in the other end's certificate; None without TLS.
        sent: Payload bytes of sent tensors, by the index of the transfer.
        send_s: Seconds spent on sending tensors.
        timeline: (index of the transfer, frame, start and end of sending in time.perf_counter) of each tensor that was
            sent since the first tensor of the newest frame.
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
        self._send_started_at = 0.0  # Time when sending of the first queued message began; 0 if the queue is empty.
        self._is_reading = self._is_writing = True
        self._is_held = False
        # Arguments of the last call of EventLoop.watch. The next call is omitted if its arguments are equal.
        self._watched_for = (False, False, False)
        self._silence_s = self._since_heartbeat_s = 0.0
        self._incomplete_since = 0.0  # Time when reading last ended with only some of a tensor's bytes.
        self._tensor_bytes, self._timed_bytes, self._timed_s = 0, 0, 0.0

    # -- handshake, before the event loop sends and receives

    def send_greeting(self, message_type: MessageType, message: Any, deadline: float) -> None:
        """Send a JSON message and wait until it is sent or the deadline passes; only before `start`."""
        self._connection.set_deadline(deadline)
        payload = json.dumps(message).encode()
        unsent = memoryview(pack_header(MessageHeader(message_type, 0, 0, len(payload))) + payload)
        while len(unsent):
            unsent = unsent[self._connection.send([unsent]) :]

    def receive_greeting(self, deadline: float) -> dict[str, Any]:
        """Wait for the HELLO message of the other end, and return its content; only before `start`.

        Raises:
            PeerRefused: An ERROR message arrives.
            ProtocolError: Another message arrives.
            OSError: The deadline has passed, or the connection failed.
        """
        self._connection.set_deadline(deadline)
        message = self._reader.read_message(_check_greeting)
        assert message is not None  # Before `start`, read_message waits for the whole message.
        header, content = message[0], decode_json(message[1])
        if header.type is MessageType.ERROR:
            raise PeerRefused(str(content.get("message")))
        return content

    def refuse(self, reason: str, deadline: float) -> None:
        """Send the reason why the other end is refused, give it time to read, and close; only before `start`."""
        with contextlib.suppress(OSError):  # An end that has disconnected needs no reason.
            self.send_greeting(MessageType.ERROR, {"message": reason}, deadline)
        self._connection.linger()
        self.close()

    def start(
        self, loop: EventLoop, check: CheckHeader, deliver: DeliverMessage, handle_end: HandleEnd, at_once: bool = True
    ) -> None:
        """Let the event loop send and receive from now on.

        Args:
            loop: The event loop, whose thread calls the callbacks.
            check: Raises ProtocolError for the header of a message that must not arrive, before its payload is read.
            deliver: Receives each message. After a true result, reading stops until `release` is called.
            handle_end: Receives, once, the reason why no more messages can arrive.
            at_once: False if the other end may be silent for any time before its first message.
        """
        with loop.lock:
            self._check, self._deliver, self._handle_end = check, deliver, handle_end
            self._loop, self._reader.has_received = loop, False
            self._silence_s = 0.0 if at_once else -math.inf
            self._connection.start()
            self._update_watch()
            # The reader may have read messages together with the greeting. The event loop does not learn of them, so
            # they are handled here.
            self.receive()

    # -- sending messages

    def post(
        self, message_type: MessageType, payload: Any = b"", index: int = 0, frame: int = 0, keep: Any = None
    ) -> None:
        """Queue a message, which the event loop's next `push` sends.

        `keep` is kept alive until then, because it owns the payload's memory.
        """
        header = MessageHeader(message_type, index, frame, len(payload))
        size = HEADER_STRUCT.size + header.length
        queued = _QueuedMessage(header, (pack_header(header), memoryview(payload)), size, keep)
        loop = self._get_loop()
        with loop.lock:
            if self._is_writing:
                self._enqueue(queued)
                loop.post(self)

    def send(self, message_type: MessageType, payload: Any = b"", index: int = 0, frame: int = 0) -> None:
        """Send all queued messages and then this one.

        Bytes that the kernel or the limit of unacknowledged bytes does not allow yet are sent later.
        """
        with self._get_loop().lock:
            self.post(message_type, payload, index, frame)
            self.push()

    def send_json(self, message_type: MessageType, message: Any) -> None:
        """Send a JSON message; before `start`, wait for at most a second until it is sent."""
        if self._loop is None:
            with contextlib.suppress(OSError):
                self.send_greeting(message_type, message, time.monotonic() + 1)
        else:
            with self._loop.lock:
                self.post_json(message_type, message)
                self.push()

    def post_json(self, message_type: MessageType, message: Any) -> None:
        self.post(message_type, json.dumps(message).encode())

    def flush(self, deadline: float) -> None:
        """Wait until the kernel has accepted all queued messages, the connection ends or the deadline passes."""
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

    # -- methods that the event loop calls while it holds its lock

    def fileno(self) -> int:
        return self._connection.fileno()

    def pause_s(self) -> float:
        """Return the seconds until `push` should be called again; valid only while the limit has stopped sending."""
        return self._pacing.pause_s

    def receive(self) -> None:
        """Read all available messages and pass them to the callbacks."""
        if self._is_reading and not self._is_held:
            was_within_tensor, bytes_before = self._reader.is_within_tensor, self._reader.received_bytes
            try:
                while not self._is_held and (message := self._reader.read_message(self._check)) is not None:
                    if message[0].type is not MessageType.HEARTBEAT:
                        self._deliver_message(*message)
            # A callback may raise any exception. If it were not reported, the device would wait forever for messages.
            except Exception as error:
                self._stop_reading(error)
            if was_within_tensor:
                self._time_arrival(self._reader.received_bytes - bytes_before)
            if self._reader.is_within_tensor:
                self._incomplete_since = time.perf_counter()

    def take_received(self) -> ReceivedTensors | None:
        """Return the tensor bytes that arrived since the last call, and their times; None if none arrived."""
        received = ReceivedTensors(self._tensor_bytes, self._timed_bytes, self._timed_s)
        self._tensor_bytes, self._timed_bytes, self._timed_s = 0, 0, 0.0
        return received if received.nbytes else None

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._update_watch()
            self.receive()

    def push(self) -> None:
        """Send queued bytes, as many as the kernel and the limit of unacknowledged bytes allow."""
        try:
            is_blocked, is_paused = self._send_queued()
        except OSError as error:
            self._stop_writing()
            self.receive()  # The other end may have sent the reason before it closed the connection, so read it.
            self._stop_reading(error)
        else:
            self._update_watch(is_blocked, is_paused)

    def tick(self, tick_s: float, interval_s: float) -> None:
        """Send a heartbeat in each interval, and end the connection after MAX_MISSED_HEARTBEATS intervals of silence.

        Silence is counted in calls of this method, one per `tick_s` seconds. Time in which this process itself was
        stopped thus does not count.
        """
        self._since_heartbeat_s += tick_s
        # Queued data also shows the other end that this end is alive, so no heartbeat is needed then.
        if self._since_heartbeat_s >= interval_s and not self._queue:
            self._since_heartbeat_s = 0.0
            self.send(MessageType.HEARTBEAT)
        # The socket wakes the event loop only if a minimum number of bytes has arrived (SO_RCVLOWAT). Fewer bytes also
        # show that the other end is alive, so they are read here.
        self.receive()
        self._silence_s = 0.0 if self._reader.has_received or self._is_held else self._silence_s + tick_s
        self._reader.has_received = False
        if self._silence_s > MAX_MISSED_HEARTBEATS * interval_s:
            self._stop_reading(HeartbeatTimeout(f"no data received for {MAX_MISSED_HEARTBEATS * interval_s:g} s"))

    # -- internal helper methods

    def _enqueue(self, queued: _QueuedMessage) -> None:
        """Append a message to the send queue, but put a tensor before the unsent tensors of later frames."""
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

    def _time_arrival(self, count: int) -> None:
        """Add the arrival of `count` bytes, which followed the first bytes of a tensor, to the measured times.

        Bytes that may have arrived while no thread ran the event loop are not counted.
        """
        if self._incomplete_since > self._get_loop().running_since:
            self._timed_bytes += count
            self._timed_s += time.perf_counter() - self._incomplete_since

    def _deliver_message(self, header: MessageHeader, payload: Any) -> None:
        if header.type is MessageType.TENSOR:
            self._tensor_bytes += header.length
        if self._deliver(header, payload):
            self._is_held = True
            self._update_watch()

    def _stop_writing(self) -> None:
        self._is_writing = False
        self._queue.clear()
        self._update_watch()

    def _stop_reading(self, error: Exception) -> None:
        if self._is_reading:
            self._is_reading = False
            self._update_watch()
            self._handle_end(error)

    def _send_queued(self) -> tuple[bool, bool]:
        """Send queued messages, as many as the kernel and the limit of unacknowledged bytes allow.

        Return (True if the kernel's buffer is full, True if the limit has stopped sending).
        """
        queue, connection, pacing = self._queue, self._connection, self._pacing
        if queue and not self._send_started_at:
            self._send_started_at = time.perf_counter()
        while queue:
            buffers, size = self._next_buffers()
            sendable = pacing.sendable_bytes(size)
            if not sendable:
                return False, True
            count = connection.send(buffers if sendable >= size else limit_buffers(buffers, sendable))
            if not count:
                return True, False
            pacing.record_sent(count)
            self._record_sent(count)
        return connection.has_unsent and not connection.send(()) and connection.has_unsent, False

    def _next_buffers(self) -> tuple[Sequence[Buffer], int]:
        if len(self._queue) == 1 and not self._sent_of_first:
            return self._queue[0].buffers, self._queue[0].size
        buffers: list[Buffer] = []
        size = -self._sent_of_first
        for message in islice(self._queue, MAX_MESSAGES_PER_SEND):
            buffers += message.buffers
            size += message.size
        if self._sent_of_first:
            header_size = len(buffers[0])
            buffers[:2] = [buffers[0][self._sent_of_first :], buffers[1][max(0, self._sent_of_first - header_size) :]]
        return buffers, size

    def _record_sent(self, count: int) -> None:
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
            if self.timeline and self.timeline[0][1] < frame:
                self.timeline = []
            self.timeline.append((index, frame, start, self._send_started_at))
            self.sent[index] = self.sent.get(index, 0) + length


def _check_greeting(header: MessageHeader) -> None:
    if header.type not in (MessageType.HELLO, MessageType.ERROR):
        raise ProtocolError(f"received {header.type.name} before a greeting")
    check_json_length(header, MAX_GREETING_BYTES)


def _is_later_tensor(header: MessageHeader, frame: int) -> bool:
    return header.type is MessageType.TENSOR and header.frame > frame
