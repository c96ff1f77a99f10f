"""A bound for what this process may take of memory for a while: for calls of libraries that know none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Within, the process gets at most `more` bytes of address space beyond what it has: MemoryError then. It holds for
    all threads, so it is for short calls. Where the system cannot do it nothing is bounded."""
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
    """Bytes that the system could give without taking them from others; where it does not tell, as many as no process
    gets."""
    with suppress(OSError), open("/proc/meminfo") as file:
        sizes = dict(line.split()[:2] for line in file)
        return 1024 * int(sizes["MemAvailable:"])
    return 1 << 62
