"""The event loop of a process: moves the bytes of all connections in the thread that waits for them.

The main thread runs the loop while it waits, so that messages need not be passed between threads. While the main thread
computes for long, a helper thread runs the loop. Otherwise the helper sleeps between two heartbeats.
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
"""The helper runs the loop if the main thread is busy for longer.

For shorter times the kernel's buffers suffice, and waking a thread takes some hundredths of this time.
"""
MAX_SPIN_S = 0.0005
"""A thread polls for this time before it blocks, if the last wait was not longer.

Waking it costs a tenth of this time on an idle processor.
"""
READ, WRITE = select.POLLIN, select.POLLOUT


class EventSource(Protocol):
    """A channel that the loop serves. All methods but `fileno` are called with `EventLoop.lock` held."""

    def fileno(self) -> int:
        """Return the descriptor to watch."""

    def receive(self) -> None:
        """Process the available data."""

    def push(self) -> None:
        """Send as much queued data as the kernel accepts."""

    def pause_s(self) -> float:
        """Return the seconds until `push` should be called again, if sending is paused."""

    def tick(self, tick_s: float, interval_s: float) -> None:
        """Send a heartbeat and check for the other end's in every interval; called every `tick_s` seconds."""


class EventLoop:
    """Polls all connections of the process.

    The helper thread runs the loop at first. After `run_until` the calling thread does, and after `let_helper_run` the
    helper if the given time is long.

    Attributes:
        lock: Held while a channel is changed.
        can_spin: The loop may poll before it blocks, because no other process needs the processor.
    """

    def __init__(self, interval_s: float, local_processes: int = 0) -> None:
        """Start the helper thread.

        Args:
            interval_s: Seconds between two heartbeats.
            local_processes: Number of other device processes that share this process's processors.
        """
        self.lock = threading.RLock()
        self._interval_s = interval_s
        self._poll = select.poll()
        self._sources: dict[int, EventSource] = {}
        self._blocked: set[EventSource] = set()
        self._posted: dict[EventSource, None] = {}
        self._paused: set[EventSource] = set()
        self._driver_lock = threading.Lock()  # Held by the thread that runs the loop.
        self._helper_drives, self._is_closed = True, False
        self._is_polling = False
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.can_spin, self._last_wait_s = cores > 1 + local_processes, 0.0
        self._helper_event = threading.Event()  # Set while the helper should run the loop.
        self._helper_event.set()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll.register(self._wake_read, READ)
        self._helper = threading.Thread(target=self._run_helper, daemon=True)
        self._helper.start()

    # -- for channels

    def watch(self, channel: EventSource, reads: bool, is_blocked: bool, is_paused: bool) -> None:
        """Set the events that a channel waits for.

        Args:
            channel: The channel.
            reads: It waits for data.
            is_blocked: It waits for space in the kernel's send buffer.
            is_paused: It waits for `pause_s` seconds.
        """
        number, mask = channel.fileno(), (READ if reads else 0) | (WRITE if is_blocked else 0)
        if mask:
            self._poll.register(number, mask)
            self._sources[number] = channel
        elif self._sources.pop(number, None) is not None:
            self._poll.unregister(number)
        for is_waiting, channels in ((is_blocked, self._blocked), (is_paused, self._paused)):
            channels.add(channel) if is_waiting else channels.discard(channel)
        self.wake()

    def post(self, channel: EventSource) -> None:
        """Send the channel's queue at the next `push`."""
        self._posted[channel] = None

    # -- for the main thread

    def push(self) -> None:
        """Send the queues of all posted channels."""
        if self._posted:
            with self.lock:
                posted, self._posted = self._posted, {}
                for channel in posted:
                    channel.push()

    def run_until(self, is_ready: Callable[[], object], deadline: float | None = None) -> bool:
        """Send and receive until `is_ready` or the deadline (time.monotonic); return True if ready."""
        if self._posted:
            self.push()
        if is_ready():
            return True
        if self._helper_drives:
            self._helper_drives = False
            self._helper_event.clear()
            self.wake()
        with self._driver_lock:
            while True:
                seconds = None if deadline is None else deadline - time.monotonic()
                if seconds is not None and seconds <= 0:
                    return bool(is_ready())
                self._run_once(is_ready, seconds)
                if is_ready():
                    return True

    def let_helper_run(self, seconds: float) -> None:
        """Let the helper run the loop if the caller is busy for long (about `seconds`) or data is still queued."""
        if self._posted:
            self.push()
        if not self._helper_drives and (seconds > HELPER_MIN_BUSY_S or self.has_backlog()):
            self._helper_drives = True
            self._helper_event.set()

    def spin_next(self) -> None:
        """Poll before blocking in the next wait, however long the last one was: data arrives soon."""
        self._last_wait_s = 0.0

    def has_backlog(self) -> bool:
        """Return True if pushed data is still queued."""
        return bool(self._blocked or self._paused)

    def wake(self) -> None:
        """Make the thread that runs the loop check its condition and channels again."""
        if self._is_polling:
            with contextlib.suppress(OSError):  # The pipe is full or closed.
                os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Stop the loop and its helper."""
        if not self._is_closed:
            self._is_closed, self._helper_drives = True, False
            self._helper_event.set()
            self.wake()
            self._helper.join()
            os.close(self._wake_read)
            os.close(self._wake_write)

    # -- running

    def _run_once(self, should_stop: Callable[[], object], seconds: float | None) -> None:
        """Wait for events, at most `seconds` and not at all if `should_stop`, and process them."""
        if self._paused:
            pause_s = min(channel.pause_s() for channel in tuple(self._paused))
            seconds = pause_s if seconds is None else min(seconds, pause_s)
        self._is_polling = True  # From here on, threads that change something wake this one.
        try:
            if should_stop():
                return
            if self._paused and seconds is not None and seconds < 0.001:
                time.sleep(seconds)  # poll() counts in milliseconds.
                seconds = 0.0
            events = self._wait(seconds)
        finally:
            self._is_polling = False
        for number, event in events:
            with self.lock:
                if (channel := self._sources.get(number)) is None:
                    self._drain_wake_pipe(number)
                    continue
                if event != READ:  # There is space to send, or the connection ended, which `push` reports.
                    channel.push()
                if event != WRITE:
                    channel.receive()
        if self._paused:
            with self.lock:
                for channel in tuple(self._paused):
                    channel.push()

    def _wait(self, seconds: float | None) -> list[tuple[int, int]]:
        """Poll for at most `seconds`, first without blocking if data is expected soon."""
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

    def _drain_wake_pipe(self, number: int) -> None:
        if number == self._wake_read:
            os.read(number, 4096)

    def _run_helper(self) -> None:
        tick_s = self._interval_s / 4
        due = time.monotonic() + tick_s
        while not self._is_closed:
            self._helper_event.wait(max(0.0, due - time.monotonic()))
            if self._driver_lock.acquire(blocking=False):  # Otherwise the main thread runs the loop.
                try:
                    while self._helper_drives and (left_s := due - time.monotonic()) > 0:
                        self._run_once(lambda: not self._helper_drives, left_s)
                    if time.monotonic() >= due:
                        self._run_once(lambda: False, 0.0)  # Received data counts as a heartbeat.
                finally:
                    self._driver_lock.release()
            if time.monotonic() >= due and not self._is_closed:
                due = max(due, time.monotonic() - tick_s / 2) + tick_s  # Small delays must not add up.
                self._tick(tick_s)

    def _tick(self, tick_s: float) -> None:
        for channel in tuple(self._sources.values()):
            with self.lock:
                channel.tick(tick_s, self._interval_s)
        self.wake()  # A waiting thread must check whether it waits in vain.
