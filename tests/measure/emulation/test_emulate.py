"""Tests of emulation: outputs, times, and boards that this host cannot emulate."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.commands import command, failed

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.driver.prepare import prepare
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir.cluster import Network
from dicompiler.ir.plan import load_plan
from dicompiler.ir.platform import Platform, platform_to_toml
from dicompiler.measure.emulation.emulate import _check_speed, board_segment_seconds, emulate
from dicompiler.measure.profile_package import relu_model
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import OrtSession, run_model
from dicompiler.verify.run_inputs import prepare_inputs


def slow(count: int = 3, rate: float = 4e7, bandwidth: float = 1e8) -> Platform:
    """Return boards on which LeNet takes 20 ms.

    At less than 100 Mbit/s, a burst would be a large part of a message.
    """
    boards = Platform.load(f"rpi4x{count}")
    devices = tuple(replace(device, rate=rate / (i + 1)) for i, device in enumerate(boards.devices))
    return replace(boards, devices=devices, network=Network("switch", bandwidth, 0.002))


def compiled(place: Path, strategy: str, platform: Platform, network: str = "lenet", target: str = "sockets") -> Path:
    objective = "throughput" if strategy == "replicate" else "latency"
    model = networks.build(network, 0)
    dicompiler.compile(model, platform, strategy, target=target, objective=objective, output=place)
    return place


def seconds_without_runtime(directory: Path, model: dicompiler.Model, platform: Platform | None = None) -> float:
    """Return the predicted latency without the costs of the runtime, which are too high if the host is busy.

    The default platform is `slow()`.
    """
    problem = make_problem(replace(prepare(model), platform=platform or slow()))
    return problem.evaluate(load_plan(directory / "plan.json")).latency_s


@pytest.mark.parametrize(
    ("target", "strategy"),
    [
        pytest.param("sockets", "single", marks=pytest.mark.slow),
        ("sockets", "modnn"),
        ("sockets", "replicate"),
        pytest.param("mpi", "modnn", marks=pytest.mark.slow),
    ],
)
def test_boards_take_their_time_and_compute_the_same_outputs(tmp_path: Path, target: str, strategy: str) -> None:
    directory = compiled(tmp_path / "artifact", strategy, slow(), target=target)
    model = dicompiler.Model.load(networks.build("lenet", 0))
    given = prepare_inputs(model)
    roles = len(load_plan(directory / "plan.json").roles)
    found = emulate(directory, inputs=given, frames=6)
    (expected,) = run_model(model, given).values()
    assert all(np.allclose(next(iter(one.values())), expected, atol=1e-5) for one in found.result.outputs)
    for report in found.result.reports:
        calls = 6 // roles
        assert all(
            took >= calls * (0.99 * due - 60e-6)  # Sleeps that slow down computing end late, or at most 60 µs early.
            for took, due in zip(report.segments_s, found.segments_s[report.device], strict=True)
        )
    assert found.frame_s >= 0.9 * seconds_without_runtime(directory, model) and found.compute_slowdown < 5


@pytest.mark.parametrize("target", ["sockets", pytest.param("mpi", marks=pytest.mark.slow)])
def test_emulates_no_failures(tmp_path: Path, target: str) -> None:
    model = networks.build("lenet", 0)
    directory = tmp_path / "artifact"
    dicompiler.compile(model, slow(), "modnn", target=target, tolerate_failures="1", output=directory)
    found = emulate(directory, frames=3)
    model = dicompiler.Model.load(model)
    (expected,) = run_model(model, prepare_inputs(model)).values()
    assert all(np.allclose(next(iter(one.values())), expected, atol=1e-5) for one in found.result.outputs)
    assert found.frame_s >= 0.9 * seconds_without_runtime(directory, model) and found.compute_slowdown < 5
    # `segments_s` lists the segments of failure plans after those of the main plan.
    for report in found.result.reports:
        assert len(report.segments_s) > len(found.segments_s[report.device])


@pytest.mark.slow
def test_emulates_other_platforms_speeds_and_streams(tmp_path: Path) -> None:
    directory = compiled(tmp_path / "artifact", "modnn", slow())
    measured = emulate(directory, slow(), slower=300, frames=3)
    assert measured.segments_s.keys() == {"pi01", "pi02", "pi03"} and measured.predicted_s == measured.simulated_s
    one = emulate(directory, frames=3)
    slower_links, model = slow(bandwidth=2e5), dicompiler.Model.load(networks.build("lenet", 0))
    least_s = seconds_without_runtime(directory, model, slower_links)
    assert least_s > 3 * seconds_without_runtime(directory, model)
    # A part of each message passes at once, because links accept bursts.
    assert emulate(directory, slower_links, frames=3).frame_s >= 0.5 * least_s
    stream = emulate(directory, frames=12, options=RunOptions(in_flight=6))
    assert stream.timed_unit == "12 frames, each" and len(stream.result.frames_s) == 12
    assert stream.predicted_s < one.predicted_s


def test_slower_scales_times_by_the_rates_of_boards() -> None:
    rates = [device.rate for device in slow().devices]
    assert rates == [rates[0], rates[0] / 2, rates[0] / 3]
    host_s = {"pi01": (1.0, 0.5), "pi03": (1.0,)}
    assert board_segment_seconds(host_s, slow(), 300) == {"pi01": (300.0, 150.0), "pi03": (pytest.approx(900),)}


@pytest.mark.slow
def test_dilation_emulates_fast_boards(tmp_path: Path) -> None:
    directory = compiled(tmp_path / "artifact", "modnn", slow(2, rate=3e11, bandwidth=1e9), "squeezenet")
    start = time.monotonic()
    found = emulate(directory, frames=3, dilation=50)
    taken = time.monotonic() - start
    assert 0.9 * found.predicted_s <= found.frame_s and 50 * sum(found.result.frames_s) < taken
    assert 50 * found.result.total_s < taken and found.compute_slowdown < 1
    for report in found.result.reports:
        assert sum(report.segments_s) >= 0.9 * 3 * sum(found.segments_s[report.device])
        assert report.compute_s + report.wait_s <= 1.1 * found.result.total_s
        assert all(span.end <= found.result.total_s for span in report.timeline)
    with pytest.raises(UsageError, match=r"^emulate: dilation must be at least 1, not 0.5"):
        emulate(directory, dilation=0.5)


@pytest.mark.slow
def test_slower_does_not_scale_the_time_of_a_call(tmp_path: Path) -> None:
    dicompiler.compile(relu_model(), slow(1), "single", output=tmp_path / "artifact")
    engine, given, taken = OrtSession(relu_model(), {}, "call", "all"), {"x": np.zeros((1, 1), np.float32)}, []
    for _ in range(100):
        start = time.thread_time()
        engine.run(given)
        taken.append(time.thread_time() - start)
    (own,) = emulate(tmp_path / "artifact", slower=300, frames=1).segments_s.values()
    assert sum(own) < 300 * min(taken) / 2


def test_rejects_boards_that_this_host_cannot_emulate(tmp_path: Path) -> None:
    fast = compiled(tmp_path / "fast", "single", slow(1, rate=1e15), "squeezenet")
    slower = r"^emulate: pi01 computes .* host needs .* slower boards .*, or run everything slower \(--dilation\)"
    with pytest.raises(DicompilerError, match=slower):
        emulate(fast)
    # The check uses constructed times. Times that are measured on a busy host could be too slow even for one board.
    _check_speed({"pi01": (1e-6,)}, {"pi01": (0.0,)}, 1e-3, replica_count=1)  # It takes only 0.1 % of a frame.
    with pytest.raises(DicompilerError, match=r"processors of this host busy for .*% of each frame"):
        _check_speed(
            {f"pi{i}": (0.5,) for i in range(12)}, {f"pi{i}": (1.0,) for i in range(12)}, 1e-3, replica_count=12
        )
    with pytest.raises(UsageError, match=r"^emulate: target 'tflm' cannot emulate boards: compile for sockets or mpi"):
        emulate(compiled(tmp_path / "tflm", "single", slow(1), target="tflm"))
    with pytest.raises(DicompilerError, match="unknown device 'pi03'"):
        emulate(compiled(tmp_path / "artifact", "modnn", slow()), slow(2))


@pytest.mark.slow
def test_command_prints_measurement_and_prediction(tmp_path: Path) -> None:
    directory, log = compiled(tmp_path / "artifact", "modnn", slow()), tmp_path / "run.json"
    done = command("emulate", directory, "--frames", 3, "--log", log)
    assert done.returncode == 0, done.stderr
    assert "a frame: " in done.stdout and "predicted" in done.stdout and "not emulated: caches" in done.stdout
    assert json.loads(log.read_text())["target"] == "sockets"
    (tmp_path / "p.toml").write_text(platform_to_toml(slow(bandwidth=1e6)))
    done = command("emulate", directory, "--platform", tmp_path / "p.toml", "--frames", 2, "--in-flight", 2, "--json")
    found = json.loads(done.stdout)
    assert found["predicted_s"] > 0 and found["frame_s"] > 0 and len(found["run"]["frames_s"]) == 2
    done = command("emulate", directory, "--frames", 2, "--dilation", 4, "--log", log)
    assert (
        "in time that is 4 times slower" in " ".join(done.stdout.split())
        and json.loads(log.read_text())["dilation"] == 4
    )
    assert "not an artifact" in failed(1, "emulate", tmp_path)
