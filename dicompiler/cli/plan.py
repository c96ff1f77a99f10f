"""`dicompiler plan`: decides only: a strategy's plan, written as a file that compile and opt take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dicompiler.cli.building import building, building_options, made, print_paths
from dicompiler.cli.options import (
    PATH,
    check_file,
    cost_option,
    json_option,
    model_argument,
    objective_option,
    platform_option,
    shape_option,
    strategy_option,
)


@click.command("plan")
@model_argument
@platform_option
@strategy_option
@objective_option
@cost_option
@shape_option
@json_option
@building_options
@click.option("-o", "--output", metavar="PLAN.json", type=PATH, required=True, help="Where to write the plan.")
def command(
    model: Path,
    platform: str | None,
    strategy: str | None,
    objective: str | None,
    cost: str | None,
    shape: tuple[str, ...],
    as_json: bool,
    depfile: Path | None,
    depfile_target: str | None,
    print_outputs: bool,
    output: Path,
) -> None:
    """Decide only: write the plan that a strategy makes.

    Prints what the plan is predicted to cost.
    """
    from dicompiler.cli.files import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.results import show_planned
    from dicompiler.driver.compiler import compile
    from dicompiler.ir.plan import dumps

    check_file(output)
    parts = made(strategy=strategy, cost=cost)
    told = building(depfile, depfile_target, [output], model, platform, parts=parts.values())
    given: dict[str, Any] = {
        **parts,
        "platform": platform,
        "objective": objective,
        "shape": shape or None,
    }
    with progress(f"planning {model.name}"):
        result = compile(model, **{name: value for name, value in given.items() if value is not None})
    assert result.plan is not None
    write_text(output, dumps(result.plan))
    told.write()
    if print_outputs and not as_json:
        print_paths([output])
    else:
        show_planned(result, output, as_json)
