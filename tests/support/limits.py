"""A time limit for what a test does, without a thread or process of its own. In: seconds. Out: the test's failure."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

LIMIT_S = 600.0
"""For each of a test's phases: longer than what tests themselves allow what they start."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Fails the test where the block takes longer: in the main thread, once what runs there returns to Python. Failed
    once, it has as long again to clean up."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail(f"it did not end within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
