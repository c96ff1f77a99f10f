"""A run of an artifact: its devices are joined once, then given frames, several at a time, until it is closed.

Whatever goes wrong (a process ends or is silent, a device reports an error, time is up, an interrupt): all processes
are ended and waited for, and one RunError names the device and the cause.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions, UsageError
from dicompiler.plugin_api.artifacts import RunEvent
from dicompiler.plugin_api.utilities import check_type, did_you_mean
from dicompiler_targets.sockets.artifact import RoleIO, SocketsArtifact, from_payload, state_piece, to_payload
from dicompiler_targets.sockets.cluster_state import ClusterState
from dicompiler_targets.sockets.daemon_client import DaemonConnector
from dicompiler_targets.sockets.device_process import DeviceProcess, StartDevice, empty_report, local_starter
from dicompiler_targets.sockets.failures import DeviceEvent
from dicompiler_targets.sockets.frame_reader import FrameReader
from dicompiler_targets.sockets.guarded import FailOnceSession, timeout_error
from dicompiler_targets.sockets.leaving import EventLog, FailedProcesses
from dicompiler_targets.sockets.rendezvous import ANY_LOOPBACK_PORT, RunAcceptor
from dicompiler_targets.sockets.runtime.protocol import MAX_FRAMES_IN_FLIGHT, MessageType
from dicompiler_targets.sockets.runtime.transport import seconds_left

GRACE_S = 1.0
"""Seconds after a deadline in which devices can still say what they were waiting for."""


@dataclass
class InFlightFrame:
    """A frame on its way: its inputs as long as it may have to be given again, and when it was given first.

    What is true of it now: its number, which changes when it is given again; its role, and the devices that play it;
    when it is `due` (see Session._due), payloads by sink device and index of output, and who has finished it. start_s,
    end_s: of time.perf_counter; begun_s: when a device began to compute it, as far as those say that have finished it.
    """

    inputs: Mapping[str, Any] | None
    start_s: float
    end_s: float = 0.0
    begun_s: float = math.inf
    number: int = -1
    role: RoleIO = field(init=False, repr=False)
    active_devices: tuple[str, ...] = ()
    deadline: float = 0.0
    outputs: dict[str, dict[int, Any]] = field(default_factory=dict)
    missing_outputs: int = 0
    finished_devices: set[str] = field(default_factory=set)

    @property
    def waited_s(self) -> float:
        """Seconds from its inputs on in which no device computed it yet."""
        return max(0.0, min(self.begun_s, self.end_s) - self.start_s)


class ClusterSession(FailOnceSession):
    """The processes of an artifact and the frames on their way. Use it from one thread at a time.

    start: how devices are started, by default on this host, but those that `options.elsewhere` names, which someone
    else starts. `deadline` (of time.monotonic) bounds all of it, if given. `events`: what befell it so far; `begun_s`:
    when it began, of time.perf_counter. Errors: RunError, UsageError for options that cannot be.
    """

    def __init__(
        self,
        artifact: SocketsArtifact,
        options: RunOptions,
        start: StartDevice | None = None,
        deadline: float | None = None,
    ) -> None:
        self.artifact, self.options, self.deadline = artifact, options, deadline
        self.in_flight = check_frames_in_flight(options, len(artifact.devices))
        self.reports: tuple[DeviceReport, ...] = ()
        self._event_log = EventLog(options.on_event)
        self.events = self._event_log.events
        self._roles = artifact.roles
        self._resets_states = False
        self._in_flight_frames = dict[int, InFlightFrame]()
        self.begun_s, self._replayed_frames, self._finished_frames = time.perf_counter(), 0, 0
        self._change_deadline = math.inf
        self._caller_s, self._left_at = 0.0, math.inf
        count = len({*artifact.devices} - {*options.start_manually, *options.start_without})
        door = (
            start
            if isinstance(start, DaemonConnector)
            else RunAcceptor(options.listen or ANY_LOOPBACK_PORT, options.keys, options.insecure)
        )
        beside = 0 if start else count
        start = start or local_starter(artifact.directory, options, max(1, count))
        leaving = FailedProcesses(self._event_log.set_reason)
        self._cluster = ClusterState(artifact, options, self.in_flight, start, beside, self._log_event, leaving)
        self._window, self._loop = self._cluster.window, self._cluster.loop
        with self._ends_on_error(), contextlib.ExitStack() as stack:
            stack.callback(door.close)
            self._cluster.join(door, self._new_deadline(), self._check_time)
            if self._cluster.schedule.tolerates_failures:
                stack.pop_all()  # who was lost may come back

    @property
    def processes(self) -> Mapping[str, DeviceProcess]:
        """Those of all devices."""
        return self._cluster.processes

    # -- what a user calls

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of one frame by name. RunError as for the class; DicompilerError for inputs that do not fit."""
        given = self.artifact.check_inputs(inputs)
        with self._ends_on_error():
            delivered = self._wait_for_outputs(self._submit_frame(given))
            self._wait_for_event_log()
            return self.artifact.first_outputs(delivered)

    def reset(self) -> None:
        """States begin anew, as zeros, with the frame that is given next."""
        self._resets_states = True

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The outputs of each frame by name, in the order of the frames: see `flights`."""
        for _, delivered in self.stream_frames(frames):
            yield self.artifact.first_outputs(delivered)

    def stream_frames(
        self, frames: Iterable[Mapping[str, Any]]
    ) -> Iterator[tuple[InFlightFrame, dict[str, dict[str, Any]]]]:
        """Each frame with its outputs by sink device and name, in the order of `frames`, which a thread reads.

        It reads at most as many frames ahead of what was taken here as may be on their way at once. What reading them
        raises is raised after the outputs of those before; the session goes on.
        """
        check_type(frames, (Iterable,), "stream: frames", "an iterable of inputs by name")
        feed, waiting = (
            FrameReader(frames, self.in_flight, self._loop.wake, self.artifact.copy_inputs),
            deque[InFlightFrame](),
        )
        away_s = math.inf
        try:
            while True:
                with self._ends_on_error():
                    flight = self._next_finished_frame(feed, waiting)
                    if flight is not None:
                        delivered = self._wait_for_outputs(flight)
                        self._loop.let_helper_run(away_s if self._is_busy() else 0.0)
                    else:
                        self._wait_for_event_log()
                if flight is None:
                    if feed.error is not None:
                        raise feed.error
                    return
                gone = time.perf_counter()
                yield flight, delivered
                away_s = time.perf_counter() - gone
                feed.release()
        finally:
            feed.close()

    def close(self) -> None:
        """Ends the run in good order, after the frames that are still on their way; `reports` are there then."""
        if self._end_reason is not None:
            return
        with self._ends_on_error():
            self._wait_until_none(self._awaited_devices)
            self._finish_run()
        self._end("it was closed")

    # -- starting and ending

    @contextlib.contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        with super()._ends_on_error():
            self._caller_s += max(0.0, time.monotonic() - self._left_at)
            yield
            self._left_at = time.monotonic()

    def _stop(self) -> None:
        self._cluster.close()
        self._event_log.flush()

    def _finish_run(self) -> None:
        crew, deadline = self._cluster, self._new_deadline()
        self._wait_for_event_log()
        crew.finish()
        self._wait_until_none(lambda: [name for name in crew.up if crew.processes[name].report is None], deadline)
        processes = [crew.processes[name] for name in crew.up]
        for process in processes:
            try:
                if process.popen is not None:
                    process.popen.wait(seconds_left(deadline))
            except subprocess.TimeoutExpired:
                raise RunError(f"{process.title}: its process does not end in time: allow more (--timeout)") from None
        self.reports = tuple(
            crew.processes[manifest["device"]].report or empty_report(manifest) for manifest in self.artifact.manifests
        )

    # -- frames

    def _new_deadline(self) -> float:
        """The deadline of what begins now."""
        end_s = time.monotonic() + self.options.timeout_s
        return end_s if self.deadline is None else min(end_s, self.deadline)

    def _is_full(self) -> bool:
        """Whether no more frames may be on their way for now."""
        return self._cluster.needs_replay or bool(self._cluster.awaiting_ack) or len(self._window) >= self.in_flight

    def _is_busy(self) -> bool:
        """Whether anything is on its way."""
        return self._cluster.needs_replay or bool(self._cluster.awaiting_ack) or len(self._window) > 0

    def _awaited_devices(self) -> list[str]:
        """The devices that everything waits for: the oldest frame's, or those that have not answered to a change."""
        if not len(self._window):
            return sorted(self._cluster.awaiting_ack)
        oldest = self._in_flight_frames[self._window.oldest]
        return [name for name in oldest.active_devices if name not in oldest.finished_devices]

    def _current_deadline(self) -> float:
        """Until when they may take, with the time in which the user was away: nothing was handled then."""
        due = self._in_flight_frames[self._window.oldest].deadline if len(self._window) else self._change_deadline
        return due + self._caller_s

    def _submit_frame(self, inputs: Mapping[str, Any]) -> InFlightFrame:
        """Gives a frame to the devices once it may be on its way."""
        while self._is_full():
            self._handle_events(self._awaited_devices())
        flight = InFlightFrame(inputs if self._cluster.schedule.tolerates_failures else None, time.perf_counter())
        self._send_frame(flight, inputs, self._loop.push)
        return flight

    def _send_frame(self, flight: InFlightFrame, inputs: Mapping[str, Any], each: Callable[[], object]) -> None:
        """Posts a frame to its devices; `each` is called after every one."""
        crew = self._cluster
        flight.number = number = self._window.open()
        flight.role = role = self._roles[crew.schedule.role_index(number)]
        flight.active_devices = tuple(name for name in crew.up if name in role.active_devices)
        until = self._new_deadline()
        flight.finished_devices, flight.deadline = set(), until - self._caller_s
        flight.outputs = {name: {} for name, values in role.outputs.items() if values}
        flight.missing_outputs = sum(map(len, role.outputs.values()))
        self._in_flight_frames[number] = flight
        allowed = min(int(1000 * seconds_left(until)), 2**32 - 1)
        # Those first that can begin at once.
        for name in sorted(flight.active_devices, key=lambda name: not role.inputs[name]):
            connection = crew.processes[name].get_channel()
            begins = any(state["name"] in inputs for state in self.artifact.states)
            if role.states[name] and (begins or self._resets_states):
                connection.post(MessageType.RESET_STATES, index=int(begins), frame=number)
            connection.post(MessageType.BEGIN_FRAME, index=allowed, frame=number)
            for state in role.states[name] if begins else ():
                payload = to_payload(state_piece(inputs[state["state"]], state), state)
                connection.post(MessageType.INPUT, payload, state["index"], number)
            for value in role.inputs[name]:
                payload = to_payload(inputs[value["name"]], value)
                connection.post(MessageType.INPUT, payload, value["index"], number)
            each()
        self._resets_states = False

    def _replay_frames(self) -> None:
        """Gives what was on its way when a device was lost, together with the word of it: who hears of it sooner tells
        its peers so, before what they would not expect."""
        self._cluster.needs_replay, self._change_deadline = False, self._new_deadline() - self._caller_s
        flights, self._in_flight_frames = (
            [self._in_flight_frames[number] for number in sorted(self._in_flight_frames)],
            {},
        )
        for flight in flights:
            if flight.missing_outputs and flight.inputs is not None:
                self._replayed_frames += 1
                self._send_frame(flight, flight.inputs, lambda: None)
        self._loop.push()
        self._loop.spin_next()
        if not self._in_flight_frames:
            self._log_takeover()

    def _next_finished_frame(self, feed: FrameReader, waiting: deque[InFlightFrame]) -> InFlightFrame | None:
        """The next frame of the feed whose outputs are there; None after the last. Gives frames in the meantime."""
        while True:
            while feed.queue and not self._is_full():
                if (inputs := feed.take()) is not None:
                    waiting.append(self._submit_frame(inputs))
            if waiting and waiting[0].missing_outputs == 0:
                return waiting.popleft()
            if feed.is_exhausted and not waiting and not feed.queue:
                return None
            if self._is_busy():
                self._handle_events(self._awaited_devices(), None if feed.is_exhausted or self._is_full() else feed)
            else:
                self._handle_events([], feed)

    def _wait_for_outputs(self, flight: InFlightFrame) -> dict[str, dict[str, Any]]:
        """Waits for a frame's outputs, by sink device and name."""
        self._wait_until_none(lambda: self._awaited_devices() if flight.missing_outputs else [])
        delivered: dict[str, dict[str, Any]] = {}
        for device, payloads in flight.outputs.items():
            values = flight.role.outputs[device]
            try:
                delivered[device] = {v["name"]: from_payload(payloads[i], v) for i, v in values.items()}
            except ValueError as error:
                raise RunError(f"{self.processes[device].title}: it sent what it must not: {error}") from None
        return delivered

    # -- events

    def _wait_until_none(self, missing: Callable[[], list[str]], deadline: float | None = None) -> None:
        """Handles events until `missing` names no device any more. deadline: by default that of what is on its way."""
        while waiting := missing():
            self._handle_events(waiting, deadline=deadline)

    def _handle_events(
        self, waiting: Sequence[str], feed: FrameReader | None = None, deadline: float | None = None
    ) -> None:
        """Handles what has come, or comes soon; does not wait where the feed has something."""
        crew = self._cluster
        if deadline is None:
            deadline = self._current_deadline() if waiting else math.inf
        for event in crew.events(lambda: feed is not None and feed.has_frame_or_end()):
            if crew.handle(event) and event.header is not None and event.header.frame in self._in_flight_frames:
                self._record_progress(self._in_flight_frames[event.header.frame], event)
            if crew.needs_replay:
                self._replay_frames()
        crew.poll()
        if crew.needs_replay:
            self._replay_frames()
        self._check_time(deadline, waiting)

    def _wait_for_event_log(self) -> None:
        """Waits until all is told that has happened: how a lost process ends shows soon."""
        while self._event_log:
            self._handle_events([])

    def _record_progress(self, flight: InFlightFrame, event: DeviceEvent) -> None:
        """An output of a frame came, or a device has finished it."""
        assert event.header is not None
        if event.header.type is MessageType.OUTPUT:
            flight.outputs[event.device][event.header.index] = event.payload
            flight.missing_outputs -= 1
            flight.end_s = event.received_at
            if not flight.missing_outputs:
                flight.inputs = None
                self._finished_frames += 1
                self._log_takeover()
        else:
            flight.finished_devices.add(event.device)
            if event.header.index:
                flight.begun_s = min(flight.begun_s, event.received_at - event.header.index / 1e6)
        if flight.missing_outputs == 0 and len(flight.finished_devices) == len(flight.active_devices):
            del self._in_flight_frames[flight.number]
            self._window.finish(flight.number)

    def _log_event(self, kind: Any, device: str, why: str, replays: int = 0, interruption_s: float = 0.0) -> None:
        """Tells the user of a loss, a take-over or a return; of a loss once more is known of why."""
        self._change_deadline = self._new_deadline() - self._caller_s
        away = tuple(name for name in self.artifact.devices if name in self._cluster.down)
        at_s = time.perf_counter() - self.begun_s
        event = RunEvent(kind, device, why, away, at_s, self._finished_frames, replays, interruption_s)
        self._event_log.add(event, known=kind != "loss")

    def _log_takeover(self) -> None:
        """After a loss the first frame is finished, or there was none to finish."""
        if self._cluster.failed_at:
            seconds, self._cluster.failed_at = time.perf_counter() - self._cluster.failed_at, 0.0
            replays, self._replayed_frames = self._replayed_frames, 0
            self._log_event("take-over", self._cluster.last_failed, "", replays, seconds)

    def _check_time(self, deadline: float, waiting: Sequence[str], more: str = "") -> None:
        if time.monotonic() > deadline + GRACE_S:
            others = f" (nor did {', '.join(map(repr, waiting[1:]))})" if len(waiting) > 1 else ""
            raise timeout_error(self.processes[waiting[0]].title, self.options, f"{others}{more}")


def check_frames_in_flight(options: RunOptions, devices: int) -> int:
    """How many frames may be on their way; UsageError for options that cannot be."""
    frames = options.resolve_in_flight(devices, MAX_FRAMES_IN_FLIGHT)
    if not 0.05 <= options.heartbeat_s <= 3600:
        raise UsageError(f"run: the heartbeat must be between 0.05 and 3600 s, not {options.heartbeat_s:g}")
    return frames


def check_device_options(options: RunOptions, artifact: SocketsArtifact) -> None:
    """UsageError for a device that the artifact does not have, or without which it cannot be run."""
    for name in (*options.start_manually, *options.start_without):
        if name not in artifact.devices:
            raise UsageError(f"run: there is no device {name!r}{did_you_mean(name, artifact.devices)}")
    if artifact.make_schedule().find_failed_set(options.start_without) is None:
        names = ", ".join(map(repr, options.start_without))
        remedy = f"compile it with one (--survive {len(set(options.start_without))})"
        raise UsageError(f"run: no plan in the artifact does without {names}: {remedy}")
