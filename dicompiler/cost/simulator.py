"""The simulator: plays a Program's own steps on a platform, event by event, for one frame or a stream of frames.

Workload + Platform → Simulation: when each segment ran, when each message travelled, and who waited for whom.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from dicompiler.cost.workload import DeviceWork, Job, Workload
from dicompiler.ir.platform import Platform

Resource = tuple[str, str]  # ("out" | "in" | "all", host or "")


@dataclass(frozen=True)
class Span:
    """Something that took time, in seconds from the start of the first frame. compute: a segment on `device`; handle:
    its runtime sends a message to `peer`, or takes one from it; message: bytes on the line from `device` to `peer`;
    wait: `device` had nothing that it could do, for want of a message from `peer` ("": for want of a frame)."""

    kind: Literal["compute", "handle", "message", "wait"]
    device: str
    name: str
    frame: int
    start: float
    end: float
    peer: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Simulation:
    """frames: (start, end) of each, in seconds: from its inputs on the sources to its outputs on all sinks. spans: in
    order of their ends."""

    frames: tuple[tuple[float, float], ...]
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def latency_s(self) -> float:
        """Seconds of the first frame, which had the devices to itself if no other was on its way."""
        return self.frames[0][1] - self.frames[0][0]

    @property
    def period_s(self) -> float:
        """Mean seconds between the ends of frames in the middle half of the stream: at its start and its end the
        devices are not all at work. Of fewer than four frames: the whole time by their number."""
        ends = sorted(end for _, end in self.frames)
        count = len(ends)
        if count < 4:
            return ends[-1] / count
        first, last = count // 4, 3 * count // 4
        return (ends[last] - ends[first]) / (last - first)

    @cached_property
    def waits(self) -> dict[str, dict[str, float]]:
        """Device → device that it waited for → seconds."""
        waits: dict[str, dict[str, float]] = {}
        for span in self.spans:
            if span.kind == "wait":
                by_peer = waits.setdefault(span.device, {})
                by_peer[span.peer] = by_peer.get(span.peer, 0.0) + span.seconds
        return waits

    @cached_property
    def _sums(self) -> dict[tuple[str, bool, str], float]:
        """(kind, whether its peer is meant, device) → seconds."""
        sums: dict[tuple[str, bool, str], float] = {}
        for span in self.spans:
            for key in ((span.kind, False, span.device), (span.kind, True, span.peer)):
                sums[key] = sums.get(key, 0.0) + span.seconds
        return sums

    def seconds(self, kind: str, device: str, peer: bool = False) -> float:
        """All seconds of one kind of a device (`peer`: of messages to it instead of from it)."""
        return self._sums.get((kind, peer, device), 0.0)


@dataclass
class _Frame:
    """A frame on its way: its role's number and workload, for each device the next job, for each job how many messages
    it lacks."""

    number: int
    role: int
    work: Workload
    start: float
    position: list[int]
    lacks: list[list[int]]
    missing: int
    last: list[list[int]]


def simulate(work: Workload, platform: Platform, frames: int = 1, in_flight: int = 1) -> Simulation:
    """Plays `frames` frames, at most `in_flight` of them on their way at once.

    A device computes one segment at a time: of the oldest frame that can go on the next one (as the runtimes do).
    What its runtime takes for a message (`DeviceWork.runtime`) it takes of the same processor: after the segment that
    made it, and when it came, but while a segment computes and there is another core, beside it. On a switch a message
    needs the sender's outgoing and the receiver's incoming line for its time, and of those that could go the one that
    was ready first goes; on a shared medium, or through a gateway, one message travels at a time, in the order in which
    they were ready. A message takes its bytes over the narrowest bandwidth on its way, the network's time per message
    and its sender's gap, and arrives the link's latency later. Devices of one host pass tensors at no cost but the
    runtime's. Frames go through the workload's roles in turn.
    """
    return _Player(work, platform, frames, max(1, in_flight)).run()


class _Player:
    """The state of a simulation. Events are (time, order of entry, what to do, with which device or message, frame)."""

    def __init__(self, work: Workload, platform: Platform, frames: int, in_flight: int) -> None:
        self.roles, self.count, self.in_flight = work.roles, frames, in_flight
        self.names = [device.device for device in work.devices]
        self.lines = _Lines(self.roles, platform)
        self.readers = [_readers(role) for role in self.roles]
        self.busy = [False] * len(work.devices)
        self.started = [0.0] * len(work.devices)
        self.idle_since = [0.0] * len(work.devices)
        self.inbox: list[deque[tuple[_Frame, int]]] = [deque() for _ in work.devices]
        self.active: list[_Frame] = []
        self.released = 0
        self.ended: dict[int, tuple[float, float]] = {}
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, str, int, _Frame]] = []
        self.order = 0

    def run(self) -> Simulation:
        for _ in range(min(self.in_flight, self.count)):
            self._release(0.0)
        while self.events:
            now, _, kind, number, frame = heapq.heappop(self.events)
            if kind == "done":
                self._done(now, frame, number)
            elif kind == "sent":
                self.lines.free(number, frame)
                self._travel(now)
            elif kind == "posted":
                self._send(now, frame, number)
                self._travel(now)
            elif kind == "free":
                self.busy[number], self.idle_since[number] = False, now
                self._advance(now, number)
            elif kind == "arrived":
                self._arrived(now, frame, number)
            else:
                self._received(now, frame, number)
        frames = tuple(self.ended[i] for i in range(self.count))
        return Simulation(frames, tuple(sorted(self.spans, key=lambda span: (span.end, span.device, span.name))))

    def _at(self, time: float, kind: str, frame: _Frame, number: int) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, kind, number, frame))

    def _release(self, now: float) -> None:
        """One more frame's inputs are on their sources."""
        role = self.released % len(self.roles)
        work = self.roles[role]
        devices = work.devices
        frame = _Frame(
            self.released,
            role,
            work,
            now,
            [0] * len(devices),
            [[len(job.needs) for job in device.jobs] for device in devices],
            sum(job.outputs for device in devices for job in device.jobs),
            [[-1] * len(device.jobs) for device in devices],
        )
        self.released += 1
        self.active.append(frame)
        for device in devices:
            self._post(now, frame, device, device.first)
        self._travel(now)
        for d in range(len(devices)):
            self._advance(now, d)
        if not frame.missing:
            self._finish(now, frame)

    def _advance(self, now: float, d: int) -> None:
        """Starts what the device can do next, if it does nothing."""
        if self.busy[d]:
            return
        for frame in self.active:
            jobs, at = frame.work.devices[d].jobs, frame.position[d]
            if at < len(jobs) and not frame.lacks[d][at]:
                self._note_wait(now, d, frame, frame.last[d][at])
                self.busy[d], self.started[d] = True, now
                self._at(now + jobs[at].seconds, "done", frame, d)
                return
        if self.inbox[d]:
            self._take(now, d, *self.inbox[d].popleft())

    def _note_wait(self, now: float, d: int, frame: _Frame, message: int) -> None:
        start = max(self.idle_since[d], 0.0)
        if now > start:
            messages = frame.work.messages
            peer = self.names[messages[message].sender] if message >= 0 else ""
            name = messages[message].name if message >= 0 else "a frame"
            self.spans.append(Span("wait", self.names[d], name, frame.number, start, now, peer))

    def _done(self, now: float, frame: _Frame, d: int) -> None:
        device = frame.work.devices[d]
        job: Job = device.jobs[frame.position[d]]
        self.spans.append(Span("compute", device.device, job.name, frame.number, self.started[d], now))
        frame.position[d] += 1
        free = self._post(now, frame, device, job.sends)
        self.busy[d], self.idle_since[d] = free > now, now
        if free > now:
            self._at(free, "free", frame, d)
        self._travel(now)
        frame.missing -= job.outputs
        if job.outputs and not frame.missing:
            self._finish(now, frame)
        self._advance(now, d)

    def _finish(self, now: float, frame: _Frame) -> None:
        """All outputs are there; copies that nobody waits for may still be computed."""
        self.ended[frame.number] = (frame.start, now)
        if self.released < self.count:
            self._release(now)

    def _post(self, now: float, frame: _Frame, device: DeviceWork, messages: Sequence[int]) -> float:
        """Sends messages one after another as fast as the runtime can; when that is done."""
        for message in messages:
            record = frame.work.messages[message]
            done = now + device.runtime.sending(record.nbytes)
            if done > now:
                peer = self.names[record.receiver]
                self.spans.append(Span("handle", device.device, record.name, frame.number, now, done, peer))
                self._at(done, "posted", frame, message)
            else:
                self._send(now, frame, message)
            now = done
        return now

    def _send(self, now: float, frame: _Frame, message: int) -> None:
        if not self.lines.queue(message, frame):
            self._at(now, "arrived", frame, message)

    def _travel(self, now: float) -> None:
        """Starts every message whose lines are free."""
        for message, frame in self.lines.start():
            seconds, latency = self.lines.times[frame.role][message]
            record = frame.work.messages[message]
            sender, receiver = self.names[record.sender], self.names[record.receiver]
            self.spans.append(Span("message", sender, record.name, frame.number, now, now + seconds, receiver))
            self._at(now + seconds, "sent", frame, message)
            self._at(now + seconds + latency, "arrived", frame, message)

    def _arrived(self, now: float, frame: _Frame, message: int) -> None:
        record = frame.work.messages[message]
        d, device = record.receiver, frame.work.devices[record.receiver]
        seconds = device.runtime.receiving(record.nbytes)
        if not seconds:
            self._received(now, frame, message)
        elif not self.busy[d]:
            self._take(now, d, frame, message)
        elif device.cores > 1:
            self._handle(now, now + seconds, frame, message)
        else:
            self.inbox[d].append((frame, message))

    def _take(self, now: float, d: int, frame: _Frame, message: int) -> None:
        """An idle device takes a message."""
        done = now + frame.work.devices[d].runtime.receiving(frame.work.messages[message].nbytes)
        self._note_wait(now, d, frame, message)
        self.busy[d] = True
        self._handle(now, done, frame, message)
        self._at(done, "free", frame, d)

    def _handle(self, now: float, done: float, frame: _Frame, message: int) -> None:
        record = frame.work.messages[message]
        device, peer = self.names[record.receiver], self.names[record.sender]
        self.spans.append(Span("handle", device, record.name, frame.number, now, done, peer))
        self._at(done, "received", frame, message)

    def _received(self, now: float, frame: _Frame, message: int) -> None:
        d = frame.work.messages[message].receiver
        for job in self.readers[frame.role][message]:
            frame.lacks[d][job] -= 1
            frame.last[d][job] = message
        self._advance(now, d)


