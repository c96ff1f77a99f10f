"""Tests of predicted and measured times of a run, and of the discrepancies between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import command, failed
from support.reports import made
from support.workloads import job, work

import dicompiler
from dicompiler import networks
from dicompiler.analysis.prediction_error import (
    DeviceTiming,
    RunTiming,
    expect_timing,
    find_discrepancies,
    find_wrong_bytes,
    measured_timing,
    segment_seconds,
    typical_frame_s,
)
from dicompiler.base.schema import load_json, validate
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.target.manifest import PROVENANCE_FILE, write_digests_and_checksum


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("lenet"), "lenet")


@pytest.fixture(scope="module")
def ran(artifact: Path) -> tuple[str, dict[str, Any]]:
    """Output and log of a run of five frames."""
    done = command("run", "net", "--frames", 5, "--in-flight", 1, "--log", "run.json", cwd=artifact.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout, load_json(artifact.with_name("run.json"))


def program_of(artifact: Path) -> Program:
    program = reopen_artifact(artifact)[0].program
    assert program is not None
    return program


def test_log_has_predicted_times_of_each_device(artifact: Path, ran: tuple[str, dict[str, Any]]) -> None:
    _, log = ran
    validate(log, "run", "log")
    assert (log["artifact_directory"], log["location"], log["in_flight"]) == ("net", "local", 1)
    compilation, _, problem = reopen_artifact(artifact)
    assert compilation.metrics is not None and compilation.program is not None
    predicted, frame_s = log["predicted"], compilation.metrics.latency_s + compilation.metrics.input_output_s
    assert (predicted["cost_model"], predicted["frame_s"]) == ("analytic", pytest.approx(frame_s))
    for told, due, device in zip(
        predicted["devices"], compilation.metrics.devices, compilation.program.devices, strict=True
    ):
        assert told["device"] == due.device and len(told["segments_s"]) == len(device.segments)
        assert sum(told["segments_s"]) == pytest.approx(told["compute_s"])
        # A device's measured times do not include the engine's cost of a call.
        calls = len(device.segments) * problem.runtime_costs[due.device].call
        assert told["compute_s"] == pytest.approx(due.compute_s - calls)
        assert told["wait_s"] == pytest.approx(due.wait_s) == pytest.approx(sum(told["waits"].values()))


def test_measured_times_are_per_frame(artifact: Path, ran: tuple[str, dict[str, Any]]) -> None:
    log, program = ran[1], program_of(artifact)
    told = measured_timing(log, program)
    assert told.frame_s == sorted(log["frames_s"][1:])[1] / 2 + sorted(log["frames_s"][1:])[2] / 2
    for entry in log["devices"]:
        share = told.devices[entry["device"]]
        assert (share.compute_s, share.wait_s) == (entry["compute_s"] / 5, entry["wait_s"] / 5)
        assert sum(share.segments_s) == pytest.approx(share.compute_s)
        spans = [one for one in entry["timeline"] if one["kind"] == "wait" and one["frame"] == 4]
        assert sum(share.waits.values()) == pytest.approx(sum(one["end"] - one["start"] for one in spans))
        assert set(share.waits) <= {"", *(one.device for one in program.devices)} - {entry["device"]}


def test_bytes_of_each_link_match_the_prediction(artifact: Path, ran: tuple[str, dict[str, Any]]) -> None:
    log, program = ran[1], program_of(artifact)
    assert find_wrong_bytes(log, program) == []
    one = program.all_transfers[0]
    sender = next(entry for entry in log["devices"] if entry["device"] == one.sender)
    more = sender | {"sent_bytes": sender["sent_bytes"] | {"0": sender["sent_bytes"]["0"] + 1}}
    changed = log | {"devices": [more if entry is sender else entry for entry in log["devices"]]}
    ((a, b, due, got),) = find_wrong_bytes(changed, program)
    assert (a, b, got) == (one.sender, one.receiver, due + 1)


@pytest.mark.slow
def test_command_prints_discrepancies(artifact: Path, tmp_path: Path) -> None:
    boards = Platform.load("rpi4x3")
    slow_boards = replace(boards, devices=tuple(replace(device, rate=1e6) for device in boards.devices))
    dicompiler.compile(networks.build("lenet", 0), slow_boards, "modnn", output=tmp_path / "net")
    printed = command("run", "net", "--frames", 2, "--log", "run.json", cwd=tmp_path).stdout
    assert "each of 2 frames on this host only: " in printed
    assert "by simulation of the whole stream (cost model analytic)" in " ".join(printed.split())
    assert (
        "differs by more than 10 %" in printed and "bytes sent," not in printed
    )  # This host computes much faster than the boards of the platform.
    silent = command("run", artifact, "--frames", 2)
    assert silent.returncode == 0 and "differs by" not in silent.stdout
    log = artifact.with_name("wrong.json")
    assert "unknown cost model" in failed(2, "run", artifact, "--log", log, "--cost", "analytik")
    assert not log.exists()


def test_warns_if_the_cost_model_needs_options(artifact: Path) -> None:
    made = artifact / PROVENANCE_FILE
    text = made.read_text()
    assert '"cost_model": "analytic"' in text
    made.write_text(text.replace('"cost_model": "analytic"', '"cost_model": "profile"'))
    try:
        write_digests_and_checksum(artifact)
        log = artifact.with_name("profiled.json")
        done = command("run", artifact, "--log", log)
        assert done.returncode == 0 and "no prediction: " in done.stderr
        assert "select a cost model with its options (--cost)" in done.stderr
        assert "predicted" not in load_json(log)
    finally:
        made.write_text(text)
        write_digests_and_checksum(artifact)


def told(frame_s: float, **changes: Any) -> RunTiming:
    share = {"compute_s": 0.5, "send_s": 0.1, "wait_s": 0.2, "segments_s": (0.25, 0.25), "waits": {"b": 0.1, "c": 0.1}}
    return RunTiming(frame_s, {"a": DeviceTiming(**share | changes)})


def test_segment_times_are_not_negative() -> None:
    call = 0.0008445774296735232
    share = 5 * call / 5  # Time of one of five calls; rounding makes it slightly shorter than `call`.
    assert share < call
    made = work([], ((), [job(share, outputs=1), job(1.0 + call)]))
    costing = replace(made, devices=tuple(replace(one, runtime=RuntimeCosts(call=call)) for one in made.devices))
    assert segment_seconds(costing) == {"d0": (0.0, pytest.approx(1.0))}


def test_finds_discrepancies_with_their_causes() -> None:
    assert not list(find_discrepancies(told(1.0), told(1.0, compute_s=0.54, send_s=0.01, wait_s=0.21)))
    slow = told(1.3, compute_s=0.7, segments_s=(0.25, 0.45), wait_s=0.4, waits={"b": 0.12, "c": 0.28}, send_s=0.2)
    found = [(one.cause, one.location, one.predicted_s, one.measured_s) for one in find_discrepancies(told(1.0), slow)]
    assert found == [("computing", "segment 1", 0.5, 0.7), ("sending", "", 0.1, 0.2), ("waiting", "c", 0.2, 0.4)]
    assert [
        one.cause for one in find_discrepancies(told(100.0), told(100.0, compute_s=0.9))
    ] == []  # Differences that are a tiny share of a frame of 100 s are not listed.


def test_predicts_streams(artifact: Path) -> None:
    one, stream = expect_timing(artifact, "", 8, 1).timing, expect_timing(artifact, "", 8, 6).timing
    assert stream.frame_s < one.frame_s
    assert [share.compute_s for share in stream.devices.values()] == pytest.approx(
        [share.compute_s for share in one.devices.values()]
    )


def test_typical_frame_omits_the_first_and_averages_replicas() -> None:
    assert (typical_frame_s([9.0], 1), typical_frame_s([9.0, 1.0, 2.0, 3.0], 1), typical_frame_s([], 1)) == (
        9.0,
        2.0,
        0.0,
    )
    assert typical_frame_s([9.0, 3.0, 1.0, 3.0, 1.0, 3.0], 2) == 2.0
    assert typical_frame_s([9.0, 3.0], 2) == 6.0
