"""A session of an artifact whose devices are other processes. Several frames can be in flight at the same time.

`ClusterSession` sends frames (inference requests) and returns their outputs. Its `cluster_state.ClusterState` starts
the devices and reacts to failures. Together they are the coordinator. At the first failure that no failure plan covers,
all processes are ended, and a RunError names the device and the cause.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions, Session, UsageError
from dicompiler.plugin_api.artifacts import BoardState, FrameTimes, ReceivedBytes, RunEvent, describe_missing_plan
from dicompiler.plugin_api.utilities import ALLOW_MORE_TIME, check_type, did_you_mean
from dicompiler_targets.sockets.artifact import Manifest, RoleIO, SocketsArtifact, from_payload, state_piece, to_payload
from dicompiler_targets.sockets.cluster_state import POLL_INTERVAL_S, ClusterState
from dicompiler_targets.sockets.daemon_client import DaemonConnector
from dicompiler_targets.sockets.device_connections import (
    ANY_LOOPBACK_PORT,
    DeviceEvent,
    DeviceProcess,
    RunAcceptor,
    StartDevice,
    local_starter,
)
from dicompiler_targets.sockets.failures import EventLog
from dicompiler_targets.sockets.frame_reader import FrameReader, make_frame_reader
from dicompiler_targets.sockets.runtime.protocol import MAX_FRAMES_IN_FLIGHT, MessageType, role_manifests
from dicompiler_targets.sockets.runtime.transport import seconds_left


class TurnLock:
    """A reentrant lock that threads acquire in the order in which they asked for it.

    With `threading.Lock`, a thread that releases and acquires the lock in a loop usually gets it again, while other
    threads wait.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting = deque[object]()
        self._owner, self._depth = 0, 0

    @property
    def is_contended(self) -> bool:
        return bool(self._waiting)

    def acquire(self, wake_owner: Callable[[], None]) -> None:
        """Acquire the lock. If another thread holds it, call `wake_owner` and wait."""
        thread = threading.get_ident()
        if self._owner != thread:
            with self._condition:
                if self._owner or self._waiting:
                    self._wait_for_turn(wake_owner)
                self._owner = thread
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            with self._condition:
                self._owner = 0
                self._condition.notify_all()

    def _wait_for_turn(self, wake_owner: Callable[[], None]) -> None:
        ticket = object()
        self._waiting.append(ticket)
        try:
            if self._owner:
                wake_owner()
            self._condition.wait_for(lambda: not self._owner and self._waiting[0] is ticket)
        # A KeyboardInterrupt can end the wait. If the ticket stayed in the queue, all later threads would wait forever.
        finally:
            self._waiting.remove(ticket)
            self._condition.notify_all()


class _Turn:
    """A context manager in which only one thread uses a session. Entering it in a forked child raises a RunError.

    A class is used, because a generator with `contextlib.contextmanager` takes several times as long.
    """

    def __init__(self, guard: SessionGuard, turns: TurnLock, wake: Callable[[], None], is_call: bool) -> None:
        """Guard a session. A call (`is_call`) of it needs a usable session, and an exception in the call ends it."""
        self._guard, self._turns, self._wake, self._is_call = guard, turns, wake, is_call

    def __enter__(self) -> None:
        self._guard.check_process()
        self._turns.acquire(self._wake)
        if self._is_call and self._guard.reason is not None:
            self._turns.release()
            self._guard.check_end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if kind is not None and self._is_call:
                self._guard.end(str(error) or kind.__name__)
        finally:
            self._turns.release()


