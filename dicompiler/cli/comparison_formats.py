"""Comparisons as one table in CSV or Markdown, with a row for each model, platform and strategy."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dicompiler.analysis.compare import Comparison, StrategyResult

HEADERS = (
    "model", "platform", "objective", "strategy", "value", "lower_bound", "latency_s", "input_output_s", "period_s",
    "energy_j", "memory_bytes", "total_bytes", "speedup", "failed", "failure_latency_s", "search_s", "best", "error",
)  # fmt: skip
"""Names of the columns, which `docs/use/strategies.md` explains."""


def comparison_rows(comparisons: Sequence[tuple[Path, Comparison]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row. Numbers are not rounded; cells of a strategy without a plan are empty."""
    for model, comparison in comparisons:
        problem, best = comparison.problem, comparison.best
        for result in comparison.results:
            setting = (model, problem.platform.name, problem.objective, result.strategy)
            bound = "" if comparison.lower_bound is None else comparison.lower_bound
            value = "" if result.metrics is None else comparison.objective_value(result)
            is_best = "yes" if result is best else ""
            cells = (*setting, value, bound, *_figures(comparison, result), result.search_s, is_best, result.error)
            yield tuple(map(str, cells))


def _figures(comparison: Comparison, result: StrategyResult) -> tuple[float | str, ...]:
    """Return the cells of the columns from `latency_s` to `failure_latency_s` in HEADERS."""
    metrics, worst = result.metrics, result.worst_failure
    if metrics is None:
        return ("",) * 9
    return (
        metrics.latency_s,
        metrics.input_output_s,
        metrics.period_s,
        metrics.energy_j or "",  # It is 0 if the platform states no powers.
        metrics.memory,
        metrics.total_bytes,
        metrics.speedup_over(comparison.single_device, comparison.problem.objective),
        "" if worst is None else " ".join(worst.failed),
        "" if worst is None else worst.metrics.latency_s,
    )


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
