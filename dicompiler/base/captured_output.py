"""What other programs and hosts write: as much of it as can be kept.

In: a pipe. Out: the beginning and the end of what came.
"""

from __future__ import annotations

import os
import threading
from typing import IO

KEPT_BYTES = 1 << 19
"""Bytes that are kept of the beginning of what a process writes, and of its end."""


class CapturedOutput:
    """What a process writes: all is read, or it would wait, and of much the first and the last `kept` bytes stay."""

    def __init__(self, pipe: IO[bytes], kept: int = KEPT_BYTES) -> None:
        self._kept = kept
        self._first, self._last, self._left_out = bytearray(), bytearray(), 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read_all, args=(pipe,), daemon=True)
        self._thread.start()

    def read(self) -> bytes:
        """What was written so far; all of it where the process has ended."""
        self._thread.join(0.2)
        with self._lock:
            gap = f"\n[{self._left_out} bytes are left out here]\n".encode() if self._left_out else b""
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
