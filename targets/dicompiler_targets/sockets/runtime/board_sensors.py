"""A board's sensors, which the kernel offers as files: temperature, and flags that the clock rate was lowered."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

READ_INTERVAL_S = 1.0
UNKNOWN_FLAGS = 2**32 - 1
"""Value of the throttling flags for boards that have no such flags."""
MAX_FLAGS = 2**31 - 1
THROTTLED_FILE = "devices/platform/soc/soc:firmware/get_throttled"
"""File with the flags of `vcgencmd get_throttled` on a Raspberry Pi, in hexadecimal."""


class BoardSensors:
    """Reads the sensors of this board, at most once a second."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        """Find the sensor files below `root`, the kernel's directory of devices."""
        self._temperature_file = next(iter(sorted(root.glob("class/thermal/thermal_zone*/temp"))), None)
        throttled_file = root / THROTTLED_FILE
        self._throttled_file = throttled_file if throttled_file.is_file() else None
        self._values, self._read_at = (math.nan, UNKNOWN_FLAGS), -math.inf

    def read(self) -> tuple[float, int]:
        """Return the temperature in °C (NaN if unknown) and the throttling flags (UNKNOWN_FLAGS if unknown)."""
        if (self._temperature_file or self._throttled_file) and time.monotonic() - self._read_at >= READ_INTERVAL_S:
            self._read_at = time.monotonic()
            temperature, flags = math.nan, UNKNOWN_FLAGS
            with contextlib.suppress(OSError, ValueError):
                if self._temperature_file is not None:
                    temperature = int(self._temperature_file.read_text()) / 1000
            with contextlib.suppress(OSError, ValueError):
                if self._throttled_file is not None:
                    flags = int(self._throttled_file.read_text(), 16) & MAX_FLAGS
            self._values = temperature, flags
        return self._values
