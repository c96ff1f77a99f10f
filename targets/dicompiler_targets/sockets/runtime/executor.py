"""The step executor: runs a device's steps for all frames in flight, the oldest frame first.

A frame is one inference request. A step runs a segment (an ONNX submodel), or posts a result to another device or the
coordinator. Before a segment runs, the executor posts all values that are there, of all frames: otherwise other devices
would wait for them until the segment has finished. The thread that runs the event loop puts received tensors and orders
into the mailbox, and the main thread removes each by its key.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from .channel import EventLoop
from .protocol import ProtocolError, RoleSchedule, role_manifests
from .segments import (
    BufferPool,
    BufferSet,
    SegmentIO,
    call_session,
    can_run_on_arrays,
    run_copies,
    run_segment,
    value_from_bytes,
    value_to_bytes,
)


class DeviceError(Exception):
    """An error after which this device cannot continue.

    Attributes:
        peer: Name of the other device that seems to have caused the error; None if there is none.
    """

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Mailbox:
    """Tensors and orders that have arrived for one device, by key.

    A tensor's key is the pair of its frame number and its name. Orders are all other messages. Their keys are strings,
    or tuples that start with a string: ("frame", 3) for the announcement of frame 3.

    Attributes:
        changes: Number of changes so far. A waiting thread compares it to notice that something arrived.
        order_changes: Number of calls of `put_order` and `drop` so far.
    """

    def __init__(self) -> None:
        self._items: dict[Any, Any] = {}
        self._failure: DeviceError | None = None
        self.changes = self.order_changes = 0

    def put(self, key: Any, item: Any) -> None:
        """Store an item; raise ProtocolError if an item with this key is stored already."""
        if key in self._items:
            raise ProtocolError(f"received the same item twice: {key}")
        self._items[key] = item
        self.changes += 1

    def put_order(self, key: Any, item: Any) -> None:
        self.put(key, item)
        self.order_changes += 1

    def drop(self, first: int) -> None:
        """Discard all items of frames before number `first`, and order the main thread to drop these frames."""
        for key in list(self._items):
            number = key[1] if key[0] in ("frame", "reset states", "skip") else key[0]
            if isinstance(number, int) and number < first:
                self._items.pop(key, None)
        self._items["drop"] = first
        self.order_changes += 1
        self.changes += 1

    def has_item(self, key: Any) -> bool:
        return key in self._items or self._failure is not None

    def wake(self) -> None:
        """Make waiting threads check their condition again, although nothing arrived."""
        self.changes += 1

    def fail(self, error: DeviceError) -> None:
        """Store an error, which `check`, `pop` and `take` raise from now on; later errors are ignored."""
        self._failure = self._failure or error
        self.changes += 1

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def pop(self, key: Any) -> Any:
        """Remove and return the item with this key, or None; raise the error that was passed to `fail`, if any."""
        self.check()
        return self._items.pop(key, None)

    def skip_frames(self, frame: int) -> int:
        """Remove the orders to skip frames from number `frame` on; return the first frame that is not skipped."""
        while (end := self.pop(("skip", frame))) is not None:
            frame = end
        return frame

    def take(self, loop: EventLoop, key: Any, deadline: float, description: str, peer: str | None = None) -> Any:
        """Run the event loop until the item with this key arrives, then remove and return it.

        At the deadline (time.monotonic), raise a DeviceError that has `description` and names the `peer` that should
        have sent the item.
        """
        loop.run_until(lambda: self.has_item(key), deadline)
        if (item := self.pop(key)) is None:
            raise DeviceError(f"{description} did not arrive in time", peer)
        return item


DEADLINE_GRACE_S = 10.0
"""Seconds after a frame's deadline for which a device still waits for the coordinator.

Within this time, the coordinator finds out which device is at fault and ends the run.
"""
SLEEP_OVERRUN_S = 100e-6
"""Seconds by which a sleep ends late, even if the kernel's timer slack is minimal."""
PR_SET_TIMERSLACK = 29
MAX_TIMELINE_ENTRIES = 10_000
"""Maximum number of timeline entries in a device's report, because messages have limited length."""


