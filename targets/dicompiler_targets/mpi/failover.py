"""Goes on where a rank is lost. MPI ends all ranks with one, so that mpirun is called again, without it, for the frames
that are not finished: by the plan for its loss, where the artifact has one.

In: how mpirun is called once. Out: what all calls together gave, each frame once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from dicompiler.plugin_api import DeviceReport, RunOptions, RunResult, UsageError
from dicompiler.plugin_api.artifacts import RunEvent
from dicompiler_targets.mpi import mpirun
from dicompiler_targets.mpi.artifact import DeliveredFrames, MpiArtifact

log = logging.getLogger("dicompiler")

Frames = Sequence[Mapping[str, NDArray[Any]]]
RunOnce = Callable[[Frames, RunOptions, Collection[str], tuple[int, int]], tuple[Mapping[str, Any], DeliveredFrames]]
"""Plays frames without the devices that are away, by those roles (the first one's place and how many): what rank 0
printed, and outputs. Unfinished where a rank is lost."""


class UnfinishedRun(Exception):
    """A rank was lost. done: the frames that were finished."""

    def __init__(self, lost: mpirun.RankFailure, done: DeliveredFrames) -> None:
        super().__init__(str(lost))
        self.failure, self.finished_frames = lost, done


def run_with_failover(artifact: MpiArtifact, frames: Frames, options: RunOptions, call: RunOnce) -> RunResult:
    """Calls until all frames are finished. UsageError where devices are away that no plan does without, RunError for a
    loss that no plan covers."""
    begun, away, events = time.perf_counter(), set(options.start_without), list[RunEvent]()
    done: DeliveredFrames = ()
    wanted, keep = len(frames), mpirun.count_kept_frames(len(frames), options)
    if (roles := artifact.find_roles(away)) is None:
        names = ", ".join(map(repr, options.start_without))
        remedy = f"compile it with one (--survive {len(set(options.start_without))})"
        raise UsageError(f"run: no plan in the artifact does without {names}: {remedy}")
    survives = "lost" in artifact.program

    def tell(event: RunEvent) -> None:
        events.append(event)
        log.warning("%s", event.message)
        if options.on_event is not None:
            options.on_event(event)

    while True:
        left = options.timeout_s - (time.perf_counter() - begun if events else 0.0)
        at_once = replace(options, timeout_s=max(0.0, left), kept_frames=None if survives else options.kept_frames)
        since = time.perf_counter()
        try:
            report, delivered = call(frames[len(done) :], at_once, away, roles)
            break
        except UnfinishedRun as end:
            lost = end.failure
            others = artifact.find_roles(away.union(lost.failed_devices.devices))
            if others is None:
                raise lost from None
            roles = others
            done += end.finished_frames
            for name in lost.failed_devices.devices:
                away.add(name)
                missing = tuple(other for other in artifact.devices if other in away)
                now = time.perf_counter() - begun
                tell(RunEvent("failure", name, lost.failed_devices.reason, missing, now, len(done)))
            done = done[: wanted - 1]  # where all are finished their times are not told: the last one is played again
    result = mpirun.make_result(artifact, report, delivered)
    if events:
        now, again = time.perf_counter(), options.resolve_in_flight(len(artifact.devices), mpirun.MAX_FRAMES_IN_FLIGHT)
        pause = now - since - result.total_s + result.frames_s[0]
        again = min(again, wanted - len(done))  # at most: who was ended does not say what it had begun
        at_s = since - begun + pause
        tell(replace(events[-1], kind="takeover", reason="", at_s=at_s, replayed_frames=again, interruption_s=pause))
    every = (*done, *result.outputs_by_device)[:keep]
    outputs = tuple(artifact.take_first_outputs(frame) for frame in every)
    total = result.total_s if not events else time.perf_counter() - begun
    reports = tuple(_renumber_segments(artifact, i, one, roles[0]) for i, one in enumerate(result.reports))
    return replace(
        result, reports=reports, outputs=outputs, outputs_by_device=every, total_s=total, events=tuple(events)
    )


def _renumber_segments(artifact: MpiArtifact, rank: int, report: DeviceReport, first: int) -> DeviceReport:
    """A report in which segments have their places among those of all roles. first: of the roles that were played."""
    calls = artifact.program["ranks"][rank]["roles"]
    counts = [sum(call[0] == "run" for call in role) for role in calls]
    before = sum(counts[:first])
    rest = sum(counts) - before - len(report.segments_s)
    timeline = (replace(one, index=one.index + before) if one.kind == "run" else one for one in report.timeline)
    return replace(report, segments_s=(*[0.0] * before, *report.segments_s, *[0.0] * rest), timeline=tuple(timeline))
