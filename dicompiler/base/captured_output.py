"""Capture of another process's output that keeps only its first and last bytes in memory."""

from __future__ import annotations

import os
import threading
from typing import IO

KEPT_BYTES = 1 << 19
"""Number of bytes to keep of the start of the output, and also of its end."""


class CapturedOutput:
    """Output of a process. A thread reads it, so that the process never waits for a full pipe."""

    def __init__(self, pipe: IO[bytes], kept: int = KEPT_BYTES) -> None:
        """Start to read the pipe.

        Args:
            pipe: Output of the process.
            kept: Number of bytes to keep of the output's start, and also of its end.
        """
        self._kept = kept
        self._first, self._last, self._left_out = bytearray(), bytearray(), 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read_all, args=(pipe,), daemon=True)
        self._thread.start()

    def read(self) -> bytes:
        """Return the output so far. It is complete if the process has ended.

        Returns:
            The output. If it is longer than the kept bytes, a note replaces its middle.
        """
        self._thread.join(0.2)
        with self._lock:
            gap = f"\n[{self._left_out} bytes are omitted here]\n".encode() if self._left_out else b""
            return bytes(self._first) + gap + bytes(self._last)

    def _read_all(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                with self._lock:
                    room = self._kept - len(self._first)
                    self._first += data[:room]
                    self._last += data[room:]
                    over = max(0, len(self._last) - self._kept)
                    self._left_out += over
                    del self._last[:over]