@dataclass(eq=False)
class ExecutorStep:
    """A step of a device: it runs a segment (an ONNX submodel), or posts a transfer or an output.

    `entry` is the manifest's entry of the segment, transfer or output, and `index` its index in the manifest's list.
    The step reads the tensors `needed`; no later step needs the tensors `released`.
    """

    is_segment: bool
    index: int
    entry: Mapping[str, Any]
    needed: tuple[str, ...]
    released: list[str] = field(default_factory=list)


class RoleSteps:
    """The device's steps for the frames of one plan (role): the normal plan, a replica of it, or a failure plan.

    `first_segment` is the index of the plan's first segment among the segments of all plans.
    """

    def __init__(self, manifest: Mapping[str, Any], first_segment: int, sessions: Sequence[Any]) -> None:
        self.manifest, self.first_segment = manifest, first_segment
        self.transfers = {t["index"]: t for t in manifest["transfers"]}
        self.received = {t["name"]: t for t in manifest["transfers"] if t["receiver"] == manifest["device"]}
        self.states = {state["name"]: state for state in manifest.get("states", ())}
        self.received |= {value["name"]: value for value in (*manifest["inputs"], *self.states.values())}
        self.states_by_tensor: dict[str, list[str]] = {}
        for name, state in self.states.items():
            self.states_by_tensor.setdefault(state["tensor"], []).append(name)
        self.segment_ios = [
            SegmentIO(segment, session) for segment, session in zip(manifest["segments"], sessions, strict=True)
        ]
        self.buffers = BufferPool(manifest, sessions, self.segment_ios)
        used_as_values = {name for io in self.segment_ios for name in io.session_entry["inputs"]}
        used_as_values |= {value["tensor"] for value in (*manifest["outputs"], *self.states.values())}
        # Names of received tensors that only copies read. They stay bytes; all others become onnxruntime values.
        self.raw_inputs = {name for io in self.segment_ios for name in io.copy_sources} - used_as_values
        self.steps = self._make_steps()

    def _make_steps(self) -> list[ExecutorStep]:
        """Return the run and send steps in the manifest's order, and then a step for each output.

        There are no receive steps, because each step waits for its tensors in the mailbox.
        """
        steps, last_steps, outputs = list[ExecutorStep](), dict[str, ExecutorStep](), self.manifest["outputs"]
        for kind, index in self.manifest["steps"]:
            if kind == "run":
                segment = self.manifest["segments"][index]
                steps.append(ExecutorStep(True, index, segment, tuple(segment["inputs"])))
                last_steps |= dict.fromkeys([*segment["inputs"], *segment["outputs"]], steps[-1])
            elif kind == "send":
                transfer = self.transfers[index]
                steps.append(ExecutorStep(False, index, transfer, (transfer["name"],)))
                last_steps[transfer["name"]] = steps[-1]
        for name in last_steps.keys() - {output["tensor"] for output in outputs}:
            last_steps[name].released.append(name)
        return steps + [ExecutorStep(False, i, output, (output["tensor"],)) for i, output in enumerate(outputs)]


class StateSource(enum.Enum):
    """The source of a frame's states (inputs that are usually outputs of the previous frame)."""

    PREVIOUS_FRAME = enum.auto()
    """The states continue from the previous frame."""
    ZEROS = enum.auto()
    """The states start as zeros."""
    COORDINATOR = enum.auto()
    """The states start with values that the coordinator sends."""


@dataclass(eq=False)
class FrameExecution:
    """A frame (inference request) that this device is computing.

    Attributes:
        number: The frame's number.
        deadline: Time (time.monotonic) by which the frame must be finished.
        role: The steps of the plan that computes the frame.
        position: Index of the next step in `role.steps`.
        values: The tensors that a later step needs, by name.
        buffer_set: Memory of the frame's small tensors; None until it is needed.
        started_at: Time (time.perf_counter) when the frame's first segment started; 0 before that.
        compute_s: Seconds that the frame's segments have taken so far.
        state_source: Source of the states (inputs that are outputs of the previous frame).
    """

    number: int
    deadline: float
    role: RoleSteps
    position: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    buffer_set: BufferSet | None = None
    started_at: float = 0.0
    compute_s: float = 0.0
    state_source: StateSource = StateSource.PREVIOUS_FRAME


