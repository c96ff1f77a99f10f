"""A terminal of a given width as stdout and stderr of this process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def run_on_terminal(call: Callable[[], object], columns: int = 80) -> str:
    """Return the output of a call to stdout and stderr on a terminal, without the codes for bold text."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read_all, ours)
        with (
            os.fdopen(theirs, "w", encoding="utf-8") as terminal,
            contextlib.redirect_stdout(terminal),
            contextlib.redirect_stderr(terminal),
        ):
            call()
        printed = reading.result()
    os.close(ours)
    return re.sub(r"\x1b\[[\d;]*m", "", printed.replace("\r\n", "\n"))


def _read_all(terminal: int) -> str:
    """Return the output to a terminal until its other end is closed, which raises OSError on Linux."""
    printed = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            printed += part
    return printed.decode()
