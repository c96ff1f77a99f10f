"""Tuning: find the fastest plan by running the most promising plans of several strategies.

It repeats three steps until no other plan is predicted to be faster, or the time is over:

1. The strategies search on the platform, as far as it is known.
2. The most promising plan that was not measured yet is compiled and run.
3. The run corrects the rates and bandwidths of the platform (`measure.calibrate`).

Each plan has a subdirectory with its artifact, run log and corrected platform. `tune.json` lists them, so that an
interrupted tuning can continue.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dicompiler.analysis.compare import StrategyResult, compare_strategies
from dicompiler.analysis.prediction_error import measured_timing
from dicompiler.base.atomic_output import atomic_file
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.base.schema import load_json, validate
from dicompiler.base.units import format_seconds
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem
from dicompiler.driver.problem_setup import on_platform
from dicompiler.driver.run_log import platform_digest
from dicompiler.ir import plan as plans
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform, platform_to_toml
from dicompiler.ir.program import Program
from dicompiler.measure.calibrate import calibrate
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem
from dicompiler.target.target_base import Target

TUNING_FILE, PLAN_FILE, PLATFORM_FILE = "tune.json", "plan.json", "platform.toml"
ARTIFACT_DIRECTORY, LOG_FILE = "artifact", "run.json"
TUNING_FORMAT = "dicompiler.tuning/1"
DEFAULT_STRATEGIES = ("single", "pipeline", "modnn", "dp", "auto{budget=10}")
FIRST_TRIALS = 3
"""Number of plans that are measured even if they are predicted to be slower than measured ones.

The first predictions are not reliable, because only few runs have corrected the platform.
"""
MAX_FIRST_RATIO = 3.0
"""Even a first plan is not measured if it is predicted to be slower than the fastest one by more than this factor."""
MIN_GAIN = 0.01
"""Later plans are measured only if their predicted time is shorter than the fastest one by more than this fraction."""
MAX_SPREAD = 0.25
"""A run is repeated once if the quartiles of its frame times differ by more than this fraction of the median."""
MAX_FAILURES = 2
"""The tuning ends after this number of failed runs in a row (for example, because a board is off)."""

Runner = Callable[[Path, Path], Mapping[str, Any]]
"""Function (artifact, file for the log) → content of the run log, with at least three frames.

