"""`dicompiler compare`: all strategies in one table, with one cost model and simulator."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.units import format_number
from dicompiler.cli.completion import complete_name_list, complete_platform
from dicompiler.cli.options import (
    PATH,
    cost_options,
    executor_option,
    objective_option,
    refuse_options,
    tolerate_failures_option,
    wire_dtype_option,
)
from dicompiler.cli.result_stream import echo_document

if TYPE_CHECKING:
    from dicompiler.analysis.compare import Comparison, StrategyResult
    from dicompiler.analysis.explain import Explanation, SplitReason


HEADERS = (
    "model", "platform", "objective", "strategy", "value", "lower_bound", "latency_s", "input_output_s", "period_s",
    "energy_j", "memory_bytes", "total_bytes", "speedup", "failed", "failure_latency_s", "search_s", "best", "error",
    "note",
)  # fmt: skip
"""Names of the columns of the CSV and Markdown tables, which `docs/use/strategies.md` explains."""


def comparison_rows(
    comparisons: Sequence[tuple[Path, Comparison]], format_float: Callable[[float], str] = str
) -> Iterator[tuple[str, ...]]:
    """Yield a table row (see HEADERS) for each model, platform and strategy. The default does not round numbers."""
    for model, comparison in comparisons:
        problem, best = comparison.problem, comparison.best
        for result in comparison.results:
            setting = (model, problem.platform.name, problem.objective, result.strategy)
            bound = "" if comparison.lower_bound is None else comparison.lower_bound
            value = "" if result.metrics is None else comparison.objective_value(result)
            is_best = "yes" if result is best else ""
            cells = (
                *setting,
                value,
                bound,
                *_make_metric_cells(comparison, result),
                result.search_s,
                is_best,
                result.error,
                result.note,
            )
            yield tuple(format_float(cell) if isinstance(cell, float) else str(cell) for cell in cells)


def _make_metric_cells(comparison: Comparison, result: StrategyResult) -> tuple[float | str, ...]:
    """Return the cells of the columns from `latency_s` to `failure_latency_s`, empty for a strategy without a plan."""
    metrics, worst = result.metrics, result.worst_failure
    if metrics is None:
        return ("",) * 9
    return (
        metrics.latency_s,
        metrics.input_output_s,
        metrics.period_s,
        metrics.energy_j or "",  # The energy is 0 if the platform states no power.
        metrics.memory,
        metrics.total_bytes,
        metrics.speedup_over(comparison.single_device, comparison.problem.objective),
        "" if worst is None else " ".join(worst.failed),
        "" if worst is None else worst.metrics.latency_s,
    )


def print_csv(comparisons: Sequence[tuple[Path, Comparison]]) -> None:
    """Print the comparisons as CSV (RFC 4180, but with line feeds)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([HEADERS, *comparison_rows(comparisons)])
    echo_document(text.getvalue(), nl=False)


def print_markdown(comparisons: Sequence[tuple[Path, Comparison]]) -> None:
    """Print the comparisons as a Markdown table, with numbers of four significant digits."""
    echo_document(_format_row(HEADERS))
    echo_document("|" + "---|" * len(HEADERS))
    for row in comparison_rows(comparisons, format_number):
        echo_document(_format_row(row))


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


FORMATS = ("table", "csv", "markdown", "json")

MAX_EXPLAINED_LAYERS = 20


