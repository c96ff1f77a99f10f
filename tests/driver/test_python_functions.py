"""Functions of `dicompiler` with the same effect as the commands, and their results."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.onnx_models import parsed

import dicompiler
from dicompiler.base.schema import validate
from dicompiler.cli import main
from dicompiler.ir.plan import load_plan, plan_to_text
from dicompiler.networks import build

SPLIT = "infer-shapes,form-layers,tile-height{layers=conv1 parts=2}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and an artifact."""
    directory = tmp_path_factory.mktemp("functions")
    onnx.save(build("lenet"), directory / "lenet.onnx")
    dicompiler.compile(directory / "lenet.onnx", "rpi4x2", "modnn", output=directory / "build", allow_worse=True)
    return directory


def test_plan_is_that_of_the_command(place: Path, tmp_path: Path) -> None:
    result = dicompiler.plan(place / "lenet.onnx", "rpi4x2", "modnn", allow_worse=True)
    assert isinstance(result, dicompiler.CompileResult)
    line = f"plan {place}/lenet.onnx --platform rpi4x2 --strategy modnn -o {tmp_path}/plan.json --quiet"
    assert main(line.split()) == 0
    assert plan_to_text(result.plan) == (tmp_path / "plan.json").read_text()
    assert result.plan == load_plan(tmp_path / "plan.json")
    with pytest.raises(dicompiler.UsageError, match="plan: output: "):
        dicompiler.plan(place / "lenet.onnx", "rpi4x2", output=tmp_path / "out")


def test_unused_devices_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = dicompiler.plan(place / "lenet.onnx", "rpi4x3", "single")
    assert result.unused_devices == ("pi02", "pi03")
    assert main(f"compile {place}/lenet.onnx --platform rpi4x3 --strategy single -o {place}/single".split()) == 0
    assert "\nno part of the plan is on: pi02, pi03\n" in capsys.readouterr().out
    assert dicompiler.plan(place / "lenet.onnx", "rpi4x2", "modnn", allow_worse=True).unused_devices == ()


def test_advice_in_results_has_no_options_of_commands(place: Path) -> None:
    for strategy in ("single", "modnn", "pipeline"):
        for objective in ("latency", "throughput"):
            result = dicompiler.plan(place / "lenet.onnx", "rpi4x2", strategy, objective=objective, allow_worse=True)
            assert "--" not in result.summary.advice
            assert "dicompiler " not in result.summary.advice


@pytest.mark.parametrize(
    ("state", "objective", "has_advice"),
    [((), "latency", True), ((), "throughput", False), ("x=y", "latency", False)],
)
def test_advice_names_replicas_only_if_they_are_new_and_possible(
    state: str | tuple[str, ...], objective: str, has_advice: bool
) -> None:
    model = parsed('<ir_version: 8, opset_import: ["": 17]> g (float[1, 8] x) => (float[1, 8] y) { y = Relu (x) }')
    result = dicompiler.plan(model, "rpi4x2", "single", objective=objective, state=state)
    assert ("whole frames to different devices" in result.summary.advice) == has_advice


def test_advice_for_objective_memory_is_about_memory(place: Path) -> None:
    result = dicompiler.plan(place / "lenet.onnx", "rpi4x2", "modnn", objective="memory")
    assert result.summary.advice == "add a device, or quantise the network to int8"


def test_opt_is_that_of_the_command(place: Path, tmp_path: Path) -> None:
    state = dicompiler.opt(place / "lenet.onnx", SPLIT)
    assert isinstance(state, dicompiler.PipelineState)
    assert state.plan is not None and len(state.plan.layers["conv1"]) == 2
    assert main(["opt", str(place / "lenet.onnx"), "-p", SPLIT, "-o", str(tmp_path / "out.onnx")]) == 0
    assert state.model.to_bytes() == (tmp_path / "out.onnx").read_bytes()
    again = dicompiler.opt(build("lenet"), "infer-shapes,form-layers", plan=state.plan)
    assert again.routing is not None
    with pytest.raises(dicompiler.UsageError, match="opt: wire_dtype: the pipeline makes no plan: add a pass that"):
        dicompiler.opt(build("lenet"), "infer-shapes", wire_dtype="float16")


def test_compare_has_a_typed_result_for_each_strategy(place: Path) -> None:
    comparison = dicompiler.compare(place / "lenet.onnx", "rpi4x2", "single,modnn")
    assert isinstance(comparison, dicompiler.Comparison)
    assert [result.strategy for result in comparison.results] == ["single", "modnn"]
    assert comparison.best is comparison.results[0]
    assert isinstance(comparison.best, dicompiler.StrategyResult)
    validate(comparison.document(), "comparison", "the document")
    other = dicompiler.compare(build("lenet"), "rpi4x2", ["single", comparison.results[1].strategy])
    assert [r.metrics for r in other.results] == [r.metrics for r in comparison.results]


def test_write_report_is_that_of_the_command(place: Path, tmp_path: Path) -> None:
    comparison = dicompiler.compare(place / "lenet.onnx", "rpi4x2", "single,modnn").document()
    page = dicompiler.write_report(place / "build", tmp_path / "page.html", comparison=comparison)
    assert page == tmp_path / "page.html" and "modnn" in page.read_text()
    dicompiler.write_report(place / "build", tmp_path / "plain.html")
    assert main(["report", str(place / "build"), "-o", str(tmp_path / "command.html")]) == 0
    assert (tmp_path / "plain.html").read_bytes() == (tmp_path / "command.html").read_bytes()
    with pytest.raises(dicompiler.UsageError, match="are both given"):
        dicompiler.write_report(place / "build", page, comparison=comparison, strategies="single")


def test_connect_takes_frames_in_flight_and_a_function_for_events(place: Path) -> None:
    events: list[Any] = []
    inputs = {"input": np.zeros((1, 1, 32, 32), np.float32)}
    with dicompiler.connect(place / "build", in_flight=2, on_event=events.append) as session:
        assert re.fullmatch(r"<\w+Session: .*/build on pi01.*>", repr(session))
        assert [set(outputs) for outputs in session.stream([inputs] * 4)] == [{"output"}] * 4
    assert events == []
    for options, text in (
        ({"on_event": 1}, "connect: on_event must be a function that takes a RunEvent, not 1"),
        ({"in_flight": "2"}, "connect: in_flight must be a number of frames"),
        ({"in_flight": -1}, "in_flight must be 1 or more, or 0 for the default, not -1"),
    ):
        with pytest.raises(dicompiler.UsageError, match=text):
            dicompiler.connect(place / "build", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["plan", "opt", "compare", "emulate", "deploy", "write_report"])
def test_functions_have_typed_results(name: str) -> None:
    function = getattr(dicompiler, name)
    assert name in dicompiler.__all__
    assert inspect.signature(function).return_annotation not in (inspect.Signature.empty, "Any", Any)
