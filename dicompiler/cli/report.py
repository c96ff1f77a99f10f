"""`dicompiler report`: write an HTML page about an artifact or a Pareto front."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.completion import complete_name_list
from dicompiler.cli.options import PATH, check_output_file, cost_option, directory_argument, json_option, output_option


@click.command("report")
@directory_argument
@click.option(
    "--log", metavar="RUN.json", type=PATH, help="Show the measured times of this log ('dicompiler run --log')."
)
@click.option("--compare", metavar="C.json", type=PATH, help="Show this comparison ('dicompiler compare --json').")
@click.option(
    "--strategies",
    shell_complete=complete_name_list("strategies"),
    metavar="A,B{…},C",
    help="Compare these strategies now, as 'dicompiler compare' does.",
)
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
    from dicompiler.analysis.report.write_report import write_report
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json

    check_output_file(output)
    with progress(f"reading {directory}") as tell:
        write_report(
            directory,
            output,
            run_log=log,
            comparison=compare,
            strategies=strategies or (),
            front=front,
            cost=cost or "",
            progress=tell,
        )
    size = output.stat().st_size
    if as_json:
        print_json({"report": str(output), "bytes": size})
    else:
        click.echo(f"written: {output}, {size} bytes")
