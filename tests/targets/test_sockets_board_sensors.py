"""Sensors of boards: files of the kernel, as they are on a Raspberry Pi."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dicompiler_targets.sockets.runtime import board_sensors
from dicompiler_targets.sockets.runtime.board_sensors import THROTTLED_FILE, UNKNOWN_FLAGS, BoardSensors


def test_reads_temperature_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thermal, throttled = tmp_path / "class/thermal/thermal_zone0/temp", tmp_path / THROTTLED_FILE
    for file, text in ((thermal, "61345\n"), (throttled, "50005\n")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    sensors = BoardSensors(tmp_path)
    assert sensors.read() == (61.345, 0x50005)
    thermal.write_text("70000\n")
    # The sensors were read less than a second ago, so the old values are returned.
    assert sensors.read() == (61.345, 0x50005)
    monkeypatch.setattr(board_sensors, "READ_INTERVAL_S", 0.0)
    throttled.write_text("damaged")
    assert sensors.read() == (70.0, UNKNOWN_FLAGS)
    thermal.unlink()
    assert math.isnan(sensors.read()[0])


def test_boards_without_sensors(tmp_path: Path) -> None:
    temperature, flags = BoardSensors(tmp_path).read()
    assert math.isnan(temperature) and flags == UNKNOWN_FLAGS