class SessionGuard:
    """Lets one thread at a time use a session, and ends the session at its first error.

    After that, each call raises a RunError with the reason. Calls in a forked child process also raise a RunError, and
    change nothing.

    Attributes:
        reason: Why the session has ended; None while it is usable.
    """

    def __init__(self, stop: Callable[[], None], wake: Callable[[], None]) -> None:
        """Guard a session that `stop` ends; `stop` may be called several times.

        `wake` interrupts a call that waits in another thread, so that it checks `has_waiting_call` and `check_end`
        again.
        """
        self._stop, self._wake = stop, wake
        self._process, self._turns = os.getpid(), TurnLock()
        self.reason: str | None = None
        self._call, self._exclusive_use = (_Turn(self, self._turns, wake, is_call) for is_call in (True, False))

    @property
    def has_waiting_call(self) -> bool:
        return self._turns.is_contended

    def end(self, reason: str) -> None:
        """End the session. Do nothing in a forked child process, because the session belongs to the parent."""
        if os.getpid() == self._process:
            self.reason = self.reason or reason
            with self._exclusive_use:
                self._stop()

    def check_end(self) -> None:
        if self.reason is not None:
            raise RunError(f"the session has ended: {self.reason}")

    def check_process(self) -> None:
        if os.getpid() != self._process:
            raise RunError(
                f"the session belongs to process {self._process}, and process {os.getpid()} is a fork of it: open a "
                "session in each process (dicompiler.connect)"
            )

    def use_exclusively(self) -> AbstractContextManager[None]:
        """Return a context manager in which only this thread uses the session; raise RunError in a forked child."""
        return self._exclusive_use

    def use(self) -> AbstractContextManager[None]:
        """Return a context manager in which only this thread uses the session; an exception in it ends the session.

        Entering it raises RunError in a forked child, or if the session has ended already.
        """
        return self._call


MAX_TIMES_WAIT_S = 0.005
"""Longest wait for the devices' times of a frame after its outputs, if the option `on_frame` is given."""

COVERED_HEARTBEAT_S, UNCOVERED_HEARTBEAT_S = 0.5, 2.0
"""Default seconds between two heartbeats, with and without failure plans.

On two busy processors, no device was wrongly declared failed with heartbeats of 0.25 s and more (see
docs/reference/results.md).
"""


@dataclass
class InFlightFrame:
    """A frame (inference request) that was sent to the devices and that they have not finished.

    Attributes:
        inputs: The inputs, kept to send the frame again after a failure. None without failure plans, or when all
            outputs have arrived.
        sent_at: When the frame was first sent (time.perf_counter).
        finished_at: When the newest output arrived (time.perf_counter); 0 before the first output.
        computing_since: When the first device started to compute the frame (time.perf_counter); math.inf if not known.
        number: The frame's number, which changes when the frame is sent again.
        role: Index of the plan (the normal plan, a replica or a failure plan) by which the frame is computed.
        role_io: Inputs and outputs of this plan.
        active_devices: The devices that take part in the frame.
        deadline: When the frame must be finished (time.monotonic), minus `ClusterSession._caller_s` at the time of
            sending.
        outputs: By device that sends outputs to this process, the received payloads by index of the output.
        missing_outputs: Number of outputs that have not arrived.
        compute_s: Seconds for which each device computed, by name; only devices that have finished the frame.
        received: By (sender, receiver), the bytes that the receiver has reported with this frame, and the seconds in
            which they arrived.
        boards: The state of the board of each device in `compute_s`.
    """

    inputs: Mapping[str, Any] | None
    sent_at: float
    finished_at: float = 0.0
    computing_since: float = math.inf
    number: int = -1
    role: int = 0
    role_io: RoleIO = field(init=False, repr=False)
    active_devices: tuple[str, ...] = ()
    deadline: float = 0.0
    outputs: dict[str, dict[int, Any]] = field(default_factory=dict)
    missing_outputs: int = 0
    compute_s: dict[str, float] = field(default_factory=dict)
    received: dict[tuple[str, str], ReceivedBytes] = field(default_factory=dict)
    boards: dict[str, BoardState] = field(default_factory=dict)

    @property
    def queue_wait_s(self) -> float:
        """Seconds from sending the frame until the first device started to compute it."""
        return max(0.0, min(self.computing_since, self.finished_at) - self.sent_at)