It raises RunError if a board fails.
"""
TrialState = Literal["measured", "disturbed", "failed"]


@dataclass(frozen=True)
class TuneOptions:
    """Options of a tuning.

    Attributes:
        platform: The cluster, with its rates and links before any correction.
        objective: "latency", or "throughput" to minimize the time between two frames.
        strategies: Strategies that search for plans, as text with their options.
        target: The target that the plans are compiled for.
        budget_s: Seconds after which no further plan is measured.
        max_trials: Largest number of measured plans.
    """

    platform: Platform
    objective: str = "latency"
    strategies: Sequence[str] = DEFAULT_STRATEGIES
    target: str = "sockets"
    budget_s: float = 300.0
    max_trials: int = 12

    def __post_init__(self) -> None:
        if self.objective not in ("latency", "throughput"):
            raise UsageError(f"tune: objective {self.objective!r} cannot be measured: use latency or throughput")
        if not self.budget_s > 0:
            raise UsageError(f"tune: the budget must be more than 0 s, not {self.budget_s:g}")


@dataclass(frozen=True)
class Trial:
    """A plan that was run.

    Attributes:
        directory: Name of its subdirectory.
        strategy: The strategy that made the plan.
        state: "measured"; "disturbed" if the frame times differed too much in two runs; or "failed".
        predicted_s: Predicted seconds of a frame, on the platform before the run. They include input and result.
        measured_s: Measured seconds of a frame; infinite if the run failed.
        spread: Difference of the quartiles of the frame times, as a fraction of their median.
        error: Reason of the failure.
    """

    directory: str
    strategy: str
    state: TrialState
    predicted_s: float
    measured_s: float = float("inf")
    spread: float = 0.0
    error: str = ""

    def document(self) -> dict[str, Any]:
        """Return the trial as JSON. JSON has no infinity, so `measured_s` is None if the run failed."""
        return asdict(self) | ({"measured_s": None} if self.state == "failed" else {})


@dataclass(frozen=True)
class Tuning:
    """State of a tuning.

    Attributes:
        platform: The platform, corrected by all runs so far.
        trials: The results of the plans that were run, in the order of the runs.
        plans: The plan of each trial.
        reason: Reason why the tuning ended; empty before its end.
    """

    platform: Platform
    trials: tuple[Trial, ...] = ()
    plans: tuple[Plan, ...] = field(default=(), compare=False)
    reason: str = ""

    @property
    def best(self) -> int | None:
        """Index of the fastest trial; None if no run succeeded. Undisturbed runs are preferred."""
        ran = [i for i, trial in enumerate(self.trials) if trial.state != "failed"]
        key = lambda i: (self.trials[i].state == "disturbed", self.trials[i].measured_s)  # noqa: E731
        return min(ran, key=key, default=None)

    @property
    def keeps_failing(self) -> bool:
        """True if the last MAX_FAILURES runs failed, so that the tuning must end."""
        last = self.trials[-MAX_FAILURES:]
        return len(last) == MAX_FAILURES and all(trial.state == "failed" for trial in last)


def tune(
    model: Model,
    options: TuneOptions,
    run: Runner,
    directory: Path,
    progress: Callable[[str], None] = lambda _text: None,
) -> Tuning:
    """Find the fastest plan by measuring the most promising ones.

    Args:
        model: The model to plan.
        options: Platform, strategies, objective, target and limits.
        run: Function that runs an artifact on the boards, or on emulated boards.
        directory: Directory for artifacts and logs. Trials of an earlier, interrupted call are continued.
        progress: Function that is called with a line of text before each step.

    Returns:
        All trials. The fastest plan and the corrected platform are in `plan.json` and `platform.toml`.

    Raises:
        DicompilerError: No strategy has a plan, or no run succeeded; the message gives the reason of the last failure.
        UsageError: The directory has a tuning of another model or with other options.
    """
    target: Target = registry().resolve("targets", options.target)
    problem = load_problem(model, options.platform, objective=options.objective, target=target)
    setup = _TuningSetup(model, options, target, problem, run, directory, time.monotonic() + options.budget_s, progress)
    identity = _make_identity(model, options)
    tuning = _load_tuning(directory, identity, options.platform)
    while not tuning.reason:
        tuning = _next_trial(setup, tuning)
        _save_tuning(directory, identity, tuning)
    if tuning.best is None:
        raise DicompilerError(f"tune: no plan could be run: {tuning.trials[-1].error}")
    _write_text(directory / PLAN_FILE, plans.plan_to_text(tuning.plans[tuning.best]))
    _write_text(directory / PLATFORM_FILE, platform_to_toml(tuning.platform))
    return tuning


@dataclass(frozen=True)
class _TuningSetup:
    """The arguments of `tune`, which are the same for all trials.

    Attributes:
        problem: The problem that the strategies solve, with the platform before any correction.
        deadline: Time (of time.monotonic) after which no further plan is measured.
    """

    model: Model
    options: TuneOptions
    target: Target
    problem: Problem
    run: Runner
    directory: Path
    deadline: float
    progress: Callable[[str], None]


def _next_trial(setup: _TuningSetup, tuning: Tuning) -> Tuning:
    """Run one more plan, and return the tuning with this trial, or with the reason why no further plan is run."""
    options, progress = setup.options, setup.progress
    reason = _end_reason(options, tuning, setup.deadline)
    if reason:
        return replace(tuning, reason=reason)
    problem = on_platform(setup.problem, tuning.platform, setup.target)
    progress("searching" if not tuning.trials else f"searching again after {len(tuning.trials)} measured plans")
    chosen = _choose_plan(problem, options, tuning)
    if chosen is None:
        return replace(tuning, reason="no other plan is predicted to be faster")
    if tuning.trials and time.monotonic() > setup.deadline:
        return replace(tuning, reason=f"the budget of {options.budget_s:g} s is over")
    assert chosen.plan is not None and chosen.metrics is not None
    predicted_s = _predicted_seconds(chosen.metrics, options.objective)
    progress(f"measuring the plan of {chosen.strategy}, predicted {format_seconds(predicted_s)}")
    trial = Trial(f"{len(tuning.trials) + 1:02d}", chosen.strategy, "failed", predicted_s)
    place = setup.directory / trial.directory
    place.mkdir(parents=True, exist_ok=True)
    artifact = place / ARTIFACT_DIRECTORY
    try:
        compiled = compile(
            setup.model,
            tuning.platform,
            plan=chosen.plan,
            objective=options.objective,
            target=setup.target,
            output=artifact,
        )
        trial = _measure_trial(trial, compiled.program, setup.run, artifact, place / LOG_FILE)
        platform = _correct_platform(tuning.platform, place, artifact)
    except DicompilerError as error:
        trial, platform = replace(trial, state="failed", error=str(error)), tuning.platform
    return Tuning(platform, (*tuning.trials, trial), (*tuning.plans, chosen.plan))


def _end_reason(options: TuneOptions, tuning: Tuning, deadline: float) -> str:
    if len(tuning.trials) >= options.max_trials:
        return f"{len(tuning.trials)} plans were measured"
    if tuning.keeps_failing:
        return f"{MAX_FAILURES} runs in a row failed"
    # The first plan is measured even if the budget is very small, so that the tuning has a result.
    return f"the budget of {options.budget_s:g} s is over" if tuning.trials and time.monotonic() > deadline else ""


def _choose_plan(problem: Problem, options: TuneOptions, tuning: Tuning) -> StrategyResult | None:
    """Return the new plan with the best prediction; None if no new plan is promising enough."""
    strategies = {text: registry().resolve("strategies", text) for text in options.strategies}
    found = compare_strategies(problem, strategies)
    valid = [result for result in found.results if result.plan is not None]
    if not valid:
        raise DicompilerError(f"tune: no strategy has a plan: {found.results[0].error}")
    measured = {plans.plan_to_text(plan) for plan in tuning.plans}
    new = [result for result in valid if result.plan is not None and plans.plan_to_text(result.plan) not in measured]
    if not new:
        return None

    def predicted(result: StrategyResult) -> float:
        assert result.metrics is not None
        return _predicted_seconds(result.metrics, options.objective)

    chosen = min(new, key=predicted)
    known = [_predicted_seconds(problem.evaluate(plan), options.objective) for plan in _working_plans(tuning)]
    if not known:
        return chosen
    if len(tuning.trials) < FIRST_TRIALS:
        best_s = min(min(known), min(map(predicted, valid)))
        return chosen if predicted(chosen) <= MAX_FIRST_RATIO * best_s else None
    assert tuning.best is not None
    fastest_s = _predicted_seconds(problem.evaluate(tuning.plans[tuning.best]), options.objective)
    return chosen if predicted(chosen) < (1 - MIN_GAIN) * fastest_s else None


def _predicted_seconds(metrics: Metrics, objective: str) -> float:
    """Return the predicted seconds that a run measures.

    For latency, they include the time for the input and the result of a frame.
    """
    return metrics.frame.total_s if objective == "latency" else metrics.objective_value(objective)


def _working_plans(tuning: Tuning) -> Iterator[Plan]:
    return (plan for plan, trial in zip(tuning.plans, tuning.trials, strict=True) if trial.state != "failed")


def _measure_trial(trial: Trial, program: Program, run: Runner, artifact: Path, log: Path) -> Trial:
    """Run the artifact of a plan once or, if the frame times differ too much, twice; return the measured trial."""
    for state in ("measured", "disturbed"):
        document = run(artifact, log)
        _write_text(log, json.dumps(document))
        if document.get("events"):
            raise RunError(f"{log}: a device failed during the run")
        measured_s, spread = measured_timing(document, program).frame_s, _relative_spread(document["frames_s"])
        trial = replace(trial, state=state, measured_s=measured_s, spread=spread)
        if spread <= MAX_SPREAD:
            return replace(trial, state="measured")
    return trial


def _relative_spread(frames_s: Sequence[float]) -> float:
    """Return the difference of the quartiles of frame times as a fraction of the median, without the first frame."""
    lower, median, upper = statistics.quantiles(frames_s[1:], n=4) if len(frames_s) > 2 else (1.0, 1.0, 1.0)
    return (upper - lower) / median


def _correct_platform(platform: Platform, place: Path, artifact: Path) -> Platform:
    """Correct a platform by the run log in the directory `place`, and write it there."""
    corrected = calibrate([place / LOG_FILE], artifact, force=True, platform=platform).platform
    _write_text(place / PLATFORM_FILE, platform_to_toml(corrected))
    return corrected


def _make_identity(model: Model, options: TuneOptions) -> dict[str, Any]:
    """Return the entries of `tune.json` that must not change when an earlier tuning is continued."""
    return {
        "format": TUNING_FORMAT,
        "model": model.digest(),
        "platform": platform_digest(options.platform),
        "objective": options.objective,
        "target": options.target,
    }


def _save_tuning(directory: Path, identity: Mapping[str, Any], tuning: Tuning) -> None:
    for trial, plan in zip(tuning.trials, tuning.plans, strict=True):
        _write_text(directory / trial.directory / PLAN_FILE, plans.plan_to_text(plan))
    trials = [trial.document() for trial in tuning.trials]
    _write_text(directory / TUNING_FILE, json.dumps({**identity, "trials": trials}, indent=1) + "\n")


def _load_tuning(directory: Path, identity: Mapping[str, Any], platform: Platform) -> Tuning:
    """Return the tuning in a directory, or a new one for `platform` if there is none."""
    path = directory / TUNING_FILE
    if not path.exists():
        return Tuning(platform)
    document = load_json(path)
    validate(document, "tuning", str(path))
    for key, value in identity.items():
        if document[key] != value:
            raise UsageError(f"{path}: the tuning has another {key}: give another directory (-o), or remove this one")
    trials = tuple(
        Trial(**(entry | {"measured_s": float("inf") if entry["measured_s"] is None else entry["measured_s"]}))
        for entry in document["trials"]
    )
    corrected = [directory / trial.directory / PLATFORM_FILE for trial in trials if trial.state != "failed"]
    platform = Platform.load(corrected[-1]) if corrected else platform
    known = tuple(plans.load_plan(directory / trial.directory / PLAN_FILE) for trial in trials)
    # Failed trials at the end are removed and thus repeated, because the failed board may work again.
    while trials and trials[-1].state == "failed":
        trials, known = trials[:-1], known[:-1]
    return Tuning(platform, trials, known)


def _write_text(path: Path, text: str) -> None:
    with atomic_file(path) as stage:
        stage.write_text(text, encoding="utf-8")
