"""Emulation: run an artifact on this host at the speed of its platform's boards.

Links are rate-limited. Each call of a segment (an ONNX submodel) is delayed until it has taken as long as on its board.
All other work runs at the speed of this host.

If this host has too few processors, everything can run slower by a factor (`dilation`). Reported times are divided by
this factor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.analysis.prediction_error import (
    ExpectedTiming,
    RunTiming,
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
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.measure.emulation.boards import (
    check_dilation,
    measure_runtime_costs,
    open_boards,
    options_on_boards,
    scale_seconds,
)
from dicompiler.measure.emulation.segment_timing import measure_segments
from dicompiler.search.problem import plan_workload
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.target.target_base import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.cost.workload import Workload
    from dicompiler.ir.onnx.model import Model
    from dicompiler.ir.plan import Plan
    from dicompiler.search.problem import Problem
    from dicompiler.target.target_base import Target


log = logging.getLogger("dicompiler")

MAX_LOAD_SHARE = 0.8
"""Largest fraction of this host's processors that computing may need. With more, boards would delay each other."""
MAX_EXCESS_SHARE = 0.01
"""Fraction of a frame by which a board's calls may take longer on this host than on the board.

A call that only copies data takes no time on a board, and less than a microsecond on this host.
"""
MAX_COMPUTE_SLOWDOWN = 0.05
"""Largest slowdown of computing without a warning, as a fraction of the time on the boards."""
NOT_EMULATED = (
    "caches and memory of a board, changes of its clock frequency, other traffic, message_overhead of the platform; "
    "the runtime itself runs as fast as here"
)


def describe_limits(dilation: float) -> str:
    """Return a text that names the effects of real boards that the emulation omits.

    Args:
        dilation: Factor by which the emulation runs slower than the boards.
    """
    return NOT_EMULATED if dilation == 1 else f"{NOT_EMULATED}, in time that is {dilation:g} times slower"


@dataclass(frozen=True)
class EmulationResult:
    """Result of an emulated run. All times are times on the boards: measured times are divided by `dilation`.

    Attributes:
        result: Outputs and measurements of the run.
        timed_unit: What the times are about: "a frame", or "8 frames, each" if several frames were in flight.
        frame_s: Measured seconds of a frame.
        predicted_s: Predicted seconds of a frame, with the message costs of this host.
        on_boards: The prediction for real boards, with the message costs of the boards.
        simulated_s: Seconds of a frame in a simulation with the segment times of the emulated boards.
        segments_s: Seconds of each call of a segment (an ONNX submodel) on its board, by device name.
        compute_slowdown: How much longer computing took than intended, because this host was busy (0.05 means 5 %).
        expected: The prediction with the times of each device.
        platform: The platform that was emulated.
        runtime: Costs of the target's runtime on this host (`measure_runtime_costs`).
        dilation: Factor by which everything ran slower than on the boards.
    """

    result: RunResult
    timed_unit: str
    frame_s: float
    predicted_s: float
    on_boards: RunTiming
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
    """Run an artifact at the speed of emulated boards.

    This needs root, because it creates network namespaces with rate-limited links.

    Args:
        directory: Directory of the artifact.
        platform: The platform to emulate. Default: the platform that the artifact was compiled for.
        inputs: Arrays by the names of the graph inputs. Default: seeded random arrays.
        frames: Number of frames that are computed.
        slower: How many times longer computing takes on the fastest emulated device than on one core of this host. On
            other devices, it takes longer in inverse proportion to their compute rates. Default: computing takes as
            long as the cost model predicts.
        cost: The cost model of the prediction. Default: the model that the artifact was compiled with or, with
            `slower`, the emulated times themselves.
        options: Options of the run. Default: one frame in flight.
        dilation: Factor of at least 1 by which computing and links are slowed; measured times are divided by it. A
            larger factor lets this host emulate more or faster boards. The runtime itself is not slowed, so after the
            division it seems faster than it is.

    Returns:
        The measured times of the run, and the predicted ones.

    Raises:
        DicompilerError: This host cannot emulate these boards.
        RunError: A device failed; the message names it.
        UsageError: An argument is invalid.
    """
    check_frame_count(frames)
    check_dilation(dilation)
    boards = _open_artifact(directory, platform, cost, frames, options or RunOptions(in_flight=1), dilation)
    log.info("timing %d segments on this host", sum(len(device.segments) for device in boards.program.devices))
    host_s = boards.measure_host_seconds(inputs, is_long=slower is not None)
    workload = plan_workload(boards.problem, boards.plan)[1]
    board_s = segment_seconds(workload) if slower is None else board_segment_seconds(host_s, boards.platform, slower)
    simulated = boards.predict(with_segment_seconds(workload, board_s))
    predicted = boards.predict(workload) if cost or slower is None else simulated
    on_boards = plan_workload(boards.board_problem, boards.plan)[1]
    if slower is not None and not cost:
        on_boards = with_segment_seconds(on_boards, board_s)
    host_s = scale_seconds(host_s, 1 / dilation)
    _check_speed(host_s, board_s, predicted.frame_s, boards.replica_count)

    result = boards.run(Path(directory), inputs, board_s)
    timed_unit, frame_s = _timed_frame(result, boards.options.in_flight, boards.replica_count)
    return EmulationResult(
        result=result,
        timed_unit=timed_unit,
        frame_s=frame_s,
        predicted_s=predicted.frame_s,
        on_boards=boards.predict(on_boards),
        simulated_s=simulated.frame_s,
        segments_s=board_s,
        compute_slowdown=_compute_slowdown(result, board_s, host_s, boards.replica_count),
        expected=ExpectedTiming(boards.problem.cost_model.name, boards.program, predicted),
        platform=boards.platform,
        runtime=boards.runtime,
        dilation=dilation,
    )


