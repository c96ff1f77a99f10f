"""`dicompiler explore`: search for Pareto-optimal plans and write them, with a table and a chart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dicompiler.base.atomic_output import check_writable
from dicompiler.base.errors import UsageError
from dicompiler.base.units import format_number
from dicompiler.cli.completion import complete_names
from dicompiler.cli.options import (
    CompileRequest,
    cost_options,
    executor_option,
    output_option,
    problem_options,
    takes_compile_request,
    wire_dtype_option,
)

if TYPE_CHECKING:
    from dicompiler.search.pareto_front import ParetoFront

MAX_SHOWN_PLANS = 20


@click.command("explore")
@problem_options
@click.option(
    "--strategy",
    shell_complete=complete_names("strategies"),
    metavar="'NAME{…}'",
    default="genetic",
    show_default=True,
    help="Use this strategy for the search.",
)
@click.option(
    "--objectives",
    metavar="A,B,…",
    help="Minimize these: latency, throughput, energy, memory, communication, device-memory, device-energy. "
    "Default: throughput,device-memory,device-energy.",
)
@click.option("--generations", metavar="N", type=int, help="Search N generations. Default: 150.")
@click.option("--population", metavar="N", type=int, help="Keep N plans in each generation. Default: 100.")
@click.option(
    "--seed", metavar="N", type=int, help="Seed the random numbers; equal seeds give equal fronts. Default: 0."
)
@wire_dtype_option
@executor_option
@cost_options
@output_option(metavar="DIR", required=True, help="Write the front to this directory.")
@takes_compile_request
def command(
    request: CompileRequest,
    objectives: str | None,
    generations: int | None,
    population: int | None,
    seed: int | None,
    executor: str | None,
    as_json: bool,
    output: Path,
) -> None:
    """Search for Pareto-optimal plans.

    Writes front.json, front.csv, a chart (front.svg) and each plan, for 'dicompiler compile --plan'. Ctrl-C ends the
    search and keeps the front found so far. The chart needs the extra explore: pip install 'dicompiler[explore]'.

    Example: dicompiler explore model.onnx --platform rpi4x4 --objectives latency,energy -o front
    """
    from dicompiler.analysis.explore import explore, override_options
    from dicompiler.cli.progress import progress
    from dicompiler.driver.compile_options import format_shapes
    from dicompiler.driver.executors import open_executor

    options = request.options
    platform, strategy = options.platform, options.strategy
    if platform is None:
        raise UsageError("explore: no platform: give a TOML file or a built-in one such as rpi4x4 (--platform)")
    check_writable(output)
    assert isinstance(platform, str) and isinstance(strategy, str)
    numbers = {"generations": generations, "population": population, "seed": seed}
    strategy_options: dict[str, str | tuple[str, ...]] = {name: str(n) for name, n in numbers.items() if n is not None}
    if objectives is not None:
        strategy_options["objectives"] = tuple(objectives.split(","))
    with open_executor(executor) as workers, progress("reading the model") as tell:
        front = explore(
            request.model,
            platform,
            override_options(strategy, strategy_options),
            options.cost,
            output,
            format_shapes(options.shape),
            tell,
            options.wire_dtype,
            options.target,
            options.state,
            workers,
            options.engine,
            options.precision,
        )
    _show_front(front, platform, output, as_json)


def _show_front(front: ParetoFront, platform: str, output: Path, as_json: bool) -> None:
    from dicompiler.base.schema import load_json
    from dicompiler.cli.table import print_json, print_table, wrap_text

    if front.interrupted:
        click.echo("dicompiler: interrupted: the front is incomplete", err=True)
    document = load_json(output / "front.json")
    if as_json:
        print_json({**document, "front": str(output)})
        return
    units = document["objectives"]
    rows = [
        (
            point["plan"],
            str(point["devices"]),
            *(_format_value(name, point[name], unit) for name, unit in units.items()),
        )
        for point in document["points"]
    ]
    headers = ("plan", "devices", *("frames/s" if name == "throughput" else name for name in units))
    print_table(headers, rows[:MAX_SHOWN_PLANS], right=range(len(headers)))
    if len(rows) > MAX_SHOWN_PLANS:
        click.echo(f"… and {len(rows) - MAX_SHOWN_PLANS} more")
    plans = f"{front.evaluations} plan{'' if front.evaluations == 1 else 's'}"
    counts = f"{plans} evaluated on {platform}, {len(rows)} kept"
    searched = f"{counts}; the values are from {_describe_level(front)}"
    click.echo(f"\n{wrap_text(searched)}\nwritten: {output}")


def _describe_level(front: ParetoFront) -> str:
    return "a full simulation of each plan" if front.metrics_source == "measured" else "the search's fast model"


def _format_value(objective: str, value: float, unit: str) -> str:
    """Return an objective's value as text. Throughput is stored in seconds per frame, and shown in frames/s."""
    if objective == "throughput":
        return format_number(1 / value, 3)
    if unit == "s":
        return f"{format_number(1000 * value)} ms"
    if unit == "bytes":
        return f"{format_number(value / 1e6)} MB"
    return f"{format_number(value)} {unit}"
