"""Emulating: an artifact is run on this host as the boards of its platform would run it.

artifact + platform → what a run gives, beside what is predicted. Lines are shaped and each call of a segment is held
back until it has taken as long as on its board; the target's real runtime does the rest, at this host's speed: what the
prediction supposes too, and that the boards' runtimes share this host's processors. Where these are too few, everything
may go so many times slower here than on the boards (`dilation`): seconds are the boards' all the same.
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
"""The share of this host's processors that computing may need: above it the boards would wait for each other here."""
MAX_COMPUTE_SLOWDOWN = 0.05
"""By what share computing may take longer than on the boards before it is told."""
NOT_EMULATED = (
    "caches and memory of a board, its clock's changes, other traffic; the runtime itself runs as fast as here"
)
"""What an emulation does not show, see `left_out`."""


def describe_limits(dilation: float) -> str:
    """What an emulation whose time is so many times slower does not show."""
    return NOT_EMULATED if dilation == 1 else f"{NOT_EMULATED} in time that is {dilation:g} times slower"


@dataclass(frozen=True)
class EmulationResult:
    """A run as the boards would do it. what: was timed, a frame or the time between two; frame_s: seconds that it took;
    predicted_s: seconds by simulation, timed_s: by that of the very seconds that boards were given to compute here.
    computing: of each segment's call on its board. late: by what share computing
    took longer than that, because this host was busy. expected: all that is predicted; platform: what was played;
    runtime: what the target's costs here, see `costs_here`. dilation: how many times slower all of it was played, of
    which no seconds here tell."""

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
    """Runs an artifact as the boards of `platform` would, by default of the one that it was compiled for.

    A segment's call takes what the cost model says (`cost`: by default that of the compilation); with `slower` that
    many times what it takes on one core of this host, on the fastest device, and on others by their rates. Then the
    prediction is the simulator's for just these seconds, or, where a `cost` is given, for its own. With a `dilation`
    (at least 1) lines and segments are so many times slower here, and what was measured is divided by it: this host
    plays more boards then, or faster ones, but their runtimes are as many times faster. Needs root: see
    `target.emulated.network`. DicompilerError for what this host cannot carry, RunError as for `run`.
    """
    from dicompiler.verify.run_inputs import prepare_inputs

    _check_arguments(frames, dilation)
    own = None if platform is None else resolve_platform(platform)
    compilation, target, problem = reopen_artifact(directory, cost, own, will_run=True)
    platform, program, plan = compilation.platform, compilation.program, compilation.plan
    assert platform is not None and program is not None and plan is not None
    assert compilation.reference is not None
    if not target.can_emulate:
        raise UsageError(f"emulate: target {target.name!r} plays no boards: compile for sockets or mpi")
    options = _with_in_flight(options or RunOptions(), program, frames)
    log.info("measuring what the runtime of %s costs here", target.name)
    runtime = measure_runtime_costs(target.name).scaled_by(1 / dilation)
    problem = on_emulation_host(problem, runtime, program, secure=options.keys is not None)
    work = problem.workload(plan)[1]
    log.info("measuring %d segments here", sum(len(device.segments) for device in program.devices))
    turns = replace(program.replica_roles[0], other_roles=program.replica_roles[1:])
    here = measure_segments(target, turns, prepare_inputs(compilation.reference, inputs), slower is not None)
    board = segment_seconds(work) if slower is None else _slow_down(here, platform, slower)
    timed = predict_timing(with_segment_seconds(work, board), platform, frames, options.in_flight)
    told = predict_timing(work, platform, frames, options.in_flight) if cost or slower is None else timed
    expected = ExpectedTiming(problem.cost_model.name, program, told)
    here = _scale_seconds(here, 1 / dilation)
    _check_speed(here, board, told.frame_s, len(program.replica_roles))
    first = program.devices[0].device
    with open_boards(platform, _with_failure_segments(board, program), first, dilation) as emulation:
        there = options_on_boards(emulation, first, options)
        result = run_opened(Path(directory), target, compilation.reference, inputs, frames, there).with_scaled_times(
            1 / dilation
        )
    late, times = _compute_slowdown(result, board, here, len(program.replica_roles)), (told.frame_s, timed.frame_s)
    played = _timed_frame(result, options.in_flight, len(program.replica_roles))
    return EmulationResult(result, *played, *times, board, late, expected, platform, runtime, dilation)


def _check_arguments(frames: int, dilation: float) -> None:
    check_frame_count(frames)
    if not 1 <= dilation < float("inf"):
        raise UsageError(f"emulate: dilation must be at least 1, not {dilation!r}")


def _with_in_flight(options: RunOptions, program: Program, frames: int) -> RunOptions:
    """With as many frames on their way at once as a run of so many has."""
    return replace(options, in_flight=frames_in_flight(options.in_flight, len(program.devices), frames))


def _with_failure_segments(board: SegmentSeconds, program: Program) -> SegmentSeconds:
    """What boards take, and nothing for segments of the roles for losses, which are not played: no board is lost."""
    lost = [role for role in program.roles if role.failed]
    spare = {name: sum(len(role.devices[i].segments) for role in lost) for i, name in enumerate(board)}
    return {name: (*seconds, *spare[name] * (0.0,)) for name, seconds in board.items()}


def _scale_seconds(taken: SegmentSeconds, factor: float) -> SegmentSeconds:
    return {name: tuple(factor * one for one in seconds) for name, seconds in taken.items()}


def _slow_down(here: SegmentSeconds, platform: Platform, slower: float) -> SegmentSeconds:
    """What boards take that are so many times as slow as this host, and slower by their rates."""
    return {
        name: tuple(s * slower * _relative_slowness(platform, name) for s in seconds) for name, seconds in here.items()
    }


def _timed_frame(result: RunResult, in_flight: int, roles: int) -> tuple[str, float]:
    """What was timed, in words, and its seconds."""
    if in_flight > 1:
        count = len(result.frames_s)
        return f"{count} frames, each", result.total_s / count
    return "a frame", typical_frame_s(result.frames_s, roles)


def _relative_slowness(platform: Platform, device: str) -> float:
    """How many times as long as the fastest device it takes."""
    return platform.fastest_device.rate / platform.device(device).rate if platform.device(device).can_compute else 1.0


def _check_speed(here: SegmentSeconds, board: SegmentSeconds, frame_s: float, roles: int) -> None:
    """DicompilerError where a board is faster than this host, or all boards together need more than it has."""
    for name, seconds in here.items():
        if sum(seconds) > sum(board[name]):
            raise DicompilerError(
                f"emulate: {name} computes {format_seconds(sum(board[name]) / roles)} in a frame, this host alone "
                f"needs {format_seconds(sum(seconds) / roles)} for that: it can only play slower boards (--slower), or "
                "all of it slower (--dilation)"
            )
    cores = available_processors()
    load = sum(map(sum, here.values())) / roles / frame_s / cores
    if load > MAX_LOAD_SHARE:
        raise DicompilerError(
            f"emulate: computing would keep {cores} processors of this host busy for {load:.0%} of each frame "
            f"({MAX_LOAD_SHARE:.0%} is allowed): boards would wait here that do not wait there: give slower ones "
            "(--slower), or fewer, or play all of it slower (--dilation)"
        )


def _compute_slowdown(result: RunResult, board: SegmentSeconds, here: SegmentSeconds, roles: int) -> float:
    """By what share computing took longer than on the boards."""
    due = sum(max(pair) for name in board for pair in zip(board[name], here[name], strict=True))
    due *= len(result.frames_s) / roles
    return sum(sum(report.segments_s) for report in result.reports) / due - 1 if due else 0.0
