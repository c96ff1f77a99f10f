"""Emulated boards that become slower and faster during a stream."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import command, failed

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import RunError, UsageError
from dicompiler.cost.speed_changes import SpeedChange
from dicompiler.ir.platform import Platform
from dicompiler.measure.adapt import AdaptOptions
from dicompiler.measure.emulation import speed_changes
from dicompiler.measure.emulation.speed_changes import emulate_speed_changes
from dicompiler.target.run_records import RunOptions


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeNet on two boards that take about 20 ms for it."""
    boards = Platform.load("rpi4x2")
    boards = replace(boards, devices=tuple(replace(device, rate=4e7) for device in boards.devices))
    directory = tmp_path_factory.mktemp("compiled") / "net"
    dicompiler.compile(networks.build("lenet", 0), boards, "modnn", output=directory)
    return directory


@pytest.fixture(scope="module")
def finished_s(compiled: Path) -> Sequence[float]:
    """The times at which frames are finished while first a board and then the links become slower and recover."""
    changes = [SpeedChange("pi02", 0.1, 1.5, 3.5), SpeedChange("link:*", 0.0003, 5.5, 7.5)]
    trial = emulate_speed_changes(compiled, changes, duration_s=9.5)
    assert not trial.adaptations
    return trial.finished_s


def count_between(finished_s: Sequence[float], start_s: float, end_s: float) -> int:
    return sum(start_s < seconds < end_s for seconds in finished_s)


@pytest.mark.slow
def test_board_slows_down_and_recovers(finished_s: Sequence[float]) -> None:
    """Without adaptation, the time between frames follows the slow board."""
    before, during, after = (count_between(finished_s, start, start + 1) for start in (0.4, 2.3, 4.4))
    assert before > 10
    assert during < 0.7 * before and during < 0.7 * after


@pytest.mark.slow
def test_link_slows_down_and_recovers(finished_s: Sequence[float]) -> None:
    before, during, after = (count_between(finished_s, start, start + 1) for start in (4.4, 6.3, 8.4))
    assert during < 0.7 * before and during < 0.7 * after


@pytest.mark.slow
def test_dilation_slows_everything_down_and_divides_the_times(compiled: Path, finished_s: Sequence[float]) -> None:
    """A board at a tenth of its speed is found, and no board seems slow because of the dilation."""
    changes = [SpeedChange("pi02", 0.1, 1.5)]
    trial = emulate_speed_changes(compiled, changes, AdaptOptions(), duration_s=7, dilation=2)
    before, during = (count_between(trial.finished_s, start, start + 1) for start in (0.4, 1.7))
    assert before > 0.7 * count_between(finished_s, 0.4, 1.4)
    assert during < 0.7 * before
    assert trial.adaptations[0].at_s > 1.5
    assert list(trial.adaptations[0].ratios) == ["pi02"]


@pytest.mark.slow
def test_command_prints_times_and_adaptations(compiled: Path) -> None:
    words = ["emulate", compiled, "--slow", "pi02=0.2@1s", "--adapt", "--duration", 12, "--in-flight", 4]
    document = json.loads(command(*words, "--json").stdout)
    assert set(document) == {"finished_s", "adaptations"}
    messages = [found["message"] for found in document["adaptations"]]
    assert any("pi02 computes" in message for message in messages), messages
    output = command("emulate", compiled, "--slow", "pi02=0.5@1s", "--duration", 3).stdout
    assert output.splitlines()[0].split() == ["from", "frames", "time", "between", "frames"]
    assert [line.split()[0] for line in output.splitlines()[1:4]] == ["0", "1", "2"]


@pytest.mark.parametrize("dilation", [0.5, -1.0, math.inf, math.nan])
def test_rejects_a_dilation_that_makes_boards_faster(dilation: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^emulate: dilation must be at least 1, not {dilation}$"):
        emulate_speed_changes(tmp_path, [], dilation=dilation)


@pytest.mark.parametrize(("options", "limit_s"), [(RunOptions(timeout_s=30), 30), (None, 606)])
def test_time_limit_is_for_the_whole_run(
    options: RunOptions | None, limit_s: float, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[RunOptions]()

    def open_session(_directory: Path, session_options: RunOptions, _specialize: object) -> None:
        seen.append(session_options)
        raise RunError("seen")

    monkeypatch.setattr(speed_changes, "SwappableSession", open_session)
    start = time.monotonic()
    with pytest.raises(RunError, match="seen"):
        emulate_speed_changes(compiled, [], duration_s=1, options=options)
    assert start + limit_s <= seen[0].deadline <= time.monotonic() + limit_s


def test_rejects_a_time_limit_that_is_shorter_than_the_duration(compiled: Path) -> None:
    message = failed(2, "emulate", compiled, "--adapt", "--duration", 20, "--timeout", 20)
    assert "emulate: the run takes at least 25 s, but may take only 20 s: allow more time (--timeout), or" in message


def test_rejects_unknown_devices_and_options_that_exclude_each_other(compiled: Path) -> None:
    message = failed(2, "emulate", compiled, "--slow", "pi03=0.5@3s")
    assert "slow: there is no device 'pi03' (did you mean 'pi02'?)" in message
    message = failed(2, "emulate", compiled, "--slow", "link:pi03=0.5@3s")
    assert "slow: there is no host 'pi03' (did you mean 'pi02'?)" in message
    message = failed(2, "emulate", compiled, "--adapt", "--slower", 2)
    assert "--slow and --adapt exclude --slower and --log" in message
