"""All connections of a process, and who moves their bytes: the thread that waits for them, itself.

In: channels. Out: what came, delivered in the thread that drives. The main thread drives while it waits, so that
nothing is handed from thread to thread; while it is busy for long a helper drives, which else sleeps between signs of
life.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

LONG_S = 0.002
"""Seconds of computing in which nobody need drive: what comes meanwhile has room in the system's buffers, and to wake a
thread costs some hundredths of that."""
SPIN_S = 0.0005
"""Seconds for which a thread looks for what comes before it sleeps, where the last wait was not longer: to wake it
costs a tenth of that on an idle processor."""
READ, WRITE = select.POLLIN, select.POLLOUT


class Watched(Protocol):
    """A channel. All of it but `fileno` is called while `Lines.turn` is held."""

    def fileno(self) -> int:
        """What to watch."""

    def receive(self) -> None:
        """Takes what is there."""

    def push(self) -> None:
        """Hands over what the system takes of what is queued."""

    def pause_s(self) -> float:
        """Seconds until it is worth to push again, where the line has enough for now."""

    def beat(self, tick_s: float, interval_s: float) -> None:
        """Called every `tick_s` seconds: gives and expects a sign of life in every interval."""


class Lines:
    """`turn`: held while anything of a channel is changed. `interval_s`: seconds between signs of life. beside: how
    many devices run beside this process on its processors. `alone`: whether it may look for what comes before it
    sleeps: nobody else needs the processor for that.

    At first the helper drives; from `drive` on the thread that calls it; after `rest` the helper where that is long.
    """

    def __init__(self, interval_s: float, beside: int = 0) -> None:
        self.turn = threading.RLock()
        self._interval_s = interval_s
        self._poll = select.poll()
        self._watched: dict[int, Watched] = {}
        self._blocked: set[Watched] = set()
        self._posted: dict[Watched, None] = {}
        self._paused: set[Watched] = set()
        self._wheel = threading.Lock()  # who holds it drives
        self._lent, self._ended = True, False
        self._asleep = False
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.alone, self._waited_s = cores > 1 + beside, 0.0
        self._call = threading.Event()  # set while the wheel is lent
        self._call.set()
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)
        self._poll.register(self._bell, READ)
        self._helper = threading.Thread(target=self._help, daemon=True)
        self._helper.start()

    # -- for channels

    def watch(self, channel: Watched, reads: bool, blocked: bool, paused: bool) -> None:
        """What a channel waits for has changed: bytes that come; room for what is queued; or time (see `pause_s`)."""
        number, mask = channel.fileno(), (READ if reads else 0) | (WRITE if blocked else 0)
        if mask:
            self._poll.register(number, mask)
            self._watched[number] = channel
        elif self._watched.pop(number, None) is not None:
            self._poll.unregister(number)
        for waits, those in ((blocked, self._blocked), (paused, self._paused)):
            those.add(channel) if waits else those.discard(channel)
        self.wake()

    def post(self, channel: Watched) -> None:
        """What the channel has queued leaves with the next `push`."""
        self._posted[channel] = None

    # -- for the main thread

    def push(self) -> None:
        """Hands over what was posted."""
        if self._posted:
            with self.turn:
                posted, self._posted = self._posted, {}
                for channel in posted:
                    channel.push()

    def drive(self, ready: Callable[[], object], deadline: float | None = None) -> bool:
        """Sends and receives until `ready`, or the deadline (of time.monotonic); whether it is."""
        if self._posted:
            self.push()
        if ready():
            return True
        if self._lent:
            self._lent = False
            self._call.clear()
            self.wake()
        with self._wheel:
            while True:
                seconds = None if deadline is None else deadline - time.monotonic()
                if seconds is not None and seconds <= 0:
                    return bool(ready())
                self._round(ready, seconds)
                if ready():
                    return True

    def rest(self, seconds: float) -> None:
        """The caller is busy for about that long: the helper drives if that is long, or something is still queued."""
        if self._posted:
            self.push()
        if not self._lent and (seconds > LONG_S or self.behind()):
            self._lent = True
            self._call.set()

    def hurry(self) -> None:
        """What comes next comes soon, however long the last wait was: it is looked for."""
        self._waited_s = 0.0

    def behind(self) -> bool:
        """Whether something that was pushed has not left."""
        return bool(self._blocked or self._paused)

    def wake(self) -> None:
        """Whoever drives looks again at whether it is to go on, and for what."""
        if self._asleep:
            with contextlib.suppress(OSError):  # full of wake-ups, or closed
                os.write(self._ring, b"\0")

    def end(self) -> None:
        """Nothing is sent or received any more."""
        if not self._ended:
            self._ended, self._lent = True, False
            self._call.set()
            self.wake()
            self._helper.join()
            os.close(self._bell)
            os.close(self._ring)

    # -- driving

    def _round(self, stop: Callable[[], object], seconds: float | None) -> None:
        """Waits for something to do, no longer than that, and does it; does not wait where it is to `stop`."""
        if self._paused:
            pause_s = min(channel.pause_s() for channel in tuple(self._paused))
            seconds = pause_s if seconds is None else min(seconds, pause_s)
        self._asleep = True  # from here on who changes something wakes this thread
        try:
            if stop():
                return
            if self._paused and seconds is not None and seconds < 0.001:
                time.sleep(seconds)  # poll counts in milliseconds
                seconds = 0.0
            found = self._wait(seconds)
        finally:
            self._asleep = False
        for number, what in found:
            with self.turn:
                if (channel := self._watched.get(number)) is None:
                    self._hear(number)
                    continue
                if what != READ:  # there is room, or an end, which who sends is told of
                    channel.push()
                if what != WRITE:
                    channel.receive()
        if self._paused:
            with self.turn:
                for channel in tuple(self._paused):
                    channel.push()

    def _wait(self, seconds: float | None) -> list[tuple[int, int]]:
        """Waits for something to do, no longer than that."""
        found: list[tuple[int, int]] = []
        begun = time.perf_counter()
        if self.alone and self._waited_s < SPIN_S:
            look, until = self._poll.poll, begun + (SPIN_S if seconds is None else min(SPIN_S, seconds))
            while not (found := look(0)) and time.perf_counter() < until:
                os.sched_yield()
        if not found:
            found = self._poll.poll(None if seconds is None else 1000 * seconds)
        self._waited_s = time.perf_counter() - begun
        return found

    def _hear(self, number: int) -> None:
        if number == self._bell:
            os.read(number, 4096)

    def _help(self) -> None:
        tick_s = self._interval_s / 4
        due = time.monotonic() + tick_s
        while not self._ended:
            self._call.wait(max(0.0, due - time.monotonic()))
            if self._wheel.acquire(blocking=False):  # else the main thread has it
                try:
                    while self._lent and (left := due - time.monotonic()) > 0:
                        self._round(lambda: not self._lent, left)
                    if time.monotonic() >= due:
                        self._round(lambda: False, 0.0)  # what has come is a sign of life
                finally:
                    self._wheel.release()
            if time.monotonic() >= due and not self._ended:
                due = max(due, time.monotonic() - tick_s / 2) + tick_s  # being late a little does not add up
                self._beat(tick_s)

    def _beat(self, tick_s: float) -> None:
        for channel in tuple(self._watched.values()):
            with self.turn:
                channel.beat(tick_s, self._interval_s)
        self.wake()  # who waits looks at whether it waits in vain
