"""One artifact, one frame, one prediction: all commands state the same time and its parts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
from support.commands import command

from dicompiler import networks
from dicompiler.analysis.report.page import render_report
from dicompiler.analysis.report.report_data import load_report_data
from dicompiler.base.units import format_seconds
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.ir.frame_prediction import HOST_COSTS_NOTE, FramePrediction

PREDICTION = re.compile(r"([\d.]+ [mµn]?s) = ([\d.]+ [mµn]?s) in the cluster \+ ([\d.]+ [mµn]?s) for input and result")
BOARDS = """[network]
kind = "switch"
bandwidth = "100 Mbit/s"
""" + "".join(
    f'[[host]]\nname = "pi0{i}"\nmemory = "1 GiB"\n[[device]]\nname = "pi0{i}"\nrate = "0.02 GFLOP/s"\n' for i in (1, 2)
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("predictions")
    onnx.save(networks.build("lenet", 0), directory / "lenet.onnx")
    (directory / "boards.toml").write_text(BOARDS)
    arguments = ("lenet.onnx", "--platform", "boards.toml", "--strategy", "modnn", "-o", "net")
    done = command("compile", *arguments, cwd=directory)
    assert done.returncode == 0, done.stderr
    (directory / "compile.txt").write_text(done.stdout)
    return directory


@pytest.fixture(scope="module")
def frame(place: Path) -> FramePrediction:
    metrics = reopen_artifact(place / "net")[0].metrics
    assert metrics is not None and metrics.input_output_s > 0
    return metrics.frame


def predictions(text: str) -> list[str]:
    """Return the predictions with parts in a text, whose lines may be wrapped."""
    return [match[0] for match in PREDICTION.finditer(" ".join(text.split()))]


def test_text_states_the_sum_and_its_parts() -> None:
    assert str(FramePrediction(0.045, 0.0052)) == "50.2 ms = 45.0 ms in the cluster + 5.20 ms for input and result"
    assert str(FramePrediction(0.045)) == "45.0 ms in the cluster"
    assert FramePrediction(0.045, 0.0052).total_s == pytest.approx(0.0502)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "lenet.onnx", "--platform", "boards.toml", "--strategy", "modnn", "-o", "plan.json"),
        ("simulate", "lenet.onnx", "--platform", "boards.toml", "--strategy", "modnn"),
        ("compare", "lenet.onnx", "--platform", "boards.toml", "--strategies", "modnn"),
        ("run", "net", "--frames", "2", "--in-flight", "1", "--log", "run.json"),
    ],
)
def test_commands_state_the_same_prediction(place: Path, frame: FramePrediction, arguments: tuple[str, ...]) -> None:
    done = command(*arguments, cwd=place)
    assert done.returncode == 0, done.stderr
    assert str(frame) in predictions(done.stdout)
    if arguments[0] in ("simulate", "run", "compare"):
        assert set(predictions(done.stdout)) == {str(frame)}


@pytest.mark.slow
def test_simulate_explains_another_period_than_that_of_compile(place: Path) -> None:
    given = ("lenet.onnx", "--platform", "rpi4x2", "--strategy", "modnn")
    planned = command("plan", *given, "-o", "other.json", cwd=place)
    period = re.search(r"frame period +(\S+ \S+) ", planned.stdout)
    done = command("simulate", *given, "--frames", "50", cwd=place)
    assert period is not None and f"\nframe period of compile: {period[1]}, the sum of the work of the" in done.stdout


def test_compile_states_the_parts_in_table_and_summary(place: Path, frame: FramePrediction) -> None:
    text = (place / "compile.txt").read_text()
    assert str(frame) in predictions(text)
    parts = {
        "frame": frame.total_s,
        "in the cluster (latency)": frame.cluster_s,
        "for input and result": frame.input_output_s,
    }
    for name, seconds in parts.items():
        assert re.search(rf"^ *{re.escape(name)} +{re.escape(format_seconds(seconds))} ", text, re.MULTILINE)


def test_report_states_the_prediction_of_the_run_that_it_shows(place: Path, frame: FramePrediction) -> None:
    done = command("run", "net", "--frames", "2", "--in-flight", "1", "--log", "local.json", cwd=place)
    assert done.returncode == 0, done.stderr
    page = render_report(load_report_data(place / "net", run_log=place / "local.json"))
    assert set(predictions(page)) == {str(frame)} and HOST_COSTS_NOTE not in page
    log = json.loads((place / "local.json").read_text())
    assert log["predicted"]["frame_s"] == pytest.approx(frame.total_s)
    assert log["predicted"]["input_output_s"] == pytest.approx(frame.input_output_s)


@pytest.mark.slow
def test_emulation_states_both_predictions(place: Path, frame: FramePrediction) -> None:
    done = command("emulate", "net", "--frames", "2", "--log", "emulated.json", cwd=place)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    of_host, of_boards = predictions(text)
    assert of_boards == str(frame) and f"predicted: {of_host}, {HOST_COSTS_NOTE}" in text
    assert f"with the boards' own message costs: {of_boards}" in text
    log = json.loads((place / "emulated.json").read_text())
    assert format_seconds(log["predicted"]["frame_s"]) == of_host.split(" = ")[0]
    page = render_report(load_report_data(place / "net", run_log=place / "emulated.json"))
    assert set(predictions(page)) == {of_host, of_boards} and f"predicted: {of_host}, {HOST_COSTS_NOTE}" in page
