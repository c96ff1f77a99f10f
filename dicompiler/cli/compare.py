"""`dicompiler compare`: all strategies in one table, under one cost model, evaluated by the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dicompiler.cli.options import (
    Request,
    cost_options,
    executor_option,
    handed,
    objective_option,
    problem_options,
    survive_option,
    wire_option,
)

if TYPE_CHECKING:
    from dicompiler.search.strategy import Strategy

# Those that need no file and no choice of the user's.
DEFAULT = "single,pipeline,modnn,dp,gradient,genetic,cpsat,auto"


@click.command("compare")
@problem_options
@click.option("--strategies", metavar="A,B{…},C", help=f"Which, separated by commas. Default: {DEFAULT}.")
@click.option("--why", "reasons", is_flag=True, help="Say of what stays whole why, and when a split would pay.")
@objective_option
@survive_option
@wire_option
@executor_option
@cost_options
@handed(request=Request)
def command(request: Request, strategies: str | None, reasons: bool, executor: str | None, as_json: bool) -> None:
    """Compare strategies: what their plans come to, how long they searched, what holds the best back.

    Times are simulated, for the same cost model; below the table stands a bound that no plan can beat. With --survive
    each has plans for losses, and the longest frame of them stands beside.
    """
    from dicompiler.cli.progress import progress
    from dicompiler.cli.results import comparison_document, show_comparison
    from dicompiler.cli.tables import show_json
    from dicompiler.cli.why import show_why, why_document
    from dicompiler.driver.compare import compare
    from dicompiler.driver.executors import open_executor
    from dicompiler.driver.prepare import DEFAULT_COST, DEFAULT_TARGET, load_problem
    from dicompiler.driver.why import why

    candidates = chosen(strategies or DEFAULT)
    cost, objective = request.cost or DEFAULT_COST, request.objective or "latency"
    target = request.target or DEFAULT_TARGET
    problem = load_problem(
        request.model, request.platform, request.shape, objective, cost, request.wire, target, request.state
    )
    with open_executor(executor) as spread, progress("single") as tell:
        comparison = compare(replace(problem, executor=spread), candidates, tell, request.survive or 0)
        said = why(comparison) if reasons else None
    if as_json:
        show_json(comparison_document(comparison) | ({} if said is None else {"why": why_document(said)}))
        return
    show_comparison(comparison)
    if said is not None:
        show_why(said)


def chosen(text: str) -> dict[str, Strategy]:
    """`dp,cpsat{…}` → the strategies by their specs. UsageError for unknown names."""
    from dicompiler.base.specs import parse_pipeline
    from dicompiler.plugin.registry import registry

    return {str(spec): registry().make("strategies", spec) for spec in parse_pipeline(text)}
