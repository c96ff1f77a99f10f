"""The simulator: plays the steps of a program on a platform, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count
from typing import Any

from dicompiler.base.process import gc_paused
from dicompiler.cost.link_sharing import Flow, LinkScheduler
from dicompiler.cost.simulation_result import SimulationResult, Span
from dicompiler.cost.speed_changes import Speeds, end_of_computing
from dicompiler.cost.workload import Message, Workload
from dicompiler.ir.platform import Platform


@dataclass(slots=True, eq=False)
class _DeviceState:
    """The state of a device in a simulation. A job is the run of one segment (an ONNX sub-model) for one frame.

    Times are in seconds.

    Attributes:
        number: Index of the device.
        started: Time at which the current job started.
        idle_since: Time at which the device last became idle.
        ready: Heap of the frames that have a job ready for the device, as (frame number, frame).
        inbox: Messages that have arrived while the device was busy.
        computed: Total seconds of computing.
        handled: Total seconds of the processor for messages.
        occupied: Total seconds in which it computes or handles messages. If it does both at once, they count once.
        occupied_until: Time until which it computes or handles messages, as far as is known.
        sent: Total seconds of the links for messages from the device.
        received: Total seconds of the links for messages to the device.
        waited: Total seconds of waiting, by the device that sent the missing message.
    """

    number: int
    name: str
    is_busy: bool = False
    started: float = 0.0
    idle_since: float = 0.0
    ready: list[tuple[int, _FrameState]] = field(default_factory=list)
    inbox: deque[_InFlightMessage] = field(default_factory=deque)
    computed: float = 0.0
    handled: float = 0.0
    occupied: float = 0.0
    occupied_until: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)

    def occupy(self, start: float, end: float) -> None:
        """Add the seconds from `start` to `end` to `occupied`.

        Seconds before `occupied_until` are not added again. They are assumed to be counted already: the device must not
        have been idle between `start` and `occupied_until`.
        """
        self.occupied += max(0.0, end - max(start, self.occupied_until))
        self.occupied_until = max(end, self.occupied_until)


@dataclass(slots=True, eq=False)
class _MessagePath:
    """The properties that one message has in every frame.

    Attributes:
        flow: The connection between the two devices; None if both are on one host.
        seconds: Seconds on the link if no other message uses it.
        latency: Seconds from the end of sending until the receiver is awake.
        is_parallel: Whether the receiver can receive the message while a segment computes.
        in_order: Whether messages are sent in the order in which they become ready. Otherwise the messages of older
            frames are sent first.
        readers: Indices of the receiver's jobs (runs of segments) that wait for the message.
    """

    name: str
    sender: _DeviceState
    receiver: _DeviceState
    send_s: float
    flow: Flow[_InFlightMessage] | None
    seconds: float
    latency: float
    receive_s: float
    is_parallel: bool
    in_order: bool
    readers: list[int]


@dataclass(slots=True, eq=False)
class _FrameState:
    """The state of a frame in flight. A job is the run of one segment (an ONNX sub-model) for this frame.

    Attributes:
        next_jobs: For each device, the index of its next job.
        missing_messages: Number of messages that each job still waits for.
        last_messages: The message that arrived last, by index of the job, for jobs that wait for no more messages.
        missing_outputs: Number of outputs that are not computed yet.
        started_at: Time at which the first job of the frame started.
    """

    number: int
    role: _RoleSchedule
    start: float
    next_jobs: list[int]
    missing_messages: list[int]
    last_messages: dict[int, _MessagePath]
    missing_outputs: int
    started_at: float = float("inf")


_InFlightMessage = tuple[_FrameState, _MessagePath]
_Handler = Callable[[float, _FrameState, Any], object]
"""A method that handles an event. The arguments are its time, its frame, and its subject, such as a device.

