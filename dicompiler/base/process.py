"""Limits of this process's memory, and pauses of its garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Limit the memory that this process can additionally allocate within the block.

    The limit applies to all threads, so use it only for short calls. On systems without resource limits it has no
    effect.

    Args:
        more: Bytes of address space that the process may add to its current use.

    Yields:
        None.

    Raises:
        MemoryError: The block needs more memory.
    """
    try:
        import resource
    except ImportError:  # Windows
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

    Use it for code that creates very many objects without reference cycles: the collector would use a fifth of the
    time of such code.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
