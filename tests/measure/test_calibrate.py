"""Tests of calibration: it finds the figures that a run was simulated with, and rejects runs that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support import profiles
from support.commands import command, failed
from support.emulating import Ran, boards, ran

import dicompiler
from dicompiler import networks
from dicompiler.analysis.prediction_error import measured_timing, on_emulation_host, predict_timing
from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import load_json
from dicompiler.cli.file_io import write_json
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.prepare import prepare
from dicompiler.ir.platform import Platform
from dicompiler.measure.calibrate import Calibration, calibrate
from dicompiler.measure.emulation.boards import measure_runtime_costs
from dicompiler.search.problem import plan_workload
from dicompiler.target.run_records import RunEvent

FAILURE = asdict(RunEvent("failure", "pi02", "it ended", ("pi02",), 0.1, 1))
Changes = Callable[[dict[str, Any]], object]


def found(run: Ran, **options: Any) -> Calibration:
    """Calibrate by a run, even if this machine was busy."""
    return calibrate([run.log], force=True, **options)


def check_frame(calibration: Calibration) -> None:
    (frame,) = calibration.frames
    assert frame.after_s == pytest.approx(frame.measured_s, rel=0.1)


@pytest.fixture(scope="module")
def lenet(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run on boards that are slower than their platform says, with a slower network."""
    guess, truth = boards((9e7, 6e7, 3e7), latency=0.002), boards((6e7, 4e7, 2e7), latency=0.004)
    return ran(tmp_path_factory.mktemp("lenet"), "lenet", guess, truth, tolerate_failures=1)


@pytest.fixture
def changed(lenet: Ran) -> Callable[[Changes], Path]:
    """A function that writes the log with a change."""

    def write(change: Changes) -> Path:
        log = load_json(lenet.log)
        change(log)
        path = lenet.log.with_name("changed.json")
        write_json(path, log)
        return path

    return write


def test_finds_rates_and_latency(lenet: Ran) -> None:
    calibration = found(lenet)
    for device, truth in zip(calibration.platform.devices, lenet.truth.devices, strict=True):
        assert device.rate == pytest.approx(truth.rate, rel=0.1)
    assert calibration.platform.network.latency == pytest.approx(0.004, rel=0.35)
    (frame,) = calibration.frames
    check_frame(calibration)
    assert frame.before_s < 0.95 * frame.measured_s


@pytest.mark.slow
def test_finds_slower_network_and_predicts_another_plan(tmp_path: Path) -> None:
    guess, truth = boards((2e9,) * 3, 1e8, 0.0005), boards((1e9, 1.5e9, 1e9), 4e7, 0.0005)
    calibration = found(ran(tmp_path, "squeezenet", guess, truth))
    assert [one.rate for one in calibration.platform.devices] == pytest.approx([1e9, 1.5e9, 1e9], rel=0.1)
    assert calibration.platform.network.bandwidth == pytest.approx(4e7, rel=0.25)
    check_frame(calibration)
    (tmp_path / "other").mkdir()
    other = ran(tmp_path / "other", "squeezenet", guess, truth, strategy="dp")
    compilation, target, problem = reopen_artifact(other.log.with_name("net"), "analytic", calibration.platform)
    assert compilation.program is not None and compilation.plan is not None
    work = plan_workload(
        on_emulation_host(problem, measure_runtime_costs(target.name), compilation.program), compilation.plan
    )[1]
    seen = measured_timing(load_json(other.log), compilation.program)
    assert predict_timing(work, problem.platform, 1, 1).frame_s == pytest.approx(seen.frame_s, rel=0.1)


def test_scales_profile_and_stream_determines_only_rates(tmp_path: Path) -> None:
    layers = prepare(dicompiler.Model.load(networks.build("lenet", 0))).layers
    assert layers is not None
    made = [profiles.document(layers) for _ in range(2)]
    for i, document in enumerate(made):
        for one in (one for layer in document["layers"] for one in layer["measurements"]):
            seconds = 0.06 * (i + 1) * one["median_s"]
            one |= {"median_s": seconds, "min_s": seconds, "max_s": seconds}
        alone = [len(own["names"]) * own["measurements"][0]["median_s"] for own in document["layers"]]
        document |= {"whole_model_s": 0.9 * sum(alone), "weight_byte_s": 2e-9 * (i + 1)}
        transfers = [{"nbytes": 4096, "median_s": 2e-6 * (i + 1)}]
        engine = {"name": "ncnn", "versions": {}, "call_s": 0.0, "whole_model_s": None, "layers": []}
        document["engines"] = [engine | {"transfers": transfers}]
        write_json(tmp_path / f"{('guess', 'truth')[i]}.json", document)
    slower = made[1]
    run = ran(tmp_path, "lenet", boards((1e9,) * 3), cost=f"profile{{file={tmp_path / 'truth.json'} others=true}}")
    calibration = found(run, profile=tmp_path / "guess.json")
    assert calibration.document is not None
    (value,) = calibration.values
    assert value.after == pytest.approx(2, rel=0.1)
    check_frame(calibration)
    for made, due in zip(calibration.document["layers"], slower["layers"], strict=True):
        for one, two in zip(made["measurements"], due["measurements"], strict=True):
            assert one["median_s"] == pytest.approx(two["median_s"], rel=0.12)
    for key in ("whole_model_s", "weight_byte_s"):
        assert calibration.document[key] == pytest.approx(slower[key], rel=0.12)
    (transfer,) = calibration.document["engines"][0]["transfers"]
    assert transfer["median_s"] == pytest.approx(slower["engines"][0]["transfers"][0]["median_s"], rel=0.12)

    def streamed(log: dict[str, Any]) -> None:
        log["in_flight"], log["total_s"] = 3, sum(log["frames_s"]) / 2

    log = load_json(run.log)
    streamed(log)
    write_json(run.log, log)
    by_name = {one.name: one for one in found(run).values}
    assert by_name["network latency"].reason == "no run with one frame in flight has the times of all segments"
    assert by_name["pi01 rate"].after is not None