A true result means that the event was cancelled.
"""


class _RoleSchedule:
    """The jobs of one role (the plan or one of its replicas), numbered consecutively over all devices.

    A job is a segment (an ONNX sub-model) with its predicted seconds. The jobs of device i have the indices from
    `first_jobs[i]` to `job_ends[i]` - 1.
    """

    def __init__(
        self,
        workload: Workload,
        devices: Sequence[_DeviceState],
        platform: Platform,
        links: LinkScheduler[_InFlightMessage],
    ) -> None:
        self.jobs = [job for device in workload.devices for job in device.jobs]
        self.job_ends = list(accumulate(len(device.jobs) for device in workload.devices))
        self.first_jobs = [end - len(device.jobs) for end, device in zip(self.job_ends, workload.devices, strict=True)]
        self.missing_messages = [len(job.waits_for) for job in self.jobs]
        self.outputs = sum(job.outputs for job in self.jobs)
        self.paths = [_message_path(workload, message, devices, platform, links) for message in workload.messages]
        for number, job in enumerate(self.jobs):
            for message in dict.fromkeys(job.waits_for):
                self.paths[message].readers.append(number)
        # For each job that reads states (outputs of the previous frame): the jobs of that frame that compute them.
        self.state_makers: dict[int, list[int]] = {}
        for first_job, device in zip(self.first_jobs, workload.devices, strict=True):
            for i, job in enumerate(device.jobs):
                if job.state_makers:
                    self.state_makers[first_job + i] = [first_job + maker for maker in job.state_makers]
        self.initial_sends = [device.initial_sends for device in workload.devices if device.initial_sends]
        self.starting_devices = [
            d for d, device in enumerate(workload.devices) if device.jobs and not device.jobs[0].waits_for
        ]

    def frame(self, number: int, start: float) -> _FrameState:
        return _FrameState(number, self, start, self.first_jobs.copy(), self.missing_messages.copy(), {}, self.outputs)


def _message_path(
    workload: Workload,
    message: Message,
    devices: Sequence[_DeviceState],
    platform: Platform,
    links: LinkScheduler[_InFlightMessage],
) -> _MessagePath:
    sender, receiver = workload.devices[message.sender], workload.devices[message.receiver]
    link = platform.link(sender.device, receiver.device)
    devices_of_flow = (message.sender, message.receiver)
    return _MessagePath(
        message.name,
        devices[message.sender],
        devices[message.receiver],
        sender.runtime.send_seconds(message.nbytes, message.is_coalesced),
        None if link is None else links.flow(devices_of_flow, platform.occupied_links(sender.device, receiver.device)),
        0.0 if link is None else sender.runtime.link_seconds(link, message.nbytes, platform.network.message_overhead_s),
        receiver.runtime.latency + (0.0 if link is None else link.latency),
        receiver.runtime.receive_seconds(message.nbytes, message.is_coalesced),
        receiver.cores > 1,
        sender.runtime.in_order,
        [],
    )


def simulate(
    workload: Workload,
    platform: Platform,
    frames: int = 1,
    in_flight: int = 1,
    keep_spans: bool = True,
    speeds: Mapping[str, Speeds] | None = None,
    link_speeds: Mapping[str, Speeds] | None = None,
) -> SimulationResult:
    """Simulate frames on a platform.

    Like the targets' runtimes, a device computes one segment (an ONNX sub-model) at a time: the next segment of the
    oldest frame, among those with complete inputs. Sending and receiving a message also take time of the device's
    processor. A device sends a message after the segment that computed the tensor, and receives a message on arrival. A
    device with several cores receives while a segment computes.

    Messages from one device to another are sent in the order in which they become ready, but messages of older frames
    are sent first. If `RuntimeCosts.in_order` is set, older frames have no priority. Messages of different pairs of
    devices share links equally, as TCP connections do. `Platform.occupied_links` states the links that a message uses.

    A message that shares its links with no other message occupies them for the sum of three times: its bytes divided by
    the lowest bandwidth of these links, the network's time for each message, and the sender's `RuntimeCosts.gap`. It
    arrives after the latencies of the link and of the receiver's runtime. Devices of one host exchange tensors at the
    cost of the runtime alone.

    `frames` is the number of frames, which use the replicas (`Workload.roles`) in turn. `in_flight` is the largest
    number of frames at a time. Without `keep_spans`, the result has totals but no periods (`SimulationResult.spans`).
    `speeds` are the speeds of devices that compute more slowly or faster for some time, by name; their messages take
    as long as otherwise. `link_speeds` are the speeds of links, by their names in `Platform.occupied_links`.
    """
    with gc_paused():
        simulator = _EventSimulator(workload, platform, frames, max(1, in_flight), keep_spans, speeds or {})
        return simulator.run(link_speeds or {})


class _EventSimulator:
    """A running simulation.

    An event is (time, number in the order of creation, method to call, frame, argument of the method).
    """

    def __init__(
        self,
        workload: Workload,
        platform: Platform,
        frames: int,
        in_flight: int,
        keep_spans: bool,
        speeds: Mapping[str, Speeds],
    ) -> None:
        self.devices = [_DeviceState(number, device.device) for number, device in enumerate(workload.devices)]
        self.speeds = [speeds.get(device.device) for device in workload.devices]
        self.links: LinkScheduler[_InFlightMessage] = LinkScheduler()
        self.roles = [_RoleSchedule(role, self.devices, platform, self.links) for role in workload.roles]
        self.frame_count, self.in_flight = frames, in_flight
        self.input_output_s = sum(role.ends_s for role in workload.roles) / len(workload.roles)
        self.released = 0
        self.frame_times: dict[int, tuple[float, float, float]] = {}
        self.spans: list[Span] | None = [] if keep_spans else None
        self.events: list[tuple[float, int, _Handler, _FrameState, Any]] = []
        self.event_order = count()
        # The finished jobs of the youngest frame, by the number of that frame. They are kept, because the next frame
        # may read states that they computed.
        self.finished_jobs: dict[int, set[int]] = {}
        # For each (frame number, job) that computes states: the frames and jobs that wait for these states.
        self.state_readers: dict[tuple[int, int], list[tuple[_FrameState, int]]] = {}

    def run(self, link_speeds: Mapping[str, Speeds]) -> SimulationResult:
        link_changes = [(at, name, speed) for name, speeds in link_speeds.items() for at, speed in speeds]
        link_changes.sort(reverse=True)
        for _ in range(min(self.in_flight, self.frame_count)):
            self._start_frames(0.0)
        events, now = self.events, 0.0
        while events:
            if link_changes and link_changes[-1][0] <= events[0][0]:
                self.links.set_link_speed(*link_changes.pop())
                self._schedule_departures(events[0][3])
                continue
            at, _, handle, frame, subject = heappop(events)
            if not handle(at, frame, subject):
                now = at
        totals = {
            ("compute", False): {device.name: device.computed for device in self.devices},
            ("handle", False): {device.name: device.handled for device in self.devices},
            ("occupied", False): {device.name: device.occupied for device in self.devices},
            ("message", False): {device.name: device.sent for device in self.devices},
            ("message", True): {device.name: device.received for device in self.devices},
        }
        waits = {device.name: device.waited for device in self.devices if device.waited}
        spans = sorted(self.spans or (), key=lambda span: (span.end, span.device, span.name))
        ended = [self.frame_times[i] for i in range(self.frame_count)]
        frames, queued_s = tuple((start, end) for start, end, _ in ended), tuple(wait for _, _, wait in ended)
        return SimulationResult(
            frames, totals, waits, tuple(spans), queued_s, self.links.busy_s, now, self.input_output_s
        )

    def _start_frames(self, now: float, idle_devices: Iterable[int] = ()) -> None:
        """Start the next frame.

        A frame in which no device computes an output of the network ends at once, so the frame after it is started too.
        `idle_devices` are the indices of devices that have just become idle and must look for new work.
        """
        while self.released < self.frame_count:
            role = self.roles[self.released % len(self.roles)]
            frame = role.frame(self.released, now)
            self.released += 1
            if role.state_makers:
                self._wait_for_states(frame)
            for messages in role.initial_sends:
                self._send_messages(now, frame, messages)
            self._schedule_departures(frame)
            for d in role.starting_devices:
                if not frame.missing_messages[frame.next_jobs[d]]:
                    heappush(self.devices[d].ready, (frame.number, frame))
            for d in sorted({*role.starting_devices, *idle_devices}):
                self._advance(now, self.devices[d])
            if frame.missing_outputs:
                return
            self.frame_times[frame.number] = (now, now, 0.0)

    def _wait_for_states(self, frame: _FrameState) -> None:
        """Make the jobs of a frame wait for the states that the previous frame has not computed yet.

        A state is an output of the network that is an input of the next frame. A job is the run of a segment.
        """
        finished = self.finished_jobs.pop(frame.number - 1, set())
        for reader, makers in frame.role.state_makers.items() if frame.number else ():
            missing = [job for job in makers if job not in finished]
            frame.missing_messages[reader] += len(missing)
            for job in missing:
                self.state_readers.setdefault((frame.number - 1, job), []).append((frame, reader))

    def _make_states(self, frame: _FrameState, job: int, device: _DeviceState) -> None:
        """Record that a job has computed its states, and release the next frame's jobs that wait for them.

        A state is an output of the network that is an input of the next frame. A job is the run of a segment.
        """
        if frame.number + 1 == self.released:
            self.finished_jobs.setdefault(frame.number, set()).add(job)
        for later, reader in self.state_readers.pop((frame.number, job), ()):
            later.missing_messages[reader] -= 1
            if not later.missing_messages[reader] and reader == later.next_jobs[device.number]:
                heappush(device.ready, (later.number, later))

    def _advance(self, now: float, device: _DeviceState) -> None:
        """Start the next job of an idle device, or receive the next message if no job is ready.

        The job (the run of a segment) is that of the oldest frame. If the device is busy, nothing is done.
        """
        if device.is_busy:
            return
        if device.ready:
            _, frame = heappop(device.ready)
            number = frame.next_jobs[device.number]
            last = frame.last_messages.pop(number, None)
            if now > device.idle_since:
                self._record_wait(now, device, frame, last)
            device.is_busy, device.started, frame.started_at = True, now, min(frame.started_at, now)
            seconds, speeds = frame.role.jobs[number].seconds, self.speeds[device.number]
            done = now + seconds if speeds is None else end_of_computing(now, seconds, speeds)
            device.occupy(now, done)
            heappush(self.events, (done, next(self.event_order), self._finish_job, frame, device))
        elif device.inbox:
            self._receive(now, *device.inbox.popleft())

    def _record_wait(self, now: float, device: _DeviceState, frame: _FrameState, path: _MessagePath | None) -> None:
        start, peer = device.idle_since, "" if path is None else path.sender.name
        device.waited[peer] = device.waited.get(peer, 0.0) + (now - start)
        if self.spans is not None:
            name = "a frame" if path is None else path.name
            self.spans.append(Span("wait", device.name, name, frame.number, start, now, peer))

    def _finish_job(self, now: float, frame: _FrameState, device: _DeviceState) -> None:
        role, number, start = frame.role, frame.next_jobs[device.number], device.started
        job = role.jobs[number]
        device.computed += now - start
        if self.spans is not None:
            self.spans.append(Span("compute", device.name, job.name, frame.number, start, now))
        if role.state_makers:
            self._make_states(frame, number, device)
        frame.next_jobs[device.number] = number = number + 1
        if number < role.job_ends[device.number] and not frame.missing_messages[number]:
            heappush(device.ready, (frame.number, frame))
        free = self._send_messages(now, frame, job.sends)
        device.is_busy, device.idle_since = free > now, now
        if free > now:
            heappush(self.events, (free, next(self.event_order), self._become_idle, frame, device))
        self._schedule_departures(frame)
        if job.outputs:
            frame.missing_outputs -= job.outputs
            if not frame.missing_outputs:  # The outputs are complete, even if devices still compute other regions.
                self.frame_times[frame.number] = (frame.start, now, frame.started_at - frame.start)
                self._start_frames(now, (device.number,))
        self._advance(now, device)

    def _become_idle(self, now: float, _: _FrameState, device: _DeviceState) -> None:
        device.is_busy, device.idle_since = False, now
        self._advance(now, device)

    def _send_messages(self, now: float, frame: _FrameState, messages: Sequence[int]) -> float:
        """Send messages one after another, and return the time at which the sender's processor is done."""
        for message in messages:
            path = frame.role.paths[message]
            done = now + path.send_s
            if done > now:
                self._record_handling(now, done, frame, path, path.sender, path.receiver)
                heappush(self.events, (done, next(self.event_order), self._after_sending, frame, path))
                now = done
            else:
                self._put_on_link(now, frame, path)
        return now

    def _after_sending(self, now: float, frame: _FrameState, path: _MessagePath) -> None:
        self._put_on_link(now, frame, path)
        self._schedule_departures(frame)

    def _put_on_link(self, now: float, frame: _FrameState, path: _MessagePath) -> None:
        if path.flow is None:
            heappush(self.events, (now + path.latency, next(self.event_order), self._arrive, frame, path))
        else:
            path.sender.sent += path.seconds
            path.receiver.received += path.seconds
            rank = 0 if path.in_order else frame.number
            self.links.enqueue(now, path.flow, (frame, path), path.seconds, rank)

    def _schedule_departures(self, frame: _FrameState) -> None:
        """Turn the departures (ends of the sending of a message) that the links have planned into events."""
        for at, flow, version in self.links.departures:
            heappush(self.events, (at, next(self.event_order), self._finish_message, frame, (flow, version)))
        self.links.departures.clear()

    def _finish_message(self, now: float, _: _FrameState, departure: tuple[Flow[_InFlightMessage], int]) -> bool:
        """Finish the sending of a message, unless its departure (the end of sending) has been planned again.

        In this case the event is out of date, and the result is True.
        """
        flow, version = departure
        if flow.version != version:
            return True
        (frame, path), start = self.links.finish_message(now, flow)
        if self.spans is not None:
            sender, receiver = path.sender.name, path.receiver.name
            self.spans.append(Span("message", sender, path.name, frame.number, start, now, receiver))
        self._schedule_departures(frame)
        if path.latency:
            heappush(self.events, (now + path.latency, next(self.event_order), self._arrive, frame, path))
        else:
            self._arrive(now, frame, path)
        return False

    def _arrive(self, now: float, frame: _FrameState, path: _MessagePath) -> None:
        if not path.receive_s:
            self._deliver(now, frame, path)
        elif not path.receiver.is_busy:
            self._receive(now, frame, path)
        elif path.is_parallel:
            done = now + path.receive_s
            self._record_handling(now, done, frame, path, path.receiver, path.sender)
            heappush(self.events, (done, next(self.event_order), self._deliver, frame, path))
        else:
            path.receiver.inbox.append((frame, path))

    def _receive(self, now: float, frame: _FrameState, path: _MessagePath) -> None:
        device, done = path.receiver, now + path.receive_s
        if now > device.idle_since:
            self._record_wait(now, device, frame, path)
        device.is_busy = True
        self._record_handling(now, done, frame, path, device, path.sender)
        heappush(self.events, (done, next(self.event_order), self._after_receiving, frame, path))

    def _after_receiving(self, now: float, frame: _FrameState, path: _MessagePath) -> None:
        self._deliver(now, frame, path)
        self._become_idle(now, frame, path.receiver)

    def _record_handling(
        self,
        now: float,
        done: float,
        frame: _FrameState,
        path: _MessagePath,
        device: _DeviceState,
        peer: _DeviceState,
    ) -> None:
        device.handled += done - now
        device.occupy(now, done)
        if self.spans is not None:
            self.spans.append(Span("handle", device.name, path.name, frame.number, now, done, peer.name))

    def _deliver(self, now: float, frame: _FrameState, path: _MessagePath) -> None:
        device, missing_messages = path.receiver, frame.missing_messages
        for number in path.readers:
            missing_messages[number] -= 1
            if not missing_messages[number]:
                frame.last_messages[number] = path
                if number == frame.next_jobs[device.number]:
                    heappush(device.ready, (frame.number, frame))
        self._advance(now, device)
