"""Tables of failure plans: predicted metrics and extra memory, for terminals and as JSON.

A failure plan is a plan for the remaining devices, which is used after some devices have failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.units import format_number
from dicompiler.cli.table import print_table, wrap_text

if TYPE_CHECKING:
    from dicompiler.cost.failure_timeline import StreamInterval
    from dicompiler.ir.metrics import FailureMetrics
    from dicompiler.ir.pipeline_state import PipelineState

FAILURE_HEADERS = ("failed", "latency ms", "frame period ms", "fullest host MiB", "extra weights MiB")


def failures_document(failures: Sequence[FailureMetrics]) -> dict[str, Any]:
    """Return a document with the entry `failures`; an empty one if there are no failure plans."""
    return {"failures": [dataclasses.asdict(entry) for entry in failures]} if failures else {}


def worst_failure_columns(worst: FailureMetrics | None) -> tuple[str, str]:
    """Return two table cells: the longest latency after a failure, and the devices that fail in this case."""
    return ("-", "-") if worst is None else (f"{1000 * worst.metrics.latency_s:.1f}", ", ".join(worst.failed))


def show_failures(result: PipelineState) -> None:
    """Print the metrics of each failure plan, and the memory that all of them need; nothing if there are none."""
    if not result.failure_metrics or result.metrics is None:
        return
    rows = [
        (
            ", ".join(failure.failed) or "none",
            format_number(1000 * failure.metrics.latency_s),
            format_number(1000 * failure.metrics.period_s),
            format_number(failure.metrics.memory / 2**20),
            format_number(failure.extra_weight_bytes / 2**20) if failure.failed else "",
        )
        for failure in result.failure_metrics
    ]
    click.echo()
    print_table(FAILURE_HEADERS, rows, right=range(1, len(FAILURE_HEADERS)))
    without, total = (metrics.memory / 2**20 for metrics in (result.failure_metrics[0].metrics, result.metrics))
    needs = f"{format_number(total)} MiB instead of {format_number(without)} MiB"
    click.echo(f"\n{wrap_text(f'to tolerate these failures the fullest host needs {needs}')}")


def intervals_document(intervals: Sequence[StreamInterval]) -> list[dict[str, Any]]:
    """Return the intervals of a stream as JSON entries; a new interval begins when a device fails or returns."""
    return [
        {
            "down": interval.down,
            "since_s": interval.changed_at,
            "start_s": interval.resumed_at,
            "frames": len(interval.frames),
            "period_s": interval.period_s,
            "interruption_s": interval.interruption_s if i else None,
            "replayed_frames": len(intervals[i - 1].replayed) if i else 0,
        }
        for i, interval in enumerate(intervals)
    ]


def show_intervals(intervals: Sequence[StreamInterval]) -> None:
    """Print a row for each interval of a stream: failed devices, frames, and length of the interruption."""
    headers = ("from s", "down", "frames", "frame period ms", "replayed", "interruption s")
    rows = [
        (
            format_number(entry["since_s"]),
            ", ".join(entry["down"]) or "none",
            str(entry["frames"]),
            "-" if entry["period_s"] is None else format_number(1000 * entry["period_s"]),
            str(entry["replayed_frames"]),
            "-" if entry["interruption_s"] is None else format_number(entry["interruption_s"]),
        )
        for entry in intervals_document(intervals)
    ]
    click.echo()
    print_table(headers, rows, right=(0, 2, 3, 4, 5))
