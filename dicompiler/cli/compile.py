"""`dicompiler compile`: write the programs that run a model on the devices of a platform."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.base.atomic_output import check_writable
from dicompiler.base.errors import UsageError
from dicompiler.base.termination import signal_deferral
from dicompiler.cli.build_system_options import BuildSystemOptions, build_system_options, print_paths
from dicompiler.cli.options import (
    PATH,
    CompileRequest,
    allow_worse_option,
    complete_search_option,
    cost_option,
    engine_options,
    executor_option,
    json_option,
    make_plugins,
    objective_option,
    options_as,
    output_option,
    plan_option,
    problem_options,
    refuse_options,
    shape_options,
    strategy_option,
    takes_compile_request,
    target_option,
    tolerate_failures_option,
    wire_options,
)


@click.command("compile")
@problem_options
@strategy_option
@plan_option(help="Use this plan instead of a strategy.")
@click.option(
    "--fit",
    is_flag=True,
    help="Use strategy fit: find the fewest boards, or the largest tiles on one board, that fit RAM and flash.",
)
@objective_option
@allow_worse_option
@complete_search_option
@tolerate_failures_option
@cost_option
@engine_options
@target_option(help="Set the target (see 'dicompiler list targets'). Default: sockets.")
@shape_options
@executor_option
@click.option(
    "--quantize-samples",
    metavar="SAMPLES.npz",
    type=PATH,
    help="Quantise the model to int8 before it is split, with these samples of the inputs.",
)
@wire_options
@json_option
@build_system_options
@output_option(metavar="DIR", required=True, help="Write the artifact to this directory.")
@takes_compile_request
@options_as(building=BuildSystemOptions)
def command(
    request: CompileRequest,
    building: BuildSystemOptions,
    fit: bool,
    executor: str | None,
    as_json: bool,
    output: Path,
) -> None:
    """Compile a model into programs for the devices of a platform.

    Prints the number of segments (ONNX submodels) and transfers of each device, the bytes of its weights, and the
    predicted times. Use 'dicompiler verify DIR' to check that the programs compute the model's outputs.

    Example: dicompiler compile model.onnx --platform rpi4x4 --strategy dp -o build
    """
    from dicompiler.base.atomic_output import tracked_files
    from dicompiler.cli.compile_output import show_compilation
    from dicompiler.cli.progress import progress
    from dicompiler.driver.executors import open_executor
    from dicompiler.target.manifest import ARTIFACT_FILE

    options = request.options
    strategy, plan = options.strategy, options.plan
    if strategy is not None and plan is not None:
        raise UsageError("compile: --strategy and --plan exclude each other: remove one")
    if fit and (strategy is not None or plan is not None):
        raise UsageError("compile: --fit is a strategy: remove --strategy and --plan, or use --strategy 'fit{…}'")
    if plan is not None:
        refuse_options("a plan needs no search", "require_complete_search", "executor")
    check_writable(output)
    plugins = make_plugins(strategy="fit" if fit else strategy, cost=options.cost, target=options.target)
    depfile_rule = building.depfile_rule([output / ARTIFACT_FILE], request, plugins.values())
    signal_deferral.is_commit_last = True
    with open_executor(executor) as workers, progress(f"compiling {request.model.name}"):
        result = request.compile(**plugins, output=output, executor=workers)
    depfile_rule.write()
    if building.print_outputs:
        print_paths(output / name for name in tracked_files(output))
    else:
        show_compilation(result, as_json)
