"""Deadlines for onnxruntime: loading or running a model within a `with` block is stopped at the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import onnxruntime as ort

from dicompiler.base.errors import DicompilerError

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds after the deadline until onnxruntime must have stopped.

onnxruntime ignores the request to stop while it creates a session. If it has not stopped after this time, its thread
continues, and its result is not used.
"""


class DeadlineExceededError(DicompilerError):
    """Error if onnxruntime has not finished loading or running a model before the deadline."""


@dataclass(frozen=True)
class Deadline:
    """A point in time that is `seconds` after `started_at`, a time of the monotonic clock."""

    seconds: float
    started_at: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 if the deadline has passed."""
        return max(0.0, self.started_at + self.seconds - time.monotonic())


_CURRENT: ContextVar[tuple[Deadline, str] | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline_scope(deadline: Deadline | None, place: str) -> Iterator[None]:
    """Apply a deadline to all `run_interruptibly` calls within the block; `place` begins the error message.

    If `deadline` is None, these calls have no time limit.
    """
    token = _CURRENT.set(None if deadline is None else (deadline, place))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def run_interruptibly(place: str, call: Callable[[ort.RunOptions], T]) -> T:
    """Call a function that uses onnxruntime, and stop it at the deadline of the enclosing `deadline_scope`.

    `place` names the model or segment in the error message. The function must pass its argument, the run options, to
    onnxruntime.

    Raises:
        DeadlineExceededError: The deadline has passed.
    """
    options, current = ort.RunOptions(), _CURRENT.get()
    # Only fatal messages are logged, because onnxruntime logs an error when it is stopped at the deadline.
    options.log_severity_level = 4
    if current is None:
        return call(options)
    deadline, scope = current
    results: list[Any] = []
    errors: list[BaseException] = []
    # An Event is used instead of Thread.join(), which returns at once after Ctrl-C although the thread still runs.
    ended = threading.Event()

    def work() -> None:
        try:
            results.append(call(options))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    # onnxruntime ignores signals, so it runs in another thread, and Ctrl-C interrupts the wait for this thread. If
    # onnxruntime cannot be stopped, its result is not used.
    try:
        threading.Thread(target=work, daemon=True).start()
        ended.wait(deadline.remaining_s)
    finally:
        is_late = not ended.is_set()
        options.terminate = True
        ended.wait(GRACE_S)
    if is_late:
        raise DeadlineExceededError(
            f"{scope}: {place}: not finished after {deadline.seconds:g} s in all: allow more time (--timeout)"
        )
    if errors:
        raise errors[0]
    result: T = results[0]
    return result
