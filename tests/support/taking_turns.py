"""Exclusive use of the machine for some tests, across the processes of the test suite."""

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
    """Run the block while no other test runs, or without `alone` while no exclusive test runs.

    The file locks are released when their process ends, however it ends.
    """
    # A test that waits for exclusive use locks ".queue", so that later tests cannot start before it.
    with LOCK.with_suffix(".queue").open("w") as queue, LOCK.with_suffix(".running").open("w") as running:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield
