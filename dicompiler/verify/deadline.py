"""Deadlines for onnxruntime: a call that loads or runs a model is stopped at the deadline of its `with` block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import onnxruntime as ort

from dicompiler.base.errors import ALLOW_MORE_TIME, DicompilerError

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds after the deadline for which the caller waits until onnxruntime stops.

onnxruntime cannot be stopped while it creates a session. After this time, its thread continues in the background, and
its result is ignored.
"""


class DeadlineExceededError(DicompilerError):
    """Error if onnxruntime did not load or run a model before the deadline."""


@dataclass(frozen=True)
class Deadline:
    """A point in time: `seconds` after `started_at`, which is a time of `time.monotonic()`."""

    seconds: float
    started_at: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.started_at + self.seconds - time.monotonic())


_CURRENT: ContextVar[tuple[Deadline, str] | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline_scope(deadline: Deadline | None, place: str) -> Iterator[None]:
    """Apply a deadline (None: no limit) to all `run_interruptibly` calls within the block.

    `place` begins the error message.
    """
    token = _CURRENT.set(None if deadline is None else (deadline, place))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def run_interruptibly(place: str, call: Callable[[ort.RunOptions], T]) -> T:
    """Call a function that uses onnxruntime, and stop it at the deadline of the enclosing `deadline_scope`.

    Args:
        place: Name of the model or segment for the error message.
        call: The function. It must pass its argument, the run options, to onnxruntime.

    Raises:
        DeadlineExceededError: The deadline has passed.
    """
    options, current = ort.RunOptions(), _CURRENT.get()
    # onnxruntime logs an error when it is stopped at the deadline, so only fatal messages are logged.
    options.log_severity_level = 4
    if current is None:
        return call(options)
    deadline, scope = current
    results: list[Any] = []
    errors: list[BaseException] = []
    # Thread.join() cannot be used: after Ctrl-C it returns at once, although the thread still runs.
    ended = threading.Event()

    def work() -> None:
        try:
            results.append(call(options))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    # onnxruntime ignores signals, so it runs in another thread. Ctrl-C interrupts the wait for this thread.
    try:
        threading.Thread(target=work, daemon=True).start()
        ended.wait(deadline.remaining_s)
    finally:
        is_late = not ended.is_set()
        options.terminate = True
        ended.wait(GRACE_S)
    if is_late:
        raise DeadlineExceededError(
            f"{scope}: {place}: not finished after {deadline.seconds:g} s in all: {ALLOW_MORE_TIME}"
        )
    if errors:
        raise errors[0]
    result: T = results[0]
    return result
