"""A deadline for onnxruntime: model loading and runs within a block are stopped when the time is over."""

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
"""Seconds to wait for onnxruntime to stop. It ignores the request while it creates a session."""


class DeadlineExceededError(DicompilerError):
    """A deadline has passed."""


@dataclass(frozen=True)
class Deadline:
    """A point in time, given in seconds after its creation.

    Attributes:
        seconds: Allowed time in seconds.
        started_at: Creation time in seconds of the monotonic clock.
    """

    seconds: float
    started_at: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        """Remaining seconds, 0 if the deadline has passed."""
        return max(0.0, self.started_at + self.seconds - time.monotonic())


_CURRENT: ContextVar[tuple[Deadline, str] | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline_scope(deadline: Deadline | None, place: str) -> Iterator[None]:
    """Apply a deadline to all `run_interruptibly` calls within the block; `place` opens the error message."""
    token = _CURRENT.set(None if deadline is None else (deadline, place))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def run_interruptibly(place: str, call: Callable[[ort.RunOptions], T]) -> T:
    """Call a function that uses onnxruntime, and stop it at the current deadline.

    Args:
        place: The model or segment that runs, for the error message.
        call: The function. It must pass the run options that it gets to onnxruntime.

    Returns:
        The result of the function.

    Raises:
        DeadlineExceededError: The deadline of the enclosing `deadline_scope` has passed.
    """
    options, current = ort.RunOptions(), _CURRENT.get()
    options.log_severity_level = 4  # Otherwise onnxruntime logs that it was stopped.
    if current is None:
        return call(options)
    deadline, scope = current
    results: list[Any] = []
    errors: list[BaseException] = []
    ended = threading.Event()  # join() is not used, because after Ctrl-C it considers the thread dead.

    def work() -> None:
        try:
            results.append(call(options))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    # onnxruntime does not react to signals, so it runs in a thread. A thread that cannot be stopped is abandoned.
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
