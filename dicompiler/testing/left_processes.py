"""Detection of processes that a call of a plugin leaves running."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dicompiler.testing.assertions import require

END_WAIT_S = 2.0
"""Seconds in which started processes may still end after the call."""
_POLL_INTERVAL_S = 0.02
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # These constants are in linux/prctl.h.
_ENDS_WITH_PARENT = "multiprocessing.resource_tracker"


@contextmanager
def no_processes_left(function: str) -> Iterator[None]:
    """Raise AssertionError if a process that was started in the `with` block still runs after it.

    The process is killed. Nothing is checked on systems without /proc, or if the block raises an exception.

    Args:
        function: Name of the function that starts processes, for the message.
    """
    with _orphans_as_children():
        before = _find_descendants()
        yield
        deadline = time.monotonic() + END_WAIT_S
        while (left := _find_descendants() - before) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
        lines = {pid: _command_line(pid) for pid in sorted(left)}
        for pid in left:
            _kill(pid)
    names = ", ".join(f"process {pid} ({line})" for pid, line in lines.items())
    require(not left, f"{function} leaves {names} running: end all started processes")


@contextmanager
def _orphans_as_children() -> Iterator[None]:
    """Let processes whose parent ends become children of this process, so that they are found too."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        yield
        return
    was_subreaper = ctypes.c_int(0)
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was_subreaper), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, was_subreaper.value, 0, 0, 0)


def _find_descendants() -> set[int]:
    """Return the running processes that this process or its descendants have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        # A process may end while the files are read.
        with contextlib.suppress(OSError):
            state, parent, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if _ENDS_WITH_PARENT not in _command_line(pid)]
        found.update(new)
        waiting.extend(new)
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
