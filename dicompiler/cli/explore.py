"""`dicompiler explore`: plans of which none is better than another in everything: their numbers, files, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dicompiler.base.atomic import check_parent
from dicompiler.base.errors import UsageError
from dicompiler.cli.options import (
    Request,
    cost_options,
    executor_option,
    handed,
    output_option,
    problem_options,
    wire_option,
)

if TYPE_CHECKING:
    from dicompiler.search.fronts import Front

SHOWN = 20


@click.command("explore")
@problem_options
@click.option("--strategy", metavar="'NAME{…}'", default="genetic", show_default=True, help="Who searches.")
@click.option(
    "--objectives",
    metavar="A,B,…",
    help="What is made small: latency, throughput, energy, memory, communication, device-memory, device-energy. "
    "Default: throughput,device-memory,device-energy.",
)
@click.option("--generations", metavar="N", type=int, help="How long the search is. Default: 150.")
@click.option("--population", metavar="N", type=int, help="Plans of a generation. Default: 100.")
@click.option("--seed", metavar="N", type=int, help="Of the random numbers: the same seed, the same front. Default: 0.")
@wire_option
@executor_option
@cost_options
@output_option(metavar="DIR", required=True, help="The directory to write.")
@handed(request=Request)
def command(
    request: Request,
    objectives: str | None,
    generations: int | None,
    population: int | None,
    seed: int | None,
    executor: str | None,
    as_json: bool,
    output: Path,
) -> None:
    """Search for the plans of which none is better than another in everything.

    Writes front.json, front.csv, a picture (front.svg) and each plan, which 'dicompiler compile --plan' takes. Ctrl-C
    ends the search with the front so far.
    """
    from dicompiler.cli.progress import progress
    from dicompiler.driver.executors import open_executor
    from dicompiler.driver.explore import explore, spec
    from dicompiler.driver.prepare import DEFAULT_COST, DEFAULT_TARGET

    platform = request.platform
    if platform is None:
        raise UsageError("explore: no platform: give a TOML file or a built-in one such as rpi4x4 (--platform)")
    check_parent(output)
    assert request.strategy is not None
    numbers = {"generations": generations, "population": population, "seed": seed}
    given: dict[str, str | tuple[str, ...]] = {name: str(n) for name, n in numbers.items() if n is not None}
    if objectives is not None:
        given["objectives"] = tuple(objectives.split(","))
    with open_executor(executor) as spread, progress("reading the model") as tell:
        search, cost = spec(request.strategy, given), DEFAULT_COST if request.cost is None else request.cost
        target = request.target or DEFAULT_TARGET
        wanted = (cost, output, request.shape, tell, request.wire, target)
        front = explore(request.model, platform, search, *wanted, state=request.state, executor=spread)
    _show(front, platform, output, as_json)


def _show(front: Front, platform: str, output: Path, as_json: bool) -> None:
    """The points, or as JSON what front.json holds and where it is."""
    from dicompiler.base.schema import load_json
    from dicompiler.cli.tables import show, show_json, wrapped

    if front.interrupted:
        click.echo("dicompiler: interrupted: this is the front so far", err=True)
    document = load_json(output / "front.json")
    if as_json:
        show_json({**document, "front": str(output)})
        return
    units = document["objectives"]
    rows = [
        (str(i), str(point["devices"]), *(_number(point[name], unit) for name, unit in units.items()))
        for i, point in enumerate(document["points"])
    ]
    headers = ("plan", "devices", *units)
    show(headers, rows[:SHOWN], right=range(len(headers)))
    if len(rows) > SHOWN:
        click.echo(f"… and {len(rows) - SHOWN} more")
    searched = f"{front.evaluations} plans looked at on {platform}, {len(rows)} kept; the numbers are {_level(front)}"
    click.echo(f"\n{wrapped(searched)}\nwritten: {output}")


def _level(front: Front) -> str:
    return "each plan's own evaluation" if front.level == "measured" else "those of the search's fast model"


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1000 * value:.4g} ms"
    if unit == "bytes":
        return f"{value / 2**20:.4g} MiB"
    return f"{value:.4g} {unit}"
