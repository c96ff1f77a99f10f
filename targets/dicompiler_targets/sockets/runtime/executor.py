"""Plays a device's steps for the frames that are on their way: of the oldest frame that can go on, the next step.

In: tensors that arrive in the mailbox, sessions. Out: calls that post transfers and outputs; times.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from .event_loop import EventLoop
from .mailbox import DeviceError, Mailbox
from .role_schedule import RoleSchedule, role_manifests
from .segments import SegmentIO, run_copies
from .slots import BufferPool, BufferSet
from .values import run_bound, run_segment, value_from_bytes, value_to_bytes

DEADLINE_GRACE_S = 10.0
"""Seconds after a frame's deadline in which the coordinator, which knows whom to blame, must have ended the run."""
SLEEP_OVERRUN_S = 100e-6
"""Seconds by which a sleep that is not rounded up ends late."""
PR_SET_TIMERSLACK = 29
MAX_TIMELINE_ENTRIES = 10_000
"""Entries of a timeline at most: a report has a bounded length."""


@dataclass(frozen=True)
class ExecutorStep:
    """A step that does something: the segment that it runs, or the value (a transfer or an output) that it posts; the
    tensors it needs, and those that are not needed any more after it."""

    is_segment: bool
    index: int
    value: Mapping[str, Any]
    needed: tuple[str, ...]
    released: tuple[str, ...]


class RoleSteps:
    """What the device does for a frame, as a manifest of one role says. `first`: the number of its first segment;
    sessions: of its segments."""

    def __init__(self, manifest: Mapping[str, Any], first: int, sessions: Sequence[Any]) -> None:
        self.manifest, self.first = manifest, first
        self.transfers = {t["index"]: t for t in manifest["transfers"]}
        self.received = {t["name"]: t for t in manifest["transfers"] if t["receiver"] == manifest["device"]}
        self.states = {state["name"]: state for state in manifest.get("states", ())}
        self.received |= {value["name"]: value for value in (*manifest["inputs"], *self.states.values())}
        self.states_by_tensor: dict[str, list[str]] = {}  # tensor → the states that it becomes
        for name, state in self.states.items():
            self.states_by_tensor.setdefault(state["tensor"], []).append(name)
        self.segment_ios = [SegmentIO(*one) for one in zip(manifest["segments"], sessions, strict=True)]
        self.buffers = BufferPool(manifest, sessions, self.segment_ios)
        wrapped = {name for seam in self.segment_ios for name in seam.inner["inputs"]}
        wrapped |= {value["tensor"] for value in (*manifest["outputs"], *self.states.values())}
        self.raw_inputs = {name for seam in self.segment_ios for name in seam.copied_inputs} - wrapped
        self.steps = self._make_steps()

    def _make_steps(self) -> list[ExecutorStep]:
        found, segments = [], self.manifest["segments"]
        for (kind, index), unused in zip(self.manifest["steps"], released_tensors(self.manifest), strict=True):
            if kind == "run":
                found.append(
                    ExecutorStep(True, index, segments[index], tuple(segments[index]["inputs"]), tuple(unused))
                )
            elif kind == "send":
                transfer = self.transfers[index]
                found.append(ExecutorStep(False, index, transfer, (transfer["name"],), tuple(unused)))
        outputs = self.manifest["outputs"]
        return found + [ExecutorStep(False, i, output, (output["tensor"],), ()) for i, output in enumerate(outputs)]


@dataclass(eq=False)
class FrameExecution:
    """A frame on its way: its role, the step that is next, the tensors that are held, until when it must be done, and
    its place for small tensors once it has one. begun: when its first segment began, 0 before that. anew: states begin
    anew with it, as they are given (true) or as zeros; None: they are what the frame before made."""

    number: int
    deadline: float
    role: RoleSteps
    position: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    buffer_set: BufferSet | None = None
    started_at: float = 0.0
    resets_states: bool | None = None


