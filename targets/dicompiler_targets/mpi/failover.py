"""Continues a run after a rank (MPI process) has failed, if the artifact has a failure plan for it.

A failure plan is another plan that does not use certain devices. MPI ends all ranks when one of them fails. Therefore,
mpirun is started again for the frames that are not finished, with the failure plan.
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
"""A function that runs mpirun once. It returns the report of rank 0 and the outputs of the frames.

Arguments: the frames, the options, the failed devices, and the roles (see `MpiArtifact.find_roles`). It raises
UnfinishedRun if a rank fails."""


class UnfinishedRun(Exception):
    """A run in which a rank has failed.

    Attributes:
        failure: The error with the failed devices.
        finished_frames: The outputs of the frames that were finished before the failure.
    """

    def __init__(self, failure: mpirun.RankFailure, finished_frames: DeliveredFrames) -> None:
        super().__init__(str(failure))
        self.failure, self.finished_frames = failure, finished_frames


def run_with_failover(artifact: MpiArtifact, frames: Frames, options: RunOptions, run_once: RunOnce) -> RunResult:
    """Run mpirun until all frames are finished; after a failure, run it again with a failure plan.

    The result combines all runs of mpirun, and contains each frame once. Raise RunError if no failure plan excludes the
    failed devices, and UsageError if no failure plan excludes the devices in `options.start_without`.
    """
    start, down, events = time.perf_counter(), set(options.start_without), list[RunEvent]()
    working_until = noticed_at = 0.0
    finished: DeliveredFrames = ()
    kept_frames = mpirun.count_kept_frames(len(frames), options)
    if (roles := artifact.find_roles(down)) is None:
        names = ", ".join(map(repr, options.start_without))
        remedy = f"compile the model with --tolerate-failures {len(set(options.start_without))}"
        raise UsageError(f"run: the artifact has no failure plan for a run without {names}: {remedy}")
    has_failure_plans = "failed" in artifact.program

    def report_event(event: RunEvent) -> None:
        events.append(event)
        log.warning("%s", event.message)
        if options.on_event is not None:
            options.on_event(event)

    while True:
        elapsed_s = time.perf_counter() - start if events else 0.0
        timeout_s = max(0.0, options.timeout_s - elapsed_s)
        run_options = replace(
            options, timeout_s=timeout_s, kept_frames=None if has_failure_plans else options.kept_frames
        )
        try:
            report, delivered = run_once(frames[len(finished) :], run_options, down, roles)
            break
        except UnfinishedRun as unfinished:
            failed = unfinished.failure.failed_devices
            failure_roles = artifact.find_roles(down.union(failed.devices))
            if failure_roles is None:
                raise unfinished.failure from None
            roles = failure_roles
            if unfinished.finished_frames or not events:  # Otherwise the previous interruption continues.
                noticed_at = unfinished.failure.noticed_at
                working_until = noticed_at - failed.silent_s
            finished += unfinished.finished_frames
            for name in failed.devices:
                down.add(name)
                all_down = tuple(device for device in artifact.devices if device in down)
                at_s = time.perf_counter() - start
                report_event(RunEvent("failure", name, failed.reason, all_down, at_s, len(finished)))
            # A failed run has no report, but the result needs one. So at least the last frame is computed again.
            finished = finished[: len(frames) - 1]
    result = mpirun.make_result(artifact, report, delivered)
    if events:
        continued_at = time.perf_counter() - result.total_s + result.frames_s[0]
        # The number of replayed frames is an upper bound, because ended ranks do not report the frames they had begun.
        replayed = min(options.resolve_in_flight(len(artifact.devices)), len(frames) - len(finished))
        takeover = replace(
            events[-1],
            kind="takeover",
            reason="",
            at_s=continued_at - start,
            replayed_frames=replayed,
            interruption_s=max(0.0, continued_at - working_until),
            takeover_s=max(0.0, continued_at - noticed_at),
        )
        report_event(takeover)
    all_delivered = (*finished, *result.outputs_by_device)[:kept_frames]
    return replace(
        result,
        reports=tuple(
            _renumber_segments(artifact, rank, device_report, roles[0])
            for rank, device_report in enumerate(result.reports)
        ),
        outputs=tuple(artifact.take_first_outputs(frame) for frame in all_delivered),
        outputs_by_device=all_delivered,
        total_s=result.total_s if not events else time.perf_counter() - start,
        events=tuple(events),
    )


def _renumber_segments(artifact: MpiArtifact, rank: int, report: DeviceReport, first_role: int) -> DeviceReport:
    """Return a rank's report that numbers segments over all roles (the normal plan, replicas and failure plans).

    A run uses consecutive roles, beginning with role `first_role`. In `report`, segment 0 is the first segment of this
    role. In the result, segment 0 is the first segment of role 0, and the segments of unused roles have zero seconds.
    """
    roles = artifact.program["ranks"][rank]["roles"]
    segment_counts = [sum(call[0] == "run" for call in calls) for calls in roles]
    before = sum(segment_counts[:first_role])
    after = sum(segment_counts) - before - len(report.segments_s)
    segments_s = (*[0.0] * before, *report.segments_s, *[0.0] * after)
    timeline = (replace(entry, index=entry.index + before * (entry.kind == "run")) for entry in report.timeline)
    return replace(report, segments_s=segments_s, timeline=tuple(timeline))
