"""Boards that change their speed, in simulations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from support.commands import command, failed

from dicompiler import Platform, networks
from dicompiler.base.errors import UsageError
from dicompiler.cost.simulator import simulate
from dicompiler.cost.speed_changes import SpeedChange, end_of_computing, list_speeds, mean_periods
from dicompiler.driver.prepare import make_problem, prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.partition.tiling import single_device_plan

WRONG_CHANGES = ("pi02", "pi02=1", "=1@3s", "pi02=0@3s", "pi02=x@3s", "pi02=1@3", "pi02=1@9s-3s", "pi02=nan@3s")


def test_parses_changes() -> None:
    for text in WRONG_CHANGES:
        with pytest.raises(UsageError, match=r"slow: .* is not of the form DEVICE=SPEED@START"):
            SpeedChange.parse(text)
    assert SpeedChange.parse("a=2@500ms-1.5s") == SpeedChange("a", 2.0, 0.5, 1.5)
    assert SpeedChange.parse("a=0.4@20s") == SpeedChange("a", 0.4, 20.0)


def test_later_of_overlapping_changes_applies() -> None:
    changes = [SpeedChange("a", 0.5, 10), SpeedChange("a", 0.2, 20, 30), SpeedChange("b", 3.0, 1)]
    speeds = {"a": [(110, 0.5), (120, 0.2), (130, 0.5)], "b": [(101, 3.0)]}
    assert list_speeds(changes, ["a", "b", "c"], 100) == speeds
    with pytest.raises(UsageError, match=r"slow: there is no device 'b' \(known: a, c\)"):
        list_speeds(changes, ["a", "c"])


@pytest.mark.parametrize(
    ("start", "seconds", "end"),
    [(0, 5, 5), (0, 10, 10), (0, 12, 14), (12, 4, 20), (12, 5, 20.5), (15, 10, 25 - 1.25), (20, 4, 22), (30, 1, 30.5)],
)
def test_computing_ends_later_at_lower_speed(start: float, seconds: float, end: float) -> None:
    """The device has half its speed from 10 s to 20 s, and twice its speed afterwards."""
    assert end_of_computing(start, seconds, [(10, 0.5), (20, 2.0)]) == pytest.approx(end)


def test_simulated_frames_follow_the_speed() -> None:
    """With one device, a frame takes the predicted seconds divided by the speed."""
    compilation = prepare(Model.load(networks.build("lenet", 0)))
    platform = Platform.load("rpi4x1")
    assert compilation.layers is not None
    problem = make_problem(replace(compilation, platform=platform))
    plan = single_device_plan(compilation.layers, "pi01")
    work = problem.workload(plan)[1]
    (usual,) = (end - start for start, end in simulate(work, platform).frames)
    slow = simulate(work, platform, 3, speeds={"pi01": [(1.5 * usual, 0.5)]})
    durations = [end - start for start, end in slow.frames]
    assert durations == pytest.approx([usual, 1.5 * usual, 2 * usual], rel=1e-6)
    assert simulate(work, platform, 3, speeds={}).frames == simulate(work, platform, 3).frames


def test_intervals_of_a_stream() -> None:
    assert mean_periods((0.5, 0.7, 0.9, 2.5), 1.0) == [(0.0, 3, pytest.approx(0.2)), (2.0, 1, 0.0)]


def test_command_prints_the_time_between_frames(tmp_path: Path) -> None:
    onnx.save(networks.build("lenet", 0), tmp_path / "lenet.onnx")
    words = ["simulate", tmp_path / "lenet.onnx", "--platform", "rpi4x2", "--strategy", "modnn", "--frames", 4000]
    lines = command(*words, "--in-flight", 4, "--slow", "pi02=0.2@1s-2s").stdout.splitlines()
    table = [line.split() for line in lines[lines.index(next(line for line in lines if "time between" in line)) + 1 :]]
    counts = [int(row[2]) for row in table[:3]]
    assert counts[1] < 0.9 * counts[0] and counts[1] < 0.9 * counts[2]
    message = failed(2, *words, "--slow", "pi02=0.2@1s", "--fail", "pi02@1s")
    assert "--slow and --fail cannot be combined: omit one of them" in message
    assert "slow: there is no device 'pi07'" in command(*words, "--slow", "pi07=0.2@1s").stderr
