"""`dicompiler compile`: one model and one platform in, a directory of programs out."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.base.atomic_output import check_writable
from dicompiler.base.errors import UsageError
from dicompiler.cli.build_system_options import BuildSystemOptions, build_system_options, make_plugins, print_paths
from dicompiler.cli.options import (
    PATH,
    CompileRequest,
    cost_option,
    executor_option,
    json_option,
    objective_option,
    options_as,
    output_option,
    plan_option,
    problem_options,
    shape_options,
    strategy_option,
    target_option,
    tolerate_failures_option,
    wire_options,
)


@click.command("compile")
@problem_options
@strategy_option
@plan_option(help="A plan to carry out, instead of a strategy.")
@click.option(
    "--fit",
    is_flag=True,
    help="Find the fewest boards, or on one the coarsest tiles in turn, that fit RAM and flash: strategy fit.",
)
@objective_option
@tolerate_failures_option
@cost_option
@target_option(help="What to emit: see 'dicompiler list targets'. Default: sockets.")
@shape_options
@executor_option
@click.option("--calibrate", metavar="SAMPLES.npz", type=PATH, help="Samples of the inputs: quantises to int8 first.")
@wire_options
@json_option
@build_system_options
@output_option(metavar="DIR", required=True, help="The directory to write.")
@options_as(request=CompileRequest, building=BuildSystemOptions)
def command(
    request: CompileRequest,
    building: BuildSystemOptions,
    fit: bool,
    executor: str | None,
    calibrate: Path | None,
    as_json: bool,
    output: Path,
) -> None:
    """Compile a model into programs for the devices of a platform.

    Prints who computes what; 'dicompiler verify DIR' then proves that the programs compute what the model does.
    """
    from dicompiler.base.atomic_output import tracked_files
    from dicompiler.cli.compile_output import show_compilation
    from dicompiler.cli.progress import progress
    from dicompiler.driver.executors import open_executor
    from dicompiler.target.manifest import ARTIFACT_FILE

    strategy, plan = request.strategy, request.plan
    if strategy is not None and plan is not None:
        raise UsageError("compile: --strategy and --plan exclude each other: a plan needs no strategy")
    if fit and (strategy is not None or plan is not None):
        raise UsageError("compile: --fit decides itself: leave out --strategy and --plan, or take --strategy 'fit{…}'")
    check_writable(output)
    parts = make_plugins(strategy="fit" if fit else strategy, cost=request.cost, target=request.target)
    rule = building.depfile_rule([output / ARTIFACT_FILE], request, parts.values())
    with open_executor(executor) as spread, progress(f"compiling {request.model.name}"):
        result = request.compile(**parts, output=output, quantize_samples=calibrate, executor=spread)
    rule.write()
    if building.print_outputs and not as_json:
        print_paths(output / name for name in tracked_files(output))
    else:
        show_compilation(result, as_json)
