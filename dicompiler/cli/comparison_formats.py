"""Comparisons as one table in CSV or Markdown, with a row for each model, platform and strategy."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dicompiler.analysis.compare import Comparison

HEADERS = (
    "model", "platform", "objective", "strategy", "latency_s", "input_output_s", "period_s", "energy_j", "memory",
    "total_bytes", "speedup", "search_s", "best", "error",
)  # fmt: skip
"""Names of the columns. Times are in seconds, energies in joules, and memory is in bytes.

`energy_j` is empty if the platform states no powers."""


def comparison_rows(comparisons: Sequence[tuple[Path, Comparison]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row. Numbers are not rounded; cells of a strategy without a plan are empty."""
    for model, comparison in comparisons:
        best = comparison.best
        for result in comparison.results:
            metrics = result.metrics
            figures: tuple[float | str, ...] = ("",) * 7
            if metrics is not None:
                times = (metrics.latency_s, metrics.input_output_s, metrics.period_s)
                speedup = metrics.speedup_over(comparison.single_device, comparison.problem.objective)
                energy_j = metrics.energy_j or ""  # It is 0 if the platform states no powers.
                figures = (*times, energy_j, metrics.memory, metrics.total_bytes, speedup)
            setting = (str(model), comparison.problem.platform.name, comparison.problem.objective, result.strategy)
            is_best = "yes" if result is best else ""
            yield tuple(map(str, (*setting, *figures, result.search_s, is_best, result.error)))


def print_csv(comparisons: Sequence[tuple[Path, Comparison]]) -> None:
    """Print the rows as CSV (RFC 4180, but with line feeds)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([HEADERS, *comparison_rows(comparisons)])
    click.echo(text.getvalue(), nl=False)


def print_markdown(comparisons: Sequence[tuple[Path, Comparison]]) -> None:
    """Print the rows as a Markdown table."""
    click.echo(_format_row(HEADERS))
    click.echo("|" + "---|" * len(HEADERS))
    for row in comparison_rows(comparisons):
        click.echo(_format_row(row))


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