def _readers(work: Workload) -> list[list[int]]:
    """For each message the jobs of its receiver that wait for it."""
    readers: list[list[int]] = [[] for _ in work.messages]
    for device in work.devices:
        for i, job in enumerate(device.jobs):
            for message in dict.fromkeys(job.needs):
                readers[message].append(i)
    return readers


class _Lines:
    """The lines between hosts: which messages wait for them, and which are free. A shared medium is one line."""

    def __init__(self, roles: Sequence[Workload], platform: Platform) -> None:
        self.times: list[list[tuple[float, float]]] = [[] for _ in roles]
        self.ends: list[list[tuple[Resource, Resource] | None]] = [[] for _ in roles]
        switch = platform.network.kind == "switch"
        for work, own_times, own_ends in zip(roles, self.times, self.ends, strict=True):
            for message in work.messages:
                sender, receiver = work.devices[message.sender], work.devices[message.receiver]
                link = platform.link(sender.device, receiver.device)
                once = platform.network.message
                seconds = 0.0 if link is None else sender.runtime.on_line(link, message.nbytes, once)
                own_times.append((seconds, 0.0 if link is None else link.latency))
                ends: tuple[Resource, Resource] = (("out", sender.host), ("in", receiver.host))
                own_ends.append(None if link is None else ends if switch else (("all", ""), ("all", "")))
        self.waiting: dict[tuple[Resource, Resource], deque[tuple[int, int, _Frame]]] = {}
        self.taken: set[Resource] = set()
        self.entered = 0

    def queue(self, message: int, frame: _Frame) -> bool:
        """The message is ready to go; False if it needs no line."""
        ends = self.ends[frame.role][message]
        if ends is None:
            return False
        self.waiting.setdefault(ends, deque()).append((self.entered, message, frame))
        self.entered += 1
        return True

    def start(self) -> Iterator[tuple[int, _Frame]]:
        """Takes the lines for the messages that can go now, the one that was ready first before others."""
        while True:
            ready = [
                (queue[0][0], ends)
                for ends, queue in self.waiting.items()
                if ends[0] not in self.taken and ends[1] not in self.taken
            ]
            if not ready:
                return
            _, ends = min(ready)
            queue = self.waiting[ends]
            _, message, frame = queue.popleft()
            if not queue:
                del self.waiting[ends]
            self.taken.update(ends)
            yield message, frame

    def free(self, message: int, frame: _Frame) -> None:
        """The message has left its lines."""
        ends = self.ends[frame.role][message]
        assert ends is not None
        self.taken.difference_update(ends)
