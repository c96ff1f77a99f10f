"""`dicompiler plan`: write the plan of a strategy to a file, for `compile` and `opt`."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.base.termination import signal_deferral
from dicompiler.cli.build_system_options import BuildSystemOptions, build_system_options, print_paths
from dicompiler.cli.options import (
    CompileRequest,
    allow_worse_option,
    check_output_file,
    complete_search_option,
    cost_options,
    make_plugins,
    objective_option,
    options_as,
    output_option,
    problem_options,
    strategy_option,
    takes_compile_request,
    tolerate_failures_option,
    wire_options,
)


@click.command("plan")
@problem_options
@strategy_option
@objective_option
@allow_worse_option
@complete_search_option
@tolerate_failures_option
@wire_options
@cost_options
@build_system_options
@output_option(metavar="PLAN.json", required=True, help="Write the plan to this file.")
@takes_compile_request
@options_as(building=BuildSystemOptions)
def command(request: CompileRequest, building: BuildSystemOptions, as_json: bool, output: Path) -> None:
    """Write the plan that a strategy makes, without compiling.

    Prints the predicted metrics of the plan.

    Example: dicompiler plan model.onnx --platform rpi4x4 --strategy dp -o plan.json
    """
    from dicompiler.cli.compile_output import show_plan
    from dicompiler.cli.file_io import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.ir.plan import plan_to_text

    check_output_file(output)
    parts = make_plugins(strategy=request.options.strategy, cost=request.options.cost)
    rule = building.depfile_rule([output], request, parts.values())
    with progress(f"planning {request.model.name}"):
        result = request.compile(**parts)
    assert result.plan is not None
    signal_deferral.is_commit_last = True
    write_text(output, plan_to_text(result.plan))
    rule.write()
    if building.print_outputs:
        print_paths([output])
    else:
        show_plan(result, output, as_json)
