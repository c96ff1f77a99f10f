"""`dicompiler simulate`: plays a plan's program on a platform, without any device: times, waits, and a trace."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.options import (
    PATH,
    check_file,
    cost_option,
    json_option,
    model_argument,
    platform_option,
    shape_option,
)


@click.command("simulate")
@model_argument
@platform_option
@click.option("--plan", metavar="PLAN.json", type=PATH, help="The plan; without it the strategy's.")
@click.option("--strategy", metavar="'NAME{…}'", help="Who decides where there is no plan. Default: auto.")
@click.option("--frames", metavar="N", type=click.IntRange(min=1), default=1, help="Length of the stream. Default: 1.")
@click.option(
    "--in-flight",
    metavar="N",
    type=click.IntRange(min=1, max=1024),
    help="Frames that are on their way at once. Default: twice the number of devices.",
)
@click.option("--trace", metavar="T.json", type=PATH, help="Writes the timeline for Perfetto (ui.perfetto.dev).")
@cost_option
@shape_option
@json_option
def command(
    model: Path,
    platform: str | None,
    plan: Path | None,
    strategy: str | None,
    frames: int,
    in_flight: int | None,
    trace: Path | None,
    cost: str | None,
    shape: tuple[str, ...],
    as_json: bool,
) -> None:
    """Play a plan on a platform, step by step as its devices would, and show who computes, sends and waits.

    Predicted times rest on the platform's figures and the cost model.
    """
    from dicompiler.cli.files import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.results import show_simulation
    from dicompiler.cost.trace import dumps
    from dicompiler.driver.compiler import DEFAULT_COST, compile
    from dicompiler.ir.plan import load_given
    from dicompiler.plugin.registry import registry
    from dicompiler.search.problem import play

    check_file(trace)
    costs = registry().make("cost_models", cost or DEFAULT_COST)
    given = None if plan is None else load_given(plan)
    with progress(f"planning {model.name}") as tell:
        result = compile(model, platform=platform, plan=given, strategy=strategy, cost=costs, shape=shape)
        assert result.program is not None
        devices = [device.device for device in result.program.devices]
        tell(f"playing {frames} frame{'' if frames == 1 else 's'}")
        simulation = play(result, costs, frames, in_flight or 2 * len(devices))
    if trace is not None:
        write_text(trace, dumps(simulation, devices))
    show_simulation(result, simulation, as_json)
