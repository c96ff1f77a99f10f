"""A deadline for onnxruntime: whatever is made or run with it within the block ends by then, or is stopped.

In: seconds, and what for. Out: a DicompilerError of one line where they have passed. Ctrl-C works meanwhile.
"""

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
"""Seconds in which onnxruntime ends once it is told to; making a session it does not listen."""


class DeadlineExceededError(DicompilerError):
    """A deadline has passed."""


@dataclass(frozen=True)
class Deadline:
    """`seconds` from when it was made."""

    seconds: float
    started_at: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        """Seconds; none where it has passed."""
        return max(0.0, self.started_at + self.seconds - time.monotonic())


_CURRENT: ContextVar[tuple[Deadline, str] | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline_scope(deadline: Deadline | None, place: str) -> Iterator[None]:
    """Within, `stoppable` holds to the deadline; `level` opens the error."""
    token = _CURRENT.set(None if deadline is None else (deadline, place))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def run_interruptibly(place: str, call: Callable[[ort.RunOptions], T]) -> T:
    """What `call` gives, which hands the options on to onnxruntime; they stop it at the deadline, if there is one."""
    options, current = ort.RunOptions(), _CURRENT.get()
    options.log_severity_level = 4  # it reports that it was stopped
    if current is None:
        return call(options)
    deadline, level = current
    done: list[Any] = []
    failed: list[BaseException] = []
    ended = threading.Event()  # a join that Ctrl-C interrupts takes the thread for dead

    def work() -> None:
        try:
            done.append(call(options))
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    # A thread of its own, as onnxruntime hears no signal; nobody waits for it where it cannot be stopped.
    try:
        threading.Thread(target=work, daemon=True).start()
        ended.wait(deadline.remaining_s)
    finally:
        late = not ended.is_set()
        options.terminate = True
        ended.wait(GRACE_S)
    if late:
        raise DeadlineExceededError(
            f"{level}: {place}: not done after {deadline.seconds:g} s in all: give it longer (--timeout)"
        )
    if failed:
        raise failed[0]
    result: T = done[0]
    return result
