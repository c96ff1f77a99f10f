"""`dicompiler compare`: all strategies in one table, with one cost model and simulator."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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


@dataclass(frozen=True)
class NamedComparison:
    """The comparison of one model on one platform, with the names for the output.

    Attributes:
        model: Path of the model.
        platform: The platform's name; the text of --platform if there are several, because their names may be equal.
        comparison: The results of the strategies.
        explanation: The result of --explain; None without this option.
        splits: Conditions under which a split is better, if the best plan uses one device.
    """

    model: Path
    platform: str
    comparison: Comparison
    explanation: Explanation | None = None
    splits: tuple[SplitReason, ...] = ()

    def __str__(self) -> str:
        return f"{self.model} on {self.platform}"

    def document(self) -> dict[str, Any]:
        """Return the JSON object that --json prints."""
        explained = {} if self.explanation is None else {"explanation": asdict(self.explanation)}
        return self.comparison.document() | {"platform": self.platform} | explained


HEADERS = (
    "model", "platform", "objective", "strategy", "value", "lower_bound", "latency_s", "input_output_s", "period_s",
    "energy_j", "memory_bytes", "total_bytes", "speedup", "failed", "failure_latency_s", "search_s", "best", "error",
    "note",
)  # fmt: skip
"""Names of the columns of the CSV and Markdown tables, which `docs/use/strategies.md` explains."""


def comparison_rows(
    comparisons: Sequence[NamedComparison], format_float: Callable[[float], str] = str
) -> Iterator[tuple[str, ...]]:
    """Yield a table row (see HEADERS) for each model, platform and strategy. The default does not round numbers."""
    for named in comparisons:
        comparison, best = named.comparison, named.comparison.best
        for result in comparison.results:
            setting = (named.model, named.platform, comparison.problem.objective, result.strategy)
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


def print_csv(comparisons: Sequence[NamedComparison]) -> None:
    """Print the comparisons as CSV (RFC 4180, but with line feeds)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([HEADERS, *comparison_rows(comparisons)])
    echo_document(text.getvalue(), nl=False)


def print_markdown(comparisons: Sequence[NamedComparison]) -> None:
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
    from dicompiler.cli.table import print_json
    from dicompiler.driver.executors import open_executor

    if as_json and output_format != "json":
        refuse_options("--json is --format json", "output_format")
    output_format = "json" if as_json else output_format
    if with_explanation and output_format in ("csv", "markdown"):
        raise UsageError(f"compare: --explain cannot be used with --format {output_format}: remove one of them")
    given = {name: value for name, value in options.items() if value not in (None, ())}
    needs_hints = output_format == "table"
    comparisons: list[NamedComparison] = []
    for model, platform in _pair_models_and_platforms(models, platforms):
        with (
            _name_in_log(f"{model} on {platform}" if len(models) * len(platforms) > 1 else ""),
            open_executor(executor) as workers,
        ):
            comparison = _compare(model, platform, strategies, len(platforms) > 1, executor=workers, **given)
            name = platform if platform and len(platforms) > 1 else comparison.problem.platform.name
            named = NamedComparison(model, name, comparison)
            comparisons.append(_with_reasons(named, with_explanation, needs_hints))
    if output_format == "csv":
        print_csv(comparisons)
    elif output_format == "markdown":
        print_markdown(comparisons)
    elif output_format == "json":
        documents = [named.document() for named in comparisons]
        print_json(documents[0] if len(documents) == 1 else documents)
    else:
        _show_tables(comparisons)
    if output_format != "json":
        _require_plans(comparisons, "" if output_format == "table" else ": see the column error")


def _compare(
    model: Path, platform: str | None, strategies: str | None, has_several_platforms: bool, **options: Any
) -> Comparison:
    """Return the comparison of strategies for a model on a platform.

    If a platform without powers is one of several, and energy is the objective, each result has the error.
    """
    from dicompiler.analysis.compare import DEFAULT_STRATEGIES, compare, compare_without_powers
    from dicompiler.cli.progress import progress
    from dicompiler.driver.problem_setup import MissingPowersError

    chosen = strategies or DEFAULT_STRATEGIES
    with progress("single") as tell:
        try:
            return compare(model, platform, chosen, progress=tell, **options)
        except MissingPowersError as error:
            if not has_several_platforms:
                raise
            return compare_without_powers(model, platform, chosen, str(error), **options)


def _with_reasons(named: NamedComparison, with_explanation: bool, needs_hints: bool) -> NamedComparison:
    """Add the reasons why the best plan does not split more layers, unless no strategy has a plan."""
    from dicompiler.analysis.explain import explain, explain_splits

    if named.comparison.best is None:
        return named
    if with_explanation:
        explanation = explain(named.comparison)
        return replace(named, explanation=explanation, splits=explanation.splits)
    return replace(named, splits=explain_splits(named.comparison)) if needs_hints else named


def _show_tables(comparisons: Sequence[NamedComparison]) -> None:
    from dicompiler.cli.compile_output import show_comparison

    for named in comparisons:
        if named is not comparisons[0]:
            click.echo()
        if len(comparisons) > 1:
            click.echo(f"{named}\n")
        show_comparison(named.comparison, named.splits)
        if named.explanation is not None:
            _show_explanation(named.explanation)


def _require_plans(comparisons: Sequence[NamedComparison], remedy: str) -> None:
    """Raise DicompilerError if no strategy has a plan for some model and platform, which the message names."""
    without_plan = [named for named in comparisons if named.comparison.best is None]
    if without_plan:
        places = f" for {', '.join(map(str, without_plan))}" if len(comparisons) > 1 else ""
        raise DicompilerError(f"compare: no strategy found a feasible plan{places}{remedy}")


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
