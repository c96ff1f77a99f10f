"""The simulator: plays the steps of a program on a platform, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count
from typing import Any

from dicompiler.base.process import gc_paused
from dicompiler.cost.link_sharing import Flow, LinkScheduler
from dicompiler.cost.simulation_result import SimulationResult, Span
from dicompiler.cost.workload import Message, Workload
from dicompiler.ir.platform import Platform


@dataclass(slots=True, eq=False)
class _DeviceState:
    """The state of a device.

    Attributes:
        ready: Heap of frames whose next job has all inputs, the oldest first.
        inbox: Messages that arrived while the device was busy.
        computed: Total seconds of computing; the following fields are totals too.
        waited: Total seconds of waiting, by peer.
    """

    number: int
    name: str
    busy: bool = False
    started: float = 0.0
    idle_since: float = 0.0
    ready: list[tuple[int, _FrameState]] = field(default_factory=list)
    inbox: deque[_InFlightMessage] = field(default_factory=deque)
    computed: float = 0.0
    handled: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _MessagePath:
    """One message of every frame.

    Attributes:
        sending: Seconds of the sender's processor.
        way: Flow on the network, None within a host.
        seconds: Seconds on the link if alone.
        latency: Seconds from leaving the link until the receiver is awake.
        receiving: Seconds of the receiver's processor.
        beside: Whether the receiver takes it on another core while it computes.
        in_order: Whether messages of younger frames that were ready before are sent first.
        readers: Numbers of the jobs that wait for it.
    """

    name: str
    sender: _DeviceState
    receiver: _DeviceState
    sending: float
    way: Flow[_InFlightMessage] | None
    seconds: float
    latency: float
    receiving: float
    beside: bool
    in_order: bool
    readers: list[int]


@dataclass(slots=True, eq=False)
class _FrameState:
    """A frame in flight.

    Attributes:
        position: Number of the next job of each device.
        lacks: Number of messages that each job still lacks.
        last: For jobs that lack none, the message that arrived last.
        missing: Number of outputs that are still to be delivered.
        begun: Time at which the first job started.
    """

    number: int
    role: _RoleSchedule
    start: float
    position: list[int]
    lacks: list[int]
    last: dict[int, _MessagePath]
    missing: int
    begun: float = float("inf")


_InFlightMessage = tuple[_FrameState, _MessagePath]
_Handler = Callable[[float, _FrameState, Any], None]  # with the device or the passage that it is about


class _RoleSchedule:
    """The jobs of a role, numbered device by device. The jobs of device i end before `ends[i]`."""

    def __init__(
        self,
        work: Workload,
        devices: Sequence[_DeviceState],
        platform: Platform,
        lines: LinkScheduler[_InFlightMessage],
    ) -> None:
        self.jobs = [job for device in work.devices for job in device.jobs]
        self.ends = list(accumulate(len(device.jobs) for device in work.devices))
        self.begins = [end - len(device.jobs) for end, device in zip(self.ends, work.devices, strict=True)]
        self.lacks = [len(job.waits_for) for job in self.jobs]
        self.outputs = sum(job.outputs for job in self.jobs)
        self.passages = [_passage(work, message, devices, platform, lines) for message in work.messages]
        for number, job in enumerate(self.jobs):
            for message in dict.fromkeys(job.waits_for):
                self.passages[message].readers.append(number)
        self.after: dict[int, list[int]] = {}  # job → those that must be done in the frame before
        for begin, device in zip(self.begins, work.devices, strict=True):
            after = {
                begin + i: [begin + j for j in job.state_makers]
                for i, job in enumerate(device.jobs)
                if job.state_makers
            }
            self.after.update(after)
        self.sources = [device.initial_sends for device in work.devices if device.initial_sends]
        self.starters = [d for d, device in enumerate(work.devices) if device.jobs and not device.jobs[0].waits_for]

    def frame(self, number: int, start: float) -> _FrameState:
        return _FrameState(number, self, start, self.begins.copy(), self.lacks.copy(), {}, self.outputs)


def _passage(
    work: Workload,
    message: Message,
    devices: Sequence[_DeviceState],
    platform: Platform,
    lines: LinkScheduler[_InFlightMessage],
) -> _MessagePath:
    sender, receiver = work.devices[message.sender], work.devices[message.receiver]
    link = platform.link(sender.device, receiver.device)
    ends = (message.sender, message.receiver)
    return _MessagePath(
        message.name,
        devices[message.sender],
        devices[message.receiver],
        sender.runtime.send_seconds(message.nbytes, message.is_coalesced),
        None if link is None else lines.flow(ends, (sender.host, receiver.host), platform.link_shares(link)),
        0.0 if link is None else sender.runtime.link_seconds(link, message.nbytes, platform.network.message_overhead_s),
        receiver.runtime.latency + (0.0 if link is None else link.latency),
        receiver.runtime.receive_seconds(message.nbytes, message.is_coalesced),
        receiver.cores > 1,
        sender.runtime.in_order,
        [],
    )


def simulate(
    workload: Workload, platform: Platform, frames: int = 1, in_flight: int = 1, keep_spans: bool = True
) -> SimulationResult:
    """Simulate frames on a platform.

    A device computes one segment at a time: the next one of the oldest frame that has its inputs, as the runtimes do.
    Its runtime uses the same processor for messages (`DeviceWork.runtime`): sending after the segment that made the
    tensor, and receiving when the message arrives. If a segment computes and there is another core, receiving runs in
    parallel.

    Messages between two devices are sent in the order in which they become ready, those of the oldest frame first
    (unless `RuntimeCosts.in_order`). Messages between different devices share links equally, as TCP connections do: on
    a switch the sender's outgoing and the receiver's incoming link, otherwise the one medium. A message alone takes its
    bytes over the narrowest bandwidth, the network's time per message and its sender's gap. It arrives after the
    latency of the link and of the receiver's runtime. Devices of a host exchange tensors at the cost of the runtime
    alone.

    Args:
        workload: The program with predicted seconds. Frames use its roles in turn.
        platform: The platform.
        frames: Number of frames.
        in_flight: Largest number of frames in flight.
        keep_spans: Whether to keep the spans. Totals are always kept.
    """
    with gc_paused():
        return _EventSimulator(workload, platform, frames, max(1, in_flight), keep_spans).run()


class _EventSimulator:
    """The state of a simulation. Events are (time, order of entry, handler, frame, subject of the event)."""

    def __init__(self, work: Workload, platform: Platform, frames: int, in_flight: int, spans: bool) -> None:
        self.devices = [_DeviceState(number, device.device) for number, device in enumerate(work.devices)]
        self.lines: LinkScheduler[_InFlightMessage] = LinkScheduler(platform.network.kind == "switch")
        self.roles = [_RoleSchedule(role, self.devices, platform, self.lines) for role in work.roles]
        self.count, self.in_flight = frames, in_flight
        self.released = 0
        self.ended: dict[int, tuple[float, float, float]] = {}
        self.spans: list[Span] | None = [] if spans else None
        self.events: list[tuple[float, int, _Handler, _FrameState, Any]] = []
        self.order = count()
        self.made: dict[int, set[int]] = {}  # of a network with states: jobs that are done in the last frame
        self.awaited: dict[tuple[int, int], list[tuple[_FrameState, int]]] = {}  # (frame, job) → who reads its states

    def run(self) -> SimulationResult:
        for _ in range(min(self.in_flight, self.count)):
            self._release(0.0)
        events = self.events
        while events:
            now, _, handle, frame, about = heappop(events)
            handle(now, frame, about)
        sums = {
            ("compute", False): {device.name: device.computed for device in self.devices},
            ("handle", False): {device.name: device.handled for device in self.devices},
            ("message", False): {device.name: device.sent for device in self.devices},
            ("message", True): {device.name: device.received for device in self.devices},
        }
        waits = {device.name: device.waited for device in self.devices if device.waited}
        spans = sorted(self.spans or (), key=lambda span: (span.end, span.device, span.name))
        ended = [self.ended[i] for i in range(self.count)]
        frames, waited = tuple((start, end) for start, end, _ in ended), tuple(wait for _, _, wait in ended)
        return SimulationResult(frames, sums, waits, tuple(spans), waited)

    def _release(self, now: float, done: Iterable[int] = ()) -> None:
        """Start the next frame, and further ones while a frame has no outputs to wait for.

        Args:
            now: Time in seconds.
            done: Devices that are free now and have not continued.
        """
        while self.released < self.count:
            role = self.roles[self.released % len(self.roles)]
            frame = role.frame(self.released, now)
            self.released += 1
            if role.after:
                self._wait_for_states(frame)
            for messages in role.sources:
                self._post(now, frame, messages)
            self._plan(frame)
            for d in role.starters:
                if not frame.lacks[frame.position[d]]:
                    heappush(self.devices[d].ready, (frame.number, frame))
            for d in sorted({*role.starters, *done}):
                self._advance(now, self.devices[d])
            if frame.missing:
                return
            self.ended[frame.number] = (now, now, 0.0)

    def _wait_for_states(self, frame: _FrameState) -> None:
        """Make the jobs of a frame wait for the states that the frame before has not made yet."""
        made = self.made.pop(frame.number - 1, set())
        for reader, makers in frame.role.after.items() if frame.number else ():
            lacking = [job for job in makers if job not in made]
            frame.lacks[reader] += len(lacking)
            for job in lacking:
                self.awaited.setdefault((frame.number - 1, job), []).append((frame, reader))

    def _make_states(self, frame: _FrameState, job: int, device: _DeviceState) -> None:
        """Release jobs of the next frame that read the states that a job has made."""
        if frame.number + 1 == self.released:
            self.made.setdefault(frame.number, set()).add(job)
        for later, reader in self.awaited.pop((frame.number, job), ()):
            later.lacks[reader] -= 1
            if not later.lacks[reader] and reader == later.position[device.number]:
                heappush(device.ready, (later.number, later))

    def _advance(self, now: float, device: _DeviceState) -> None:
        """Start the next work of an idle device: a job of the oldest frame, or a waiting message."""
        if device.busy:
            return
        if device.ready:
            _, frame = heappop(device.ready)
            number = frame.position[device.number]
            last = frame.last.pop(number, None)
            if now > device.idle_since:
                self._note_wait(now, device, frame, last)
            device.busy, device.started, frame.begun = True, now, min(frame.begun, now)
            heappush(self.events, (now + frame.role.jobs[number].seconds, next(self.order), self._done, frame, device))
        elif device.inbox:
            self._take(now, *device.inbox.popleft())

    def _note_wait(self, now: float, device: _DeviceState, frame: _FrameState, passage: _MessagePath | None) -> None:
        start, peer = device.idle_since, "" if passage is None else passage.sender.name
        device.waited[peer] = device.waited.get(peer, 0.0) + (now - start)
        if self.spans is not None:
            name = "a frame" if passage is None else passage.name
            self.spans.append(Span("wait", device.name, name, frame.number, start, now, peer))

    def _done(self, now: float, frame: _FrameState, device: _DeviceState) -> None:
        """Finish a job of a device."""
        role, number, start = frame.role, frame.position[device.number], device.started
        job = role.jobs[number]
        device.computed += now - start
        if self.spans is not None:
            self.spans.append(Span("compute", device.name, job.name, frame.number, start, now))
        if role.after:
            self._make_states(frame, number, device)
        frame.position[device.number] = number = number + 1
        if number < role.ends[device.number] and not frame.lacks[number]:
            heappush(device.ready, (frame.number, frame))
        free = self._post(now, frame, job.sends)
        device.busy, device.idle_since = free > now, now
        if free > now:
            heappush(self.events, (free, next(self.order), self._free, frame, device))
        self._plan(frame)
        if job.outputs:
            frame.missing -= job.outputs
            if not frame.missing:  # copies that nobody waits for may still be computed
                self.ended[frame.number] = (frame.start, now, frame.begun - frame.start)
                self._release(now, (device.number,))
        self._advance(now, device)

    def _free(self, now: float, _: _FrameState, device: _DeviceState) -> None:
        device.busy, device.idle_since = False, now
        self._advance(now, device)

    def _post(self, now: float, frame: _FrameState, messages: Sequence[int]) -> float:
        """Send messages one after another and return the time at which that is done."""
        for message in messages:
            passage = frame.role.passages[message]
            done = now + passage.sending
            if done > now:
                self._note_handling(now, done, frame, passage, passage.sender, passage.receiver)
                heappush(self.events, (done, next(self.order), self._posted, frame, passage))
                now = done
            else:
                self._send(now, frame, passage)
        return now

    def _posted(self, now: float, frame: _FrameState, passage: _MessagePath) -> None:
        self._send(now, frame, passage)
        self._plan(frame)

    def _send(self, now: float, frame: _FrameState, passage: _MessagePath) -> None:
        if passage.way is None:
            heappush(self.events, (now + passage.latency, next(self.order), self._arrived, frame, passage))
        else:
            passage.sender.sent += passage.seconds
            passage.receiver.received += passage.seconds
            rank = 0 if passage.in_order else frame.number
            self.lines.enqueue(now, passage.way, (frame, passage), passage.seconds, rank)

    def _plan(self, frame: _FrameState) -> None:
        """Turn planned departures of messages into events."""
        for at, way, version in self.lines.departures:
            heappush(self.events, (at, next(self.order), self._due, frame, (way, version)))
        self.lines.departures.clear()

    def _due(self, now: float, _: _FrameState, due: tuple[Flow[_InFlightMessage], int]) -> None:
        """Finish a message on its links, unless its departure was planned anew since."""
        way, version = due
        if way.version != version:
            return
        (frame, passage), start = self.lines.finish_message(now, way)
        if self.spans is not None:
            sender, receiver = passage.sender.name, passage.receiver.name
            self.spans.append(Span("message", sender, passage.name, frame.number, start, now, receiver))
        self._plan(frame)
        if passage.latency:
            heappush(self.events, (now + passage.latency, next(self.order), self._arrived, frame, passage))
        else:
            self._arrived(now, frame, passage)

    def _arrived(self, now: float, frame: _FrameState, passage: _MessagePath) -> None:
        if not passage.receiving:
            self._received(now, frame, passage)
        elif not passage.receiver.busy:
            self._take(now, frame, passage)
        elif passage.beside:
            done = now + passage.receiving
            self._note_handling(now, done, frame, passage, passage.receiver, passage.sender)
            heappush(self.events, (done, next(self.order), self._received, frame, passage))
        else:
            passage.receiver.inbox.append((frame, passage))

    def _take(self, now: float, frame: _FrameState, passage: _MessagePath) -> None:
        """Let an idle device take a message."""
        device, done = passage.receiver, now + passage.receiving
        if now > device.idle_since:
            self._note_wait(now, device, frame, passage)
        device.busy = True
        self._note_handling(now, done, frame, passage, device, passage.sender)
        heappush(self.events, (done, next(self.order), self._taken, frame, passage))

    def _taken(self, now: float, frame: _FrameState, passage: _MessagePath) -> None:
        self._received(now, frame, passage)
        self._free(now, frame, passage.receiver)

    def _note_handling(
        self,
        now: float,
        done: float,
        frame: _FrameState,
        passage: _MessagePath,
        device: _DeviceState,
        peer: _DeviceState,
    ) -> None:
        device.handled += done - now
        if self.spans is not None:
            self.spans.append(Span("handle", device.name, passage.name, frame.number, now, done, peer.name))

    def _received(self, now: float, frame: _FrameState, passage: _MessagePath) -> None:
        """Release the jobs that wait for a message."""
        device, lacks = passage.receiver, frame.lacks
        for number in passage.readers:
            lacks[number] -= 1
            if not lacks[number]:
                frame.last[number] = passage
                if number == frame.position[device.number]:
                    heappush(device.ready, (frame.number, frame))
        self._advance(now, device)