PostValue = Callable[[Mapping[str, Any], int, Any, Any], None]
"""Posts a transfer or an output: (manifest entry, frame number, payload, owner of the payload's memory)."""
ReportOverdue = Callable[[int, DeviceError], None]
"""Called with the frame number and an error if a tensor is overdue; it may raise the error."""


def raise_overdue(_: int, error: DeviceError) -> None:
    raise error


@dataclass(frozen=True)
class EmulatedSpeed:
    """The speed of an emulated board, which can change during a run.

    Attributes:
        changes: Pairs of a time (time.perf_counter) and the speed from this time on, in ascending order. The speed is a
            factor: 1.0 is the board's normal speed.
    """

    changes: Sequence[tuple[float, float]] = ()

    @staticmethod
    def parse(text: str) -> EmulatedSpeed:
        """Return the speed for a value of the option --speeds: pairs TIME:SPEED, separated by commas.

        TIME (time.perf_counter) is the time of a change, and SPEED is a multiple of the board's normal speed.
        """
        pairs = (change.split(":") for change in text.split(",") if change)
        return EmulatedSpeed([(float(at), float(speed)) for at, speed in pairs])

    def at(self, time_s: float) -> float:
        """Return the board's speed at `time_s` (time.perf_counter) as a multiple of its normal speed."""
        return next((speed for at, speed in reversed(self.changes) if at <= time_s), 1.0)


FULL_SPEED = EmulatedSpeed()