PostValue = Callable[[Mapping[str, Any], int, Any, Any], None]
"""Posts a value of the manifest (a transfer or an output) of a frame: (value, frame, payload, what to keep)."""
ReportOverdue = Callable[[int, DeviceError], None]
"""Is told that what a frame needs is overdue: (its number, what is), and may raise that."""


def raise_overdue(_: int, error: DeviceError) -> None:
    """What is late ends it: a `Late`."""
    raise error


class StepExecutor:
    """The frames on their way on this device, each in its role. `sessions`: of the segments of all roles in order.

    `wait_s`: seconds in which no frame could go on. `segments_s`: seconds of each segment, in the order of `sessions`.
    `least`: seconds that a call of each takes at least; () where nothing is to be held back. `halts`: whether `halt`
    may be called where no losses are survived.
    `timeline`: what was done from the announcement of the last frame (at `begun`, of time.perf_counter) on: ("run",
    number of the segment) or ("wait", index of the transfer that it was for, -1 for an input), frame, start, end.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        sessions: list[Any],
        mailbox: Mailbox,
        lines: EventLoop,
        post: PostValue,
        least: Sequence[float] = (),
        schedule: RoleSchedule | None = None,
        halts: bool = False,
        late: ReportOverdue = raise_overdue,
    ) -> None:
        self._schedule = schedule or RoleSchedule.from_manifest(manifest)
        self._run_options = _make_run_options() if halts or self._schedule.tolerates_failures else None
        self._first_valid = 0
        self._sessions, self._mailbox, self._loop = sessions, mailbox, lines
        self._post, self._report_overdue = post, late
        self._min_segment_s = least
        if least:
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # nanoseconds: the system rounds up by 50 µs else
        self._roles: list[RoleSteps] = []
        first = 0
        for own in role_manifests(manifest):
            count = len(own["segments"])
            self._roles.append(RoleSteps(own, first, sessions[first : first + count]))
            first += count
        self.frames: list[FrameExecution] = []
        self._states: dict[tuple[int, str], Any] = {}  # by frame and name, what the frame before made of states
        self.wait_s = 0.0
        self.segments_s = [0.0] * len(sessions)
        self._last_run_s: dict[
            int, float
        ] = {}  # of each segment that has run; others are taken for the longest of these
        self.announced_at = 0.0
        self.timeline: list[tuple[str, int, int, float, float]] = []

    def begin_frame(self, number: int, announced: float, deadline: float) -> None:
        """One more frame is on its way, since `announced` (of time.perf_counter)."""
        self.announced_at = announced
        self.timeline = [span for span in self.timeline if span[4] > announced]
        anew: bool | None = self._mailbox.pop(("anew", number))
        if anew is None and number == 0:
            anew = False
        self.frames.append(
            FrameExecution(number, deadline, self._roles[self._schedule.role_index(number)], resets_states=anew)
        )

    def stop_before(self, first: int) -> None:
        """Frames before `first` are not played any further, for any thread to call: the main thread calls `drop`."""
        self._first_valid = first
        if self._run_options is not None:
            self._run_options.terminate = True

    def drop_stopped(self) -> None:
        """Forgets the frames that are not played any further."""
        if self._run_options is not None:
            self._run_options = _make_run_options()
        for frame in self.frames:
            if frame.number < self._first_valid and frame.buffer_set is not None:
                frame.role.buffers.give_back(frame.buffer_set, unused=False)
        self.frames = [frame for frame in self.frames if frame.number >= self._first_valid]

    def advance(self, done: Callable[[FrameExecution], None]) -> bool:
        """Plays what can be played, always of the oldest frame that can go on. `done` is called with the first frame
        that is finished then, which is forgotten; whether there was one, or there are frames to drop."""
        at, seen = 0, self._mailbox.changes
        while at < len(self.frames):
            frame = self.frames[at]
            if frame.number < self._first_valid:
                return True
            steps = frame.role.steps
            if frame.position < len(steps):
                step = steps[frame.position]
                if not self._has_inputs(step, frame):
                    at += 1
                    continue
                try:
                    self._run_segment(step, frame) if step.is_segment else self._post_step(step, frame)
                except ValueError:
                    if frame.number < self._first_valid:  # it was ended in the middle
                        return True
                    raise
                for name in step.released:
                    del frame.values[name]
                frame.position += 1
            if frame.position == len(steps):
                self._finish(frame, done)
                return True
            if at and self._mailbox.changes != seen:  # an older one may be able to go on
                at, seen = 0, self._mailbox.changes
        self._loop.push()
        return False

    def _finish(self, frame: FrameExecution, done: Callable[[FrameExecution], None]) -> None:
        self.frames.remove(frame)
        done(frame)
        self._loop.push()
        if frame.buffer_set is not None:
            frame.role.buffers.give_back(frame.buffer_set, not self._loop.has_backlog())

    def wait(self, seen: int) -> None:
        """Drives until something has come since the mailbox's `changes` was `seen`. `late` is told if what the oldest
        frame needs is overdue, with the peer that should have sent it."""
        if not self.frames:
            self._loop.run_until(lambda: self._mailbox.changes != seen)
            return
        frame = self.frames[0]
        name = next(name for name in frame.role.steps[frame.position].needed if name not in frame.values)
        awaited = frame.role.received[name]
        peer = awaited.get("sender")
        deadline = frame.deadline if peer else frame.deadline + DEADLINE_GRACE_S
        start = time.perf_counter()
        came = self._loop.run_until(lambda: self._mailbox.changes != seen, None if deadline == math.inf else deadline)
        self.wait_s += self._record_span("wait", awaited["index"] if peer else -1, frame.number, start)
        if not came:
            frame.deadline = math.inf  # it is told once
            self._report_overdue(frame.number, DeviceError(f"tensor {name!r} did not come in time", peer))

    def _record_span(self, kind: str, index: int, frame: int, start: float) -> float:
        """Notes what was done from `start` to now; the seconds of it."""
        end = time.perf_counter()
        if len(self.timeline) < MAX_TIMELINE_ENTRIES:
            self.timeline.append((kind, index, frame, start, end))
        return end - start

    def _has_inputs(self, step: ExecutorStep, frame: FrameExecution) -> bool:
        """Whether all that the step needs is there, made here or received."""
        for name in step.needed:
            if name not in frame.values:
                payload = self._take_payload(name, frame)
                if payload is None:
                    return False
                slot = frame.buffer_set or self._take_buffers(frame)
                view = slot.views.get(name)
                if isinstance(payload, ort.OrtValue):  # a state in memory of its own
                    if view is None:
                        frame.values[name] = payload
                        continue
                    payload = value_to_bytes(payload, frame.role.received[name])
                if view is not None:
                    view[:] = payload
                    frame.values[name] = slot.values[name]
                elif name in frame.role.raw_inputs:
                    frame.values[name] = payload
                else:
                    frame.values[name] = value_from_bytes(payload, frame.role.received[name])
        return True

    def _take_payload(self, name: str, frame: FrameExecution) -> Any:
        """What came, or is kept, under that name; None as long as it is not there."""
        if not frame.role.states or frame.resets_states or (state := frame.role.states.get(name)) is None:
            return self._mailbox.pop((frame.number, name))
        if frame.resets_states is None:
            return self._states.pop((frame.number, name), None)
        return np.zeros(state["bytes"], np.uint8)

    def _keep_states(self, segment: Mapping[str, Any], frame: FrameExecution, slot: BufferSet) -> None:
        """What the segment made of states is for the next frame; the memory of slots is not ours for so long."""
        for tensor in segment["outputs"]:
            for name in frame.role.states_by_tensor.get(tensor, ()):
                small = slot.views.get(tensor)
                kept = frame.values[tensor] if small is None else np.frombuffer(bytes(small), np.uint8)
                self._states[frame.number + 1, name] = kept

    def _take_buffers(self, frame: FrameExecution) -> BufferSet:
        frame.buffer_set = slot = frame.role.buffers.take()
        return slot

    def _run_segment(self, step: ExecutorStep, frame: FrameExecution) -> None:
        """Runs a segment."""
        slot, number = frame.buffer_set or self._take_buffers(frame), frame.role.first + step.index
        last_s = self._last_run_s.get(number)
        self._loop.let_helper_run(max(self._last_run_s.values(), default=math.inf) if last_s is None else last_s)
        start = time.perf_counter()
        frame.started_at = frame.started_at or start
        if self._min_segment_s:
            with _emulated_duration(start + self._min_segment_s[number]):
                made = self._compute_outputs(step, number, frame, slot)
        else:
            made = self._compute_outputs(step, number, frame, slot)
        self._last_run_s[number] = seconds = self._record_span("run", number, frame.number, start)
        self.segments_s[number] += seconds
        frame.values.update(made)
        if frame.role.states_by_tensor:
            self._keep_states(step.value, frame, slot)

    def _compute_outputs(
        self, step: ExecutorStep, number: int, frame: FrameExecution, slot: BufferSet
    ) -> Mapping[str, Any]:
        """The segment's outputs by name."""
        if (bound := slot.bindings.get(step.index)) is None:
            seam = frame.role.segment_ios[step.index]
            values, computed = seam.join_inputs(frame.values), dict[str, Any]()
            if (session := self._sessions[number]) is not None:
                computed = run_segment(session, seam.inner, values, slot.values, self._run_options)
            return seam.cut_outputs(computed, frame.values)
        binding, made, before, after = bound
        run_copies(before)
        if binding is not None:
            run_bound(self._sessions[number], step.value, binding, self._run_options)
        run_copies(after)
        return made

    def _post_step(self, step: ExecutorStep, frame: FrameExecution) -> None:
        """Posts a transfer or an output."""
        slot, name = frame.buffer_set or self._take_buffers(frame), step.needed[0]
        if (view := slot.views.get(name)) is not None:
            self._post(step.value, frame.number, view, None)
        else:
            tensor = frame.values[name]
            self._post(step.value, frame.number, value_to_bytes(tensor, step.value), tensor)


