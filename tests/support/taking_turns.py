"""Tests that need the machine for themselves: while one runs, those of the suite's other processes wait.

In: whether a test is to be alone. Out: a block that others do not run beside, or only others that need not be alone.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(tempfile.gettempdir(), f"dicompiler-tests-{os.getuid()}")


@contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Locks end with the process that holds them, however it ends."""
    # Who waits to be alone holds the queue, so that nobody overtakes.
    with LOCK.with_suffix(".queue").open("w") as queue, LOCK.with_suffix(".running").open("w") as running:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield
