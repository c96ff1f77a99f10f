"""Streams on emulated boards and links that change their speed, with or without a session that adapts its plan."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dicompiler.analysis.prediction_error import segment_seconds
from dicompiler.base.errors import UsageError
from dicompiler.cost.speed_changes import SpeedChange, list_host_speeds, list_speeds
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.prepare import resolve_platform
from dicompiler.driver.swap import SwappableSession
from dicompiler.ir.platform import Platform
from dicompiler.measure.adapt import AdaptiveSession, AdaptOptions, SpeedTrial
from dicompiler.measure.emulation.boards import check_dilation, open_boards, options_on_boards, scale_seconds
from dicompiler.measure.emulation.emulate import with_failure_segments
from dicompiler.search.problem import plan_workload
from dicompiler.target.run_records import Emulation, RunOptions

START_S = 5.0
"""Seconds for the start of the devices. The times of speed changes count from the end of this period."""


def emulate_speed_changes(
    directory: str | Path,
    changes: Sequence[SpeedChange],
    adapt: AdaptOptions | None = None,
    *,
    platform: str | Path | Platform | None = None,
    inputs: dict[str, Any] | None = None,
    duration_s: float = 60.0,
    cost: str = "",
    options: RunOptions | None = None,
    dilation: float = 1.0,
) -> SpeedTrial:
    """Stream frames on emulated boards and links that change their speed.

    This needs root, because it creates network namespaces with rate-limited links.

    Args:
        directory: Directory of the artifact.
        changes: The changes of speed. Each names a device, `link:HOST` (the link of a host) or `link:*` (all links).
        adapt: When the session searches for another plan; None: never.
        platform: The platform to emulate. Default: the platform that the artifact was compiled for.
        inputs: Arrays by the names of the graph inputs, the same for all frames. Default: seeded random arrays.
        duration_s: Seconds in which frames are sent.
        cost: The cost model that predicts how long boards compute. Default: that of the artifact.
        options: Options of the session; `timeout_s` limits the whole run. Default: `RunOptions()` with a time limit of
            10 minutes + `START_S` + `dilation` · `duration_s`.
        dilation: Factor of at least 1 by which computing and links are slowed; measured times are divided by it. A
            search for another plan is not slowed, so it seems faster than it is.

    Returns:
        The times of the frames, and the searches for another plan. All times are times on the boards.

    Raises:
        DicompilerError: This computer cannot emulate the platform.
        RunError: A device failed; the message names it.
        UsageError: A change names an unknown device or host, or one link of a shared network. The target of the
            artifact supports no sessions. The dilation is below 1. The time limit is too short for the duration.
    """
    check_dilation(dilation)
    options = options or with_added_stream_time(RunOptions(), duration_s, dilation)
    _check_time_limit(options, duration_s, dilation)
    options = replace(options, deadline=options.deadline_from_now())
    boards, first, frame = _load_artifact(directory, platform, inputs, cost)
    start = time.perf_counter() + START_S
    dilated_changes = [
        replace(change, start_s=dilation * change.start_s, end_s=dilation * change.end_s) for change in changes
    ]
    speeds = list_speeds(dilated_changes, [device.name for device in boards.devices], start)
    host_speeds = list_host_speeds(dilated_changes, boards, start)
    link_changes = sorted((at, host, speed) for host, found in host_speeds.items() for at, speed in found)

    def with_segment_times(artifact: Path, session_options: RunOptions) -> RunOptions:
        emulation = session_options.emulation
        assert emulation is not None
        min_segments_s = scale_seconds(segment_times(artifact, cost, boards), dilation)
        return replace(session_options, emulation=replace(emulation, min_segments_s=min_segments_s, speeds=speeds))

    with (
        # Each artifact has its own seconds of computing. They are {} here, and `with_segment_times` sets them later.
        open_boards(boards, {}, first, dilation) as emulation,
        _change_links(emulation, link_changes),
    ):
        if adapt is not None:
            adapt = replace(adapt, min_interval_s=dilation * adapt.min_interval_s)
        session_options = options_on_boards(emulation, first, options)
        with _start_session(Path(directory), session_options, adapt, with_segment_times) as session:
            finished = _stream_frames(session, frame, start, dilation * duration_s)
    return _make_trial(session, finished, dilation)


def with_added_stream_time(options: RunOptions, duration_s: float, dilation: float) -> RunOptions:
    """Return the options with a time limit that is longer by the seconds of the start and of the stream."""
    return options.with_timeout(options.timeout_s + START_S + dilation * duration_s)


def _check_time_limit(options: RunOptions, duration_s: float, dilation: float) -> None:
    """Raise UsageError if the time limit is shorter than the start and the stream."""
    least_s = START_S + dilation * duration_s
    if options.timeout_s < least_s:
        raise UsageError(
            f"emulate: the run takes at least {least_s:g} s, but may take only {options.timeout_s:g} s: allow more "
            "time (--timeout), or send frames for a shorter time (--duration)"
        )


def _load_artifact(
    directory: str | Path, platform: str | Path | Platform | None, inputs: dict[str, Any] | None, cost: str
) -> tuple[Platform, str, dict[str, Any]]:
    """Return the boards to emulate, the name of the artifact's first device, and the inputs of a frame.

    Raises:
        UsageError: The target of the artifact supports no sessions.
    """
    from dicompiler.verify.run_inputs import prepare_inputs

    own_platform = None if platform is None else resolve_platform(platform)
    compilation, target, problem = reopen_artifact(directory, cost, own_platform, will_run=True)
    if not target.can_emulate or target.name == "mpi":
        raise UsageError(f"emulate: boards of target {target.name!r} cannot change their speed: compile for sockets")
    assert compilation.reference is not None and compilation.program is not None
    frame = prepare_inputs(compilation.reference, inputs)
    return problem.platform, compilation.program.devices[0].device, frame


def _start_session(
    directory: Path,
    options: RunOptions,
    adapt: AdaptOptions | None,
    with_segment_times: Callable[[Path, RunOptions], RunOptions],
) -> SwappableSession:
    """Start the devices of an artifact, and return the session. It searches for other plans only if `adapt` is given.

    `with_segment_times` returns the options for one artifact, given its directory and the options of the session.
    """
    if adapt is None:
        return SwappableSession(directory, options, with_segment_times)
    return AdaptiveSession(directory, options, adapt, with_segment_times)


def _stream_frames(session: SwappableSession, frame: dict[str, Any], start: float, duration_s: float) -> list[float]:
    """Stream the same frame for some seconds, and return the time at which each frame was finished.

    Args:
        session: The open session.
        frame: Arrays by the names of the graph inputs.
        start: Time (`time.perf_counter`) at which the stream starts.
        duration_s: Seconds in which frames are sent.

    Returns:
        Seconds from the start.
    """
    time.sleep(max(0.0, start - time.perf_counter()))

    def repeat_frame() -> Iterator[dict[str, Any]]:
        while time.perf_counter() < start + duration_s:
            yield frame

    return [time.perf_counter() - start for _ in session.stream(repeat_frame())]


def _make_trial(session: SwappableSession, finished: Sequence[float], dilation: float) -> SpeedTrial:
    """Return the result of a stream, with all times divided by the dilation."""
    adaptations = session.adaptations if isinstance(session, AdaptiveSession) else ()
    return SpeedTrial(
        tuple(at_s / dilation for at_s in finished),
        tuple(replace(found, at_s=found.at_s / dilation) for found in adaptations),
    )


@contextlib.contextmanager
def _change_links(emulation: Emulation, changes: Sequence[tuple[float, str, float]]) -> Iterator[None]:
    """Change the speeds of links in a thread until the end of the `with` block.

    Args:
        emulation: The emulated boards with the links.
        changes: Sorted changes: the time (`time.perf_counter`), the host, and the new speed as a factor.
    """
    assert emulation.scale_links is not None
    scale_links, is_ended = emulation.scale_links, threading.Event()

    def change_links() -> None:
        for at, host, speed in changes:
            if is_ended.wait(max(0.0, at - time.perf_counter())):
                return
            scale_links(host, speed)

    thread = threading.Thread(target=change_links)
    thread.start()
    try:
        yield
    finally:
        is_ended.set()
        thread.join()


def segment_times(artifact: str | Path, cost: str, platform: Platform) -> dict[str, tuple[float, ...]]:
    """Return the predicted seconds of each segment (ONNX submodel) of an artifact, by device name.

    Args:
        artifact: Directory of the artifact.
        cost: The cost model; empty for that of the artifact.
        platform: Platform of the emulated boards.

    Returns:
        The seconds for the main plan, then for its replicas (copies on other devices), then 0 for each segment of a
        failure plan (a plan for the remaining devices).
    """
    compilation, _, problem = reopen_artifact(artifact, cost, platform)
    assert compilation.plan is not None and compilation.program is not None
    seconds = segment_seconds(plan_workload(problem, compilation.plan)[1])
    return dict(with_failure_segments(seconds, compilation.program))
