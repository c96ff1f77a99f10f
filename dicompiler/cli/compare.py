"""`dicompiler compare`: all strategies in one table, with one cost model and simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dicompiler.cli.options import (
    CompileRequest,
    cost_options,
    executor_option,
    objective_option,
    options_as,
    problem_options,
    tolerate_failures_option,
    wire_option,
)

if TYPE_CHECKING:
    from dicompiler.search.strategy import Strategy

# The strategies that need no file and no required option.
DEFAULT_STRATEGIES = "single,pipeline,modnn,dp,gradient,genetic,cpsat,auto"


@click.command("compare")
@problem_options
@click.option("--strategies", metavar="A,B{…},C", help=f"Compare these, separated by commas. Default: {DEFAULT_STRATEGIES}.")
@click.option("--why", "reasons", is_flag=True, help="Explain why layers are not split, and from which bandwidth on a split would pay off.")
@objective_option
@tolerate_failures_option
@wire_option
@executor_option
@cost_options
@options_as(request=CompileRequest)
def command(
    request: CompileRequest, strategies: str | None, reasons: bool, executor: str | None, as_json: bool
) -> None:
    """Compare strategies: predicted metrics, search time, and the bottleneck of the best plan.

    All times are simulated with the same cost model. The lower bound below the table holds for every plan. With
    --tolerate-failures, each strategy also makes failure plans, and the table shows the longest latency after a failure.

    Example: dicompiler compare model.onnx --platform rpi4x4 --strategies single,modnn,dp
    """
    from dicompiler.analysis.compare import compare
    from dicompiler.analysis.explain import explain
    from dicompiler.cli.compile_output import comparison_document, show_comparison
    from dicompiler.cli.explain_output import explanation_document, show_explanation
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json
    from dicompiler.driver.compile_options import DEFAULT_COST_MODEL, DEFAULT_TARGET
    from dicompiler.driver.executors import open_executor
    from dicompiler.driver.prepare import load_problem

    candidates = parse_strategies(strategies or DEFAULT_STRATEGIES)
    cost, objective = request.cost or DEFAULT_COST_MODEL, request.objective or "latency"
    target = request.target or DEFAULT_TARGET
    problem = load_problem(
        request.model, request.platform, request.shape, objective, cost, request.wire_dtype, target, request.state
    )
    with open_executor(executor) as spread, progress("single") as tell:
        comparison = compare(replace(problem, executor=spread), candidates, tell, request.tolerate_failures or 0)
        said = explain(comparison) if reasons else None
    if as_json:
        print_json(comparison_document(comparison) | ({} if said is None else {"why": explanation_document(said)}))
        return
    show_comparison(comparison)
    if said is not None:
        show_explanation(said)


def parse_strategies(text: str) -> dict[str, Strategy]:
    """Return the strategies of a text such as `dp,cpsat{…}`, by their specs; raise UsageError for unknown names."""
    from dicompiler.base.option_specs import parse_pipeline
    from dicompiler.plugin.registry import registry

    return {str(spec): registry().make("strategies", spec) for spec in parse_pipeline(text)}