def test_keeps_links_without_a_timeline(changed: Callable[[Changes], Path]) -> None:
    path = changed(lambda log: [device.update(timeline=[]) for device in log["devices"]])
    values = calibrate([path], force=True).values
    assert [one.after is None for one in values] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda log: log.update(artifact_digest="0" * 64),
            r"the log is of another artifact than .*net: run this artifact",
        ),
        (
            lambda log: log.update(platform_digest="0" * 64),
            r"the run emulated another platform than .*net was compiled for: em",
        ),
        (
            lambda log: log.update(location="local"),
            r"all devices ran on one host, but the platform has 3 hosts: run the",
        ),
        (lambda log: log.pop("artifact_directory"), "artifact_directory is missing: run the artifact again with --log"),
        (
            lambda log: log.update(events=[FAILURE]),
            "a device failed or returned in this run, or another plan was used: repeat the run",
        ),
        (lambda log: log.update(frames_s=log["frames_s"][:2]), r"2 frames are too few: run at least 3 frames"),
        (lambda log: log["devices"][0]["sent_bytes"].update({"0": 1}), r"pi01 → pi0\d: \d+ bytes sent, \d+ predicted"),
        (
            lambda log: log["frames_s"].__setitem__(slice(1, None), [9, 25, 33, 41, 49, 9, 25]),
            r"the machine was busy: a frame takes 9.00 s to .* \(the median\): repeat the run on an idle machine",
        ),
    ],
)
def test_rejects_unusable_runs(changed: Callable[[Changes], Path], change: Changes, message: str) -> None:
    path = changed(change)
    with pytest.raises(DicompilerError, match=message) as caught:
        calibrate([path])
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_detects_busy_machine_in_segments_and_waits(changed: Callable[[Changes], Path]) -> None:
    def slow_segment(log: dict[str, Any]) -> None:
        device = log["devices"][0]
        longest = max(range(len(device["segments_s"])), key=lambda i: device["segments_s"][i])
        more = 2 * device["segments_s"][longest]
        device["segments_s"][longest] += more
        device["compute_s"] += more

    def late(log: dict[str, Any]) -> None:
        for span in log["devices"][1]["timeline"]:
            span["start"], span["end"] = span["start"] * 4, span["start"] * 4 + span["end"] - span["start"]

    for change, words in ((slow_segment, "of pi01 takes"), (late, "unexplained waits: ")):
        path = changed(change)
        assert any(words in doubt for doubt in calibrate([path], force=True).warnings)
        with pytest.raises(DicompilerError, match="idle machine, or use this run anyway"):
            calibrate([path])


@pytest.mark.slow
def test_command_finds_the_artifact_by_the_log(lenet: Ran, tmp_path: Path) -> None:
    place = lenet.log.parent
    log, output = place / "dilated.json", tmp_path / "p.toml"
    # In a run that is 20 times slower, the errors of sleeps that end late are small in comparison.
    done = command("emulate", "net", "--frames", 4, "--dilation", 20, "--log", log.name, cwd=place)
    assert done.returncode == 0, done.stderr
    done = command("calibrate", log, log, "--force", "-o", output, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pi01 rate" in done.stdout and "error before" in done.stdout and f"written: {output}" in done.stdout
    given = Platform.load(place / "net" / "platform.toml")
    for device, emulated in zip(Platform.load(output).devices, given.devices, strict=True):
        assert device.rate != emulated.rate, "it was not measured"
        assert device.rate == pytest.approx(emulated.rate, rel=0.1)


def test_command_writes_nothing_if_it_fails(lenet: Ran, tmp_path: Path) -> None:
    output = tmp_path / "p.toml"
    assert "not an artifact of dicompiler" in failed(1, "calibrate", lenet.log, "--artifact", tmp_path, "-o", output)
    assert "no such file" in failed(1, "calibrate", tmp_path / "none.json", "-o", output)
    assert "there is no directory" in failed(1, "calibrate", lenet.log, "-o", tmp_path / "none" / "p.toml")
    assert not list(tmp_path.iterdir())
