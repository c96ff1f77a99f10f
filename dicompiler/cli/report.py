"""`dicompiler report`: a compiled network, or a front of plans, as one HTML page with pictures."""

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
@click.option("--log", metavar="RUN.json", type=PATH, help="What 'dicompiler run --log' wrote: times as measured.")
@click.option("--compare", metavar="C.json", type=PATH, help="What 'dicompiler compare --json' printed.")
@click.option("--strategies", metavar="A,B{…},C", help="Compare these now, as 'dicompiler compare' does.")
@click.option("--front", metavar="F", type=PATH, help="A directory of 'dicompiler explore', or its front.json.")
@cost_option
@json_option
@output_option(metavar="REPORT.html", required=True, help="The page to write.")
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
    """Draw a compiled network, or a front of plans, as one HTML page.

    DIR is what 'dicompiler compile' or 'dicompiler explore' wrote. Shows who computes which part of which layer, a
    frame in time, memory, and bytes between devices. The page needs no network.
    """
    from dicompiler.analysis.explore import FRONT_FILE
    from dicompiler.cli.file_io import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json
    from dicompiler.report.page import render_front, render_report
    from dicompiler.report.report_data import load_front, load_report_data

    if compare is not None and strategies is not None:
        raise UsageError("report: --compare and --strategies exclude each other: one of them fills the table")
    check_output_file(output)
    if (directory / FRONT_FILE).is_file():
        if any(value is not None for value in (log, compare, strategies, front, cost)):
            raise UsageError(f"report: {directory} is a front: only -o goes with it")
        write_text(output, render_front(directory.resolve().name, load_front(directory)))
    else:
        with progress(f"reading {directory}") as tell:
            facts = load_report_data(directory, cost or "", log, compare, front)
            if strategies is not None:
                facts = _add_comparison(facts, strategies, tell)
            write_text(output, render_report(facts))
    size = output.stat().st_size
    if as_json:
        print_json({"report": str(output), "bytes": size})
    else:
        click.echo(f"written: {output}, {size} bytes")


def _add_comparison(facts: ReportData, strategies: str, tell: Any) -> ReportData:
    """With the comparison of strategies that is made now."""
    from dataclasses import replace

    from dicompiler.analysis.compare import compare
    from dicompiler.cli.compare import parse_strategies
    from dicompiler.cli.compile_output import comparison_document

    document: Mapping[str, Any] = comparison_document(compare(facts.problem, parse_strategies(strategies), tell))
    return replace(facts, comparison=document)
