"""The event loop of a process: sends and receives on all connections, in the thread that waits for messages.

The main thread runs the loop while it waits, so that messages need not be passed between threads. While the main thread
computes for long, a helper thread runs the loop. Otherwise the helper thread wakes only four times per heartbeat
interval, to send heartbeats and to check that those of the other devices arrive.
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
"""The helper thread runs the loop only if the main thread is busy for longer than this.

While the main thread is busy for a shorter time, received data waits in the kernel's buffers. Waking the helper thread
would take some hundredths of this time.
"""
MAX_SPIN_S = 0.0005
"""Seconds for which a waiting thread polls without blocking before it blocks.

On an idle processor, waking a blocked thread takes a tenth of MAX_SPIN_S, and polling avoids that. A thread whose
previous wait was longer than MAX_SPIN_S blocks at once.
"""
READ, WRITE = select.POLLIN, select.POLLOUT


class EventSource(Protocol):
    """The methods of a channel that the event loop calls, with `EventLoop.lock` held except for `fileno`."""

    def fileno(self) -> int:
        """Return the file descriptor to watch."""

    def receive(self) -> None:
        """Process the available data."""

    def push(self) -> None:
        """Send as much queued data as the kernel accepts."""

    def pause_s(self) -> float:
        """Return the seconds until `push` should be called again, if sending is paused."""

    def tick(self, tick_s: float, interval_s: float) -> None:
        """Send and expect one heartbeat in every interval; the loop calls this every `tick_s` seconds."""


class EventLoop:
    """Sends and receives on all connections of a process, in the main thread or in a helper thread.

    DeviceRun and the coordinator create the object, and `MessageChannel.start` adds a channel to it. The loop calls
    `receive` of a channel whose connection has data, and `push` of a channel with a queued message. The helper thread
    runs the loop at first. `run_until` moves it to the calling thread, and `let_helper_run` back to the helper thread.

    Attributes:
        lock: A thread holds this lock while it changes a channel.
        can_spin: True if a waiting thread may poll without blocking, because there are more cores than processes (this
            one and `local_processes` others).
        running_since: Time (time.perf_counter) at which a thread began to run the loop. Data that arrived later was
            read at once.
    """

    def __init__(self, interval_s: float, local_processes: int = 0) -> None:
        """Start the helper thread.

        Channels send heartbeats every `interval_s` seconds. `local_processes` is the number of other device processes
        that share the processors of this process.
        """
        self.lock = threading.RLock()
        self.running_since = 0.0
        self._interval_s = interval_s
        self._poll = select.poll()
        self._sources: dict[int, EventSource] = {}
        self._blocked: set[EventSource] = set()
        self._posted: dict[EventSource, None] = {}
        self._paused: set[EventSource] = set()
        self._driver_lock = threading.Lock()  # The thread that runs the loop holds it.
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
        """Set the events for which a channel waits.

        If `reads`, the channel waits for data. If `is_blocked`, it waits for space in the kernel's send buffer. If
        `is_paused`, it waits for the seconds that its `pause_s` returns.
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
        """Note that the channel has queued messages, which the next `push` of the loop sends."""
        self._posted[channel] = None

    # -- for the main thread

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

        The helper thread runs only if `seconds` is long enough, or if some data could not be sent at once.
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
        """Return True if a channel could not send all of its queue."""
        return bool(self._blocked or self._paused)

    def wake(self) -> None:
        """Make the thread that runs the loop check the channels and the condition of `run_until` again."""
        if self._is_polling:
            with contextlib.suppress(OSError):  # The pipe is full or closed.
                os.write(self._wake_write, b"\0")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed, self._helper_drives = True, False
            self._helper_event.set()
            self.wake()
            self._helper.join()
            os.close(self._wake_read)
            os.close(self._wake_write)

    # -- running

    def _run_once(self, should_stop: Callable[[], object], seconds: float | None) -> None:
        """Wait for events for at most `seconds`, and let the channels react to them.

        Return at once if `should_stop` returns a true value.
        """
        if self._paused:
            pause_s = min(channel.pause_s() for channel in tuple(self._paused))
            seconds = pause_s if seconds is None else min(seconds, pause_s)
        self._is_polling = True  # Other threads now wake this thread when they change a channel or the condition.
        try:
            if should_stop():
                return
            if self._paused and seconds is not None and seconds < 0.001:
                time.sleep(seconds)  # poll() rounds times to milliseconds.
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
                if event != READ:  # There is space to send, or the connection ended, which sending detects.
                    channel.push()
                if event != WRITE:
                    channel.receive()
        if self._paused:
            with self.lock:
                for channel in tuple(self._paused):
                    channel.push()

    def _wait(self, seconds: float | None) -> list[tuple[int, int]]:
        """Return the events of the connections, after at most `seconds`; poll without blocking first."""
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
            if self._driver_lock.acquire(blocking=False):  # This fails while the main thread runs the loop.
                try:
                    self.running_since = time.perf_counter()
                    while self._helper_drives and (left_s := due - time.monotonic()) > 0:
                        self._run_once(lambda: not self._helper_drives, left_s)
                    if time.monotonic() >= due:
                        self._run_once(lambda: False, 0.0)  # Arrived data must count before `tick` checks for silence.
                finally:
                    self._driver_lock.release()
            if time.monotonic() >= due and not self._is_closed:
                # The next due time is computed from the present due time, so that small delays do not add up.
                due = max(due, time.monotonic() - tick_s / 2) + tick_s
                for channel in tuple(self._sources.values()):
                    with self.lock:
                        channel.tick(tick_s, self._interval_s)
                self.wake()  # The main thread may wait for a channel that `tick` has just ended.
