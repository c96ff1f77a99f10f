"""Output of run, deploy and emulate: measurements, predictions, and their differences."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.units import format_seconds
from dicompiler.cli.table import print_entries, print_json, print_table, wrap_text

if TYPE_CHECKING:
    from dicompiler.analysis.prediction_error import ExpectedTiming
    from dicompiler.driver.compile_result import CompileSummary
    from dicompiler.measure.adapt import SpeedTrial
    from dicompiler.target.run_records import DeviceReport, RunResult


def show_run(result: RunResult, in_flight: int = 1) -> None:
    """Print each device's seconds, bytes and memory over all frames. `in_flight` is the limit of frames in flight."""
    headers = ("device", "computing s", "waiting s", "sending s", "bytes sent", "memory MB")
    print_table(headers, [_report_row(report) for report in result.reports], right=range(1, len(headers)))
    if result.frames_s:
        times = ", ".join(f"{seconds:.4f}" for seconds in result.frames_s[:8])
        click.echo(wrap_text(f"{times}{', …' if len(result.frames_s) > 8 else ''}", "\nseconds of each frame: "))
    if len(result.frames_s) > 1:
        click.echo(f"frames per second: {len(result.frames_s) / result.total_s:.2f}")
        show_queueing(result.frames_s, result.queue_wait_s, in_flight)
    failures = [event for event in result.events if event.kind == "failure"]
    if failures:
        again = sum(event.replayed_frames for event in result.events)
        longest = max(event.interruption_s for event in result.events)
        times = f"{len(failures)} time{'' if len(failures) == 1 else 's'}"
        replayed = f"{again} frames were computed again"
        click.echo(wrap_text(f"devices failed {times}: {replayed}, the longest interruption was {longest:.2f} s"))


def _report_row(report: DeviceReport) -> tuple[str, ...]:
    if report.is_missing:  # A device that was down at the end of the run has no measurements.
        return (report.device, *["-"] * 5)
    return (
        report.device,
        f"{report.compute_s:.4f}",
        f"{report.wait_s:.4f}",
        f"{report.send_s:.4f}",
        str(sum(report.sent_bytes.values())),
        f"{report.peak_memory_bytes / 1e6:.1f}",
    )


def show_periods(finished_s: Sequence[float], duration_s: float) -> None:
    """Print the time between frames in about 20 intervals of a stream.

    Args:
        finished_s: For each frame, the time at which it was finished, in ascending order.
        duration_s: Seconds of the stream.
    """
    from dicompiler.cost.speed_changes import mean_periods

    rows = [
        (f"{start_s:g} s", str(count), format_seconds(period_s) if period_s else "-")
        for start_s, count, period_s in mean_periods(finished_s, max(1.0, round(duration_s / 20)))
    ]
    print_table(("from", "frames", "time between frames"), rows, right=(0, 1, 2))


def show_trial(trial: SpeedTrial, duration_s: float, as_json: bool) -> None:
    """Print the time between frames in about 20 intervals of a stream, and the plan changes of the session.

    Args:
        trial: The result of the stream.
        duration_s: Seconds of the stream.
        as_json: True to print JSON.
    """
    if as_json:
        adaptations = [{"at_s": found.at_s, "message": found.message} for found in trial.adaptations]
        print_json({"finished_s": list(trial.finished_s), "adaptations": adaptations})
        return
    show_periods(trial.finished_s, duration_s)
    if trial.adaptations:
        click.echo()
        print_entries([f"adaptation: {found.message}" for found in trial.adaptations])


def show_queueing(
    frames_s: Sequence[float],
    waited_s: Sequence[float],
    in_flight: int,
    alone_s: float | None = None,
    replica_count: int = 1,
) -> None:
    """Print the part of the frame times that is waiting for other frames. Nothing without frames in parallel.

    Args:
        frames_s: Seconds of each frame, from its start to its last output.
        waited_s: Seconds that each frame waited before its start; empty if unknown.
        in_flight: Largest number of frames in flight.
        alone_s: Mean seconds of a frame without other frames in the cluster; None if unknown.
        replica_count: Number of replicas (copies of the plan on other devices) over which `alone_s` is a mean.
    """
    many = min(in_flight, len(frames_s))
    if many < 2:
        return
    # Means are used, because they add up, and because `alone_s` is a mean over replicas.
    took = statistics.fmean(frames_s)
    text = f"queueing: up to {many} frames were in flight. On average, a frame took {format_seconds(took)}"
    if waited_s:
        waited = statistics.fmean(waited_s)
        text += (
            f": it waited {format_seconds(waited)} before its start and finished {format_seconds(took - waited)} later"
        )
    if alone_s is None:
        print_entries(
            [f"{text}, including waits for busy devices. Use --in-flight 1 to measure a frame without queueing"]
        )
    else:
        mean = f", as a mean over {replica_count} replicas" if replica_count > 1 else ""
        print_entries([f"{text}. A frame without queueing takes {format_seconds(alone_s)}{mean}"])


def show_prediction(summary: CompileSummary | None, result: RunResult, location: str, in_flight: int) -> None:
    """Print the strategy, the predicted and the measured time, the bottleneck, and a suggestion.

    Args:
        summary: Summary of the compilation; None if the artifact contains none.
        result: The run.
        location: "boards", or "local" if all processes run on this host.
        in_flight: Largest number of frames in flight.
    """
    if summary is None:
        return
    count = len(result.frames_s)
    if in_flight > 1 and count > 1:
        predicted = f"one frame every {format_seconds(summary.period_s)} (the work of the busiest device or link)"
        measured = f"one frame every {format_seconds(result.total_s / count)}"
    else:
        predicted = f"a frame takes {summary.frame}"
        measured = f"a frame took {format_seconds(statistics.median(result.frames_s))} (median)"
    place = "on the boards" if location == "boards" else "on this host, which all devices share"
    click.echo()
    print_entries(
        [
            f"plan: {summary.plan_origin}",
            f"predicted: {predicted} on the boards",
            f"measured: {measured} {place}",
            f"bottleneck: {summary.bottleneck} (predicted)",
            summary.lines[-1],
        ]
    )


def show_discrepancies(expected: ExpectedTiming | None, log: Mapping[str, Any]) -> None:
    """Print differences of more than 10 % between prediction and run, and links with unexpected bytes.

    Nothing is printed without a prediction, or if devices failed or returned during the run.
    """
    from dicompiler.analysis.prediction_error import find_discrepancies, find_wrong_bytes, measured_timing

    if expected is None or "events" in log:
        return
    measured = measured_timing(log, expected.program)
    click.echo()
    if log["location"] != "emulated":  # The command `emulate` prints the measured and predicted frame time itself.
        place = " on this host only" if log["location"] == "local" else ""
        unit = f"each of {len(log['frames_s'])} frames" if measured.is_stream else "a frame without the first one"
        times = f"{format_seconds(measured.frame_s)}, predicted for the platform: {expected.timing.frame_text}"
        click.echo(wrap_text(f"{unit}{place}: {times} (cost model {expected.cost_model})"))
    rows = [
        (entry.device, entry.cause, entry.location, f"{1000 * entry.predicted_s:.2f}", f"{1000 * entry.measured_s:.2f}")
        for entry in find_discrepancies(expected.timing, measured)
    ]
    if rows:
        print_table(("differs by more than 10 %", "in", "mainly", "predicted ms", "measured ms"), rows, right=(3, 4))
    for sender, receiver, predicted, sent in find_wrong_bytes(log, expected.program):
        click.echo(f"{sender} → {receiver}: {sent} bytes sent, {predicted} predicted")
