"""Emulation: run an artifact on this host at the speed of the boards of its platform.

artifact + Platform ──emulate──► EmulationResult: measurements and predictions

Links are rate-limited, and each call of a segment is delayed until it has taken as long as on its board. The target's
own runtime does the rest, at the speed of this host. The prediction uses this speed too, and it assumes that the
boards' runtimes share the processors of this host. If these are too few, everything can run slower than on the boards
by a factor (`dilation`). Reported times are those of the boards all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.analysis.prediction_error import (
    ExpectedTiming,
    SegmentSeconds,
    available_processors,
    on_emulation_host,
    predict_timing,
    segment_seconds,
    typical_frame_s,
    with_segment_seconds,
)
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.units import format_seconds
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.driver.artifact import check_frame_count, reopen_artifact, run_opened
from dicompiler.driver.prepare import resolve_platform
from dicompiler.driver.run_log import frames_in_flight
from dicompiler.emulation.boards import measure_runtime_costs, open_boards, options_on_boards
from dicompiler.emulation.segment_timing import measure_segments
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.target.run_records import RunOptions, RunResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("dicompiler")

MAX_LOAD_SHARE = 0.8
"""Maximum share of this host's processors that computing may need. With more, emulated boards delay each other."""
MAX_COMPUTE_SLOWDOWN = 0.05
"""A larger share by which computing was slower than on the boards is reported."""
NOT_EMULATED = (
    "caches and memory of a board, changes of its clock frequency, other traffic; the runtime itself runs as fast as "
    "here"
)


def describe_limits(dilation: float) -> str:
    """Return the effects that an emulation does not show, as text."""
    return NOT_EMULATED if dilation == 1 else f"{NOT_EMULATED}, in time that is {dilation:g} times slower"


@dataclass(frozen=True)
class EmulationResult:
    """Result of an emulated run. All times are those of the boards, without the dilation.

    Attributes:
        result: Outputs and measurements.
        timed_unit: Description of the timed unit: a frame, or each of several frames in flight.
        frame_s: Measured seconds of this unit.
        predicted_s: Predicted seconds.
        simulated_s: Simulated seconds with the segment times that the boards had in the emulation.
        segments_s: Seconds of each call of a segment on its board.
        compute_slowdown: Share by which computing took longer than on the boards, because this host was busy.
        expected: The whole prediction.
        platform: The emulated platform.
        runtime: Costs of the target's runtime on this host, see `measure_runtime_costs`.
        dilation: Factor by which everything ran slower than on the boards.
    """

    result: RunResult
    timed_unit: str
    frame_s: float
    predicted_s: float
    simulated_s: float
    segments_s: SegmentSeconds
    compute_slowdown: float
    expected: ExpectedTiming
    platform: Platform
    runtime: RuntimeCosts
    dilation: float = 1.0


def emulate(
    directory: str | Path,
    platform: str | Path | Platform | None = None,
    inputs: Mapping[str, NDArray[Any]] | None = None,
    frames: int = 8,
    slower: float | None = None,
    cost: str = "",
    options: RunOptions | None = None,
    dilation: float = 1.0,
) -> EmulationResult:
    """Run an artifact at the speed of emulated boards. It needs root, see `emulation.network`.

    Args:
        directory: The artifact.
        platform: The platform to emulate. Default: the one that it was compiled for.
        inputs: Arrays by the names of the graph inputs. Default: seeded random arrays.
        frames: Number of frames.
        slower: On the fastest device, a segment takes this multiple of its time on one core of this host; on others,
            more by their rates. Default: a segment takes the time of the cost model.
        cost: The cost model. Default: the one that it was compiled with. With `slower`, it is used only for the
            prediction, which otherwise simulates the emulated segment times.
        options: Options of the run.
        dilation: Run everything slower by this factor, at least 1, and divide measured times by it. So this host can
            emulate more or faster boards, but their runtimes appear faster by the same factor.

    Raises:
        DicompilerError: This host cannot emulate these boards.
        RunError: A device failed; the message names it.
        UsageError: An argument is not valid.
    """
    from dicompiler.verify.run_inputs import prepare_inputs

    check_frame_count(frames)
    if not 1 <= dilation < float("inf"):
        raise UsageError(f"emulate: dilation must be at least 1, not {dilation!r}")
    own_platform = None if platform is None else resolve_platform(platform)
    state, target, problem = reopen_artifact(directory, cost, own_platform, will_run=True)
    platform, program, plan, reference = state.platform, state.program, state.plan, state.reference
    assert platform is not None and program is not None and plan is not None and reference is not None
    if not target.can_emulate:
        raise UsageError(f"emulate: target {target.name!r} cannot emulate boards: compile for sockets or mpi")
    roles = program.replica_roles
    in_flight = frames_in_flight((options or RunOptions()).in_flight, len(program.devices), frames)
    options = replace(options or RunOptions(), in_flight=in_flight)

    log.info("measuring the costs of the runtime of %s on this host", target.name)
    runtime = measure_runtime_costs(target.name).scaled_by(1 / dilation)
    problem = on_emulation_host(problem, runtime, program, secure=options.keys is not None)
    workload = problem.workload(plan)[1]
    log.info("timing %d segments on this host", sum(len(device.segments) for device in program.devices))
    main_program = replace(roles[0], other_roles=roles[1:])
    host_s = measure_segments(target, main_program, prepare_inputs(reference, inputs), slower is not None)
    board_s = segment_seconds(workload) if slower is None else _slow_down(host_s, platform, slower)

    simulated = predict_timing(with_segment_seconds(workload, board_s), platform, frames, in_flight)
    predicted = simulated
    if cost or slower is None:
        predicted = predict_timing(workload, platform, frames, in_flight)
    host_s = _scale_seconds(host_s, 1 / dilation)
    _check_speed(host_s, board_s, predicted.frame_s, len(roles))

    first = program.devices[0].device
    with open_boards(platform, _with_failure_segments(board_s, program), first, dilation) as emulation:
        board_options = options_on_boards(emulation, first, options)
        result = run_opened(Path(directory), target, reference, inputs, frames, board_options)
    result = result.with_scaled_times(1 / dilation)
    timed_unit, frame_s = _timed_frame(result, in_flight, len(roles))
    return EmulationResult(
        result=result,
        timed_unit=timed_unit,
        frame_s=frame_s,
        predicted_s=predicted.frame_s,
        simulated_s=simulated.frame_s,
        segments_s=board_s,
        compute_slowdown=_compute_slowdown(result, board_s, host_s, len(roles)),
        expected=ExpectedTiming(problem.cost_model.name, program, predicted),
        platform=platform,
        runtime=runtime,
        dilation=dilation,
    )


