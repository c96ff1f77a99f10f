"""`dicompiler simulate`: simulate a plan without devices, and print times or write a trace.

The trace is for Perfetto (https://ui.perfetto.dev) or chrome://tracing. Each device has three tracks: computing,
sending and receiving.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cli.completion import complete_names
from dicompiler.cli.options import (
    PATH,
    SLOW_HELP,
    CompileRequest,
    check_output_file,
    cost_options,
    frames_option,
    in_flight_option,
    plan_option,
    problem_options,
    slow_option,
    takes_compile_request,
    tolerate_failures_option,
    wire_options,
)

if TYPE_CHECKING:
    from dicompiler.cost.failure_timeline import Outage, StreamInterval
    from dicompiler.cost.simulator import SimulationResult, Span
    from dicompiler.cost.speed_changes import SpeedChange
    from dicompiler.driver.compile_result import CompileResult
    from dicompiler.ir.plan import Plan
    from dicompiler.ir.platform import Platform
    from dicompiler.measure.adapt import SpeedTrial


@click.command("simulate")
@problem_options
@plan_option(help="Simulate this plan. Default: the strategy's plan.")
@click.option(
    "--strategy",
    shell_complete=complete_names("strategies"),
    metavar="'NAME{…}'",
    help="Use this strategy if there is no --plan. Default: auto.",
)
@frames_option(help="Simulate N frames. Default: 1.")
@in_flight_option
@tolerate_failures_option
@click.option(
    "--fail",
    "failures",
    metavar="DEVICE@2.5s[-6s]",
    multiple=True,
    help="Let this device fail at the first time, and return at the second time, if there is one. The stream continues "
    "with the failure plans of --plan or --tolerate-failures. Without --plan, the default of --tolerate-failures is "
    "the number of devices that fail. Can be repeated.",
)
@slow_option(help=SLOW_HELP + "Prints the time between frames. Can be repeated.")
@click.option(
    "--adapt",
    is_flag=True,
    help="With --slow: search for another plan and swap to it when boards or links change their speed.",
)
@click.option("--trace", metavar="T.json", type=PATH, help="Write the timeline to this file, for ui.perfetto.dev.")
@wire_options
@cost_options
@takes_compile_request
def command(
    request: CompileRequest,
    frames: int,
    in_flight: int,
    failures: tuple[str, ...],
    changes: Sequence[SpeedChange],
    adapt: bool,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Simulate a plan on a platform, and show when each device computes, sends and waits.

    Predicted times depend on the cost model, and on the rates and links of the platform.

    Example: dicompiler simulate model.onnx --platform rpi4x4 --frames 100 --fail pi02@2.5s-6s
    """
    from dicompiler.cli.compile_output import show_simulation
    from dicompiler.cli.file_io import write_text
    from dicompiler.cli.progress import progress
    from dicompiler.cli.run_output import show_periods
    from dicompiler.cost.failure_timeline import parse_outage
    from dicompiler.target.run_records import default_in_flight

    _refuse_artifact(request.model)
    check_output_file(trace)
    outages = [parse_outage(text) for text in failures]
    if outages and changes:
        raise UsageError("simulate: --slow and --fail cannot be combined: omit one of them")
    if adapt and (not changes or trace is not None):
        raise UsageError("simulate: --adapt needs --slow and excludes --trace: change these options")
    with progress(f"planning {request.model.name}") as tell:
        result = _compile_plan(request, outages)
        assert result.program is not None
        devices = [device.device for device in result.program.devices]
        tell(f"simulating {frames} frame{'' if frames == 1 else 's'}")
        max_in_flight = in_flight or default_in_flight(len(devices))
        if adapt:
            _show_adaptation(_simulate_session(request, result, changes, frames, max_in_flight), as_json)
            return
        stream = _Stream(frames, max_in_flight, tuple(changes), tuple(outages), has_spans=trace is not None)
        simulation, intervals = stream.simulate(result)
    if trace is not None:
        write_text(trace, format_trace(simulation, devices))
    show_simulation(result, simulation, as_json, intervals, max_in_flight)
    if changes and not as_json:
        finished_s = sorted(end for _, end in simulation.frames)
        click.echo()
        show_periods(finished_s, finished_s[-1])


def _refuse_artifact(directory: Path) -> None:
    if (directory / "artifact.json").is_file():
        raise DicompilerError(
            f"{directory}: it is an artifact of 'dicompiler compile': simulate its plan with 'dicompiler simulate "
            f"{directory}/reference/model.onnx --platform {directory}/platform.toml --plan {directory}/plan.json'"
        )


