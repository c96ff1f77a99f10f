"""This process: limits of its memory, pauses of its garbage collector, and progress messages from its log."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Limit the memory that this process can additionally allocate within the block.

    The limit applies to all threads, so use it only for short calls. It has no effect on systems without resource
    limits.

    Args:
        more: Bytes of address space that the process may add to its current use.

    Yields:
        None.

    Raises:
        MemoryError: The block needs more memory.
    """
    try:
        import resource
    except ImportError:  # Windows has no resource limits, so the block runs without a limit.
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = None
    with suppress(OSError), open("/proc/self/statm") as file:
        bound = int(file.read().split()[0]) * resource.getpagesize() + more
    if bound is None or (before != resource.RLIM_INFINITY and before < bound):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def available_memory() -> int:
    """Return the bytes that the system can provide without swapping, or 2**62 if the system does not report them."""
    with suppress(OSError), open("/proc/meminfo") as file:
        sizes = dict(line.split()[:2] for line in file)
        return 1024 * int(sizes["MemAvailable:"])
    return 1 << 62


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector within the block.

    Use it for code that creates very many objects without reference cycles, which then takes a fifth less time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
    """Call `progress` with each INFO message that the library logs in this thread within the block.

    If `progress` raises an exception, the work that logged the message ends with it. If `progress` is None, nothing is
    forwarded.
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
