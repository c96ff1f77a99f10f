"""`dicompiler plan`: decides only: a strategy's plan, written as a file that compile and opt take."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.building import Building, building_options, plugins_of, print_paths
from dicompiler.cli.options import (
    Request,
    check_file,
    cost_options,
    handed,
    objective_option,
    output_option,
    problem_options,
    strategy_option,
    survive_option,
    wire_options,
)


@click.command("plan")
@problem_options
@strategy_option
@objective_option
@survive_option
@wire_options
@cost_options
@building_options
@output_option(metavar="PLAN.json", required=True, help="Where to write the plan.")
@handed(request=Request, building=Building)
def command(request: Request, building: Building, as_json: bool, output: Path) -> None:
    """Decide only: write the plan that a strategy makes.

    Prints what the plan is predicted to cost.
    """
    from dicompiler.cli.files import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.results import show_planned
    from dicompiler.ir.plan import dumps

    check_file(output)
    parts = plugins_of(strategy=request.strategy, cost=request.cost)
    rule = building.rule([output], request, parts.values())
    with progress(f"planning {request.model.name}"):
        result = request.compile(**parts)
    assert result.plan is not None
    write_text(output, dumps(result.plan))
    rule.write()
    if building.print_outputs and not as_json:
        print_paths([output])
    else:
        show_planned(result, output, as_json)
