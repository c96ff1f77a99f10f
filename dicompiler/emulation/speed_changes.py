"""Streams on emulated boards that become slower and faster, with and without a session that changes its plan.

artifact + SpeedChanges ──emulate_speed_changes──► SpeedTrial: when each frame was finished, and the adaptations
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dicompiler.analysis.prediction_error import segment_seconds
from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean
from dicompiler.base.units import TIME, parse_quantity
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.prepare import resolve_platform
from dicompiler.driver.swap import SwappableSession
from dicompiler.emulation.boards import open_boards, options_on_boards
from dicompiler.emulation.emulate import with_failure_segments
from dicompiler.ir.platform import Platform
from dicompiler.measure.adapt import Adaptation, AdaptiveSession, AdaptOptions
from dicompiler.target.run_records import RunOptions

START_S = 5.0
"""Seconds allowed for the start of the devices. The times of speed changes count from the end of this period."""


@dataclass(frozen=True)
class SpeedChange:
    """A period in which a board computes with another speed.

    Attributes:
        device: Name of the device.
        speed: The speed as a multiple of the board's own speed.
        start_s: Seconds from the start of the stream to the change.
        end_s: Seconds from the start of the stream to the recovery; infinite without recovery.
    """

    device: str
    speed: float
    start_s: float
    end_s: float = float("inf")

    @staticmethod
    def parse(text: str) -> SpeedChange:
        """Return the change that a text describes: `pi03=0.4@20s` or, with a recovery, `pi03=0.4@20s-60s`.

        Raises:
            UsageError: The text has another form.
        """
        device, equals, rest = text.partition("=")
        speed, at, period = rest.partition("@")
        start, _, end = period.partition("-")
        try:
            change = SpeedChange(
                device,
                float(speed),
                parse_quantity(start, TIME, "start"),
                parse_quantity(end, TIME, "end") if end else float("inf"),
            )
            if not (device and equals and at) or not 0 < change.speed < float("inf") or change.end_s <= change.start_s:
                raise ValueError
        except (ValueError, DicompilerError):
            raise UsageError(
                f"slow: {text!r} is not of the form DEVICE=SPEED@START or DEVICE=SPEED@START-END, such as "
                "'pi03=0.4@20s-60s', with a speed above 0"
            ) from None
        return change


@dataclass(frozen=True)
class SpeedTrial:
    """A stream on boards that change their speed.

    Attributes:
        finished_s: For each frame, the seconds from the start of the stream until its outputs were complete.
        adaptations: The searches of the session; empty if it does not adapt.
    """

    finished_s: tuple[float, ...]
    adaptations: tuple[Adaptation, ...]

    def mean_periods(self, interval_s: float) -> list[tuple[float, int, float]]:
        """Return the frames of each interval of the stream.

        Args:
            interval_s: Length of an interval in seconds.

        Returns:
            For each interval, the seconds until its start, the number of frames that were finished in it, and the mean
            seconds between two of these frames (0 if there were fewer than two).
        """
        intervals: dict[int, list[float]] = {}
        for seconds in self.finished_s:
            intervals.setdefault(int(seconds // interval_s), []).append(seconds)
        return [
            (i * interval_s, len(found), (found[-1] - found[0]) / (len(found) - 1) if len(found) > 1 else 0.0)
            for i, found in sorted(intervals.items())
        ]


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
) -> SpeedTrial:
    """Stream frames on emulated boards that change their speed. This needs root (see `emulation.network`).

    Args:
        directory: The artifact.
        changes: When boards become slower or faster.
        adapt: When the session searches for another plan; None: never.
        platform: The platform to emulate. Default: the platform that the artifact was compiled for.
        inputs: Arrays by name of the graph input, the same for all frames. Default: seeded random arrays.
        duration_s: Seconds in which frames are sent.
        cost: The cost model that predicts the times of segments. Default: that of the artifact.
        options: Options of the session. Default: three frames in flight for each device.

    Returns:
        The times of the frames and the adaptations.

    Raises:
        DicompilerError: This host cannot emulate these boards.
        RunError: A device failed; the message names it.
        UsageError: A change names an unknown device, or the target of the artifact supports no sessions.
    """
    from dicompiler.verify.run_inputs import prepare_inputs

    own_platform = None if platform is None else resolve_platform(platform)
    compilation, target, problem = reopen_artifact(directory, cost, own_platform, will_run=True)
    if not target.can_emulate or target.name == "mpi":
        raise UsageError(f"emulate: boards of target {target.name!r} cannot change their speed: compile for sockets")
    boards = problem.platform
    names = [device.name for device in boards.devices]
    for change in changes:
        if change.device not in names:
            raise UsageError(f"slow: there is no device {change.device!r}{did_you_mean(change.device, names)}")
    assert compilation.reference is not None and compilation.program is not None
    frame = prepare_inputs(compilation.reference, inputs)
    start = time.perf_counter() + START_S
    speeds = {name: _speeds_of_device(name, changes, start) for name in names}
    first = compilation.program.devices[0].device
    finished: list[float] = []

    def with_segment_times(artifact: Path, session_options: RunOptions) -> RunOptions:
        emulation = session_options.emulation
        assert emulation is not None
        return replace(
            session_options,
            emulation=replace(emulation, min_segments_s=_segment_times(artifact, cost, boards), speeds=speeds),
        )

    with open_boards(boards, _segment_times(directory, cost, boards), first) as emulation:
        session_options = options_on_boards(emulation, first, options or RunOptions(in_flight=0))
        session: SwappableSession
        if adapt is None:
            session = SwappableSession(Path(directory), session_options, with_segment_times)
        else:
            session = AdaptiveSession(Path(directory), session_options, adapt, with_segment_times)
        with session:
            time.sleep(max(0.0, start - time.perf_counter()))

            def frames() -> Any:
                while time.perf_counter() < start + duration_s:
                    yield frame

            finished.extend(time.perf_counter() - start for _ in session.stream(frames()))
    return SpeedTrial(tuple(finished), tuple(session.adaptations) if isinstance(session, AdaptiveSession) else ())


def _segment_times(artifact: str | Path, cost: str, platform: Platform) -> dict[str, tuple[float, ...]]:
    """Return the predicted seconds of each segment of an artifact on the emulated boards."""
    compilation, _, problem = reopen_artifact(artifact, cost, platform)
    assert compilation.plan is not None and compilation.program is not None
    seconds = segment_seconds(problem.workload(compilation.plan)[1])
    return dict(with_failure_segments(seconds, compilation.program))


def _speeds_of_device(name: str, changes: Sequence[SpeedChange], start: float) -> list[tuple[float, float]]:
    """Return the times (time.perf_counter) at which the speed of a device changes, and its speeds from then on.

    If changes overlap, the one that began last applies. `start` is the start of the stream.
    """
    own = [change for change in changes if change.device == name]
    times = sorted({time_s for change in own for time_s in (change.start_s, change.end_s) if time_s < float("inf")})
    speeds = []
    for time_s in times:
        current = [change for change in own if change.start_s <= time_s < change.end_s]
        speed = max(current, key=lambda change: change.start_s).speed if current else 1.0
        speeds.append((start + time_s, speed))
    return speeds