def _compile_plan(request: CompileRequest, outages: Sequence[Outage]) -> CompileResult:
    """Return the compiled plan, by default with plans for the failures in `outages`."""
    # `compile` or `plan` already warned of this plan, and with the objective that the plan was made for.
    more_options: dict[str, Any] = {} if request.options.plan is None else {"allow_worse": True}
    # The default of --tolerate-failures is the integer 0. A value from the user is a string, which is not replaced.
    if outages and request.options.plan is None and request.options.tolerate_failures == 0:
        more_options["tolerate_failures"] = len({outage.device for outage in outages})
    return request.compile(**more_options)


@dataclass(frozen=True)
class _Stream:
    """A stream of frames on devices that may fail or change their speed.

    Attributes:
        frames: Number of frames.
        in_flight: Number of frames that are computed at the same time.
        changes: Changes of the speeds of devices and links.
        outages: Periods in which devices fail.
        has_spans: Whether the result contains the periods in which devices compute, send and wait.
    """

    frames: int
    in_flight: int
    changes: tuple[SpeedChange, ...]
    outages: tuple[Outage, ...]
    has_spans: bool

    def simulate(self, result: CompileResult) -> tuple[SimulationResult, Sequence[StreamInterval]]:
        """Return the simulated stream, and its intervals between failures; these are empty if no device fails."""
        from dicompiler.cost.speed_changes import list_link_speeds, list_speeds
        from dicompiler.search.failure_cases import simulate_failures

        problem, plan, program = result.problem, result.plan, result.program
        assert problem is not None and plan is not None and program is not None
        simulation = problem.simulate_compilation(
            result,
            self.frames,
            self.in_flight,
            self.has_spans,
            list_speeds(self.changes, [device.device for device in program.devices]),
            list_link_speeds(self.changes, problem.platform),
        )
        if not self.outages:
            return simulation, ()
        intervals = simulate_failures(problem, plan, self.outages, self.frames, self.in_flight, self.has_spans)
        return _with_frames_of(intervals, simulation), intervals


def _show_adaptation(trial: SpeedTrial, as_json: bool) -> None:
    from dicompiler.cli.run_output import show_trial
    from dicompiler.cli.table import print_entries
    from dicompiler.measure.simulate_adaptation import SWAP_S

    show_trial(trial, trial.finished_s[-1], as_json)
    if trial.adaptations and not as_json:
        print_entries([f"simulated: a new plan computes frames {SWAP_S:g} s after its search began"])


def _with_frames_of(intervals: Sequence[StreamInterval], simulation: SimulationResult) -> SimulationResult:
    """Return a simulation with the frames and spans of a stream in which devices fail."""
    finished = sorted(frame for interval in intervals for frame in interval.frames)
    return replace(
        simulation,
        frames=tuple((start, end) for _, start, end in finished),
        spans=tuple(span for interval in intervals for span in interval.spans),
        queued_s=(),
    )


def _simulate_session(
    request: CompileRequest, first: CompileResult, changes: Sequence[SpeedChange], frames: int, in_flight: int
) -> SpeedTrial:
    """Simulate a stream that starts with the plan `first` and changes plans as `run --adapt` does."""
    from dicompiler.measure.adapt import AdaptOptions
    from dicompiler.measure.simulate_adaptation import simulate_adaptation
    from dicompiler.plugin.registry import registry

    options = AdaptOptions()
    strategy = registry().resolve("strategies", options.strategy)

    def plan_for(platform: Platform, plan: Plan | None) -> CompileResult:
        chosen = strategy if plan is None else None
        return request.compile(platform=platform, plan=plan, strategy=chosen, allow_worse=True)

    return simulate_adaptation(first, plan_for, changes, frames, in_flight, options)


_TRACKS = ("computing", "sending", "receiving")


def format_trace(simulation: SimulationResult, devices: Sequence[str]) -> str:
    events: list[dict[str, Any]] = []
    for i, device in enumerate(devices):
        events.append({"name": "process_name", "ph": "M", "pid": i, "args": {"name": device}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": i, "args": {"sort_index": i}})
        for t, track in enumerate(_TRACKS):
            events.append({"name": "thread_name", "ph": "M", "pid": i, "tid": t, "args": {"name": track}})
    place = {device: i for i, device in enumerate(devices)}
    for span in simulation.spans:
        if span.kind == "message":
            events.append(_make_event(span, place[span.device], 1, f"{span.name} to {span.peer}"))
            events.append(_make_event(span, place[span.peer], 2, f"{span.name} from {span.device}"))
        elif span.kind == "handle":
            events.append(_make_event(span, place[span.device], 0, f"handles {span.name}"))
        elif span.kind == "compute":
            events.append(_make_event(span, place[span.device], 0, span.name))
        else:
            events.append(_make_event(span, place[span.device], 0, f"waits for {span.peer or span.name}"))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=0) + "\n"


def _make_event(span: Span, process: int, track: int, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "cat": span.kind,
        "ph": "X",
        "ts": round(1e6 * span.start, 3),
        "dur": round(1e6 * span.seconds, 3),
        "pid": process,
        "tid": track,
        "args": {"frame": span.frame},
    }
