"""The memory of this process, and how the system's allocator keeps it while sessions are made: what is freed then must
go back to the system.

glibc learns from the first large block that is freed to keep such blocks; onnxruntime makes and frees a copy of many
weights, and what it leaves behind would stay with the process: up to a quarter of its memory, another amount each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_INITIAL_THRESHOLD_BYTES, _LARGE_THRESHOLD_BYTES = 128 << 10, 32 << 20
"""What glibc begins with, and what it comes to by itself in time."""


@contextlib.contextmanager
def freed_to_system() -> Iterator[None]:
    """Inside, each block of 128 KiB or more goes back to the system when it is freed. Elsewhere than on glibc nothing
    changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _INITIAL_THRESHOLD_BYTES)
    try:
        yield
    finally:
        # Frames come and go: their memory is better kept.
        mallopt(_MMAP_THRESHOLD, _LARGE_THRESHOLD_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE_THRESHOLD_BYTES)


def peak_memory_bytes() -> int:
    """The largest resident memory of this process in bytes."""
    try:
        # On Linux getrusage also counts what the parent process had when it started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
