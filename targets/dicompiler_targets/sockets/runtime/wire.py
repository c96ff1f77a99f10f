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

from .frames import (
    GREETING_LIMIT,
    HEADER,
    Header,
    Kind,
    ProtocolError,
    Reader,
    Refused,
    check_message,
    decode,
    pack,
    read_frames,
)
from .line import Line
from .lines import Lines
from .pace import Pace

TOGETHER = 32
"""Frames that are handed to the system at once, at most."""
PATIENCE = 3
"""Intervals of signs of life without one after which the other end counts as lost."""

Admit = Callable[[Header], None]
Deliver = Callable[[Header, Any], object]
"""What returns something true has the channel held."""
Lost = Callable[[Exception], None]
Buffer = bytes | memoryview


class Silence(Exception):
    """Nothing came from the other end for so long that it must have stopped, or the network is down."""


class _Queued(NamedTuple):
    """A frame that is to leave. `keep`: what must stay alive until it has."""

    header: Header
    buffers: tuple[Buffer, Buffer]
    size: int
    keep: Any


class Channel:
    """A connection. Its calls wait up to `start`; from then on none does, and any thread may call.

    `sent`: payload bytes of tensors by transfer index; `send_s`: the seconds that sending them took; `timeline`: from
    the first of the last frame on, the transfer's index, the frame, and when sending began and ended (of
    time.perf_counter).
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._reader = Reader(line)
        self._pace = Pace(line.waiting)
        self.identity = line.identity
        self.sent: dict[int, int] = {}
        self.send_s = 0.0
        self.timeline: list[tuple[int, int, float, float]] = []
        self._lines: Lines | None = None
        self._queue: deque[_Queued] = deque()
        self._done = 0  # bytes of the first in the queue that have left
        self._begun = 0.0  # when it was its turn, 0 where none is queued
        self._reads = self._writes = True
        self._held = False
        self._waits = (False, False, False)  # what the lines know
        self._silent_s = self._unsaid_s = 0.0

    # -- before the start

    def greet(self, kind: Kind, message: Any, deadline: float) -> None:
        """Sends a JSON message at once, before `start`."""
        self._line.wait_until(deadline)
        payload = json.dumps(message).encode()
        rest = memoryview(pack(Header(kind, 0, 0, len(payload))) + payload)
        while len(rest):
            rest = rest[self._line.send([rest]) :]

    def greeting(self, deadline: float) -> dict[str, Any]:
        """The other end's HELLO, before `start`. Refused, ProtocolError or OSError if another message or none comes."""
        self._line.wait_until(deadline)
        frame = self._reader.next(_check_greeting)
        assert frame is not None  # the line waits
        message = decode(frame[1])
        if frame[0].kind is Kind.ERROR:
            raise Refused(str(message.get("message")))
        return message

    def refuse(self, words: str, deadline: float) -> None:
        """Tells the other end, before `start`, why it is sent away, and ends the connection when it can have read."""
        with contextlib.suppress(OSError):  # it may be gone already
            self.greet(Kind.ERROR, {"message": words}, deadline)
        self._line.linger()
        self.close()

    def start(self, lines: Lines, admit: Admit, deliver: Deliver, lost: Lost, at_once: bool = True) -> None:
        """From now on `lines` moves what is sent and received. `admit` raises ProtocolError for a frame that must not
        come, before memory is taken for it; `deliver` gets each other frame with its payload, an array of bytes: where
        it returns something true, what follows waits for `release`; `lost` is told once why no more will come or go.
        They are called in whatever thread drives. at_once: the other end starts now too; else its silence counts from
        when it was first heard: it may be making its sessions.
        """
        with lines.turn:
            self._admit, self._deliver, self._lost = admit, deliver, lost
            self._lines, self._reader.heard = lines, False
            self._silent_s = 0.0 if at_once else -math.inf
            self._line.start()
            self._watch()
            self.receive()  # what came behind the greeting

    # -- what is sent

    def post(self, kind: Kind, payload: Any = b"", index: int = 0, frame: int = 0, keep: Any = None) -> None:
        """Queues a frame, which leaves with the next push of the lines. `keep`: what must stay alive until it has."""
        header = Header(kind, index, frame, len(payload))
        queued = _Queued(header, (pack(header), memoryview(payload)), HEADER.size + header.length, keep)
        lines = self._started()
        with lines.turn:
            if self._writes:
                self._enqueue(queued)
                lines.post(self)

    def send(self, kind: Kind, payload: Any = b"", index: int = 0, frame: int = 0) -> None:
        """Sends a frame now, or as soon as there is room for it; also what was posted before."""
        with self._started().turn:
            self.post(kind, payload, index, frame)
            self.push()

    def send_json(self, kind: Kind, message: Any) -> None:
        """Sends a JSON message; before `start` it waits for a second at most."""
        if self._lines is None:
            with contextlib.suppress(OSError):
                self.greet(kind, message, time.monotonic() + 1)
        else:
            with self._lines.turn:
                self.post_json(kind, message)
                self.push()

    def post_json(self, kind: Kind, message: Any) -> None:
        """Queues a JSON message, as `post`."""
        self.post(kind, json.dumps(message).encode())

    def flush(self, deadline: float) -> None:
        """Waits until what was sent has been handed to the system, or cannot be."""
        if self._lines is not None:
            self._lines.drive(lambda: not self._writes or not (self._queue or self._line.holds), deadline)

    def close(self) -> None:
        """Ends the connection."""
        if self._lines is None:
            self._line.close()
        else:
            with self._lines.turn:
                self._reads = False
                self._mute()
                self._line.close()

    def _started(self) -> Lines:
        assert self._lines is not None
        return self._lines

    # -- what the lines call

    def fileno(self) -> int:
        """See lines.Watched, as for what follows."""
        return self._line.fileno()

    def pause_s(self) -> float:
        """The seconds until the line may be given more."""
        return self._pace.pause_s

    def receive(self) -> None:
        """Takes the frames that are there."""
        if self._reads and not self._held:
            try:
                read_frames(self._reader, self._admit, self._take)
            except Exception as error:  # whatever it is must be told, or others wait for what does not come
                self._end_reading(error)

    def release(self) -> None:
        """What follows is read again."""
        if self._held:
            self._held = False
            self._watch()
            self.receive()

    def push(self) -> None:
        """Hands over what the system takes of what is queued."""
        try:
            blocked, paused = self._push()
        except OSError as error:
            self._mute()
            self.receive()  # what came before may tell why
            self._end_reading(error)
        else:
            self._watch(blocked, paused)

    def beat(self, tick_s: float, interval_s: float) -> None:
        """Gives a sign of life in each interval, and tells of a silent other end.

        Ticks are counted, not time: a process that was stopped itself must not blame the others when it goes on.
        """
        self._unsaid_s += tick_s
        if self._unsaid_s >= interval_s and not self._queue:  # what is being sent is a sign of life itself
            self._unsaid_s = 0.0
            self.send(Kind.PING)
        self.receive()  # less than was waited for is a sign of life too
        self._silent_s = 0.0 if self._reader.heard or self._held else self._silent_s + tick_s
        self._reader.heard = False
        if self._silent_s > PATIENCE * interval_s:
            self._end_reading(Silence(f"nothing was heard of it for {PATIENCE * interval_s:g} s"))

    # -- within

    def _enqueue(self, queued: _Queued) -> None:
        """Puts a frame behind all that is queued; a tensor before those of younger frames behind which nothing else is
        queued and of which nothing has left: devices compute for the oldest frame first."""
        queue, place = self._queue, len(self._queue)
        if queued.header.kind is Kind.TENSOR:
            first = 1 if self._done else 0
            while place > first and _is_younger(queue[place - 1].header, queued.header.frame):
                place -= 1
        queue.insert(place, queued)

    def _watch(self, blocked: bool = False, paused: bool = False) -> None:
        if (waits := (self._reads and not self._held, blocked, paused)) != self._waits:
            self._waits = waits
            self._started().watch(self, *waits)

    def _take(self, header: Header, payload: Any) -> bool:
        if self._deliver(header, payload):
            self._held = True
            self._watch()
        return self._held

    def _mute(self) -> None:
        """Nothing is sent any more."""
        self._writes = False
        self._queue.clear()
        self._watch()

    def _end_reading(self, error: Exception) -> None:
        """Nothing is read any more; that is told, the first time. Words may still be sent."""
        if self._reads:
            self._reads = False
            self._watch()
            self._lost(error)

    def _push(self) -> tuple[bool, bool]:
        """Whether something is left that there is no room for, or that the line has enough for now."""
        queue, line, pace = self._queue, self._line, self._pace
        if queue and not self._begun:
            self._begun = time.perf_counter()
        while queue:
            buffers, size = self._first()
            free = pace.free(size)
            if not free:
                return False, True
            count = line.send(buffers if free >= size else _cut(buffers, free))
            if not count:
                return True, False
            pace.gave(count)
            self._left(count)
        return line.holds and not line.send(()) and line.holds, False

    def _first(self) -> tuple[Sequence[Buffer], int]:
        """The rest of the first frame in the queue and what follows, and the bytes of it."""
        if len(self._queue) == 1 and not self._done:
            return self._queue[0].buffers, self._queue[0].size
        buffers: list[Buffer] = []
        size = -self._done
        for frame in islice(self._queue, TOGETHER):
            buffers += frame.buffers
            size += frame.size
        if self._done:
            skip = len(buffers[0])
            buffers[:2] = [buffers[0][self._done :], buffers[1][max(0, self._done - skip) :]]
        return buffers, size

    def _left(self, count: int) -> None:
        """So many bytes more have left: frames that have wholly are counted and forgotten."""
        self._done += count
        while self._queue and self._done >= self._queue[0].size:
            frame = self._queue.popleft()
            self._done -= frame.size
            self._count(frame.header)
        if not self._queue:
            self._begun = 0.0

    def _count(self, header: Header) -> None:
        start, self._begun = self._begun, time.perf_counter()
        if header.kind is Kind.TENSOR:
            self.send_s += self._begun - start
            _, index, frame, length = header
            if self.timeline and self.timeline[0][1] < frame:  # behind it are also older ones, which overtake
                self.timeline = []
            self.timeline.append((index, frame, start, self._begun))
            self.sent[index] = self.sent.get(index, 0) + length


def _check_greeting(header: Header) -> None:
    if header.kind not in (Kind.HELLO, Kind.ERROR):
        raise ProtocolError(f"{header.kind.name} came before a greeting")
    check_message(header, GREETING_LIMIT)


def _is_younger(header: Header, frame: int) -> bool:
    """Whether it is of a tensor of a frame after that one."""
    return header.kind is Kind.TENSOR and header.frame > frame


def _cut(buffers: Sequence[Buffer], size: int) -> list[Buffer]:
    """The first `size` bytes of what is in the buffers."""
    found = []
    for buffer in buffers:
        found.append(buffer[:size])
        size -= len(found[-1])
        if not size:
            break
    return found
