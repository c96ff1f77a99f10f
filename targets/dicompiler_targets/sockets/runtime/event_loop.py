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

HELPER_MIN_BUSY_S = 0.002
"""Seconds of computing in which nobody need drive: what comes meanwhile has room in the system's buffers, and to wake a
thread costs some hundredths of that."""
MAX_SPIN_S = 0.0005
"""Seconds for which a thread looks for what comes before it sleeps, where the last wait was not longer: to wake it
costs a tenth of that on an idle processor."""
READ, WRITE = select.POLLIN, select.POLLOUT


class EventSource(Protocol):
    """A channel. All of it but `fileno` is called while `Lines.turn` is held."""

    def fileno(self) -> int:
        """What to watch."""

    def receive(self) -> None:
        """Takes what is there."""

    def push(self) -> None:
        """Hands over what the system takes of what is queued."""

    def pause_s(self) -> float:
        """Seconds until it is worth to push again, where the line has enough for now."""

    def tick(self, tick_s: float, interval_s: float) -> None:
        """Called every `tick_s` seconds: gives and expects a sign of life in every interval."""


class EventLoop:
    """`turn`: held while anything of a channel is changed. `interval_s`: seconds between signs of life. beside: how
    many devices run beside this process on its processors. `alone`: whether it may look for what comes before it
    sleeps: nobody else needs the processor for that.

    At first the helper drives; from `drive` on the thread that calls it; after `rest` the helper where that is long.
    """

    def __init__(self, interval_s: float, beside: int = 0) -> None:
        self.lock = threading.RLock()
        self._interval_s = interval_s
        self._poll = select.poll()
        self._sources: dict[int, EventSource] = {}
        self._blocked: set[EventSource] = set()
        self._posted: dict[EventSource, None] = {}
        self._paused: set[EventSource] = set()
        self._driver_lock = threading.Lock()  # who holds it drives
        self._helper_drives, self._is_closed = True, False
        self._is_polling = False
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.can_spin, self._last_wait_s = cores > 1 + beside, 0.0
        self._helper_event = threading.Event()  # set while the wheel is lent
        self._helper_event.set()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll.register(self._wake_read, READ)
        self._helper = threading.Thread(target=self._run_helper, daemon=True)
        self._helper.start()

    # -- for channels

    def watch(self, channel: EventSource, reads: bool, blocked: bool, paused: bool) -> None:
        """What a channel waits for has changed: bytes that come; room for what is queued; or time (see `pause_s`)."""
        number, mask = channel.fileno(), (READ if reads else 0) | (WRITE if blocked else 0)
        if mask:
            self._poll.register(number, mask)
            self._sources[number] = channel
        elif self._sources.pop(number, None) is not None:
            self._poll.unregister(number)
        for waits, those in ((blocked, self._blocked), (paused, self._paused)):
            those.add(channel) if waits else those.discard(channel)
        self.wake()

    def post(self, channel: EventSource) -> None:
        """What the channel has queued leaves with the next `push`."""
        self._posted[channel] = None

    # -- for the main thread

    def push(self) -> None:
        """Hands over what was posted."""
        if self._posted:
            with self.lock:
                posted, self._posted = self._posted, {}
                for channel in posted:
                    channel.push()

    def run_until(self, ready: Callable[[], object], deadline: float | None = None) -> bool:
        """Sends and receives until `ready`, or the deadline (of time.monotonic); whether it is."""
        if self._posted:
            self.push()
        if ready():
            return True
        if self._helper_drives:
            self._helper_drives = False
            self._helper_event.clear()
            self.wake()
        with self._driver_lock:
            while True:
                seconds = None if deadline is None else deadline - time.monotonic()
                if seconds is not None and seconds <= 0:
                    return bool(ready())
                self._run_once(ready, seconds)
                if ready():
                    return True

    def let_helper_run(self, seconds: float) -> None:
        """The caller is busy for about that long: the helper drives if that is long, or something is still queued."""
        if self._posted:
            self.push()
        if not self._helper_drives and (seconds > HELPER_MIN_BUSY_S or self.has_backlog()):
            self._helper_drives = True
            self._helper_event.set()

    def spin_next(self) -> None:
        """What comes next comes soon, however long the last wait was: it is looked for."""
        self._last_wait_s = 0.0

    def has_backlog(self) -> bool:
        """Whether something that was pushed has not left."""
        return bool(self._blocked or self._paused)

    def wake(self) -> None:
        """Whoever drives looks again at whether it is to go on, and for what."""
        if self._is_polling:
            with contextlib.suppress(OSError):  # full of wake-ups, or closed
                os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Nothing is sent or received any more."""
        if not self._is_closed:
            self._is_closed, self._helper_drives = True, False
            self._helper_event.set()
            self.wake()
            self._helper.join()
            os.close(self._wake_read)
            os.close(self._wake_write)

    # -- driving

    def _run_once(self, stop: Callable[[], object], seconds: float | None) -> None:
        """Waits for something to do, no longer than that, and does it; does not wait where it is to `stop`."""
        if self._paused:
            pause_s = min(channel.pause_s() for channel in tuple(self._paused))
            seconds = pause_s if seconds is None else min(seconds, pause_s)
        self._is_polling = True  # from here on who changes something wakes this thread
        try:
            if stop():
                return
            if self._paused and seconds is not None and seconds < 0.001:
                time.sleep(seconds)  # poll counts in milliseconds
                seconds = 0.0
            found = self._wait(seconds)
        finally:
            self._is_polling = False
        for number, what in found:
            with self.lock:
                if (channel := self._sources.get(number)) is None:
                    self._drain_wake_pipe(number)
                    continue
                if what != READ:  # there is room, or an end, which who sends is told of
                    channel.push()
                if what != WRITE:
                    channel.receive()
        if self._paused:
            with self.lock:
                for channel in tuple(self._paused):
                    channel.push()

    def _wait(self, seconds: float | None) -> list[tuple[int, int]]:
        """Waits for something to do, no longer than that."""
        found: list[tuple[int, int]] = []
        begun = time.perf_counter()
        if self.can_spin and self._last_wait_s < MAX_SPIN_S:
            look, until = self._poll.poll, begun + (MAX_SPIN_S if seconds is None else min(MAX_SPIN_S, seconds))
            while not (found := look(0)) and time.perf_counter() < until:
                os.sched_yield()
        if not found:
            found = self._poll.poll(None if seconds is None else 1000 * seconds)
        self._last_wait_s = time.perf_counter() - begun
        return found

    def _drain_wake_pipe(self, number: int) -> None:
        if number == self._wake_read:
            os.read(number, 4096)

    def _run_helper(self) -> None:
        tick_s = self._interval_s / 4
        due = time.monotonic() + tick_s
        while not self._is_closed:
            self._helper_event.wait(max(0.0, due - time.monotonic()))
            if self._driver_lock.acquire(blocking=False):  # else the main thread has it
                try:
                    while self._helper_drives and (left := due - time.monotonic()) > 0:
                        self._run_once(lambda: not self._helper_drives, left)
                    if time.monotonic() >= due:
                        self._run_once(lambda: False, 0.0)  # what has come is a sign of life
                finally:
                    self._driver_lock.release()
            if time.monotonic() >= due and not self._is_closed:
                due = max(due, time.monotonic() - tick_s / 2) + tick_s  # being late a little does not add up
                self._tick(tick_s)

    def _tick(self, tick_s: float) -> None:
        for channel in tuple(self._sources.values()):
            with self.lock:
                channel.tick(tick_s, self._interval_s)
        self.wake()  # who waits looks at whether it waits in vain
