"""A lock that separates tests that measure time from all others, across the processes of the test suite."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(tempfile.gettempdir(), f"dicompiler-tests-{os.getuid()}")


@contextmanager
def turn(measures_time: bool) -> Iterator[None]:
    """Run the block while no test with the other value of `measures_time` runs.

    Tests that measure time run side by side, because they mostly sleep. The file locks are released when their process
    ends, however it ends.
    """
    names = (".timed", ".untimed") if measures_time else (".untimed", ".timed")
    with (
        LOCK.with_suffix(".queue").open("w") as queue,
        LOCK.with_suffix(names[0]).open("w") as own_kind,
        LOCK.with_suffix(names[1]).open("w") as other_kind,
    ):
        # A test that waits for those of the other kind keeps ".queue" locked, so that no later test starts before it.
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(other_kind, fcntl.LOCK_EX)
        fcntl.flock(other_kind, fcntl.LOCK_UN)
        fcntl.flock(own_kind, fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # A process that the test forked would otherwise keep the lock.
            fcntl.flock(own_kind, fcntl.LOCK_UN)
