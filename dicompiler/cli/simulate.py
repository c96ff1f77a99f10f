"""`dicompiler simulate`: plays a plan's program on a platform, without any device: times, waits, and a trace."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.options import (
    PATH,
    Request,
    check_file,
    cost_options,
    frames_option,
    handed,
    in_flight_option,
    plan_option,
    problem_options,
    survive_option,
    wire_options,
)


@click.command("simulate")
@problem_options
@plan_option(help="The plan; without it the strategy's.")
@click.option("--strategy", metavar="'NAME{…}'", help="Who decides where there is no plan. Default: auto.")
@frames_option(help="Length of the stream. Default: 1.")
@in_flight_option
@survive_option
@click.option(
    "--lose",
    metavar="DEVICE@2.5s[-6s]",
    multiple=True,
    help="A device is lost then (and is back then): plays what is left. Can be repeated; needs plans for that, from "
    "--plan or --survive (default: for as many as are given).",
)
@click.option("--trace", metavar="T.json", type=PATH, help="Writes the timeline for Perfetto (ui.perfetto.dev).")
@wire_options
@cost_options
@handed(request=Request)
def command(
    request: Request, frames: int, in_flight: int, lose: tuple[str, ...], trace: Path | None, as_json: bool
) -> None:
    """Play a plan on a platform, step by step as its devices would, and show who computes, sends and waits.

    Predicted times rest on the platform's figures and the cost model.
    """
    from dataclasses import replace

    from dicompiler.cli.files import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.results import show_simulation
    from dicompiler.cost.losses import away_of
    from dicompiler.cost.trace import dumps
    from dicompiler.search.losses import played_losses
    from dicompiler.target.records import flying

    check_file(trace)
    aways = [away_of(text) for text in lose]
    if aways and request.plan is None and request.survive is None:
        request = replace(request, survive=str(len({one.device for one in aways})))
    with progress(f"planning {request.model.name}") as tell:
        result = request.compile()
        assert result.program is not None and result.problem is not None and result.plan is not None
        devices = [device.device for device in result.program.devices]
        tell(f"playing {frames} frame{'' if frames == 1 else 's'}")
        at_once = in_flight or flying(len(devices))
        simulation = result.problem.played(result, frames, at_once, trace is not None)
        stretches = (
            played_losses(result.problem, result.plan, aways, frames, at_once, trace is not None) if aways else ()
        )
        if stretches:
            spans = tuple(span for one in stretches for span in one.spans)
            ended = sorted(frame for one in stretches for frame in one.frames)
            simulation = replace(
                simulation, frames=tuple((start, end) for _, start, end in ended), spans=spans, waited=()
            )
    if trace is not None:
        write_text(trace, dumps(simulation, devices))
    show_simulation(result, simulation, as_json, stretches, at_once)
