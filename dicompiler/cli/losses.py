"""What surviving losses costs, as commands print it: a row for each loss that a plan covers, or the same as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dicompiler.cli.tables import show

if TYPE_CHECKING:
    from dicompiler.ir.compilation import Compilation
    from dicompiler.ir.metrics import LossMetrics

HEADERS = ("lost", "latency ms", "between frames ms", "fullest host MiB", "extra weights MiB")


def losses_document(losses: Sequence[LossMetrics]) -> dict[str, Any]:
    """The entry `losses`; none where none are covered."""
    return {"losses": [dataclasses.asdict(one) for one in losses]} if losses else {}


def show_losses(result: Compilation) -> None:
    """Prints what each of the plans comes to by itself, and what all of them take; nothing without losses."""
    if not result.losses or result.metrics is None:
        return
    rows = [
        (
            ", ".join(one.lost) or "nothing",
            f"{1000 * one.metrics.latency_s:.4g}",
            f"{1000 * one.metrics.period_s:.4g}",
            f"{one.metrics.memory / 2**20:.4g}",
            f"{one.stored / 2**20:.4g}" if one.lost else "",
        )
        for one in result.losses
    ]
    click.echo()
    show(HEADERS, rows, right=range(1, len(HEADERS)))
    alone, every = (metrics.memory / 2**20 for metrics in (result.losses[0].metrics, result.metrics))
    click.echo(f"\nto survive that the fullest host holds {every:.4g} MiB instead of {alone:.4g} MiB")
