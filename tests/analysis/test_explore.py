"""Tests of `dicompiler explore`: files, output, bad input, and strategies that make one plan."""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import onnx
import pytest

import dicompiler
from dicompiler.analysis.explore import explore, override_options
from dicompiler.base.atomic_output import TRACKED_LIST_NAME
from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.networks import build
from dicompiler.plugin.registry import registry
from dicompiler.search.pareto_front import FRONT_OBJECTIVES, objective_values
from dicompiler_strategies.dp import Dp

QUICK = ("--generations", "6", "--population", "20")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny network."""
    path = tmp_path_factory.mktemp("model") / "tiny.onnx"
    onnx.save(build("tiny"), path)
    return path


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def run(model: Path, output: Path, *more: str) -> int:
    # An option must not be given twice.
    quick = () if set(QUICK) & set(more) else QUICK
    return main(["explore", str(model), "--platform", "rpi4x3", "-o", str(output), *quick, *more])


def test_writes_front_as_json_csv_svg_and_plans(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path / "front") == 0
    found = files(tmp_path / "front")
    front = json.loads(found["front.json"])
    names = ["throughput", "device-memory", "device-energy"]
    assert list(front["objectives"]) == names
    assert (front["interrupted"], front["metrics_source"], front["platform"]) == (False, "measured", "rpi4x3")
    plans = [point["plan"] for point in front["points"]]
    assert sorted(found) == sorted([TRACKED_LIST_NAME, "front.json", "front.csv", "front.svg", *plans])
    rows = list(csv.reader(found["front.csv"].decode().splitlines()))
    assert rows[0] == ["plan", "throughput [s]", "device-memory [bytes]", "device-energy [J]"]
    assert [[float(cell) for cell in row[1:]] for row in rows[1:]] == [[p[n] for n in names] for p in front["points"]]
    ElementTree.fromstring(found["front.svg"].decode())
    assert list(tmp_path.iterdir()) == [tmp_path / "front"]


def test_without_matplotlib_only_the_chart_is_left_out(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(model, tmp_path / "with") == 0
    capsys.readouterr()
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # Importing it is now an ImportError.
    assert run(model, tmp_path / "without") == 0
    text = "explore: without matplotlib, front.svg is left out: pip install 'dicompiler[explore]'"
    assert text in " ".join(capsys.readouterr().err.split())
    found, expected = files(tmp_path / "without"), files(tmp_path / "with")
    assert expected.keys() - found.keys() == {"front.svg"}
    assert found["front.json"] == expected["front.json"]


def test_plans_compile_to_the_stated_values(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path / "front", "--objectives", "latency,throughput,energy,memory,communication") == 0
    for point in json.loads((tmp_path / "front/front.json").read_text())["points"]:
        compiled = dicompiler.compile(model, platform="rpi4x3", plan=tmp_path / "front" / point["plan"])
        assert compiled.metrics is not None
        for name in ("latency", "throughput", "energy", "memory", "communication"):
            assert compiled.metrics.objective_value(name) == point[name]


def test_writes_same_bytes_in_another_process_and_prints_only_a_table(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path / "here") == 0
    words = ["explore", model, "--platform", "rpi4x3", "-o", tmp_path / "there", *QUICK]
    done = subprocess.run(
        [sys.executable, "-m", "dicompiler", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].split() == ["plan", "devices", "frames/s", "device-memory", "device-energy"]
    assert done.stdout.endswith(f"written: {tmp_path / 'there'}\n")
    assert files(tmp_path / "here") == files(tmp_path / "there")


def test_json_names_the_directory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(model, Path("front"), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {**json.loads(Path("front/front.json").read_text()), "front": "front"}


def test_replaces_earlier_front_unless_the_exploration_fails(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "front"
    assert run(model, output) == 0
    before = files(output)
    assert run(model, output, "--objectives", "memory") == 0
    after = files(output)
    assert after["front.json"] != before["front.json"]
    assert run(model, output, "--cost", "none") == 2
    assert files(output) == after


def test_keeps_the_front_of_another_network(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, other = tmp_path / "front", tmp_path / "lenet.onnx"
    onnx.save(build("lenet"), other)
    explore(other, "rpi4x3", "modnn", output=output)
    before = files(output)
    assert run(model, output) == 2
    assert "it has the front of another network" in capsys.readouterr().err
    assert files(output) == before


def test_strategy_with_one_plan_gives_one_point(model: Path) -> None:
    front = explore(model, "rpi4x2", "modnn")
    (point,) = front.points
    compiled = dicompiler.compile(model, platform="rpi4x2", strategy="modnn")
    assert point.plan == compiled.plan
    assert compiled.metrics is not None
    assert set(point.objectives) == set(FRONT_OBJECTIVES)
    assert point.objectives["latency"] == compiled.metrics.latency_s


def test_interrupted_search_writes_its_points(model: Path, tmp_path: Path) -> None:
    def stop(text: str) -> None:
        if "generation 5" in text:
            raise KeyboardInterrupt

    strategy = override_options("genetic", {"population": "20", "generations": "50"})
    front = explore(model, Platform.load("rpi4x3"), strategy, output=tmp_path / "front", progress=stop)
    assert front.interrupted
    document = json.loads((tmp_path / "front/front.json").read_text())
    assert (document["interrupted"], document["metrics_source"]) == (True, "analytic")
    assert json.loads((tmp_path / "front/plans/000.json").read_text())["note"] == "the search was interrupted"


def test_override_options_replaces_options() -> None:
    assert override_options("genetic{seed=1 population=9}", {"seed": "2", "objectives": ("a", "b")}) == (
        "genetic{seed=2 population=9 objectives=a,b}"
    )


@pytest.mark.parametrize(
    ("more", "code", "expected"),
    [
        (["--generations", "0"], 2, "genetic: generations is 0: use at least 1"),
        (["--population", "-3"], 2, "genetic: population is -3: use at least 2"),
        (["--objectives", "speed"], 2, "unknown objective 'speed' (known: communication, device-energy, device-memory"),
        (["--objectives", "memory,memory"], 2, "objective 'memory' is given twice: remove one"),
        (["--strategy", "genetics"], 2, "unknown strategy 'genetics' (did you mean 'genetic'?)"),
        (["--strategy", "modnn"], 2, "explore: strategy 'modnn' has no option 'generations'"),
    ],
)
def test_rejects_bad_options_and_writes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], code: int, expected: str
) -> None:
    assert run(model, tmp_path / "front", *more) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(f"dicompiler: error: {expected}")
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_does_not_replace_other_directories(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert run(model, tmp_path) == 1
    assert "it exists and is not a directory that dicompiler wrote as front" in capsys.readouterr().err
    assert main(["explore", str(model), "-o", str(tmp_path / "x")]) == 2
    assert "explore: no platform" in capsys.readouterr().err
    with pytest.raises(DicompilerError, match="its parent directory does not exist"):
        explore(model, "rpi4x2", output=tmp_path / "a" / "b")


def test_no_plan_of_a_quick_strategy_beats_the_front(model: Path) -> None:
    names = ("latency", "throughput", "memory")
    options = f"objectives={','.join(names)} generations=1 population=4 measured=2"
    front = explore(model, "rpi4x3", f"genetic{{{options}}}")
    problem = load_problem(model, "rpi4x3", target="sockets")
    for objective in names:
        for strategy in ("single", "pipeline", "replicate", "modnn", "dp"):
            try:
                plan = registry().make("strategies", strategy).plan(replace(problem, objective=objective))
            except DicompilerError:  # The strategies replicate and dp do not support all objectives.
                continue
            values = objective_values(problem.platform, problem.evaluate(plan), names)
            assert any(all(point.objectives[name] <= values[name] for name in names) for point in front.points)
    for first, second in itertools.permutations(front.points, 2):
        assert any(first.objectives[name] > second.objectives[name] for name in names)


@pytest.mark.slow
def test_no_plan_of_dp_has_a_smaller_latency(tmp_path: Path) -> None:
    onnx.save(build("squeezenet"), tmp_path / "squeezenet.onnx")
    problem = load_problem(tmp_path / "squeezenet.onnx", "rpi4x3", target="sockets")
    plan = registry().make("strategies", "dp").plan(problem)
    front = explore(tmp_path / "squeezenet.onnx", "rpi4x3", "genetic{objectives=latency generations=1 population=4}")
    assert front.points[0].objectives["latency"] <= problem.evaluate(plan).latency_s


def test_interrupted_quick_strategy_keeps_the_front(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(Dp, "plan_within", interrupted)
    front = explore(model, "rpi4x3", "genetic{generations=1 population=4 measured=2}")
    assert front.interrupted and front.points and front.metrics_source == "measured"


def test_table_states_frames_per_second(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, tmp_path / "front", "--objectives", "throughput,latency") == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["plan", "devices", "frames/s", "latency"]
    document = json.loads((tmp_path / "front" / "front.json").read_text())
    assert first.split()[0] == document["points"][0]["plan"] == "plans/000.json"
    assert float(first.split()[2]) == pytest.approx(1 / document["points"][0]["throughput"], rel=0.01)
