"""`dicompiler emulate`: run an artifact on this host at the speed of a platform, and compare it with the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.errors import UsageError
from dicompiler.cli.options import (
    SLOW_HELP,
    StreamOptions,
    cost_option,
    directory_argument,
    frames_option,
    inputs_option,
    is_given,
    json_option,
    keys_option,
    log_option,
    options_as,
    platform_option,
    refuse_options,
    slow_option,
    timeout_option,
    warn_of_expiry,
)
from dicompiler.target.run_records import RunOptions

if TYPE_CHECKING:
    from dicompiler.cost.speed_changes import SpeedChange
    from dicompiler.measure.emulation.emulate import EmulationResult


@click.command("emulate")
@directory_argument
@platform_option
@click.option(
    "--slower",
    metavar="N",
    type=click.FloatRange(min=1.0, max=1e6),
    help="Slow the fastest device down to 1/N of the speed of one core of this host, and the others in proportion to "
    "their rates. Default: let segments take the times that the cost model predicts.",
)
@click.option(
    "--dilation",
    metavar="N",
    type=click.FloatRange(min=1.0, max=1000.0),
    default=1.0,
    help="Run everything N times slower and divide the measured times by N. Use it for more or faster boards than this "
    "host can emulate. It makes the runtime's own work seem N times faster. Default: 1.",
)
@cost_option
@inputs_option
@frames_option(default=8, help="Run N frames. Default: 8.")
@click.option(
    "--in-flight", metavar="N", type=click.IntRange(1, 1024), default=1, help="Allow N frames in flight. Default: 1."
)
@slow_option(
    help=SLOW_HELP + "Streams frames for --duration, and prints the time between frames. Can be repeated.",
)
@click.option("--adapt", is_flag=True, help="Search for another plan and swap to it if boards change their speed.")
@click.option(
    "--duration",
    metavar="S",
    type=click.FloatRange(min=1.0, max=86400.0),
    default=60.0,
    help="With --slow or --adapt: stream frames for S seconds. Default: 60.",
)
@timeout_option(
    help="Stop the run after S seconds. Default: 600; with --slow or --adapt, 600 seconds more than --duration."
)
@keys_option
@log_option
@json_option
@options_as(stream=StreamOptions, options=RunOptions)
def command(
    directory: Path,
    platform: str | None,
    slower: float | None,
    dilation: float,
    cost: str | None,
    changes: Sequence[SpeedChange],
    duration: float,
    stream: StreamOptions,
    options: RunOptions,
    as_json: bool,
) -> None:
    """Run an artifact on this host at the speed of a platform's boards.

    Creates the platform's network from network namespaces with limited links (needs root). Each segment (ONNX submodel)
    is delayed until it has taken as long as on its board. Everything else is done by the target's own programs. Prints
    the measured times and the prediction.

    Example: sudo dicompiler emulate build --frames 20 --log run.json
    """
    from dicompiler.cli.file_io import read_inputs, write_json
    from dicompiler.cli.progress import progress
    from dicompiler.cli.run_output import show_trial
    from dicompiler.driver.run_log import run_document
    from dicompiler.measure.adapt import AdaptOptions
    from dicompiler.measure.emulation.emulate import emulate
    from dicompiler.measure.emulation.speed_changes import emulate_speed_changes, with_added_stream_time

    stream.check_paths()
    warn_of_expiry(options.keys)
    if changes or stream.adapt:
        if slower is not None or stream.log is not None:
            raise UsageError("emulate: --slow and --adapt exclude --slower and --log: omit these")
        refuse_options("--slow and --adapt run frames for the seconds of --duration", "frames")
        if not is_given("timeout_s"):
            options = with_added_stream_time(options, duration, dilation)
        with progress(f"{directory}: frames for {duration:g} s"):
            trial = emulate_speed_changes(
                directory,
                changes,
                AdaptOptions() if stream.adapt else None,
                platform=platform,
                inputs=read_inputs(stream.inputs),
                duration_s=duration,
                cost=cost or "",
                options=options,
                dilation=dilation,
            )
        show_trial(trial, duration, as_json)
        return
    refuse_options("only --slow and --adapt need a duration", "duration")
    with progress(f"{directory}: {stream.frames} frames"):
        inputs = read_inputs(stream.inputs)
        options = replace(options, kept_frames=0)
        result = emulate(directory, platform, inputs, stream.frames, slower, cost or "", options, dilation)
    predicted = result.expected.document()
    log = run_document(
        directory, result.result, options, stream.log, predicted, result.platform, result.runtime, dilation
    )
    if stream.log is not None:
        write_json(stream.log, log)
    _show_emulation(result, log, as_json)


def _show_emulation(result: EmulationResult, log: Mapping[str, Any], as_json: bool) -> None:
    from dicompiler.base.units import format_seconds
    from dicompiler.cli.run_output import show_discrepancies, show_run
    from dicompiler.cli.table import print_entries, print_json
    from dicompiler.ir.frame_prediction import HOST_COSTS_NOTE
    from dicompiler.measure.emulation.emulate import MAX_COMPUTE_SLOWDOWN, describe_limits

    if as_json:
        figures = {
            "measured": result.timed_unit,
            "frame_s": result.frame_s,
            "predicted_s": result.predicted_s,
            "predicted_on_boards_s": result.on_boards.frame_s,
            "compute_slowdown": result.compute_slowdown,
        }
        print_json({**figures, "run": log})
        return
    show_run(result.result)
    show_discrepancies(result.expected, log)
    times = result.frame_s / result.predicted_s
    click.echo()
    print_entries(
        [
            f"measured: {result.timed_unit}: {format_seconds(result.frame_s)}, {times:.2f} times as long as predicted",
            f"predicted: {result.expected.timing.frame_text}, {HOST_COSTS_NOTE}",
            f"with the boards' own message costs: {result.on_boards.frame_text}",
        ]
    )
    if result.compute_slowdown > MAX_COMPUTE_SLOWDOWN:
        print_entries(
            [f"warning: this host was busy: computing took {result.compute_slowdown:.0%} longer than on the boards"]
        )
    print_entries([f"not emulated: {describe_limits(result.dilation)}"])
