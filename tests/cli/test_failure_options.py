"""Output and errors of commands with `--tolerate-failures` and `--fail`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.printed import column

from dicompiler import networks
from dicompiler.base.schema import validate
from dicompiler.cli import main
from dicompiler.ir.plan import load_plan, plan_to_text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.onnx"
    onnx.save(networks.build("tiny"), path)
    return path


def run_command(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> str:
    assert main([command, *map(str, arguments)]) == 0
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> Any:
    result = json.loads(run_command(capsys, command, *arguments, "--json"))
    validate({command: result}, "results", command)
    return result


def test_compile_and_plan_print_the_cost_of_failure_plans(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common: Sequence[object] = (tiny, "--platform", "rpi4x3", "--strategy", "modnn", "--tolerate-failures", 1, "-o")
    text = run_command(capsys, "compile", *common, tmp_path / "out")
    assert "failed  " in text and "to tolerate these failures the fullest host needs" in text
    plan = load_plan(tmp_path / "out" / "plan.json")
    assert [loss.failed for loss in plan.failures] == [("pi01",), ("pi02",), ("pi03",)]
    result = document(capsys, "compile", *common, tmp_path / "out")
    assert [failure["failed"] for failure in result["failures"]] == [[], ["pi01"], ["pi02"], ["pi03"]]
    assert result["failures"][1]["extra_weight_bytes"] > 0 < result["failures"][1]["metrics"]["latency_s"]
    planned = document(capsys, "plan", *common, tmp_path / "plan.json")["failures"]
    assert [(failure["failed"], failure["extra_weight_bytes"]) for failure in planned] == [
        (failure["failed"], failure["extra_weight_bytes"]) for failure in result["failures"]
    ]
    assert load_plan(tmp_path / "plan.json") == plan
    options = (tiny, "--platform", "rpi4x3", "--plan", tmp_path / "plan.json", "-o", tmp_path / "again")
    assert document(capsys, "compile", *options)["failures"] == result["failures"]
    assert (tmp_path / "again" / "plan.json").read_text() == plan_to_text(plan)
    assert "Failed devices" not in run_command(capsys, "report", tmp_path / "out", "-o", tmp_path / "r.html")
    assert "Failed devices" in (tmp_path / "r.html").read_text()


def test_compare_shows_the_worst_case(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (tiny, "--platform", "rpi4x3", "--strategies", "single,modnn")
    printed = run_command(capsys, "compare", *common, "--tolerate-failures", 1)
    assert column(printed, "failed")["single"] == "pi01" and float(column(printed, "worst ms")["single"]) > 0
    assert "worst ms" not in run_command(capsys, "compare", *common)
    rows = document(capsys, "compare", *common, "--tolerate-failures", "pi02")["results"]
    assert "failures" not in rows[0]  # The plan of strategy single does not use pi02.
    assert [failure["failed"] for failure in rows[1]["failures"]] == [[], ["pi02"]]


def test_simulate_plays_failures(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (tiny, "--platform", "rpi4x3", "--strategy", "modnn", "--frames", 20, "--trace", tmp_path / "t.json")
    result = document(capsys, "simulate", *common, "--fail", "pi03@20ms-500ms", "--fail", "pi02@30ms")
    intervals = result["intervals"]
    assert [interval["down"] for interval in intervals[:3]] == [[], ["pi03"], ["pi03", "pi02"]]
    assert sum(interval["frames"] for interval in intervals) == len(result["stream"]["frames"]) == 20
    assert intervals[1]["replayed_frames"] > 0 and len(result["failures"]) == 7
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    handled = [event["name"] for event in events if event.get("cat") == "handle"]
    assert handled and all(name.startswith("handles ") for name in handled)
    assert "interruption s" in run_command(capsys, "simulate", *common, "--fail", "pi03@20ms")


def test_simulate_warns_of_a_return_after_the_stream(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["simulate", str(tiny), "--platform", "rpi4x3", "--strategy", "modnn", "--frames", "20"]
    assert main([*line, "--fail", "pi03@20ms-60s"]) == 0
    warning = capsys.readouterr().err
    assert "before pi03 returns at 60.0 s: simulate more frames (--frames)" in warning


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (
            "plan MODEL --platform rpi4x1 --tolerate-failures 1 -o OUT",
            2,
            "tolerate-failures: 1: a device must remain, but only one device computes on rpi4x1",
        ),
        ("plan MODEL --platform rpi4x3 --tolerate-failures 3 -o OUT", 2, "use at most 2"),
        (
            "plan MODEL --platform rpi4x3 --tolerate-failures most -o OUT",
            2,
            "'most' is not a number, 'hosts' or a device",
        ),
        ("compare MODEL --platform rpi4x3 --tolerate-failures pi002", 2, "(did you mean 'pi02'?)"),
        ("simulate MODEL --platform rpi4x3 --fail pi01", 2, "give a device and the time of its failure"),
        ("simulate MODEL --platform rpi4x3 --fail pi01@1", 2, "'1' has no unit: write 1s for seconds"),
        ("simulate MODEL --platform rpi4x3 --fail pi09@1ms", 2, "unknown device 'pi09'"),
        (
            "simulate MODEL --platform rpi4x3 --strategy modnn --tolerate-failures 0 --frames 9 --fail pi02@1ms",
            1,
            "no plan covers the failure of pi02: plan for more failures (--tolerate-failures 1)",
        ),
    ],
)
def test_rejects_invalid_failures(
    tiny: Path, tmp_path: Path, line: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        {"MODEL": str(tiny), "OUT": str(tmp_path / "p.json")}.get(argument, argument) for argument in line.split()
    ]
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert message in error and sum("error:" in line for line in error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_rejects_failures_for_a_plan_with_failure_plans(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_path = tmp_path / "p.json"
    run_command(
        capsys, "plan", tiny, "--platform", "rpi4x2", "--strategy", "modnn", "--tolerate-failures", 1, "-o", plan_path
    )
    arguments = [tiny, "--platform", "rpi4x2", "--plan", plan_path, "--tolerate-failures", 1, "-o", tmp_path / "out"]
    assert main(["compile", *map(str, arguments)]) == 2
    assert "the plan already contains failure plans: omit tolerate_failures" in capsys.readouterr().err
