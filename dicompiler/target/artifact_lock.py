"""A lock that shows that a process uses an artifact, so that `compile` can warn before it replaces the artifact.

Runs and the devices on this host hold a shared lock on artifact.json. The system releases it when a process ends. Some
network file systems have no locks; such uses are not found.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dicompiler.target.manifest import ARTIFACT_FILE


@contextmanager
def mark_as_used(directory: Path) -> Iterator[None]:
    """Hold the shared lock of an artifact until the `with` block ends, if the file system has locks."""
    descriptor = os.open(directory / ARTIFACT_FILE, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_used(directory: Path) -> bool:
    """Return True if a process of this host uses the artifact."""
    try:
        descriptor = os.open(directory / ARTIFACT_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # The file system does not support locks.
        return False
    finally:
        os.close(descriptor)
    return False