@dataclass(frozen=True)
class _EmulatedArtifact:
    """An artifact that is ready to run on emulated boards, and its predictions.

    Attributes:
        target: The target that wrote the artifact.
        problem: The artifact's problem, with the runtime costs of this host.
        board_problem: The artifact's problem, with the runtime costs of the boards.
        platform: The platform that is emulated.
        program: The program of each board.
        plan: The plan of the artifact.
        reference: The unsplit model, which computes the expected outputs.
        runtime: Costs of the target's runtime on this host.
        frames: Number of frames that will be computed.
        options: Options of the run, with the number of frames in flight.
        dilation: Factor by which everything runs slower than on the boards.
    """

    target: Target
    problem: Problem
    board_problem: Problem
    platform: Platform
    program: Program
    plan: Plan
    reference: Model
    runtime: RuntimeCosts
    frames: int
    options: RunOptions
    dilation: float

    @property
    def replica_count(self) -> int:
        return len(self.program.replica_roles)

    def measure_host_seconds(self, inputs: Mapping[str, NDArray[Any]] | None, is_long: bool) -> SegmentSeconds:
        """Return the seconds of each segment (submodel) on one core of this host, by device name."""
        from dicompiler.verify.run_inputs import prepare_inputs

        roles = self.program.replica_roles
        program = replace(roles[0], other_roles=roles[1:])
        return measure_segments(self.target, program, prepare_inputs(self.reference, inputs), is_long)

    def predict(self, workload: Workload) -> RunTiming:
        return predict_timing(workload, self.platform, self.frames, self.options.in_flight)

    def run(self, directory: Path, inputs: Mapping[str, NDArray[Any]] | None, board_s: SegmentSeconds) -> RunResult:
        """Run the artifact on emulated boards.

        Args:
            directory: Directory of the artifact.
            inputs: Arrays by the names of the graph inputs; None for seeded random arrays.
            board_s: Seconds of each segment (submodel) on its board, by device name.
        """
        first = self.program.devices[0].device
        board_s = with_failure_segments(board_s, self.program)
        with open_boards(self.platform, board_s, first, self.dilation) as emulation:
            options = options_on_boards(emulation, first, self.options)
            result = run_opened(directory, self.target, self.reference, inputs, self.frames, options)
        return result.with_scaled_times(1 / self.dilation)


def _open_artifact(
    directory: str | Path,
    platform: str | Path | Platform | None,
    cost: str,
    frames: int,
    options: RunOptions,
    dilation: float,
) -> _EmulatedArtifact:
    """Open an artifact for emulation, and measure the costs of its target's runtime on this host."""
    own_platform = None if platform is None else resolve_platform(platform)
    compilation, target, board_problem = reopen_artifact(directory, cost, own_platform, will_run=True)
    assert compilation.platform is not None and compilation.program is not None
    assert compilation.plan is not None and compilation.reference is not None
    if not target.can_emulate:
        raise UsageError(f"emulate: target {target.name!r} cannot emulate boards: compile for sockets or mpi")
    log.info("measuring the costs of the runtime of %s on this host", target.name)
    runtime = measure_runtime_costs(target.name).scaled_by(1 / dilation)
    problem = on_emulation_host(board_problem, runtime, compilation.program, secure=options.keys is not None)
    in_flight = frames_in_flight(options.in_flight, len(compilation.program.devices), frames)
    return _EmulatedArtifact(
        target,
        problem,
        board_problem,
        compilation.platform,
        compilation.program,
        compilation.plan,
        compilation.reference,
        runtime,
        frames,
        replace(options, in_flight=in_flight),
        dilation,
    )


