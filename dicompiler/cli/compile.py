"""`dicompiler compile`: one model and one platform in, a directory of programs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dicompiler.base.errors import UsageError
from dicompiler.cli.building import building, building_options, made, print_paths
from dicompiler.cli.options import (
    PATH,
    check_parent,
    cost_option,
    json_option,
    model_argument,
    objective_option,
    platform_option,
    shape_option,
    strategy_option,
)


@click.command("compile")
@model_argument
@platform_option
@strategy_option
@click.option("--plan", metavar="PLAN.json", type=PATH, help="A plan to carry out, instead of a strategy.")
@click.option(
    "--fit",
    is_flag=True,
    help="Find the fewest boards, or on one the coarsest tiles in turn, that fit RAM and flash: strategy fit.",
)
@objective_option
@cost_option
@click.option("--target", metavar="'NAME{…}'", help="What to emit: see 'dicompiler list targets'. Default: sockets.")
@shape_option
@click.option("--calibrate", metavar="SAMPLES.npz", type=PATH, help="Samples of the inputs: quantises to int8 first.")
@json_option
@building_options
@click.option("-o", "--output", metavar="DIR", type=PATH, required=True, help="The directory to write.")
def command(
    model: Path,
    platform: str | None,
    strategy: str | None,
    plan: Path | None,
    fit: bool,
    objective: str | None,
    cost: str | None,
    target: str | None,
    shape: tuple[str, ...],
    calibrate: Path | None,
    as_json: bool,
    depfile: Path | None,
    depfile_target: str | None,
    print_outputs: bool,
    output: Path,
) -> None:
    """Compile a model into programs for the devices of a platform.

    Prints who computes what; 'dicompiler verify DIR' then proves that the programs compute what the model does.
    """
    from dicompiler.base.atomic import listed
    from dicompiler.cli.progress import progress
    from dicompiler.cli.results import show_compiled
    from dicompiler.driver.compiler import compile
    from dicompiler.ir.plan import load_given
    from dicompiler.target.manifest import MANIFEST

    if strategy is not None and plan is not None:
        raise UsageError("compile: --strategy and --plan exclude each other: a plan needs no strategy")
    if fit and (strategy is not None or plan is not None):
        raise UsageError("compile: --fit decides itself: leave out --strategy and --plan, or take --strategy 'fit{…}'")
    check_parent(output)
    parts = made(strategy="fit" if fit else strategy, cost=cost, target=target)
    told = building(depfile, depfile_target, [output / MANIFEST], model, platform, plan, parts.values())
    given: dict[str, Any] = {
        **parts,
        "platform": platform,
        "plan": None if plan is None else load_given(plan),
        "objective": objective,
        "shape": shape or None,
        "calibrate": calibrate,
    }
    with progress(f"compiling {model.name}"):
        result = compile(model, output=output, **{name: value for name, value in given.items() if value is not None})
    told.write()
    if print_outputs and not as_json:
        print_paths(output / name for name in listed(output))
    else:
        show_compiled(result, as_json)
