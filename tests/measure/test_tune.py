"""`dicompiler tune`: it measures plans, corrects the platform by each run, and keeps the fastest plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import failed
from support.emulating import boards

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.base.schema import load_json, validate
from dicompiler.cli.command_line import main
from dicompiler.cli.tune import _show_tuning
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import load_plan
from dicompiler.ir.platform import Platform, platform_to_toml
from dicompiler.measure.emulation.trial_runs import make_emulated_runner
from dicompiler.measure.tune import Runner, Trial, TuneOptions, Tuning, tune
from dicompiler.target.run_records import RunOptions

STRATEGIES = ("single", "modnn", "dp")
GUESS = boards((9e7, 9e7, 9e7), latency=0.002)
TRUTH = boards((9e7, 3e7, 9e7), latency=0.002)
"""The second board is three times slower than the platform says."""


@pytest.fixture(scope="module")
def lenet() -> Model:
    return Model.load(networks.build("lenet", 0))


def options(**changes: Any) -> TuneOptions:
    return replace(TuneOptions(GUESS, strategies=STRATEGIES, budget_s=120.0), **changes)


class CountedRunner:
    """A runner on emulated boards of TRUTH; runs with a number in `lost` fail as if a board were off."""

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        self.lost, self.count = lost, 0
        self.run: Runner = make_emulated_runner(TRUTH, 6, RunOptions(in_flight=1))

    def __call__(self, artifact: Path, log: Path) -> Mapping[str, Any]:
        self.count += 1
        if self.count in self.lost:
            raise RunError("device 'pi02': it cannot be reached")
        return self.run(artifact, log)


@pytest.fixture(scope="module")
def tuned(lenet: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuning, Path]:
    place = tmp_path_factory.mktemp("tuned")
    return tune(lenet, options(), CountedRunner(), place), place


@pytest.mark.slow
def test_keeps_the_fastest_measured_plan(tuned: tuple[Tuning, Path]) -> None:
    tuning, place = tuned
    assert len(tuning.trials) >= 2 and tuning.best is not None
    ran = [trial for trial in tuning.trials if trial.state == "measured"] or list(tuning.trials)
    assert tuning.trials[tuning.best].measured_s == min(trial.measured_s for trial in ran)
    assert load_plan(place / "plan.json") == load_plan(place / tuning.trials[tuning.best].directory / "plan.json")
    validate(load_json(place / "tune.json"), "tuning", "tune.json")


@pytest.mark.slow
def test_runs_correct_the_platform(tuned: tuple[Tuning, Path]) -> None:
    tuning, place = tuned
    assert [trial.error for trial in tuning.trials if trial.state == "failed"] == []
    rates = [device.rate for device in Platform.load(place / "platform.toml").devices]
    assert rates[1] < 0.6 * rates[0]
    assert tuning.platform.network == Platform.load(place / "platform.toml").network


@pytest.mark.slow
def test_predictions_follow_from_the_corrected_platform(lenet: Model, tuned: tuple[Tuning, Path]) -> None:
    """The costs of messages and calls depend on the rates of the boards, which every run corrects."""
    tuning, place = tuned
    corrected = Platform.load(place / tuning.trials[0].directory / "platform.toml")
    problem = load_problem(lenet, corrected, objective="latency", target="sockets")
    assert tuning.trials[1].predicted_s == pytest.approx(problem.evaluate(tuning.plans[1]).frame.total_s, rel=1e-6)


def test_goes_on_after_an_interruption(lenet: Model, tmp_path: Path) -> None:
    def interrupted(artifact: Path, log: Path) -> Mapping[str, Any]:
        if artifact.parent.name == "02":
            raise KeyboardInterrupt
        return runner(artifact, log)

    runner = CountedRunner()
    with pytest.raises(KeyboardInterrupt):
        tune(lenet, options(), interrupted, tmp_path)
    assert len(load_json(tmp_path / "tune.json")["trials"]) == 1
    tuning = tune(lenet, options(max_trials=2), runner, tmp_path)
    assert [trial.directory for trial in tuning.trials] == ["01", "02"] and tuning.reason == "2 plans were measured"
    with pytest.raises(UsageError, match=r"tune\.json: the tuning has another objective: give another directory"):
        tune(lenet, options(objective="throughput"), runner, tmp_path)


def test_failed_run_is_a_trial_and_repeated_ones_end_the_tuning(lenet: Model, tmp_path: Path) -> None:
    tuning = tune(lenet, options(max_trials=2), CountedRunner(lost=(1,)), tmp_path / "one")
    assert [trial.state == "failed" for trial in tuning.trials] == [True, False] and tuning.best == 1
    assert "cannot be reached" in tuning.trials[0].error
    with pytest.raises(DicompilerError, match="tune: no plan could be run: device 'pi02': it cannot be reached"):
        tune(lenet, options(), CountedRunner(lost=tuple(range(1, 9))), tmp_path / "all")
    assert len(load_json(tmp_path / "all" / "tune.json")["trials"]) == 2


def test_smallest_budget_measures_one_plan(lenet: Model, tmp_path: Path) -> None:
    tuning = tune(lenet, options(budget_s=1e-3), CountedRunner(), tmp_path)
    assert len(tuning.trials) == 1 and tuning.reason == "the budget of 0.001 s is over"


@pytest.mark.slow
def test_command_prints_all_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "guess.toml").write_text(platform_to_toml(GUESS))
    (tmp_path / "truth.toml").write_text(platform_to_toml(TRUTH))
    (tmp_path / "lenet.onnx").write_bytes(networks.build("lenet", 0).SerializeToString())
    line = ["tune", str(tmp_path / "lenet.onnx"), "--platform", str(tmp_path / "guess.toml")]
    emulated = [*line, "--emulate", str(tmp_path / "truth.toml"), "--strategies", "single,modnn,dp", "--frames", "6"]
    assert main([*emulated, "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert main([*emulated, "-o", str(tmp_path / "out"), "--json"]) == 0
    validate({"tune": json.loads(capsys.readouterr().out)}, "results", "tune --json")
    assert "fastest" in printed and "single" in printed and f"written: {tmp_path / 'out' / 'plan.json'}" in printed


def test_fastest_plan_of_a_disturbed_run_is_marked(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # `main` stops the propagation of records, which caplog needs.
    monkeypatch.setattr(logging.getLogger("dicompiler"), "propagate", True)
    trials = (Trial("01", "single", "disturbed", 1e-3, 2e-3, 0.4), Trial("02", "dp", "failed", 1e-3, error="no board"))
    with caplog.at_level(logging.WARNING, "dicompiler"):
        _show_tuning(Tuning(GUESS, trials, reason="the budget is over"), tmp_path, as_json=False)
    assert "40%  fastest, disturbed\n" in capsys.readouterr().out
    assert "tune: trial 01, the fastest plan, was disturbed: the times of its frames differ by 40%" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either the boards"),
        (["--emulate", "rpi4x2", "--hosts", "h.toml"], "give either the boards"),
        (["--emulate", "rpi4x2", "--frames", "2"], "2 frames are too few to measure"),
        (["--emulate", "rpi4x2", "--objective", "energy"], "'energy'"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "lenet.onnx").write_bytes(networks.build("lenet", 0).SerializeToString())
    line = ["tune", str(tmp_path / "lenet.onnx"), "--platform", "rpi4x2", "-o", str(tmp_path / "out"), *arguments]
    assert message in failed(2, *line) and not (tmp_path / "out").exists()
