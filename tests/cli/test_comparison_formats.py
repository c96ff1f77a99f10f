"""`compare` with several models and platforms, as tables, CSV, Markdown and JSON."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from dicompiler.base.schema import validate
from dicompiler.cli import main
from dicompiler.cli.compare import HEADERS


def compare(model: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Return the output of a comparison of two models on two platforms."""
    other = model.with_name("other|model.onnx")
    other.write_bytes(model.read_bytes())
    line = "--strategies single,modnn --platform rpi4x2 --platform rpi4x3"
    assert main(["compare", str(model), str(other), *line.split(), *more]) == 0
    return capsys.readouterr().out


def test_csv_has_a_row_for_each_model_platform_and_strategy(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(compare(model, capsys, "--format", "csv").splitlines()))
    assert [(Path(row["model"]).name, row["platform"], row["strategy"]) for row in rows] == [
        (name, platform, strategy)
        for name in ("model.onnx", "other|model.onnx")
        for platform in ("rpi4x2", "rpi4x3")
        for strategy in ("single", "modnn")
    ]
    assert all(float(row["latency_s"]) > 0 and int(row["memory_bytes"]) > 0 for row in rows)
    assert [row["best"] for row in rows].count("yes") == 4


def test_csv_has_bounds_and_the_longest_latency_after_a_failure(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--objective", "throughput", "--tolerate-failures", "1", "--format", "csv"]
    rows = list(csv.DictReader(compare(model, capsys, *more).splitlines()))
    assert all(row["value"] == row["period_s"] and 0 < float(row["lower_bound"]) <= float(row["value"]) for row in rows)
    assert all(row["failed"].startswith("pi0") and float(row["failure_latency_s"]) > 0 for row in rows)


def test_csv_json_and_warnings_name_searches_that_the_budget_ended(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["compare", str(model), "--platform", "rpi4x2", "--platform", "rpi4x3", "--strategies"]
    line += ["single,auto{budget=1e-9 strategies=single,dp}", "--format"]
    assert main([*line, "csv"]) == 0
    printed = capsys.readouterr()
    notes = [row["note"] for row in csv.DictReader(printed.out.splitlines())]
    assert notes[0] == notes[2] == "" and notes[1] == notes[3] != ""
    assert f"warning: {model} on rpi4x2: auto: {notes[1]}: this is the best plan so far" in printed.err
    assert f"warning: {model} on rpi4x3: auto: {notes[3]}: this is the best plan so far" in printed.err
    assert main([*line, "json"]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [row["note"] for row in documents[0]["results"]] == [None, notes[1]]


def test_all_columns_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs/use/strategies.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text.split("### Columns")[1].split("\n## ")[0], re.MULTILINE) == [*HEADERS]


def test_markdown_has_the_same_rows(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = compare(model, capsys, "--format", "markdown").splitlines()
    assert len(lines) == 2 + 8
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert all(len(re.sub(r"\D", "", cell).lstrip("0")) <= 4 for line in lines[2:] for cell in line.split(" | ")[6:10])
    assert lines[0].startswith("| model | platform | objective | strategy | value | lower_bound | latency_s |")


def test_json_is_a_list_of_comparisons(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = json.loads(compare(model, capsys, "--format", "json"))
    assert [document["platform"] for document in documents] == ["rpi4x2", "rpi4x3"] * 2
    for document in documents:
        validate(document, "comparison", "the document")


def test_tables_have_the_model_and_platform_above(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = compare(model, capsys)
    assert [line for line in text.splitlines() if line.startswith(str(model.parent))] == [
        f"{model.parent}/{name} on {platform}"
        for name in ("model.onnx", "other|model.onnx")
        for platform in ("rpi4x2", "rpi4x3")
    ]


def test_explanations_are_tables_only(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["compare", str(model), "--platform", "rpi4x2", "--strategies", "single", "--explain", "--format", "csv"]
    assert main(line) == 2
    assert "compare: --explain cannot be used with --format csv: remove one of them" in capsys.readouterr().err


PLATFORM = """format = "dicompiler.platform/2"
network = { kind = "switch", bandwidth = "1 Gbit/s" }
host = [{ name = "a", memory = "MEMORY" }]
device = [{ name = "a", rate = "1 GFLOP/s" }]
"""


def test_energy_is_empty_without_powers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = model.with_name("cluster.toml")
    cluster.write_text(PLATFORM.replace("MEMORY", "1 GiB"))
    line = ["compare", str(model), "--platform", str(cluster), "--strategies", "single", "--format", "csv"]
    assert main(line) == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert row["energy_j"] == "" and row["best"] == "yes"
    assert main([*line, "--objective", "latency+energy"]) == 2
    assert "states no powers: add power_active and power_idle to its devices" in capsys.readouterr().err


def test_rows_without_any_plan_end_with_an_error(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = model.with_name("cluster.toml")
    cluster.write_text(PLATFORM.replace("MEMORY", "1 KiB"))
    assert (
        main(["compare", str(model), "--platform", str(cluster), "--strategies", "single", "--format", "markdown"]) == 1
    )
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    assert "compare: no strategy found a feasible plan: see the column error" in printed.err


def test_platforms_of_one_name_are_shown_as_given(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = 'rpi4x2{bandwidth="10 Mbit/s"}'
    line = ["compare", str(model), "--platform", slow, "--platform", "rpi4x2", "--strategies", "single", "--format"]
    assert main([*line, "csv"]) == 0
    assert [row["platform"] for row in csv.DictReader(capsys.readouterr().out.splitlines())] == [slow, "rpi4x2"]
    assert main([*line, "json"]) == 0
    assert [document["platform"] for document in json.loads(capsys.readouterr().out)] == [slow, "rpi4x2"]
    assert main([*line, "table"]) == 0
    assert f"{model} on {slow}\n" in capsys.readouterr().out


def test_a_platform_without_powers_does_not_hide_the_other_results(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = model.with_name("cluster.toml")
    cluster.write_text(PLATFORM.replace("MEMORY", "1 GiB"))
    line = ["compare", str(model), "--platform", str(cluster), "--platform", "rpi4x2", "--strategies", "single,dp"]
    line += ["--objective", "energy", "--format"]
    assert main([*line, "csv"]) == 1
    printed = capsys.readouterr()
    rows = list(csv.DictReader(printed.out.splitlines()))
    assert ["states no powers" in row["error"] for row in rows] == [True, True, False, False]
    assert [bool(row["value"]) for row in rows] == [False, False, True, True]
    assert f"no strategy found a feasible plan for {model} on {cluster}: see the column error" in printed.err
    assert main([*line, "table"]) == 1
    printed = capsys.readouterr()
    assert "the best by energy, single" in printed.out and printed.err.endswith(f"plan for {model} on {cluster}\n")
    assert main([*line, "json"]) == 0
    for document in json.loads(capsys.readouterr().out):
        validate(document, "comparison", "the document")