def _with_failure_segments(board_s: SegmentSeconds, program: Program) -> SegmentSeconds:
    """Add times of 0 for the segments of failure plans, which are not run: no board fails."""
    failure_roles = [role for role in program.roles if role.failed]
    times = {}
    for i, (name, seconds) in enumerate(board_s.items()):
        count = sum(len(role.devices[i].segments) for role in failure_roles)
        times[name] = (*seconds, *count * (0.0,))
    return times


def _scale_seconds(times: SegmentSeconds, factor: float) -> SegmentSeconds:
    return {name: tuple(factor * value for value in seconds) for name, seconds in times.items()}


def _slow_down(host_s: SegmentSeconds, platform: Platform, slower: float) -> SegmentSeconds:
    """Return the times on boards: the fastest is slower than this host by a factor, others by their rates."""
    times = {}
    for name, seconds in host_s.items():
        device = platform.device(name)
        relative = platform.fastest_device.rate / device.rate if device.can_compute else 1.0
        times[name] = tuple(value * slower * relative for value in seconds)
    return times


def _timed_frame(result: RunResult, in_flight: int, roles: int) -> tuple[str, float]:
    """Return the timed unit as text, and its seconds."""
    if in_flight > 1:
        count = len(result.frames_s)
        return f"{count} frames, each", result.total_s / count
    return "a frame", typical_frame_s(result.frames_s, roles)


def _check_speed(host_s: SegmentSeconds, board_s: SegmentSeconds, frame_s: float, roles: int) -> None:
    """Raise DicompilerError if a board is faster than this host, or if all boards need too many processors."""
    for name, seconds in host_s.items():
        if sum(seconds) > sum(board_s[name]):
            board_text, host_text = (format_seconds(sum(own) / roles) for own in (board_s[name], seconds))
            raise DicompilerError(
                f"emulate: {name} computes for {board_text} per frame, but this host alone needs {host_text} for that: "
                "emulate slower boards (--slower), or run everything slower (--dilation)"
            )
    processors = available_processors()
    load = sum(map(sum, host_s.values())) / roles / frame_s / processors
    if load > MAX_LOAD_SHARE:
        raise DicompilerError(
            f"emulate: computing would keep {processors} processors of this host busy for {load:.0%} of each frame "
            f"({MAX_LOAD_SHARE:.0%} is allowed), so emulated boards would delay each other: emulate slower boards "
            "(--slower) or fewer, or run everything slower (--dilation)"
        )


def _compute_slowdown(result: RunResult, board_s: SegmentSeconds, host_s: SegmentSeconds, roles: int) -> float:
    """Return the share by which computing took longer than on the boards."""
    expected_s = 0.0
    for name in board_s:
        expected_s += sum(max(pair) for pair in zip(board_s[name], host_s[name], strict=True))
    expected_s *= len(result.frames_s) / roles
    if not expected_s:
        return 0.0
    return sum(sum(report.segments_s) for report in result.reports) / expected_s - 1
