"""`dicompiler compare`: all strategies in one table, with one cost model and simulator."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from dicompiler.cli.options import (
    CompileRequest,
    cost_options,
    executor_option,
    objective_option,
    problem_options,
    takes_compile_request,
    tolerate_failures_option,
    wire_dtype_option,
)

if TYPE_CHECKING:
    from dicompiler.analysis.explain import Explanation
    from dicompiler.search.strategy import Strategy

# The strategies that need no file and no required option.
DEFAULT_STRATEGIES = "single,pipeline,modnn,dp,gradient,genetic,cpsat,auto"

MAX_EXPLAINED_LAYERS = 20


@click.command("compare")
@problem_options
@click.option(
    "--strategies",
    metavar="A,B{…},C",
    help=f"Compare these strategies, separated by commas. Default: {DEFAULT_STRATEGIES}.",
)
@click.option(
    "--explain",
    "with_explanation",
    is_flag=True,
    help="Explain why layers are not split, and from which bandwidth on a split would pay off.",
)
@objective_option
@tolerate_failures_option
@wire_dtype_option
@executor_option
@cost_options
@takes_compile_request
def command(
    request: CompileRequest, strategies: str | None, with_explanation: bool, executor: str | None, as_json: bool
) -> None:
    """Compare strategies: predicted metrics, search time, and the bottleneck of the best plan.

    All times are simulated with the same cost model. The lower bound below the table holds for every plan. With
    --tolerate-failures, each strategy also makes failure plans, and the table shows the longest latency after a
    failure.

    Example: dicompiler compare model.onnx --platform rpi4x4 --strategies single,modnn,dp
    """
    from dicompiler.analysis.compare import compare
    from dicompiler.analysis.explain import explain, explain_splits
    from dicompiler.cli.compile_output import comparison_document, show_comparison
    from dicompiler.cli.progress import progress
    from dicompiler.cli.table import print_json
    from dicompiler.driver.compile_options import format_shapes
    from dicompiler.driver.executors import open_executor
    from dicompiler.driver.prepare import load_problem

    candidates = parse_strategies(strategies or DEFAULT_STRATEGIES)
    options = request.options
    problem = load_problem(
        request.model,
        options.platform,
        format_shapes(options.shape),
        options.objective,
        options.cost,
        options.wire_dtype,
        options.target,
        options.state,
        options.engine,
    )
    with open_executor(executor) as workers, progress("single") as tell:
        comparison = compare(replace(problem, executor=workers), candidates, tell, options.tolerate_failures)
        explanation = explain(comparison) if with_explanation else None
        needs_hint = not as_json and comparison.best is not None
        splits = explain_splits(comparison) if needs_hint and explanation is None else ()
    if as_json:
        more = {} if explanation is None else {"explanation": asdict(explanation)}
        print_json(comparison_document(comparison) | more)
        return
    show_comparison(comparison, splits if explanation is None else explanation.splits)
    if explanation is not None:
        _show_explanation(explanation)


def _show_explanation(explanation: Explanation) -> None:
    from dicompiler.analysis.explain import break_even_text
    from dicompiler.base.units import format_bytes, format_seconds
    from dicompiler.cli.table import print_table

    if explanation.splits:
        click.echo("\nno split is faster than one device; one is 3 % faster from this bandwidth on\n")
        lines = [
            (split.strategy, break_even_text(split.break_even_bandwidth, split.wire_dtypes))
            for split in explanation.splits
        ]
        print_table(("strategy", "pays off"), lines)
    click.echo("\nlayers that are not split, each considered on its own, largest saving first\n")
    layers = sorted(explanation.layers, key=lambda layer: -layer.saved_s)
    headers = ("layer", "operator", "reason", "saves", "sends", "pays off")
    rows = [
        (
            layer.layer,
            layer.operator,
            layer.reason,
            format_seconds(layer.saved_s) if layer.saved_s else "-",
            format_bytes(layer.sent_bytes) if layer.sent_bytes else "-",
            break_even_text(layer.break_even_bandwidth, layer.wire_dtypes) if layer.saved_s else "-",
        )
        for layer in layers[:MAX_EXPLAINED_LAYERS]
    ]
    print_table(headers, rows, right=(3, 4), wrap=2)
    if further := layers[MAX_EXPLAINED_LAYERS:]:
        most = format_seconds(further[0].saved_s)
        click.echo(f"… {len(further)} further rows, which save at most {most} each: use --json to see all")


def parse_strategies(text: str) -> dict[str, Strategy]:
    """Parse a text such as `dp,cpsat{…}` to strategies by spec; raise UsageError for unknown names."""
    from dicompiler.base.option_specs import parse_pipeline
    from dicompiler.plugin.registry import registry

    return {str(spec): registry().make("strategies", spec) for spec in parse_pipeline(text)}
