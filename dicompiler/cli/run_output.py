"""What run, deploy and emulate print: what devices measured, the prediction beside it, and where both part."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.units import format_seconds
from dicompiler.cli.table import print_entries, print_table, wrap_text

if TYPE_CHECKING:
    from dicompiler.analysis.prediction_error import ExpectedTiming
    from dicompiler.driver.compile_summary import CompileSummary
    from dicompiler.target.run_records import RunResult


def show_run(result: RunResult, in_flight: int = 1) -> None:
    """Prints what each device's process reported, over all frames. in_flight: how many may be on their way at once."""
    headers = ("device", "computing s", "waiting s", "sending s", "bytes sent", "memory MiB")
    rows = [
        (
            report.device,
            f"{report.compute_s:.4f}",
            f"{report.wait_s:.4f}",
            f"{report.send_s:.4f}",
            str(sum(report.sent_bytes.values())),
            f"{report.peak_memory_bytes / 2**20:.1f}",
        )
        for report in result.reports
    ]
    print_table(headers, rows, right=range(1, len(headers)))
    if result.frames_s:
        times = ", ".join(f"{seconds:.4f}" for seconds in result.frames_s[:8])
        click.echo(wrap_text(f"{times}{', …' if len(result.frames_s) > 8 else ''}", "\nseconds for each frame: "))
    if len(result.frames_s) > 1:
        click.echo(f"frames per second: {len(result.frames_s) / result.total_s:.2f}")
        show_queueing(result.frames_s, result.queue_wait_s, in_flight)
    losses = [event for event in result.events if event.kind == "loss"]
    if losses:
        again = sum(event.replayed_frames for event in result.events)
        longest = max(event.interruption_s for event in result.events)
        times = f"{len(losses)} time{'' if len(losses) == 1 else 's'}"
        click.echo(f"devices were lost {times}: {again} frames computed again, none came for {longest:.2f} s at most")


def show_queueing(
    frames_s: Sequence[float], waited_s: Sequence[float], in_flight: int, alone_s: float | None = None
) -> None:
    """Prints what of a frame's time in a stream is queueing, as medians of all frames; nothing where only one frame was
    on its way. waited_s: before it was started, () where that was not told. alone_s: what a frame takes by itself."""
    many = min(in_flight, len(frames_s))
    if many < 2:
        return
    took = statistics.median(frames_s)
    text = f"queueing: {many} frames were on their way at once. A frame took {format_seconds(took)} (median)"
    if waited_s:
        since = statistics.median(took - waited for took, waited in zip(frames_s, waited_s, strict=True))
        waited = format_seconds(statistics.median(waited_s))
        text += f": it waited {waited} to be started, and was done {format_seconds(since)} after that"
    if alone_s is None:
        print_entries(
            [f"{text}, behind others where a device was busy. --in-flight 1 tells what a frame takes by itself"]
        )
    else:
        print_entries([f"{text}. By itself it takes {format_seconds(alone_s)}: the rest is queueing"])


def show_prediction(summary: CompileSummary | None, result: RunResult, where: str, in_flight: int) -> None:
    """Prints who decided, the prediction beside what was measured, what holds it back, and what to try next. where:
    "boards", or "here": all devices' processes share this host."""
    if summary is None:
        return
    count = len(result.frames_s)
    if in_flight > 1 and count > 1:
        told, found, what = summary.period_s, result.total_s / count, "between frames of a stream"
    else:
        told, found, what = summary.latency_s + summary.input_output_s, statistics.median(result.frames_s), "a frame"
    place = "on the boards" if where == "boards" else "on this host, whose processors all devices share"
    times = f"{what}: {format_seconds(told)} predicted for the boards, {format_seconds(found)} measured {place}"
    click.echo()
    print_entries(
        [f"plan: {summary.plan_origin}", times, f"held back: {summary.bottleneck}, as predicted", summary.lines[-1]]
    )


def show_discrepancies(expected: ExpectedTiming | None, log: Mapping[str, Any]) -> None:
    """Prints where a run parts from its prediction by more than 10 %, and which lines carried other bytes; nothing
    without a prediction, or where frames went other ways than predicted."""
    from dicompiler.analysis.prediction_error import find_discrepancies, find_wrong_bytes, measured_timing

    if expected is None or "events" in log:
        return
    found = measured_timing(log, expected.program)
    click.echo()
    if log["where"] != "emulated":  # which says it in words of its own
        where, told = " on this host alone" if log["where"] == "here" else "", format_seconds(expected.timing.frame_s)
        click.echo(f"a frame{where}: {format_seconds(found.frame_s)}, predicted for the platform: {told}")
    rows = [
        (one.device, one.cause, one.location, f"{1000 * one.predicted_s:.2f}", f"{1000 * one.measured_s:.2f}")
        for one in find_discrepancies(expected.timing, found)
    ]
    if rows:
        print_table(("parting by 10 %", "in", "above all", "predicted ms", "measured ms"), rows, right=(3, 4))
    for sender, receiver, due, got in find_wrong_bytes(log, expected.program):
        click.echo(f"{sender} → {receiver}: {got} bytes sent, {due} predicted")
