"""Channels: connections with a thread that sends what is queued and one that reads; and the signs of life on them.

In: frames to send. Out: frames that came and were let through, and why no more will come.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from .frames import (
    GREETING_LIMIT,
    HEADER,
    Header,
    Kind,
    ProtocolError,
    Reader,
    Refused,
    check_empty,
    check_message,
    decode,
    pack,
)
from .line import Line
from .pace import Pace

SMALL = 1 << 16
"""Bytes up to which a frame goes out at once where the line is free, which saves waking a thread."""
PATIENCE = 3
"""Intervals of signs of life without one after which the other end counts as lost."""

Admit = Callable[[Header], None]
Deliver = Callable[[Header, Any], None]
Lost = Callable[[Exception], None]


class Silence(Exception):
    """Nothing came from the other end for so long that it must have stopped, or the network is down."""


class Channel:
    """A connection. One thread sends what is queued and another reads, so that no two ends can wait for each other.

    `sent`: payload bytes of tensors by transfer index; `send_s`: the seconds that sending them took; `timeline`: of the
    last frame, the transfer's index, the frame, and when sending began and ended (of time.perf_counter).
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._reader = Reader(line)
        self._pace = Pace(line.waiting)
        self.identity = line.identity
        self.sent: dict[int, int] = {}
        self.send_s = 0.0
        self.timeline: list[tuple[int, int, float, float]] = []
        self._queue: queue.SimpleQueue[tuple[Header, Any, Any, int] | None] = queue.SimpleQueue()
        self._queued = 0  # frames in the queue or being sent from it
        self._turn = threading.Lock()  # for `_queued`, and that frames leave in order
        self._sending: threading.Thread | None = None
        self._lost: Lost | None = None
        self._silent_s = self._unsaid_s = 0.0

    def greet(self, kind: Kind, message: Any, deadline: float) -> None:
        """Sends a JSON message at once, before `start`."""
        self._line.wait_until(deadline)
        payload = json.dumps(message).encode()
        self._write(_buffers(Header(kind, 0, 0, len(payload)), payload), 0)

    def greeting(self, deadline: float) -> dict[str, Any]:
        """The other end's HELLO, before `start`. Refused, ProtocolError or OSError if another message or none comes."""
        self._line.wait_until(deadline)
        header = self._reader.header()
        if header is None:
            raise ConnectionError("closed before a greeting")
        if header.kind not in (Kind.HELLO, Kind.ERROR):
            raise ProtocolError(f"{header.kind.name} came before a greeting")
        check_message(header, GREETING_LIMIT)
        message = decode(self._reader.payload(header.length))
        if header.kind is Kind.ERROR:
            raise Refused(str(message.get("message")))
        return message

    def refuse(self, words: str, deadline: float) -> None:
        """Tells the other end, before `start`, why it is sent away, and ends the connection when it can have read."""
        with contextlib.suppress(OSError):  # it may be gone already
            self.greet(Kind.ERROR, {"message": words}, deadline)
        self._line.linger()
        self.close()

    def start(self, admit: Admit, deliver: Deliver, lost: Lost) -> None:
        """Starts the threads. `admit` raises ProtocolError for a frame that must not come, before memory is taken for
        it; `deliver` gets each other frame with its payload, an array of bytes; `lost` why no more will come or go.
        """
        self._line.wait_until(None)
        self._lost = lost
        self._sending = threading.Thread(target=self._send_all, args=(lost,), daemon=True)
        self._sending.start()
        threading.Thread(target=self._read_all, args=(admit, deliver, lost), daemon=True).start()

    def send(self, kind: Kind, payload: Any = b"", index: int = 0, frame: int = 0, keep: Any = None) -> None:
        """Sends a frame, or queues it. `keep`: what must stay alive until the payload has left."""
        header = Header(kind, index, frame, len(payload))
        with self._turn:
            start = time.perf_counter()
            size = HEADER.size + len(payload)
            small = size <= SMALL and self._queued == 0 and self._pace.room(size)
            done = self._line.send_now(_buffers(header, payload)) if small else 0
            if done == size:
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
            self._sending.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Ends the connection, and with it the threads."""
        self._line.close()

    def beat(self, tick_s: float, interval_s: float) -> None:
        """Called every `tick_s` seconds: gives a sign of life in each interval, and tells of a silent other end.

        Ticks are counted, not time: a process that was stopped itself must not blame the others when it goes on.
        """
        self._unsaid_s += tick_s
        if self._unsaid_s >= interval_s and not self._queued:  # what is being sent is a sign of life itself
            self._unsaid_s = 0.0
            self.send(Kind.PING)
        self._silent_s = 0.0 if self._reader.heard else self._silent_s + tick_s
        self._reader.heard = False
        if self._silent_s > PATIENCE * interval_s and self._lost is not None:
            self._lost(Silence(f"nothing was heard of it for {PATIENCE * interval_s:g} s"))

    def _send_all(self, lost: Lost) -> None:
        try:
            while self._send_next():
                continue
        except Exception as error:  # whatever ends this thread must be told, or others wait for what it does not send
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
            end = time.perf_counter()
            self.send_s += end - start
            if self.timeline and self.timeline[-1][1] < header.frame:
                self.timeline = []
            self.timeline.append((header.index, header.frame, start, end))
            self.sent[header.index] = self.sent.get(header.index, 0) + header.length

    def _write(self, buffers: list[memoryview], done: int) -> None:
        """Writes all but the first `done` bytes. Header and payload go in one call: a small frame is one packet."""
        head, payload = buffers
        while done < len(head) + len(payload):
            end = done + self._pace.wait(len(head) + len(payload) - done)
            begin = max(0, done - len(head))
            done += self._line.send([head[done:end], payload[begin : max(0, end - len(head))]])

    def _read_all(self, admit: Admit, deliver: Deliver, lost: Lost) -> None:
        try:
            read_frames(self._reader, admit, deliver)
            raise ConnectionError("closed by the other end")
        except Exception as error:  # see _send_all
            lost(error)


def read_frames(reader: Reader, admit: Admit, deliver: Deliver) -> None:
    """Reads frames to the end: see Channel.start. What comes is stored only after `admit` has let it through."""
    while (header := reader.header()) is not None:
        if header.kind is Kind.PING:
            check_empty(header)
            continue
        admit(header)
        deliver(header, reader.payload(header.length))


def _buffers(header: Header, payload: Any) -> list[memoryview]:
    return [memoryview(pack(header)), memoryview(payload)]


class Pulse:
    """A thread that makes all channels given to it give and expect signs of life, every `interval_s` seconds."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._channels: list[Channel] = []
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def watch(self, channel: Channel) -> None:
        """Watches one more channel, which has been started."""
        self._channels.append(channel)

    def end(self) -> None:
        """No more signs of life are given or expected."""
        self._ended.set()

    def _run(self) -> None:
        tick_s = self.interval_s / 4
        while not self._ended.wait(tick_s):
            for channel in tuple(self._channels):
                with contextlib.suppress(OSError):  # the channel's own threads tell
                    channel.beat(tick_s, self.interval_s)
