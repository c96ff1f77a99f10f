"""`dicompiler simulate`: simulate a plan without devices: times, waits, and a trace."""

from __future__ import annotations

from pathlib import Path

import click

from dicompiler.cli.options import (
    PATH,
    CompileRequest,
    check_output_file,
    cost_options,
    frames_option,
    in_flight_option,
    options_as,
    plan_option,
    problem_options,
    tolerate_failures_option,
    wire_options,
)


@click.command("simulate")
@problem_options
@plan_option(help="Simulate this plan. Default: the strategy's plan.")
@click.option("--strategy", metavar="'NAME{…}'", help="Use this strategy if there is no --plan. Default: auto.")
@frames_option(help="Simulate N frames. Default: 1.")
@in_flight_option
@tolerate_failures_option
@click.option(
    "--lose",
    metavar="DEVICE@2.5s[-6s]",
    multiple=True,
    help="A device is lost then (and is back then): plays what is left. Can be repeated; needs plans for that, from "
    "--plan or --survive (default: for as many as are given).",
)
@click.option("--trace", metavar="T.json", type=PATH, help="Write the timeline to this file, for ui.perfetto.dev.")
@wire_options
@cost_options
@options_as(request=CompileRequest)
def command(
    request: CompileRequest, frames: int, in_flight: int, lose: tuple[str, ...], trace: Path | None, as_json: bool
) -> None:
    """Simulate a plan on a platform, and show when each device computes, sends and waits.

    Predicted times depend on the platform's figures and the cost model.

    Example: dicompiler simulate model.onnx --platform rpi4x4 --frames 100 --fail pi02@2.5s-6s
    """
    from dataclasses import replace

    from dicompiler.cli.compile_output import show_simulation
    from dicompiler.cli.file_io import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cost.failure_timeline import parse_outage
    from dicompiler.cost.perfetto_trace import dumps
    from dicompiler.search.failure_cases import simulate_failures
    from dicompiler.target.run_records import default_in_flight

    check_output_file(trace)
    aways = [parse_outage(text) for text in lose]
    if aways and request.plan is None and request.tolerate_failures is None:
        request = replace(request, tolerate_failures=str(len({one.device for one in aways})))
    with progress(f"planning {request.model.name}") as tell:
        result = request.compile()
        assert result.program is not None and result.problem is not None and result.plan is not None
        devices = [device.device for device in result.program.devices]
        tell(f"playing {frames} frame{'' if frames == 1 else 's'}")
        at_once = in_flight or default_in_flight(len(devices))
        simulation = result.problem.simulate_compilation(result, frames, at_once, trace is not None)
        stretches = (
            simulate_failures(result.problem, result.plan, aways, frames, at_once, trace is not None) if aways else ()
        )
        if stretches:
            spans = tuple(span for one in stretches for span in one.spans)
            ended = sorted(frame for one in stretches for frame in one.frames)
            simulation = replace(
                simulation, frames=tuple((start, end) for _, start, end in ended), spans=spans, queued_s=()
            )
    if trace is not None:
        write_text(trace, dumps(simulation, devices))
    show_simulation(result, simulation, as_json, stretches, at_once)