class ClusterSession(Session):
    """A session in which each device is a process on this host or on another host.

    `open_session` and `run_artifact` create it.

    Attributes:
        artifact: The compiled artifact that the devices run.
        options: The options of the run, with the seconds between heartbeats.
        in_flight: Maximum number of frames in flight.
        reports: The reports of the devices; empty until the session was closed without an error.
        events: Failures, takeovers (the other devices use a failure plan) and returns of devices so far.
        opened_at: When the session was opened (time.perf_counter).
    """

    def __init__(
        self,
        artifact: SocketsArtifact,
        options: RunOptions,
        start: StartDevice | None = None,
        acceptor: RunAcceptor | DaemonConnector | None = None,
    ) -> None:
        """Start the devices and wait until they are ready; raise RunError if a device does not start.

        `start` starts a device; by default, on this host. `acceptor` accepts the devices' connections; by default, at a
        listening socket.
        """
        options = options.with_heartbeat(default_heartbeat_s(artifact))
        self.artifact, self.options = artifact, options
        self.in_flight = resolve_frames_in_flight(options, len(artifact.devices))
        self.reports: tuple[DeviceReport, ...] = ()
        self._event_log = EventLog(options.on_event)
        self.events = self._event_log.events
        self._role_ios = artifact.role_ios
        self._resets_states = False
        self._in_flight_frames = dict[int, InFlightFrame]()
        self.opened_at, self._replayed_frames, self._finished_frames = time.perf_counter(), 0, 0
        self._last_finished_at = -math.inf
        self._change_deadline = math.inf
        # `_caller_s` has the seconds for which the user's code ran between calls of the session; deadlines are extended
        # by them. `_left_at` is the time when the last call returned.
        self._caller_s, self._left_at = 0.0, math.inf
        count = len({*artifact.devices} - {*options.start_manually, *options.start_without})
        acceptor = acceptor or RunAcceptor(options.listen or ANY_LOOPBACK_PORT, options.keys, options.insecure)
        self._cluster = ClusterState(
            artifact,
            options,
            self.in_flight,
            start or local_starter(artifact.directory, options, max(1, count)),
            acceptor,
            0 if start else count,
            self._log_event,
            self._event_log.set_reason,
        )
        self._window, self._loop = self._cluster.window, self._cluster.loop
        self._guard = SessionGuard(self._stop, self._loop.wake)
        with self._guard_call(), contextlib.ExitStack() as stack:
            stack.callback(acceptor.close)
            self._cluster.join(self.options.deadline_from_now())
            if self._cluster.schedule.tolerates_failures:
                stack.pop_all()  # The acceptor stays open, because failed devices may return.

    @property
    def processes(self) -> Mapping[str, DeviceProcess]:
        return self._cluster.processes

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.artifact.directory} on {', '.join(self.artifact.devices)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._guard.end("an error left its context")

    # -- methods that the user calls

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        checked = self.artifact.check_inputs(inputs)
        with self._guard_call():
            frame = self._submit_frame(checked)
            outputs = self._wait_for_outputs(frame)
            self._wait_for_times(frame)
            self._wait_for_event_log()
            return self.artifact.merge_outputs(outputs)

    def reset(self) -> None:
        with self._guard.use():
            self._resets_states = True

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for _, outputs in self.stream_frames(frames):
            yield self.artifact.merge_outputs(outputs)

    def stream_frames(
        self, frames: Iterable[Mapping[str, Any]]
    ) -> Iterator[tuple[InFlightFrame, dict[str, dict[str, Any]]]]:
        """Yield each frame and its outputs, by device and output name, in the order of `frames`.

        At most `in_flight` frames are read ahead of the yielded ones. If `frames` raises an exception, the outputs of
        all earlier frames are yielded first, and the session stays usable.
        """
        check_type(frames, (Iterable,), "stream: frames", "an iterable of inputs by name")
        reader = make_frame_reader(frames, self.in_flight, self._loop.wake, self.artifact.copy_inputs)
        waiting, caller_s = deque[InFlightFrame](), math.inf
        try:
            while True:
                if not waiting:
                    self._wait_for_reader(reader)
                with self._guard_call():
                    frame = self._next_finished_frame(reader, waiting)
                    if frame is not None:
                        outputs = self._wait_for_outputs(frame)
                        if not reader.has_frame:
                            self._wait_for_times(frame)
                        # While the caller uses the outputs, the helper thread exchanges messages with the devices.
                        self._loop.let_helper_run(caller_s if self._is_busy() else 0.0)
                    else:
                        self._wait_for_event_log()
                if frame is None and reader.error is not None:
                    raise reader.error
                if frame is None:
                    return
                yielded_at = time.perf_counter()
                yield frame, outputs
                caller_s = time.perf_counter() - yielded_at
                reader.release()
        finally:
            reader.close()

    def close(self) -> None:
        """Wait for the frames in flight, end the run, and store the devices' reports in `reports`."""
        with self._guard.use_exclusively():
            if self._guard.reason is not None:
                return
            with self._guard_call():
                self._wait_until_none(self._list_awaited_devices)
                self._finish_run()
            self._guard.end("it was closed")

    # -- start and end of calls and of the run

    @contextlib.contextmanager
    def _guard_call(self) -> Iterator[None]:
        """Return a context manager for a call of the session; an exception in it ends the session.

        It also measures the time for which the user's code runs between two calls.
        """
        with self._guard.use():
            self._caller_s += max(0.0, time.monotonic() - self._left_at)
            yield
            self._left_at = time.monotonic()

    def _stop(self) -> None:
        self._cluster.close()
        self._event_log.flush()

    def _finish_run(self) -> None:
        """Tell the devices that no frames follow, and wait for their reports and for the end of their processes."""
        cluster, deadline = self._cluster, self.options.deadline_from_now()
        self._wait_for_event_log()
        cluster.finish()
        self._wait_until_none(lambda: [name for name in cluster.up if cluster.processes[name].report is None], deadline)
        for process in (cluster.processes[name] for name in cluster.up):
            try:
                if process.popen is not None:
                    process.popen.wait(seconds_left(deadline))
            except subprocess.TimeoutExpired:
                cause = "its process did not end in time"
                raise RunError(f"{process.title}: {cause}: {ALLOW_MORE_TIME}") from None
        self.reports = tuple(
            cluster.processes[manifest["device"]].report or _empty_report(manifest)
            for manifest in self.artifact.manifests
        )

    # -- sending and finishing frames

    def _is_full(self) -> bool:
        cluster = self._cluster
        return cluster.needs_replay or bool(cluster.awaiting_ack) or len(self._window) >= self.in_flight

    def _is_busy(self) -> bool:
        """Return True if the session waits for outputs, or for devices to acknowledge a change to another plan."""
        return self._cluster.needs_replay or bool(self._cluster.awaiting_ack) or len(self._window) > 0

    def _list_awaited_devices(self) -> list[str]:
        """Return the devices that have not finished the oldest frame.

        If no frame is in flight, return the devices that have not acknowledged a change to another plan.
        """
        if not len(self._window):
            return sorted(self._cluster.awaiting_ack)
        oldest = self._in_flight_frames[self._window.oldest]
        return [name for name in oldest.active_devices if name not in oldest.compute_s]

    def _current_deadline(self) -> float:
        """Return the deadline (time.monotonic) of the oldest frame.

        If no frame is in flight, return the deadline of the last change to another plan.
        """
        if len(self._window):
            return self._in_flight_frames[self._window.oldest].deadline + self._caller_s
        return self._change_deadline + self._caller_s

    def _submit_frame(self, inputs: Mapping[str, Any]) -> InFlightFrame:
        while self._is_full():
            self._handle_events(self._list_awaited_devices())
        kept_inputs = inputs if self._cluster.schedule.tolerates_failures else None
        frame = InFlightFrame(kept_inputs, time.perf_counter())
        self._send_frame(frame, inputs, self._loop.push)
        return frame

    def _send_frame(self, frame: InFlightFrame, inputs: Mapping[str, Any], after_each: Callable[[], object]) -> None:
        """Queue the messages of a frame for all its devices; call `after_each` after the messages of each device."""
        cluster, deadline = self._cluster, self.options.deadline_from_now()
        self._admit_frame(frame, deadline)
        number, role_io = frame.number, frame.role_io
        allowed_ms = min(int(1000 * seconds_left(deadline)), 2**32 - 1)
        sets_states = any(state["name"] in inputs for state in self.artifact.states)
        # Devices with inputs get their messages first, because they can start at once. All others wait for tensors of
        # these devices anyway.
        for name in sorted(frame.active_devices, key=lambda name: not role_io.inputs[name]):
            channel = cluster.processes[name].get_channel()
            if role_io.states[name] and (sets_states or self._resets_states):
                channel.post(MessageType.RESET_STATES, index=int(sets_states), frame=number)
            channel.post(MessageType.BEGIN_FRAME, index=allowed_ms, frame=number)
            for state in role_io.states[name] if sets_states else ():
                payload = to_payload(state_piece(inputs[state["state"]], state), state)
                channel.post(MessageType.INPUT, payload, state["index"], number)
            for value in role_io.inputs[name]:
                payload = to_payload(inputs[value["name"]], value)
                channel.post(MessageType.INPUT, payload, value["index"], number)
            after_each()
        self._resets_states = False

    def _admit_frame(self, frame: InFlightFrame, deadline: float) -> None:
        """Set the frame's number and plan, and discard outputs that arrived before a failure."""
        frame.number = self._window.admit_frame()
        frame.role = self._cluster.schedule.role_index(frame.number)
        frame.role_io = role_io = self._role_ios[frame.role]
        frame.active_devices = tuple(name for name in self._cluster.up if name in role_io.active_devices)
        frame.compute_s, frame.received, frame.boards = {}, {}, {}
        frame.deadline = deadline - self._caller_s
        frame.outputs = {name: {} for name, values in role_io.outputs.items() if values}
        frame.missing_outputs = sum(map(len, role_io.outputs.values()))
        self._in_flight_frames[frame.number] = frame

    def _replay_frames(self) -> None:
        """Send the frames in flight again after a failure.

        The message that orders the failure plan, CHANGE_ROLES, is already queued for each device, so it arrives before
        the frames.
        """
        self._cluster.needs_replay = False
        self._change_deadline = self.options.deadline_from_now() - self._caller_s
        frames = [self._in_flight_frames[number] for number in sorted(self._in_flight_frames)]
        self._in_flight_frames = {}
        for frame in frames:
            if frame.missing_outputs and frame.inputs is not None:
                self._replayed_frames += 1
                self._send_frame(frame, frame.inputs, lambda: None)
        self._loop.push()
        self._loop.spin_next()
        if not self._in_flight_frames:
            self._log_takeover()

    def _next_finished_frame(self, reader: FrameReader, waiting: deque[InFlightFrame]) -> InFlightFrame | None:
        """Send the reader's frames until the oldest frame has all outputs; return it, or None after the last frame.

        `waiting` has the frames that were sent and that this method has not returned yet.
        """
        while True:
            while reader.has_frame and not self._is_full():
                if (inputs := reader.take()) is not None:
                    waiting.append(self._submit_frame(inputs))
            if waiting and waiting[0].missing_outputs == 0:
                return waiting.popleft()
            if reader.is_exhausted and not waiting:
                return None
            is_busy = self._is_busy()
            can_send = not is_busy or not (reader.is_exhausted or self._is_full())
            is_ready = reader.has_frame_or_end if can_send else None
            self._handle_events(self._list_awaited_devices() if is_busy else [], is_ready)

    def _wait_for_reader(self, reader: FrameReader) -> None:
        """Wait until the reader has a frame or no more frames follow; meanwhile, other threads may use the session."""
        while not reader.has_frame_or_end():
            with self._guard_call():
                self._handle_events(
                    self._list_awaited_devices() if self._is_busy() else [],
                    lambda: reader.has_frame_or_end() or self._guard.has_waiting_call,
                )

    def _wait_for_outputs(self, frame: InFlightFrame) -> dict[str, dict[str, Any]]:
        """Wait for a frame's outputs; return them by device and output name."""
        self._wait_until_none(lambda: self._list_awaited_devices() if frame.missing_outputs else [])
        outputs: dict[str, dict[str, Any]] = {}
        for device, payloads in frame.outputs.items():
            values = frame.role_io.outputs[device]
            try:
                outputs[device] = {v["name"]: from_payload(payloads[i], v) for i, v in values.items()}
            except ValueError as error:
                raise RunError(f"{self.processes[device].title}: sent invalid data: {error}") from None
        return outputs

    def _wait_for_times(self, frame: InFlightFrame) -> None:
        """Wait a few milliseconds for the devices' times of a frame that has all outputs.

        They usually arrive directly after the outputs. Without this wait, `on_frame` would get them in the next call.
        """
        deadline = time.monotonic() + MAX_TIMES_WAIT_S
        while (
            self.options.on_frame is not None
            and frame.number in self._in_flight_frames
            and (wait_s := deadline - time.monotonic()) > 0
        ):
            self._handle_events([], wait_s=wait_s)

    # -- messages and failures of the devices

    def _wait_until_none(self, awaited: Callable[[], list[str]], deadline: float | None = None) -> None:
        """React to messages of the devices until `awaited` returns no device.

        The default deadline is that of the oldest frame.
        """
        while waiting := awaited():
            self._handle_events(waiting, deadline=deadline)

    def _handle_events(
        self,
        waiting: Sequence[str],
        is_ready: Callable[[], bool] | None = None,
        deadline: float | None = None,
        wait_s: float = POLL_INTERVAL_S,
    ) -> None:
        """React to the devices' messages and failures that have arrived or arrive in the next milliseconds.

        Args:
            waiting: Names of the devices for which the session waits, for the error message.
            is_ready: If it returns True, do not wait for messages.
            deadline: Time (time.monotonic) after which RunError is raised; by default, the oldest frame's deadline.
            wait_s: Seconds to wait for messages.

        Raises:
            RunError: The deadline has passed, or another thread has ended the session.
        """
        cluster, guard = self._cluster, self._guard
        if deadline is None:
            deadline = self._current_deadline() if waiting else math.inf
        cluster.set_awaited(waiting, deadline)
        for event in cluster.events(lambda: guard.reason is not None or (is_ready is not None and is_ready()), wait_s):
            if cluster.handle(event) and event.header is not None and event.header.frame in self._in_flight_frames:
                self._record_progress(self._in_flight_frames[event.header.frame], event)
            if cluster.needs_replay:
                self._replay_frames()
        guard.check_end()
        cluster.poll()
        if cluster.needs_replay:
            self._replay_frames()
        cluster.check_time(deadline, waiting)

    def _wait_for_event_log(self) -> None:
        """Wait some milliseconds, until the reasons of all failures are known and all events are reported."""
        while self._event_log:
            self._handle_events([])

    def _record_progress(self, frame: InFlightFrame, event: DeviceEvent) -> None:
        """Record that a device has sent an output (message OUTPUT) or finished its work on the frame (message DONE)."""
        assert event.header is not None
        if event.header.type is MessageType.OUTPUT:
            frame.outputs[event.device][event.header.index] = event.payload
            frame.missing_outputs -= 1
            frame.finished_at = event.received_at
            if not frame.missing_outputs:
                frame.inputs = None
                self._finished_frames += 1
                self._log_takeover()
                self._last_finished_at = frame.finished_at
        else:
            frame.compute_s[event.device] = event.payload.compute_s
            frame.received |= event.payload.received
            frame.boards[event.device] = event.payload.board
            # In a DONE message, `index` has the microseconds since the device started its first segment of the frame.
            if event.header.index:
                frame.computing_since = min(frame.computing_since, event.received_at - event.header.index / 1e6)
        if frame.missing_outputs == 0 and len(frame.compute_s) == len(frame.active_devices):
            del self._in_flight_frames[frame.number]
            self._window.finish(frame.number)
            if self.options.on_frame is not None:
                frame_s = frame.finished_at - frame.sent_at
                self.options.on_frame(FrameTimes(frame_s, frame.compute_s, frame.role, frame.received, frame.boards))

    def _log_event(
        self,
        kind: Any,
        device: str,
        reason: str,
        replayed_frames: int = 0,
        interruption_s: float = 0.0,
        takeover_s: float = 0.0,
    ) -> None:
        """Add an event to the event log.

        Args:
            kind: "failure", "return", or "takeover" (the other devices use a failure plan now).
            device: The device that has failed or returned.
            reason: The reason of a failure, which may still change; '' for other events.
            replayed_frames: For takeovers, the number of frames that were sent again.
            interruption_s: For takeovers, the seconds for which the user has waited for outputs because of the failure.
            takeover_s: For takeovers, the seconds since the failure was noticed.
        """
        self._change_deadline = self.options.deadline_from_now() - self._caller_s
        down = tuple(name for name in self.artifact.devices if name in self._cluster.down)
        at_s = time.perf_counter() - self.opened_at
        counts = self._finished_frames, replayed_frames
        event = RunEvent(kind, device, reason, down, at_s, *counts, interruption_s, takeover_s)
        self._event_log.add(event, is_final=kind != "failure")

    def _log_takeover(self) -> None:
        """Log that the other devices use a failure plan, if devices have failed since the last call.

        Call this method when a frame is finished, or when no frame is in flight.
        """
        if (takeover := self._cluster.pop_takeover()) is not None:
            device, takeover_s = takeover
            replayed_frames, self._replayed_frames = self._replayed_frames, 0
            self._log_event("takeover", device, "", replayed_frames, self._interruption_s(), takeover_s)

    def _interruption_s(self) -> float:
        """Return the seconds for which the user has waited for outputs because of a failure.

        The interruption begins when the last frame was finished or, if that is later, when the oldest frame in flight
        was sent. It is 0 if no frame is in flight.
        """
        sent_at = min((frame.sent_at for frame in self._in_flight_frames.values()), default=math.inf)
        return max(0.0, time.perf_counter() - max(self._last_finished_at, sent_at))


def default_heartbeat_s(artifact: SocketsArtifact) -> float:
    """Return the default seconds between two heartbeats of a device.

    With failure plans, the interval is short, so that a failure is noticed early.
    """
    return COVERED_HEARTBEAT_S if artifact.make_schedule().tolerates_failures else UNCOVERED_HEARTBEAT_S


def resolve_frames_in_flight(options: RunOptions, devices: int) -> int:
    frames = options.resolve_in_flight(devices, MAX_FRAMES_IN_FLIGHT)
    if options.heartbeat_s is not None and not 0.05 <= options.heartbeat_s <= 3600:
        raise UsageError(f"run: the heartbeat must be between 0.05 and 3600 s, not {options.heartbeat_s:g}")
    return frames


def check_device_options(options: RunOptions, artifact: SocketsArtifact) -> None:
    """Raise UsageError if an option names an unknown device, or a device without which the artifact cannot run."""
    for name in (*options.start_manually, *options.start_without):
        if name not in artifact.devices:
            raise UsageError(f"run: there is no device {name!r}{did_you_mean(name, artifact.devices)}")
    schedule = artifact.make_schedule()
    if schedule.find_failed_set(options.start_without) is None:
        cause = describe_missing_plan({*options.start_without}, schedule.covered_failures)
        raise UsageError(f"run: start_without: {cause}")


def _empty_report(manifest: Manifest) -> DeviceReport:
    """Return a report with zeros, for a device that is down at the end of the run."""
    count = sum(len(role["segments"]) for role in role_manifests(manifest))
    return DeviceReport(manifest["device"], 0.0, 0.0, 0.0, {}, (0.0,) * count, 0)
