"""A time limit for tests, without a thread or process of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

LIMIT_S = 600.0
"""Seconds for each phase of a test: longer than the time limits in the tests themselves."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Fail the test if the block takes longer.

    It fails in the main thread as soon as the code there returns to Python, and then has as long again to clean up.
    """

    def late(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail(f"it did not end within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