def _make_run_options() -> Any:
    """What ends a call of onnxruntime. Its Python package looks in it for a GPU's graph before each call; where it says
    nothing of one, that is an exception within, which costs ten times what calling does."""
    options = ort.RunOptions()
    options.log_severity_level = 4  # what it raises is told in words
    options.add_run_config_entry("gpu_graph_id", "-1")  # none
    return options


@contextlib.contextmanager
def _emulated_duration(until: float) -> Iterator[None]:
    """Lasts until then (of time.perf_counter), if that is to come. What is computed meanwhile has time, so that it lets
    everything else go first: other boards are played beside it."""
    patient = until > time.perf_counter()
    if patient:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        if patient:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if (rest := until - time.perf_counter() - SLEEP_OVERRUN_S) > 0:
        time.sleep(rest)
    while time.perf_counter() < until:
        os.sched_yield()


def released_tensors(manifest: Mapping[str, Any]) -> list[list[str]]:
    """For each step the tensors that no later step and no output needs, so that their memory can be given back."""
    names = {t["index"]: t["name"] for t in manifest["transfers"]}
    last: dict[str, int] = {}
    for position, (kind, index) in enumerate(manifest["steps"]):
        if kind == "run":
            segment = manifest["segments"][index]
            last |= dict.fromkeys([*segment["inputs"], *segment["outputs"]], position)
        elif kind == "send":
            last[names[index]] = position
    for output in manifest["outputs"]:
        last.pop(output["tensor"], None)
    return [[n for n, at in last.items() if at == position] for position in range(len(manifest["steps"]))]