class StepExecutor:
    """Runs the steps (segments and sends) of all frames that a device has begun and not finished.

    Attributes:
        runs_on_arrays: True if `run_on_arrays` can compute the frames.
        frames: The frames in flight, oldest first.
        wait_s: Seconds in which no frame could continue.
        segments_s: Seconds that each segment took in all frames together, in the order of the sessions.
        announced_at: Time (time.perf_counter) when the last frame was announced.
        timeline: What the device did since `announced_at`, as tuples: "run" or "wait", index of the segment or of the
            awaited transfer (-1 for an input), frame, start, end (time.perf_counter).
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        sessions: list[Any],
        mailbox: Mailbox,
        loop: EventLoop,
        post: PostValue,
        min_segment_s: Sequence[float] = (),
        emulated_speed: EmulatedSpeed = FULL_SPEED,
        schedule: RoleSchedule | None = None,
        can_stop: bool = False,
        report_overdue: ReportOverdue = raise_overdue,
    ) -> None:
        """Create the executor of a device.

        `sessions` are those of the segments of all plans. `post` is called with each result that must be sent, and
        `report_overdue` if a tensor does not arrive in time. `min_segment_s` (seconds by segment) and `emulated_speed`
        emulate a slower board. With `can_stop`, `stop_before` can interrupt segments even without failure plans.
        """
        self._schedule = schedule or RoleSchedule.from_manifest(manifest)
        self._run_options = _make_run_options() if can_stop or self._schedule.tolerates_failures else None
        self._first_valid = 0  # Frames with smaller numbers were stopped by `stop_before`.
        self._sessions, self._mailbox, self._loop = sessions, mailbox, loop
        self._post, self._report_overdue = post, report_overdue
        self._min_segment_s, self._emulated_speed = min_segment_s, emulated_speed
        if min_segment_s:
            # The kernel ends sleeps up to 50 µs late. A timer slack of 1 ns makes the emulated durations more precise.
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._roles: list[RoleSteps] = []
        first = 0
        for role in role_manifests(manifest):
            count = len(role["segments"])
            self._roles.append(RoleSteps(role, first, sessions[first : first + count]))
            first += count
        is_emulated, has_other_plans = bool(min_segment_s), len(self._roles) > 1
        self.runs_on_arrays = not (is_emulated or has_other_plans) and can_run_on_arrays(manifest, sessions)
        self.frames: list[FrameExecution] = []
        # The keys are pairs: number of the frame that reads the state, and name of the state.
        self._states: dict[tuple[int, str], Any] = {}
        self._next_number = 0  # Number of the newest begun frame, plus 1.
        self.wait_s = 0.0
        self.segments_s = [0.0] * len(sessions)
        # Seconds that the last call of each segment took, by the segment's index.
        self._last_run_s: dict[int, float] = {}
        # The mailbox's number of changes when `_post_ready_values` last looked for values.
        self._posted_changes = -1
        self.announced_at = 0.0
        self.timeline: list[tuple[str, int, int, float, float]] = []

    def begin_frame(self, number: int, announced_at: float, deadline: float) -> None:
        """Add a frame that was announced at `announced_at` (time.perf_counter) and must be finished by `deadline`.

        The deadline is a time of time.monotonic.
        """
        self.announced_at = announced_at
        self.timeline = [entry for entry in self.timeline if entry[4] > announced_at]
        has_values: bool | None = self._mailbox.pop(("reset states", number))
        state_source = StateSource.PREVIOUS_FRAME
        if has_values:
            state_source = StateSource.COORDINATOR
        elif has_values is not None or number == 0:
            state_source = StateSource.ZEROS
        self._next_number = number + 1
        self._posted_changes = -1  # Values of this frame may have arrived before.
        role = self._roles[self._schedule.role_index(number)]
        self.frames.append(FrameExecution(number, deadline, role, state_source=state_source))

    def run_on_arrays(self, number: int, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], float] | None:
        """Compute a frame with one call of the only segment, without the copies and steps of other plans.

        `runs_on_arrays` must be True, and no frame in flight.

        Args:
            number: Number of the frame.
            inputs: The inputs of the network, as arrays by name.

        Returns:
            The outputs of the network as new arrays by name, and the seconds of the call. None if `stop_before` has
            stopped the frame.
        """
        (role,) = self._roles
        outputs = role.manifest["outputs"]
        self.announced_at, self.timeline = time.perf_counter(), []
        try:
            arrays = call_session(
                role.manifest["segments"][0],
                self._sessions[0].run,
                [output["tensor"] for output in outputs],
                {value["name"]: inputs[value["name"]] for value in role.manifest["inputs"]},
                self._run_options,
            )
        except ValueError:
            if number < self._first_valid:
                return None
            raise
        seconds = self._record_span("run", 0, number, self.announced_at)
        self.segments_s[0] += seconds
        return {output["name"]: array for output, array in zip(outputs, arrays, strict=True)}, seconds

    def stop_before(self, first: int) -> None:
        """Stop the frames before number `first`, and interrupt a segment that runs at present.

        Any thread may call this method. The main thread must then call `drop_stopped`.
        """
        self._first_valid = first
        if self._run_options is not None:
            self._run_options.terminate = True

    def drop_stopped(self) -> None:
        if self._run_options is not None:
            self._run_options = _make_run_options()
        for frame in self.frames:
            if frame.number < self._first_valid and frame.buffer_set is not None:
                frame.role.buffers.give_back(frame.buffer_set, is_sent=False)
        self.frames = [frame for frame in self.frames if frame.number >= self._first_valid]

    def advance(self, on_finished: Callable[[FrameExecution], None]) -> bool:
        """Run steps until a frame is finished or no frame can continue; pass a finished frame to `on_finished`.

        Return True if a frame was finished, or if `stop_before` has stopped frames.
        """
        position, seen = 0, self._mailbox.changes
        while position < len(self.frames):
            frame = self.frames[position]
            if frame.number < self._first_valid:
                return True
            steps = frame.role.steps
            if frame.position < len(steps):
                step = steps[frame.position]
                if not self._take_inputs(step, frame):
                    position += 1
                    continue
                if step.is_segment:
                    self._post_ready_values()
                if not self._execute_step(step, frame):
                    return True
            if frame.position == len(steps):
                self._finish(frame, on_finished)
                return True
            # A tensor of an older frame may have arrived during the step. The search restarts at the oldest frame,
            # because the oldest frame that can continue goes first.
            if position and self._mailbox.changes != seen:
                position, seen = 0, self._mailbox.changes
        self._loop.push()
        return False

    def _post_ready_values(self) -> None:
        """Execute the next steps of all frames that post a value that is there, until only segments are next."""
        if self._mailbox.changes == self._posted_changes:
            return
        self._posted_changes = self._mailbox.changes
        for frame in self.frames:
            if frame.number < self._first_valid:
                return
            steps = frame.role.steps
            while frame.position < len(steps) and not (step := steps[frame.position]).is_segment:
                if not self._take_inputs(step, frame) or not self._execute_step(step, frame):
                    break
        self._loop.push()

    def _execute_step(self, step: ExecutorStep, frame: FrameExecution) -> bool:
        """Run the frame's next step, after `_take_inputs`; return False if `stop_before` has stopped the frame."""
        try:
            self._run_segment(step, frame) if step.is_segment else self._post_step(step, frame)
        except ValueError as error:
            # The error is expected if `stop_before` has stopped the frame during the step.
            if frame.number < self._first_valid:
                return False
            raise _add_senders(error, frame.role) from error
        for name in step.released:
            del frame.values[name]
        frame.position += 1
        return True

    def _finish(self, frame: FrameExecution, on_finished: Callable[[FrameExecution], None]) -> None:
        self.frames.remove(frame)
        if self._states:
            self._discard_unread_states()
        on_finished(frame)
        self._loop.push()
        if frame.buffer_set is not None:
            frame.role.buffers.give_back(frame.buffer_set, not self._loop.has_backlog())

    def wait(self, seen_changes: int) -> None:
        """Run the event loop until the mailbox's number of changes differs from `seen_changes`.

        If a tensor of the oldest frame is overdue, report it and the peer that should have sent it.
        """
        if not self.frames:
            self._loop.run_until(lambda: self._mailbox.changes != seen_changes)
            return
        frame = self.frames[0]
        name = next(name for name in frame.role.steps[frame.position].needed if name not in frame.values)
        awaited = frame.role.received[name]
        peer = awaited.get("sender")
        deadline = frame.deadline if peer else frame.deadline + DEADLINE_GRACE_S
        start = time.perf_counter()
        has_changed = self._loop.run_until(
            lambda: self._mailbox.changes != seen_changes, None if deadline == math.inf else deadline
        )
        self.wait_s += self._record_span("wait", awaited["index"] if peer else -1, frame.number, start)
        if not has_changed:
            frame.deadline = math.inf  # An infinite deadline prevents a second report.
            self._report_overdue(frame.number, DeviceError(f"tensor {name!r} did not arrive in time", peer))

    def _record_span(self, kind: str, index: int, frame: int, start: float) -> float:
        """Add a timeline entry from `start` (time.perf_counter) until now; return its duration in seconds."""
        end = time.perf_counter()
        if len(self.timeline) < MAX_TIMELINE_ENTRIES:
            self.timeline.append((kind, index, frame, start, end))
        return end - start

    def _take_inputs(self, step: ExecutorStep, frame: FrameExecution) -> bool:
        """Take the tensors that the step needs from the mailbox; return True if all of them are available."""
        for name in step.needed:
            if name not in frame.values:
                payload = self._take_payload(name, frame)
                if payload is None:
                    return False
                frame.values[name] = self._make_input(name, payload, frame)
        return True

    def _make_input(self, name: str, payload: Any, frame: FrameExecution) -> Any:
        """Return a received tensor or state as an onnxruntime value, or as bytes if no segment reads it directly."""
        buffer_set = frame.buffer_set or self._take_buffers(frame)
        view = buffer_set.views.get(name)
        # Large states (outputs of the previous frame) are stored as onnxruntime values, to avoid a copy.
        if isinstance(payload, ort.OrtValue):
            if view is None:
                return payload
            payload = value_to_bytes(payload, frame.role.received[name])
        if view is not None:
            view[:] = payload
            return buffer_set.values[name]
        if name in frame.role.raw_inputs:
            return payload
        return value_from_bytes(payload, frame.role.received[name])

    def _take_payload(self, name: str, frame: FrameExecution) -> Any:
        """Remove and return a received tensor or stored state (output of the previous frame); None if missing."""
        is_sent = frame.state_source is StateSource.COORDINATOR
        if is_sent or not frame.role.states or (state := frame.role.states.get(name)) is None:
            return self._mailbox.pop((frame.number, name))
        if frame.state_source is StateSource.PREVIOUS_FRAME:
            return self._states.pop((frame.number, name), None)
        return np.zeros(state["bytes"], np.uint8)

    def _keep_states(self, segment: Mapping[str, Any], frame: FrameExecution, buffer_set: BufferSet) -> None:
        """Keep the segment's outputs that are states (inputs of the next frame, such as a key/value cache).

        Outputs in a buffer set (reused memory) are copied, because later frames overwrite it.
        """
        for tensor in segment["outputs"]:
            for name in frame.role.states_by_tensor.get(tensor, ()):
                view = buffer_set.views.get(tensor)
                state = frame.values[tensor] if view is None else np.frombuffer(bytes(view), np.uint8)
                self._states[frame.number + 1, name] = state

    def _discard_unread_states(self) -> None:
        oldest = min((frame.number for frame in self.frames), default=self._next_number)
        self._states = {key: state for key, state in self._states.items() if key[0] >= oldest}

    def _take_buffers(self, frame: FrameExecution) -> BufferSet:
        frame.buffer_set = buffer_set = frame.role.buffers.take()
        return buffer_set

    def _run_segment(self, step: ExecutorStep, frame: FrameExecution) -> None:
        buffer_set, number = frame.buffer_set or self._take_buffers(frame), frame.role.first_segment + step.index
        # The loop must know how long this thread will be busy. A segment that has not run yet is assumed to take as
        # long as the slowest of the other segments.
        if (expected_s := self._last_run_s.get(number)) is None:
            expected_s = max(self._last_run_s.values(), default=math.inf)
        self._loop.let_helper_run(expected_s)
        start = time.perf_counter()
        frame.started_at = frame.started_at or start
        if self._min_segment_s:
            with _emulate_duration(start + self._min_segment_s[number] / self._emulated_speed.at(start)):
                outputs = self._compute_outputs(step, number, frame, buffer_set)
        else:
            outputs = self._compute_outputs(step, number, frame, buffer_set)
        self._last_run_s[number] = seconds = self._record_span("run", number, frame.number, start)
        self.segments_s[number] += seconds
        frame.compute_s += seconds
        frame.values.update(outputs)
        if frame.role.states_by_tensor:
            self._keep_states(step.entry, frame, buffer_set)

    def _compute_outputs(
        self, step: ExecutorStep, number: int, frame: FrameExecution, buffer_set: BufferSet
    ) -> Mapping[str, Any]:
        """Run a step's segment and return its outputs by name.

        `number` is the segment's index among the segments of all plans.
        """
        if (bound := buffer_set.bindings.get(step.index)) is None:
            segment_io = frame.role.segment_ios[step.index]
            values, computed = segment_io.join_inputs(frame.values), dict[str, Any]()
            if (session := self._sessions[number]) is not None:
                computed = run_segment(session, segment_io.session_entry, values, buffer_set.values, self._run_options)
            return segment_io.cut_outputs(computed, frame.values)
        binding, outputs, before, after = bound
        run_copies(before)
        if binding is not None:
            call_session(step.entry, self._sessions[number].run_with_iobinding, binding, self._run_options)
        run_copies(after)
        return outputs

    def _post_step(self, step: ExecutorStep, frame: FrameExecution) -> None:
        buffer_set, name = frame.buffer_set or self._take_buffers(frame), step.needed[0]
        if (view := buffer_set.views.get(name)) is not None:
            self._post(step.entry, frame.number, view, None)
        else:
            tensor = frame.values[name]
            self._post(step.entry, frame.number, value_to_bytes(tensor, step.entry), tensor)


def _add_senders(error: ValueError, role: RoleSteps) -> ValueError:
    """Return the error of a step, with the names of the devices whose wrong tensors may have caused it."""
    senders = sorted({entry["sender"] for entry in role.received.values() if "sender" in entry})
    names = ", ".join(map(repr, senders))
    return ValueError(f"{error}; the device computes with tensors from {names}" if senders else str(error))


def _make_run_options() -> Any:
    """Return onnxruntime run options, with which another thread can end a call early."""
    options = ort.RunOptions()
    options.log_severity_level = 4  # Errors are raised as exceptions, so logging them would repeat them.
    # Without this entry, onnxruntime's Python package raises an exception internally in each call, which takes ten
    # times as long as a call.
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


@contextlib.contextmanager
def _emulate_duration(end: float) -> Iterator[None]:
    """Return a context manager that ends at the time `end` (time.perf_counter), to emulate a slower board.

    If `end` is in the future, the code in the context runs with idle priority and does not delay other emulated boards.
    """
    has_time = end > time.perf_counter()
    if has_time:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        if has_time:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if (sleep_s := end - time.perf_counter() - SLEEP_OVERRUN_S) > 0:
        time.sleep(sleep_s)
    while time.perf_counter() < end:
        os.sched_yield()
