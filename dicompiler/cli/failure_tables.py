"""Tables of failure plans: predicted metrics and extra memory, for terminals and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dicompiler.cli.table import print_table

if TYPE_CHECKING:
    from dicompiler.cost.failure_timeline import StreamInterval
    from dicompiler.ir.metrics import FailureMetrics
    from dicompiler.ir.pipeline_state import PipelineState

FAILURE_HEADERS = ("failed", "latency ms", "frame period ms", "fullest host MiB", "extra weights MiB")


def failures_document(losses: Sequence[FailureMetrics]) -> dict[str, Any]:
    """Return the entry `failures`, or an empty document if there are no failure plans."""
    return {"losses": [dataclasses.asdict(one) for one in losses]} if losses else {}


def worst_failure_columns(worst: FailureMetrics | None) -> tuple[str, str]:
    """Return the longest latency after a failure, and the failed devices."""
    return ("-", "-") if worst is None else (f"{1000 * worst.metrics.latency_s:.1f}", ", ".join(worst.failed))


def show_failures(result: PipelineState) -> None:
    """Print the metrics of each failure plan and the memory of all of them; nothing if there are none."""
    if not result.failure_metrics or result.metrics is None:
        return
    rows = [
        (
            ", ".join(one.failed) or "none",
            f"{1000 * one.metrics.latency_s:.4g}",
            f"{1000 * one.metrics.period_s:.4g}",
            f"{one.metrics.memory / 2**20:.4g}",
            f"{one.extra_weight_bytes / 2**20:.4g}" if one.failed else "",
        )
        for one in result.failure_metrics
    ]
    click.echo()
    print_table(FAILURE_HEADERS, rows, right=range(1, len(FAILURE_HEADERS)))
    alone, every = (metrics.memory / 2**20 for metrics in (result.failure_metrics[0].metrics, result.metrics))
    click.echo(f"\nto tolerate these failures the fullest host needs {every:.4g} MiB instead of {alone:.4g} MiB")


def intervals_document(stretches: Sequence[StreamInterval]) -> list[dict[str, Any]]:
    """Return the intervals of a stream between failures and returns."""
    return [
        {
            "away": one.down,
            "since_s": one.changed_at,
            "start_s": one.resumed_at,
            "frames": len(one.frames),
            "period_s": one.period_s,
            "interruption_s": one.interruption_s if i else None,
            "replayed": len(stretches[i - 1].replayed) if i else 0,
        }
        for i, one in enumerate(stretches)
    ]


def show_intervals(stretches: Sequence[StreamInterval]) -> None:
    """Print the devices down, the frames, and the interruption for each interval of the stream."""
    headers = ("from s", "down", "frames", "frame period ms", "replayed", "interruption s")
    rows = [
        (
            f"{one['since_s']:.4g}",
            ", ".join(one["away"]) or "none",
            str(one["frames"]),
            "-" if one["period_s"] is None else f"{1000 * one['period_s']:.4g}",
            str(one["replayed"]),
            "-" if one["interruption_s"] is None else f"{one['interruption_s']:.4g}",
        )
        for one in intervals_document(stretches)
    ]
    click.echo()
    print_table(headers, rows, right=(0, 2, 3, 4, 5))
