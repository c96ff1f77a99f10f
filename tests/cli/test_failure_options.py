"""`--tolerate-failures` and `--fail`: what commands print, write and refuse."""

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
from dicompiler.ir.plan import dumps, load_plan


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.onnx"
    onnx.save(networks.build("tiny"), path)
    return path


def said(capsys: pytest.CaptureFixture[str], command: str, *words: object) -> str:
    assert main([command, *map(str, words)]) == 0
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], command: str, *words: object) -> Any:
    found = json.loads(said(capsys, command, *words, "--json"))
    validate({command: found}, "results", command)
    return found


def test_compile_and_plan_print_the_cost_of_failure_plans(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common: Sequence[object] = (tiny, "--platform", "rpi4x3", "--strategy", "modnn", "--tolerate-failures", 1, "-o")
    text = said(capsys, "compile", *common, tmp_path / "out")
    assert "failed  " in text and "to tolerate these failures the fullest host needs" in text
    plan = load_plan(tmp_path / "out" / "plan.json")
    assert [loss.failed for loss in plan.failures] == [("pi01",), ("pi02",), ("pi03",)]
    found = document(capsys, "compile", *common, tmp_path / "out")
    assert [failure["failed"] for failure in found["failures"]] == [[], ["pi01"], ["pi02"], ["pi03"]]
    assert found["failures"][1]["extra_weight_bytes"] > 0 < found["failures"][1]["metrics"]["latency_s"]
    planned = document(capsys, "plan", *common, tmp_path / "plan.json")["failures"]
    assert [(one["failed"], one["extra_weight_bytes"]) for one in planned] == [
        (one["failed"], one["extra_weight_bytes"]) for one in found["failures"]
    ]
    assert load_plan(tmp_path / "plan.json") == plan
    given = (tiny, "--platform", "rpi4x3", "--plan", tmp_path / "plan.json", "-o", tmp_path / "again")
    assert document(capsys, "compile", *given)["failures"] == found["failures"]
    assert (tmp_path / "again" / "plan.json").read_text() == dumps(plan)
    assert "Failed devices" not in said(capsys, "report", tmp_path / "out", "-o", tmp_path / "r.html")
    assert "Failed devices" in (tmp_path / "r.html").read_text()


def test_compare_shows_the_worst_case(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (tiny, "--platform", "rpi4x3", "--strategies", "single,modnn")
    printed = said(capsys, "compare", *common, "--tolerate-failures", 1)
    assert column(printed, "failed")["single"] == "pi01" and float(column(printed, "worst ms")["single"]) > 0
    assert "worst ms" not in said(capsys, "compare", *common)
    rows = document(capsys, "compare", *common, "--tolerate-failures", "pi02")["results"]
    assert "failures" not in rows[0]  # pi02 takes no part
    assert [failure["failed"] for failure in rows[1]["failures"]] == [[], ["pi02"]]


def test_simulate_plays_failures(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (tiny, "--platform", "rpi4x3", "--strategy", "modnn", "--frames", 20, "--trace", tmp_path / "t.json")
    found = document(capsys, "simulate", *common, "--fail", "pi03@20ms-500ms", "--fail", "pi02@30ms")
    pieces = found["intervals"]
    assert [one["down"] for one in pieces[:3]] == [[], ["pi03"], ["pi03", "pi02"]]
    assert sum(one["frames"] for one in pieces) == len(found["stream"]["frames"]) == 20
    assert pieces[1]["replayed_frames"] > 0 and len(found["failures"]) == 7
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "interruption s" in said(capsys, "simulate", *common, "--fail", "pi03@20ms")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (
            "plan MODEL --platform rpi4x1 --tolerate-failures 1 -o OUT",
            2,
            "tolerate-failures: 1: on rpi4x1 only one device computes",
        ),
        ("plan MODEL --platform rpi4x3 --tolerate-failures 3 -o OUT", 2, "use at most 2"),
        (
            "plan MODEL --platform rpi4x3 --tolerate-failures most -o OUT",
            2,
            "'most' is not a number, 'hosts' or a device",
        ),
        ("compare MODEL --platform rpi4x3 --tolerate-failures pi002", 2, "(did you mean 'pi02'?)"),
        ("simulate MODEL --platform rpi4x3 --fail pi01", 2, "give a device and the time of its failure"),
        ("simulate MODEL --platform rpi4x3 --fail pi09@1ms", 1, "unknown device 'pi09'"),
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
    words = [{"MODEL": str(tiny), "OUT": str(tmp_path / "p.json")}.get(word, word) for word in line.split()]
    assert main(words) == code
    error = capsys.readouterr().err
    assert message in error and sum("error:" in line for line in error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_rejects_failures_for_a_plan_with_failure_plans(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "p.json"
    said(capsys, "plan", tiny, "--platform", "rpi4x2", "--strategy", "modnn", "--tolerate-failures", 1, "-o", made)
    words = [tiny, "--platform", "rpi4x2", "--plan", made, "--tolerate-failures", 1, "-o", tmp_path / "out"]
    assert main(["compile", *map(str, words)]) == 2
    assert "the plan already contains failure plans: omit tolerate_failures" in capsys.readouterr().err
