"""Progress messages: log records of the library, forwarded to a callback."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator


class _ProgressHandler(logging.Handler):
    def __init__(self, progress: Callable[[str], object]) -> None:
        super().__init__()
        self._progress = progress
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a record of level INFO, if the thread that created this handler logged it."""
        if record.levelno == logging.INFO and record.thread == self._thread:
            self._progress(" ".join(record.getMessage().split()))


@contextlib.contextmanager
def forward_progress(progress: Callable[[str], object] | None) -> Iterator[None]:
    """Call `progress` with each message that the library logs at level INFO in this thread, until the block ends.

    An exception that `progress` raises propagates to the code that logged the message, and so ends its work. If
    `progress` is None, nothing is forwarded.
    """
    if progress is None:
        yield
        return
    log, handler = logging.getLogger("dicompiler"), _ProgressHandler(progress)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