@click.command("compare")
@click.argument("models", metavar="MODEL…", nargs=-1, required=True, type=PATH)
@click.option(
    "--platform",
    "platforms",
    metavar="P",
    multiple=True,
    shell_complete=complete_platform,
    help="Describe the cluster: a TOML file, or a built-in name such as rpi4x4. Can be repeated.",
)
@click.option(
    "--strategies",
    metavar="A,B{…},C",
    shell_complete=complete_name_list("strategies"),
    help="Compare these strategies, separated by commas. "
    "Default: single,pipeline,modnn,dp,gradient,genetic,cpsat,auto.",
)
@click.option(
    "--explain",
    "with_explanation",
    is_flag=True,
    help="For each layer that is not split, print the reason, and the bandwidth from which a split saves time.",
)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(FORMATS),
    default="table",
    help="table: print tables for a terminal. csv, markdown: print one table with a row for each model, platform and "
    "strategy. json: print the same as --json. Default: table.",
)
@objective_option
@tolerate_failures_option
@wire_dtype_option
@executor_option
@cost_options
def command(
    models: tuple[Path, ...],
    platforms: tuple[str, ...],
    strategies: str | None,
    with_explanation: bool,
    output_format: str,
    executor: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare strategies: predicted metrics, search time, and the bottleneck of the best plan.

    All times are simulated with the same cost model. The lower bound below the table holds for every plan. With
    --tolerate-failures, each strategy also makes failure plans (plans for the remaining devices), and the table shows
    the longest latency after a failure. With several models or platforms, each model is compared on each platform;
    --json then prints a list.

    Example: dicompiler compare model.onnx --platform rpi4x4 --strategies single,modnn,dp
    """
    from dicompiler.analysis.compare import DEFAULT_STRATEGIES, compare
    from dicompiler.analysis.explain import explain, explain_splits
    from dicompiler.cli.compile_output import show_comparison
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json
    from dicompiler.driver.executors import open_executor

    if as_json and output_format != "json":
        refuse_options("--json is --format json", "output_format")
    output_format = "json" if as_json else output_format
    if with_explanation and output_format in ("csv", "markdown"):
        raise UsageError(f"compare: --explain cannot be used with --format {output_format}: remove one of them")
    given = {name: value for name, value in options.items() if value not in (None, ())}
    comparisons: list[tuple[Path, Comparison]] = []
    explanations: list[Explanation | None] = []
    splits: list[tuple[SplitReason, ...]] = []
    for model, platform in _pair_models_and_platforms(models, platforms):
        with (
            _name_in_log(f"{model} on {platform}" if len(models) * len(platforms) > 1 else ""),
            open_executor(executor) as workers,
            progress("single") as tell,
        ):
            comparison = compare(
                model, platform, strategies or DEFAULT_STRATEGIES, executor=workers, progress=tell, **given
            )
            explanation = explain(comparison) if with_explanation else None
            needs_hint = output_format == "table" and comparison.best is not None
            hints = explain_splits(comparison) if needs_hint and explanation is None else ()
        comparisons.append((model, comparison))
        explanations.append(explanation)
        splits.append(hints if explanation is None else explanation.splits)
    if output_format == "csv":
        print_csv(comparisons)
    elif output_format == "markdown":
        print_markdown(comparisons)
    elif output_format == "json":
        documents = [
            comparison.document() | ({} if explanation is None else {"explanation": asdict(explanation)})
            for (_, comparison), explanation in zip(comparisons, explanations, strict=True)
        ]
        print_json(documents[0] if len(documents) == 1 else documents)
    else:
        for (model, comparison), explanation, hints in zip(comparisons, explanations, splits, strict=True):
            if len(comparisons) > 1:
                click.echo(f"{model} on {comparison.problem.platform.name}\n")
            show_comparison(comparison, hints)
            if explanation is not None:
                _show_explanation(explanation)
            if comparison is not comparisons[-1][1]:
                click.echo()
    if output_format in ("csv", "markdown") and any(comparison.best is None for _, comparison in comparisons):
        raise DicompilerError("compare: no strategy found a feasible plan: see the column error")


def _pair_models_and_platforms(
    models: tuple[Path, ...], platforms: tuple[str, ...]
) -> Iterator[tuple[Path, str | None]]:
    for model in models:
        for platform in platforms or (None,):
            yield model, platform


@contextmanager
def _name_in_log(place: str) -> Iterator[None]:
    """Put `place` in front of warnings and other records of the log, until the `with` block ends."""

    def add_place(record: logging.LogRecord) -> bool:
        record.msg, record.args = f"{place}: {record.getMessage()}", ()
        return True

    log = logging.getLogger("dicompiler")
    if place:
        log.addFilter(add_place)
    try:
        yield
    finally:
        log.removeFilter(add_place)


def _show_explanation(explanation: Explanation) -> None:
    from dicompiler.analysis.explain import break_even_text
    from dicompiler.base.units import format_bytes, format_seconds
    from dicompiler.cli.table import print_table

    if explanation.splits:
        click.echo("\nno split is faster than one device; a split is 3 % faster from this bandwidth on\n")
        lines = [
            (split.strategy, break_even_text(split.break_even_bandwidth, split.wire_dtypes))
            for split in explanation.splits
        ]
        print_table(("strategy", "pays off"), lines)
    click.echo("\nlayers that are not split, each considered on its own, largest saving first\n")
    layers = sorted(explanation.layers, key=lambda layer: -layer.saved_s)
    headers = ("layer", "operator", "reason", "saves", "sends", "pays off")
    rows = [
        (
            layer.layer,
            layer.operator,
            layer.reason,
            format_seconds(layer.saved_s) if layer.saved_s else "-",
            format_bytes(layer.sent_bytes) if layer.sent_bytes else "-",
            break_even_text(layer.break_even_bandwidth, layer.wire_dtypes) if layer.saved_s else "-",
        )
        for layer in layers[:MAX_EXPLAINED_LAYERS]
    ]
    print_table(headers, rows, right=(3, 4), wrap=2)
    if further := layers[MAX_EXPLAINED_LAYERS:]:
        most = format_seconds(further[0].saved_s)
        click.echo(f"… {len(further)} further rows, which save at most {most} each: use --json to see all")
