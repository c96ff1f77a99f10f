"""Boards that change their speed, in simulations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import onnx
import pytest
from support.commands import command, failed

from dicompiler import Platform, networks
from dicompiler.base.errors import UsageError
from dicompiler.cost.simulator import simulate
from dicompiler.cost.speed_changes import SpeedChange, end_of_computing, list_link_speeds, list_speeds, mean_periods
from dicompiler.cost.workload import DeviceWork, Job, Message, Workload
from dicompiler.driver.prepare import prepare
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.onnx.model import Model
from dicompiler.partition.tiling import single_device_plan
from dicompiler.search.problem import plan_workload

WRONG_CHANGES = ("pi02", "pi02=1", "=1@3s", "pi02=0@3s", "pi02=x@3s", "pi02=1@9s-3s", "pi02=nan@3s")


def test_parses_changes() -> None:
    for text in WRONG_CHANGES:
        with pytest.raises(UsageError, match=r"slow: .* is not of the form NAME=SPEED@START"):
            SpeedChange.parse(text)
    with pytest.raises(UsageError, match=r"slow 'pi02=1@3-4': '3-4' has no unit: write 3s-4s for seconds$"):
        SpeedChange.parse("pi02=1@3-4")
    assert SpeedChange.parse("a=2@500ms-1.5s") == SpeedChange("a", 2.0, 0.5, 1.5)
    assert SpeedChange.parse("a=0.4@20s") == SpeedChange("a", 0.4, 20.0)
    assert SpeedChange.parse("link:a=0.4@20s").link_host == "a"


def test_later_of_overlapping_changes_applies() -> None:
    changes = [SpeedChange("a", 0.5, 10), SpeedChange("a", 0.2, 20, 30), SpeedChange("b", 3.0, 1)]
    speeds = {"a": [(110, 0.5), (120, 0.2), (130, 0.5)], "b": [(101, 3.0)]}
    assert list_speeds(changes, ["a", "b", "c"], 100) == speeds
    with pytest.raises(UsageError, match=r"slow: there is no device 'b' \(known: a, c\)"):
        list_speeds(changes, ["a", "c"])


def test_speeds_of_links() -> None:
    changes = [SpeedChange("link:pi01", 0.5, 10), SpeedChange("link:*", 0.2, 20, 30), SpeedChange("pi02", 3.0, 1)]
    switch = Platform.load("rpi5x4")
    shared = replace(switch, network=replace(switch.network, kind="gateway"))
    speeds = list_link_speeds(changes, switch)
    assert len(speeds) == 2 * 4
    assert speeds["the outgoing link of pi01"] == [(10, 0.5), (20, 0.2), (30, 0.5)]
    assert speeds["the incoming link of pi02"] == [(20, 0.2), (30, 1.0)]
    assert list_link_speeds(changes[1:], shared) == {"the gateway network": [(20, 0.2), (30, 1.0)]}
    for platform, host, message in (
        (switch, "pi9", "there is no host 'pi9'"),
        (shared, "pi01", "all hosts share the gateway network: use link:*"),
    ):
        with pytest.raises(UsageError, match=message):
            list_link_speeds([SpeedChange(f"link:{host}", 0.5, 1)], platform)


@pytest.mark.parametrize("kind", ["switch", "gateway"])
def test_simulated_messages_follow_the_speed_of_their_links(kind: Literal["switch", "gateway"]) -> None:
    """A message of 1 MB takes 1 s. The link slows down after half of it, and recovers during the second message."""
    hosts = tuple(Host(name, 2**30) for name in "ab")
    devices = tuple(Device(name, name, 1e9) for name in "ab")
    platform = Platform("two", hosts, devices, Network(kind, 8e6))
    sender = DeviceWork("a", "a", (), (Job("first", 0.0, (), (0,), 0),))
    receiver = DeviceWork("b", "b", (), (Job("last", 0.0, (0,), (), 1),))
    work = Workload((sender, receiver), (Message(0, 1, 1_000_000, "t"),))
    host = "*" if kind == "gateway" else "b"
    link_speeds = list_link_speeds([SpeedChange(f"link:{host}", 0.25, 0.5, 3.5)], platform)
    result = simulate(work, platform, 2, link_speeds=link_speeds)
    assert result.frames == (pytest.approx((0.0, 2.5)), pytest.approx((2.5, 4.25)))
    # The simulation ends with the last frame; later changes of the speed do not extend it.
    assert result.end_s == pytest.approx(4.25)
    late = list_link_speeds([SpeedChange("link:*", 0.5, 100)], platform)
    assert simulate(work, platform, 2, link_speeds=late) == simulate(work, platform, 2)


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
    work = plan_workload(problem, plan)[1]
    (usual,) = (end - start for start, end in simulate(work, platform).frames)
    slow = simulate(work, platform, 3, speeds={"pi01": [(1.5 * usual, 0.5)]})
    durations = [end - start for start, end in slow.frames]
    assert durations == pytest.approx([usual, 1.5 * usual, 2 * usual], rel=1e-6)
    assert simulate(work, platform, 3, speeds={}).frames == simulate(work, platform, 3).frames


def test_intervals_of_a_stream() -> None:
    assert mean_periods((0.5, 0.7, 0.9, 2.5), 1.0) == [(0.0, 3, pytest.approx(0.2)), (2.0, 1, 0.0)]


@pytest.mark.slow
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
