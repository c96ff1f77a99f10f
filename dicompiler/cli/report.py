"""`dicompiler report`: write an HTML page about an artifact or a Pareto front."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.errors import UsageError
from dicompiler.cli.options import PATH, check_output_file, cost_option, directory_argument, json_option, output_option

if TYPE_CHECKING:
    from dicompiler.report.report_data import ReportData


@click.command("report")
@directory_argument
@click.option(
    "--log", metavar="RUN.json", type=PATH, help="Show the measured times of this log ('dicompiler run --log')."
)
@click.option("--compare", metavar="C.json", type=PATH, help="Show this comparison ('dicompiler compare --json').")
@click.option("--strategies", metavar="A,B{…},C", help="Compare these strategies now, as 'dicompiler compare' does.")
@click.option(
    "--front", metavar="F", type=PATH, help="Show this front: a directory of 'dicompiler explore', or its front.json."
)
@cost_option
@json_option
@output_option(metavar="REPORT.html", required=True, help="Write the page to this file.")
def command(
    directory: Path,
    log: Path | None,
    compare: Path | None,
    strategies: str | None,
    front: Path | None,
    cost: str | None,
    as_json: bool,
    output: Path,
) -> None:
    """Write a report of an artifact or Pareto front as one HTML page.

    DIR is the output of 'dicompiler compile' or 'dicompiler explore'. The page shows the layers coloured by device, the
    timeline of a frame, memory, and bytes between devices. It is self-contained and loads nothing from the network.

    Example: dicompiler report build --log run.json -o report.html
    """
    from dicompiler.analysis.explore import FRONT_FILE
    from dicompiler.cli.file_io import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json
    from dicompiler.report.page import render_front, render_report
    from dicompiler.report.report_data import load_front, load_report_data

    if compare is not None and strategies is not None:
        raise UsageError("report: --compare and --strategies exclude each other: remove one")
    check_output_file(output)
    if (directory / FRONT_FILE).is_file():
        if any(value is not None for value in (log, compare, strategies, front, cost)):
            raise UsageError(f"report: {directory} is a front: only -o can be used with it")
        write_text(output, render_front(directory.resolve().name, load_front(directory)))
    else:
        with progress(f"reading {directory}") as tell:
            data = load_report_data(directory, cost or "", log, compare, front)
            if strategies is not None:
                data = _add_comparison(data, strategies, tell)
            write_text(output, render_report(data))
    size = output.stat().st_size
    if as_json:
        print_json({"report": str(output), "bytes": size})
    else:
        click.echo(f"written: {output}, {size} bytes")


def _add_comparison(data: ReportData, strategies: str, tell: Any) -> ReportData:
    """Compare the strategies, and return the report's data with the result. `tell` displays the progress."""
    from dataclasses import replace

    from dicompiler.analysis.compare import compare
    from dicompiler.cli.compare import parse_strategies
    from dicompiler.cli.compile_output import comparison_document

    document: Mapping[str, Any] = comparison_document(compare(data.problem, parse_strategies(strategies), tell))
    return replace(data, comparison=document)
