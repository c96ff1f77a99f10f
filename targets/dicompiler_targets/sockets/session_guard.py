"""The guard of a session: it admits one thread at a time, and only threads of the process that opened the session."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator

from dicompiler.plugin_api import RunError


class TurnLock:
    """A reentrant lock that threads get in the order in which they ask for it.

    `threading.Lock` does not keep this order: a thread that releases and acquires it in a loop usually gets it again,
    while other threads wait.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting = deque[object]()
        self._owner, self._depth = 0, 0

    @property
    def is_contended(self) -> bool:
        """True if another thread waits for the lock."""
        return bool(self._waiting)

    @contextlib.contextmanager
    def hold(self, wake_owner: Callable[[], None]) -> Iterator[None]:
        """Hold the lock in the context. If another thread holds it, first call `wake_owner`, then wait."""
        thread = threading.get_ident()
        if self._owner != thread:
            self._acquire(thread, wake_owner)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                with self._condition:
                    self._owner = 0
                    self._condition.notify_all()

    def _acquire(self, thread: int, wake_owner: Callable[[], None]) -> None:
        ticket = object()
        with self._condition:
            self._waiting.append(ticket)
            try:
                if self._owner:
                    wake_owner()
                self._condition.wait_for(lambda: not self._owner and self._waiting[0] is ticket)
                self._owner = thread
            finally:  # An interrupt can end the wait.
                self._waiting.remove(ticket)
                self._condition.notify_all()


class SessionGuard:
    """Decides which calls may use a session, and ends the session at its first error.

    Calls of several threads take turns. Later calls of an ended session raise a RunError with the reason of its end. A
    forked child cannot use the session: its calls raise a RunError, and change neither the session nor its devices.

    Attributes:
        reason: Why the session has ended; None while it is usable.
    """

    def __init__(self, stop: Callable[[], None], wake: Callable[[], None]) -> None:
        """Guard a session.

        `stop` ends everything that the session has started, and may be called several times. `wake` makes a call that
        waits in another thread check `has_waiting_call` and `check_end` again.
        """
        self._stop, self._wake = stop, wake
        self._process, self._turns = os.getpid(), TurnLock()
        self.reason: str | None = None

    @property
    def has_waiting_call(self) -> bool:
        """True if a call of another thread waits for its turn."""
        return self._turns.is_contended

    def end(self, reason: str) -> None:
        """End the session. Do nothing in a forked child, because the session belongs to the parent."""
        if os.getpid() == self._process:
            self.reason = self.reason or reason
            with self._turns.hold(self._wake):
                self._stop()

    def check_end(self) -> None:
        """Raise RunError if the session has ended."""
        if self.reason is not None:
            raise RunError(f"the session has ended: {self.reason}")

    def check_process(self) -> None:
        """Raise RunError in a forked child."""
        if os.getpid() != self._process:
            raise RunError(
                f"the session belongs to process {self._process}, and process {os.getpid()} is a fork of it: open a "
                "session in each process (dicompiler.connect)"
            )

    @contextlib.contextmanager
    def take_turn(self) -> Iterator[None]:
        """Return a context manager: while a thread is in its `with` block, all other threads wait for the session.

        Raise RunError in a forked child.
        """
        self.check_process()
        with self._turns.hold(self._wake):
            yield

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Take a turn in the context, and end the session if the context raises an exception.

        Raise RunError if the session has ended already.
        """
        with self.take_turn():
            self.check_end()
            try:
                yield
            except BaseException as error:
                self.end(str(error) or type(error).__name__)
                raise
