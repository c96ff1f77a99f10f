"""`dicompiler tune`: measure the most promising plans on the boards, and keep the fastest one."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dicompiler.base.errors import UsageError
from dicompiler.cli.options import (
    PATH,
    SecondsRange,
    frames_option,
    insecure_option,
    json_option,
    keys_option,
    model_argument,
    options_as,
    output_option,
    platform_option,
    target_option,
    timeout_option,
)
from dicompiler.target.run_records import RunOptions

if TYPE_CHECKING:
    from dicompiler.measure.tune import Runner, Trial, Tuning

log = logging.getLogger("dicompiler")


@click.command("tune")
@model_argument
@platform_option
@click.option("--hosts", "hosts_file", metavar="HOSTS.toml", type=PATH, help="Run the plans on these boards over ssh.")
@click.option(
    "--emulate",
    "truth",
    metavar="P",
    help="Run the plans on emulated boards of platform P instead (needs root). P may differ from --platform.",
)
@click.option(
    "--objective",
    type=click.Choice(("latency", "throughput")),
    default="latency",
    help="Minimize this. Default: latency.",
)
@click.option(
    "--strategies",
    metavar="A,B{…},C",
    help="Search with these strategies, separated by commas. Default: single,pipeline,modnn,dp,auto{budget=10}.",
)
@target_option(help="Compile for this target. Default: sockets.")
@click.option(
    "--budget",
    "budget_s",
    metavar="S",
    type=SecondsRange(),
    default=300.0,
    help="Measure no further plan after S seconds. Default: 300.",
)
@frames_option(default=20, help="Measure N frames of each plan. Default: 20.")
@keys_option
@insecure_option
@timeout_option(help="Stop a run after S seconds. Default: 600.")
@json_option
@output_option(metavar="DIR", required=True, help="Write plans, artifacts and logs to this directory.")
@options_as(options=RunOptions)
def command(
    model: Path,
    platform: str | None,
    hosts_file: Path | None,
    truth: str | None,
    objective: str,
    strategies: str | None,
    target: str | None,
    budget_s: float,
    frames: int,
    options: RunOptions,
    as_json: bool,
    output: Path,
) -> None:
    """Measure the most promising plans on the boards, and keep the fastest one.

    The strategies search with the rates and links of the platform. The plan with the best prediction is compiled and
    run. The measurements of this run correct the rates and links. The search is then repeated, until no other plan is
    predicted to be faster. Prints all plans with their predicted and measured times. If DIR has an interrupted
    tuning of the same model and platform, the command continues this tuning.

    Writes the fastest plan (plan.json) and the corrected platform (platform.toml) to DIR.

    Example: dicompiler tune model.onnx --platform cluster.toml --hosts hosts.toml --keys keys -o tuning
    """
    from dicompiler.cli.progress import progress
    from dicompiler.driver.prepare import resolve_platform
    from dicompiler.ir.onnx.model import Model
    from dicompiler.measure.tune import DEFAULT_STRATEGIES, TuneOptions, tune

    if (hosts_file is None) == (truth is None):
        raise UsageError("tune: give either the boards (--hosts HOSTS.toml) or a platform to emulate (--emulate P)")
    if frames < 4:
        raise UsageError(f"tune: {frames} frames are too few to measure: give at least 4 (--frames)")
    chosen = TuneOptions(
        resolve_platform(platform),
        objective,
        _parse_strategies(strategies) or DEFAULT_STRATEGIES,
        target or "sockets",
        budget_s,
    )
    options = replace(options, in_flight=1 if objective == "latency" else 0)
    with progress(f"tuning {model.name}") as tell, _open_runner(hosts_file, truth, frames, options) as run:
        tuning = tune(Model.load(model), chosen, run, output, tell)
    _show_tuning(tuning, output, as_json)


def _parse_strategies(strategies: str | None) -> tuple[str, ...]:
    from dicompiler.analysis.compare import parse_strategies

    return tuple(parse_strategies(strategies)) if strategies else ()


def _open_runner(
    hosts_file: Path | None, truth: str | None, frames: int, options: RunOptions
) -> AbstractContextManager[Runner]:
    from dicompiler.driver.prepare import resolve_platform
    from dicompiler.measure.emulation.trial_runs import make_emulated_runner, open_cluster_runner
    from dicompiler.target.remote.hosts import Hosts

    if hosts_file is not None:
        return open_cluster_runner(frames, replace(options, hosts=Hosts.load(hosts_file)))
    return nullcontext(make_emulated_runner(resolve_platform(truth), frames, options))


def _show_tuning(tuning: Tuning, output: Path, as_json: bool) -> None:
    from dicompiler.base.units import format_seconds
    from dicompiler.cli.table import print_json, print_table
    from dicompiler.measure.tune import ARTIFACT_DIRECTORY, PLAN_FILE, PLATFORM_FILE

    assert tuning.best is not None
    best = tuning.trials[tuning.best]
    if best.state == "disturbed":
        log.warning(
            f"tune: trial {best.directory}, the fastest plan, was disturbed: the times of its frames differ by "
            f"{best.spread:.0%}: end other programs on the boards, or measure more frames (--frames)"
        )
    artifact = output / best.directory / ARTIFACT_DIRECTORY
    outputs = [str(output / PLAN_FILE), str(output / PLATFORM_FILE), str(artifact)]
    if as_json:
        trials = [trial.document() for trial in tuning.trials]
        print_json({"trials": trials, "best": best.directory, "reason": tuning.reason, "outputs": outputs})
        return
    rows = [
        (trial.directory, trial.strategy, format_seconds(trial.predicted_s),
         trial.error if trial.state == "failed" else format_seconds(trial.measured_s), f"{trial.spread:.0%}",
         _describe_state(trial, trial is best))
        for trial in tuning.trials
    ]  # fmt: skip
    print_table(("trial", "strategy", "predicted", "measured", "spread", "state"), rows, right=(2, 3, 4))
    click.echo(f"\n{tuning.reason}")
    click.echo("written: " + " ".join(outputs))


def _describe_state(trial: Trial, is_fastest: bool) -> str:
    if not is_fastest:
        return trial.state
    return "fastest" if trial.state == "measured" else f"fastest, {trial.state}"