def with_failure_segments(board_s: SegmentSeconds, program: Program) -> SegmentSeconds:
    """Add 0 seconds for each segment (ONNX submodel) of a failure plan, which then runs without a delay.

    Args:
        board_s: Seconds of the segments of the plan and its replicas, by device name.
        program: The program, with its failure plans (plans for the remaining devices).
    """
    failure_roles = [role for role in program.roles if role.failed]
    times = {}
    for i, (name, seconds) in enumerate(board_s.items()):
        count = sum(len(role.devices[i].segments) for role in failure_roles)
        times[name] = (*seconds, *count * (0.0,))
    return times


def board_segment_seconds(host_s: SegmentSeconds, platform: Platform, slower: float) -> SegmentSeconds:
    """Return the seconds of segments (ONNX submodels) on the boards, from those on this host.

    Args:
        host_s: Seconds of the segments on this host, by device name.
        platform: The boards. Slower boards than the fastest need longer by the ratio of the compute rates.
        slower: How many times longer a segment takes on the fastest board than on this host.
    """
    times = {}
    for name, seconds in host_s.items():
        device = platform.device(name)
        relative = platform.fastest_device.rate / device.rate if device.can_compute else 1.0
        times[name] = tuple(value * slower * relative for value in seconds)
    return times


def _timed_frame(result: RunResult, in_flight: int, replica_count: int) -> tuple[str, float]:
    """Return a text that names the timed unit ("a frame" or "8 frames, each"), and the measured seconds of a frame."""
    if in_flight > 1:
        # The times of single frames overlap, so the total time is divided.
        count = len(result.frames_s)
        return f"{count} frames, each", result.total_s / count
    return "a frame", typical_frame_s(result.frames_s, replica_count)


def _check_speed(host_s: SegmentSeconds, board_s: SegmentSeconds, frame_s: float, replica_count: int) -> None:
    """Raise DicompilerError if this host is too slow to emulate the boards.

    Args:
        host_s: Seconds of each segment (submodel) on this host, by device name.
        board_s: Seconds of each segment on its board, by device name.
        frame_s: Predicted seconds of a frame.
        replica_count: Number of replicas (copies of the plan on other devices).
    """
    for name, seconds in host_s.items():
        if (sum(seconds) - sum(board_s[name])) / replica_count > MAX_EXCESS_SHARE * frame_s:
            board_text, host_text = (
                format_seconds(sum(call_times) / replica_count) for call_times in (board_s[name], seconds)
            )
            raise DicompilerError(
                f"emulate: {name} computes for {board_text} per frame, but this host needs {host_text} for it: "
                "emulate slower boards (--slower), or run everything slower (--dilation)"
            )
    processors = available_processors()
    load = sum(map(sum, host_s.values())) / replica_count / frame_s / processors
    if load > MAX_LOAD_SHARE:
        raise DicompilerError(
            f"emulate: computing would keep {processors} processors of this host busy for {load:.0%} of each frame "
            f"({MAX_LOAD_SHARE:.0%} is allowed), so emulated boards would delay each other: emulate slower boards "
            "(--slower) or fewer, or run everything slower (--dilation)"
        )


def _compute_slowdown(result: RunResult, board_s: SegmentSeconds, host_s: SegmentSeconds, replica_count: int) -> float:
    """Return how much longer computing took than it should, as a fraction (0.05 means 5 %).

    Args:
        result: The result of the run.
        board_s: Seconds of each segment (submodel) on its board, by device name.
        host_s: Seconds of each segment on this host, which is a lower limit.
        replica_count: Number of replicas (copies of the plan on other devices).
    """
    expected_s = 0.0
    for name in board_s:
        expected_s += sum(max(pair) for pair in zip(board_s[name], host_s[name], strict=True))
    expected_s *= len(result.frames_s) / replica_count
    if not expected_s:
        return 0.0
    return sum(sum(report.segments_s) for report in result.reports) / expected_s - 1
