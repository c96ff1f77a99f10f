"""Continues a run after a rank (MPI process) has failed, with a failure plan of the artifact.

A failure plan is another plan that does not use certain devices. MPI ends all ranks when one of them fails. Therefore,
mpirun is started again for the frames that are not finished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions, RunResult, UsageError
from dicompiler.plugin_api.artifacts import RunEvent, describe_missing_plan
from dicompiler_targets.mpi import mpirun
from dicompiler_targets.mpi.artifact import DeliveredFrames, MpiArtifact

log = logging.getLogger("dicompiler")

Frames = Sequence[Mapping[str, NDArray[Any]]]
RunOnce = Callable[[Frames, RunOptions, Collection[str], tuple[int, int]], tuple[Mapping[str, Any], DeliveredFrames]]
"""A function that runs mpirun once, and returns the report of rank 0 and the outputs of the frames.

Arguments: the frames, the options, the failed devices, and the roles (index of the first one, number). A role is the
normal plan, a failure plan, or a replica of either. The function raises UnfinishedRun if a rank fails.
"""


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
    """Run mpirun until all frames are finished: after a failure, again with a failure plan.

    A failure plan does not use certain devices. The result combines all runs of mpirun, and contains each frame once.

    Raises:
        RunError: No failure plan excludes the failed devices.
        UsageError: No failure plan excludes the devices in `options.start_without`.
    """
    run = _FailoverRun(artifact, options, len(frames))
    while True:
        try:
            report, delivered = run_once(frames[len(run.finished) :], run.options_of_next_call(), run.down, run.roles)
            break
        except UnfinishedRun as unfinished:
            run.change_plan(unfinished)
    result = mpirun.make_result(artifact, report, delivered)
    if run.events:
        run.report_takeover(result)
    return run.combine_results(result)


class _FailoverRun:
    """A run of an artifact: one call of mpirun, and one more call after each failure.

    Attributes:
        down: Names of the devices that have failed.
        roles: Index of the first role that the next call uses, and number of roles. A role is the normal plan, a
            failure plan, or a replica of either. If n roles are used, number i mod n of them computes frame i.
        finished: The outputs of the frames that earlier calls have finished.
        events: The failures and takeovers so far.
    """

    def __init__(self, artifact: MpiArtifact, options: RunOptions, frame_count: int) -> None:
        self._artifact, self._options, self._frame_count = artifact, options, frame_count
        self._start = time.perf_counter()
        self._working_until = self._noticed_at = 0.0
        self.down, self.events = set(options.start_without), list[RunEvent]()
        self.finished: DeliveredFrames = ()
        if (roles := artifact.find_roles(self.down)) is None:
            raise UsageError(f"run: start_without: {self._describe_missing_plan(self.down)}")
        self.roles = roles

    def _describe_missing_plan(self, down: Collection[str]) -> str:
        return describe_missing_plan(down, self._artifact.program.get("failed", ()))

    def options_of_next_call(self) -> RunOptions:
        """Return the options of the next call of mpirun, with the remaining time as the timeout.

        If there are failure plans, the outputs of all frames are kept, because they show which frames are finished.
        """
        elapsed_s = time.perf_counter() - self._start if self.events else 0.0
        has_failure_plans = "failed" in self._artifact.program
        return replace(
            self._options,
            timeout_s=max(0.0, self._options.timeout_s - elapsed_s),
            kept_frames=None if has_failure_plans else self._options.kept_frames,
        )

    def change_plan(self, unfinished: UnfinishedRun) -> None:
        """Use a failure plan without the failed devices from now on, and keep the finished frames.

        Raises:
            RunError: There is no such plan.
        """
        failed = unfinished.failure.failed_devices
        roles = self._artifact.find_roles(self.down.union(failed.devices))
        if roles is None:
            cause = self._describe_missing_plan(self.down.union(failed.devices))
            raise RunError(f"{unfinished.failure}; {cause}") from None
        self.roles = roles
        # If no frame was finished since the previous failure, the interruption that began with that failure continues.
        if unfinished.finished_frames or not self.events:
            self._noticed_at = unfinished.failure.noticed_at
            self._working_until = self._noticed_at - failed.silent_s
        self.finished += unfinished.finished_frames
        for name in failed.devices:
            self.down.add(name)
            all_down = tuple(device for device in self._artifact.devices if device in self.down)
            at_s = unfinished.failure.noticed_at - self._start
            self._report_event(RunEvent("failure", name, failed.reason, all_down, at_s, len(self.finished)))
        # A failed run of mpirun has no report, but the result needs one. At least the last frame is therefore computed
        # again.
        self.finished = self.finished[: self._frame_count - 1]

    def report_takeover(self, result: RunResult) -> None:
        """Report that the remaining devices have finished their first frame after a failure.

        `result` is the result of the last call of mpirun.
        """
        continued_at = time.perf_counter() - result.total_s + result.frames_s[0]
        # The number of frames that are computed again is an upper bound, because ended ranks do not report it.
        in_flight = mpirun.get_in_flight(self._artifact, self._options)
        takeover = replace(
            self.events[-1],
            kind="takeover",
            reason="",
            at_s=continued_at - self._start,
            replayed_frames=min(in_flight, self._frame_count - len(self.finished)),
            interruption_s=max(0.0, continued_at - self._working_until),
            takeover_s=max(0.0, continued_at - self._noticed_at),
        )
        self._report_event(takeover)

    def combine_results(self, result: RunResult) -> RunResult:
        kept_frames = mpirun.count_kept_frames(self._frame_count, self._options)
        all_delivered = (*self.finished, *result.outputs_by_device)[:kept_frames]
        return replace(
            result,
            reports=tuple(
                _renumber_segments(self._artifact, rank, device_report, self.roles[0])
                for rank, device_report in enumerate(result.reports)
            ),
            outputs=tuple(self._artifact.merge_outputs(frame) for frame in all_delivered),
            outputs_by_device=all_delivered,
            total_s=result.total_s if not self.events else time.perf_counter() - self._start,
            events=tuple(self.events),
        )

    def _report_event(self, event: RunEvent) -> None:
        self.events.append(event)
        log.warning("%s", event.message)
        if self._options.on_event is not None:
            self._options.on_event(event)


def _renumber_segments(artifact: MpiArtifact, rank: int, report: DeviceReport, first_role: int) -> DeviceReport:
    """Return a rank's report in which segments are numbered over all roles, not only over those of the run.

    A role is the normal plan, a replica or a failure plan. In `report`, segment 0 is the first one of role
    `first_role`. In the result, it is the first one of role 0.
    """
    roles = artifact.program["ranks"][rank]["roles"]
    segment_counts = [sum(call[0] == "run" for call in calls) for calls in roles]
    before = sum(segment_counts[:first_role])
    after = sum(segment_counts) - before - len(report.segments_s)
    segments_s = (*[0.0] * before, *report.segments_s, *[0.0] * after)
    timeline = (replace(entry, index=entry.index + before * (entry.kind == "run")) for entry in report.timeline)
    return replace(report, segments_s=segments_s, timeline=tuple(timeline))
