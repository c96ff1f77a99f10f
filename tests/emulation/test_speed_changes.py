"""Emulated boards that become slower and faster during a stream."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import command, failed

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import UsageError
from dicompiler.emulation.speed_changes import SpeedChange, SpeedTrial, _speeds_of_device, emulate_speed_changes
from dicompiler.ir.platform import Platform

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeNet on two boards that take about 20 ms for it."""
    boards = Platform.load("rpi4x2")
    boards = replace(boards, devices=tuple(replace(device, rate=4e7) for device in boards.devices))
    directory = tmp_path_factory.mktemp("compiled") / "net"
    dicompiler.compile(networks.build("lenet", 0), boards, "modnn", output=directory)
    return directory


def test_board_slows_down_and_recovers(compiled: Path) -> None:
    """Without adaptation, the time between frames follows the slow board."""
    trial = emulate_speed_changes(compiled, [SpeedChange("pi02", 0.1, 3, 6)], duration_s=9)
    assert not trial.adaptations and len(trial.finished_s) > 20
    before, during, after = (
        sum(start < seconds < start + 2 for seconds in trial.finished_s) for start in (0.5, 3.7, 6.9)
    )
    assert during < 0.7 * before and during < 0.7 * after


def test_command_prints_times_and_adaptations(compiled: Path) -> None:
    words = ["emulate", compiled, "--slow", "pi02=0.2@2s", "--adapt", "--duration", 14, "--in-flight", 4]
    document = json.loads(command(*words, "--json").stdout)
    assert set(document) == {"finished_s", "adaptations"}
    messages = [found["message"] for found in document["adaptations"]]
    assert any("pi02 computes" in message for message in messages), messages
    output = command("emulate", compiled, "--slow", "pi02=0.5@1s", "--duration", 3).stdout
    assert output.splitlines()[0].split() == ["from", "frames", "time", "between", "frames"]
    assert [line.split()[0] for line in output.splitlines()[1:4]] == ["0", "1", "2"]


WRONG_CHANGES = ("pi02", "pi02=1", "=1@3s", "pi02=0@3s", "pi02=x@3s", "pi02=1@3", "pi02=1@9s-3s", "pi02=nan@3s")


def test_rejects_invalid_changes(compiled: Path) -> None:
    for text in WRONG_CHANGES:
        with pytest.raises(UsageError, match=r"slow: .* is not of the form DEVICE=SPEED@START"):
            SpeedChange.parse(text)
    assert SpeedChange.parse("a=2@500ms-1.5s") == SpeedChange("a", 2.0, 0.5, 1.5)
    message = failed(2, "emulate", compiled, "--slow", "pi03=0.5@3s")
    assert "slow: there is no device 'pi03' (did you mean 'pi02'?)" in message
    message = failed(2, "emulate", compiled, "--adapt", "--dilation", 2)
    assert "--slow and --adapt exclude --slower, --dilation and --log" in message


def test_overlapping_changes_and_intervals() -> None:
    changes = [SpeedChange("a", 0.5, 10), SpeedChange("a", 0.2, 20, 30), SpeedChange("b", 3.0, 1)]
    assert _speeds_of_device("a", changes, 100) == [(110, 0.5), (120, 0.2), (130, 0.5)]
    assert _speeds_of_device("c", changes, 100) == []
    trial = SpeedTrial((0.5, 0.7, 0.9, 2.5), ())
    assert trial.mean_periods(1.0) == [(0.0, 3, pytest.approx(0.2)), (2.0, 1, 0.0)]
