"""The simulator: plays the steps of a program on a platform, event by event.

Messages that use a link at the same time get equal shares of it, as TCP connections do. Times are predictions; the
numbers of sent bytes are exact.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate, count
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from dicompiler.base.process import gc_paused
from dicompiler.cost.cost_model import CostModel
from dicompiler.cost.memory import LiveRange, peak_nbytes
from dicompiler.cost.op_counts import weight_regions
from dicompiler.cost.runtime_overhead import FREE_RUNTIME, NO_RUNTIMES, RuntimeCosts
from dicompiler.cost.speed_changes import Speeds, end_of_computing
from dicompiler.cost.workload import Message, Workload, task_flops, task_seconds
from dicompiler.ir.frame_prediction import FramePrediction
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.metrics import DeviceMetrics, Method, Metrics
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import Region
from dicompiler.ir.routing import Assembly, Box, Routing, Task, assembly_leaves, task_id
from dicompiler.partition.routing import route_on_platform

T = TypeVar("T")


class SharedLink(Generic[T]):
    """A network link and the flows (connections that are sending a message) that use it now.

    Attributes:
        flows: For each flow, the share of the link's present bandwidth that it would use without other flows: below 1
            if it also uses a slower link, and above 1 if this link has become slower.
        load: Sum of these shares. If it exceeds 1, all flows on the link are slowed down by this factor.
        busy_s: Seconds that the link needs at its full bandwidth for all messages so far.
        speed: Present bandwidth as a multiple of the full bandwidth.
    """

    __slots__ = ("busy_s", "flows", "load", "speed")

    def __init__(self) -> None:
        self.load = self.busy_s = 0.0
        self.speed = 1.0
        self.flows: dict[Flow[T], float] = {}

    def add_flow(self, flow: Flow[T], share: float) -> None:
        self.flows[flow] = share = share / self.speed
        self.load += share

    def set_speed(self, speed: float) -> None:
        self.flows = {flow: share * self.speed / speed for flow, share in self.flows.items()}
        self.load, self.speed = sum(self.flows.values()), speed

    def remove_flow(self, flow: Flow[T]) -> None:
        self.load -= self.flows.pop(flow)
        if not self.flows:
            # Repeated subtraction leaves rounding errors, so the load of a link without flows is set to exactly 0.
            self.load = 0.0


class Flow(Generic[T]):
    """A connection from one device to another, which sends one message at a time.

    Attributes:
        links: For each link that the flow uses, the largest share of its bandwidth that the flow can use.
        queue: Messages to send, as (message, seconds if it is sent alone, rank). The first one is being sent. Messages
            of a lower rank are sent before those of a higher rank.
        started_at: Time at which the first message started.
        remaining_s: Seconds that the first message still needed at `updated_at`, without other flows on its links.
        updated_at: Time of the last change of `speed`.
        speed: Present speed of sending, as a fraction of the speed without other flows on its links.
        version: Number of times that the end of sending the first message has been planned. Planned ends with an older
            version are invalid, because the speed has changed since then.
    """

    __slots__ = ("links", "queue", "remaining_s", "speed", "started_at", "updated_at", "version")

    def __init__(self, links: dict[SharedLink[T], float]) -> None:
        self.links = links
        self.queue: deque[tuple[T, float, int]] = deque()
        self.started_at = self.remaining_s = self.speed = self.updated_at = 0.0
        self.version = 0


class LinkScheduler(Generic[T]):
    """All links and flows (connections) of a simulation.

    Attributes:
        departures: (time, flow, version of the flow) at which a message has been sent completely. The simulator empties
            this list. Entries with an older version than the flow's are invalid.
    """

    def __init__(self) -> None:
        self._links: dict[str, SharedLink[T]] = {}
        self._flows: dict[tuple[object, object], Flow[T]] = {}
        self.departures: list[tuple[float, Flow[T], int]] = []

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds that each link needs at its full bandwidth for all messages so far, by the name of the link."""
        return {name: link.busy_s for name, link in self._links.items()}

    def flow(self, devices: tuple[object, object], shares: Mapping[str, float]) -> Flow[T]:
        """Return the flow (connection) from one device to another; create it if it does not exist yet.

        Args:
            devices: Indices of the sender and the receiver.
            shares: By name of each link that the flow uses, the largest share of its bandwidth that the flow can use.
        """
        if devices not in self._flows:
            links = {self._links.setdefault(name, SharedLink()): share for name, share in shares.items()}
            self._flows[devices] = Flow(links)
        return self._flows[devices]

    def enqueue(self, now: float, flow: Flow[T], message: T, seconds: float, rank: int = 0) -> None:
        """Insert a message into the queue of a connection, after the messages of the same or a lower rank.

        The message takes `seconds` if no other connection uses its links. It never overtakes the message that is being
        sent.
        """
        queue = flow.queue
        position = len(queue)
        while position > 1 and queue[position - 1][2] > rank:
            position -= 1
        queue.insert(position, (message, seconds, rank))
        for link, share in flow.links.items():
            link.busy_s += share * seconds
        if len(queue) > 1:
            return
        flow.started_at, flow.remaining_s, flow.updated_at = now, seconds, now
        for link, share in flow.links.items():
            link.add_flow(flow, share)
        self._update_speeds(now, flow.links)

    def set_link_speed(self, now: float, name: str, speed: float) -> None:
        if name in self._links:
            link = self._links[name]
            link.set_speed(speed)
            self._update_speeds(now, (link,))

    def finish_message(self, now: float, flow: Flow[T]) -> tuple[T, float]:
        """Remove the first message of a connection, start the next one, and return (removed message, its start)."""
        (message, _, _), started_at = flow.queue.popleft(), flow.started_at
        # A flow with more messages stays on its links, so the speeds of other flows do not change.
        if flow.queue:
            flow.started_at, flow.remaining_s, flow.updated_at = now, flow.queue[0][1], now
            self._plan_departure(now, flow)
            return message, started_at
        for link in flow.links:
            link.remove_flow(flow)
        flow.speed, flow.version = 0.0, flow.version + 1
        self._update_speeds(now, flow.links)
        return message, started_at

    def _update_speeds(self, now: float, changed_links: Iterable[SharedLink[T]]) -> None:
        """Update the speeds of all connections on links with a changed load."""
        for link in changed_links:
            for flow in link.flows:
                load = 1.0
                # This loop computes a maximum. It is faster than max(), and most of a simulation is spent here.
                for used_link in flow.links:
                    if used_link.load > load:
                        load = used_link.load
                speed = 1.0 / load
                if speed != flow.speed:
                    flow.remaining_s -= (now - flow.updated_at) * flow.speed
                    flow.updated_at, flow.speed = now, speed
                    self._plan_departure(now, flow)

    def _plan_departure(self, now: float, flow: Flow[T]) -> None:
        flow.version += 1
        self.departures.append((now + max(0.0, flow.remaining_s) / flow.speed, flow, flow.version))


class Span(NamedTuple):
    """A period of a simulation: a device computes, sends, receives or waits, or a message is on a link.

    Attributes:
        kind: "compute": `device` ran a segment (ONNX submodel). "handle": the processor of `device` sent a message to
            `peer`, or received one from it. "message": bytes were on the link from `device` to `peer`. "wait": `device`
            waited for a message from `peer`, or for the next frame if `peer` is empty.
        device: Name of the device.
        name: Name of the segment or of the tensor in the message.
        frame: Number of the frame.
        start: Start in seconds after the start of the first frame.
        end: End in seconds after the start of the first frame.
        peer: Name of the other device; empty if there is none.
    """

    kind: Literal["compute", "handle", "message", "wait"]
    device: str
    name: str
    frame: int
    start: float
    end: float
    peer: str = ""

    @property
    def seconds(self) -> float:
        """Length of the period in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class SimulationResult:
    """The times that a simulation of frames on a platform predicts.

    Attributes:
        frames: (start, end) of each frame in seconds, from the availability of all inputs on their devices to that of
            all outputs.
        totals: Total seconds as `totals[kind, as_receiver][device]`. `kind` is a kind of `Span`, or "occupied" for the
            time in which a device computes, sends or receives. `as_receiver` is True for messages to the device.
        waits: Seconds as `waits[device][peer]`, in which the device was idle because a message from the peer was
            missing. The peer is empty if no frame was available.
        spans: All periods in the order of their ends; empty if `simulate` was called without `keep_spans`.
        queued_s: Seconds from the start of each frame until the first device began to compute for it.
        link_s: Seconds that each link needs at its full bandwidth for all messages, by the name of the link.
        end_s: Time in seconds at which all devices and links have finished. It can be later than the end of the last
            frame, because devices may compute states for a next frame after the outputs.
        input_output_s: Additional seconds to bring the inputs of a frame to their devices and its outputs to the
            caller.
    """

    frames: tuple[tuple[float, float], ...]
    totals: Mapping[tuple[str, bool], Mapping[str, float]] = field(repr=False)
    waits: Mapping[str, Mapping[str, float]] = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)
    queued_s: tuple[float, ...] = ()
    link_s: Mapping[str, float] = field(default_factory=dict, repr=False)
    end_s: float = 0.0
    input_output_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """Seconds from the start to the end of the first frame, which later frames in flight may delay."""
        return self.frames[0][1] - self.frames[0][0]

    @property
    def frame(self) -> FramePrediction:
        """The predicted time of the first frame."""
        return FramePrediction(self.latency_s, self.input_output_s)

    @property
    def period_s(self) -> float:
        """Mean seconds between the ends of frames, in the middle half of the stream (if it has at least four frames).

        The result is at least the seconds that the busiest device works for each frame, because a short stream can seem
        faster.
        """
        ends = sorted(end for _, end in self.frames)
        count = len(ends)
        if count < 4:
            mean_s = ends[-1] / count
        else:
            first, last = count // 4, 3 * count // 4
            mean_s = (ends[last] - ends[first]) / (last - first)
        busiest_s = max(self.totals.get(("occupied", False), {}).values(), default=0.0) / count
        return max(mean_s, busiest_s)

    def total_seconds(self, kind: str, device: str, as_receiver: bool = False) -> float:
        """Return the total seconds of all periods of one kind on a device.

        Args:
            kind: "compute", "handle", "message" or "occupied" (the device computes, sends or receives).
            device: Name of the device.
            as_receiver: True for messages to the device, False for those from it. Other kinds need False.

        Returns:
            Seconds of all frames together.
        """
        return self.totals[kind, as_receiver].get(device, 0.0)


@dataclass(slots=True, eq=False)
class _SimulatedDevice:
    """The state of a device in a simulation. A job is the run of one segment (an ONNX submodel) for one frame.

    Times are in seconds.

    Attributes:
        number: Index of the device.
        started: Time at which the current job started.
        idle_since: Time at which the device last became idle.
        ready: Heap of the frames that have a job ready for the device, as (frame number, frame).
        inbox: Messages that have arrived while the device was busy.
        waiting_sends: Messages with inputs of frames that have started while the device was busy.
        computed: Total seconds of computing.
        handled: Total seconds in which the processor sends or receives messages.
        occupied: Total seconds of computing, sending and receiving, with overlaps counted once.
        occupied_until: Latest known end of computing, sending and receiving.
        sent: Total seconds on links of the messages from the device.
        received: Total seconds on links of the messages to the device.
        waited: Total seconds of waiting, by the device that sent the missing message.
    """

    number: int
    name: str
    is_busy: bool = False
    started: float = 0.0
    idle_since: float = 0.0
    ready: list[tuple[int, _FrameState]] = field(default_factory=list)
    inbox: deque[_InFlightMessage] = field(default_factory=deque)
    waiting_sends: list[tuple[_FrameState, Sequence[int]]] = field(default_factory=list)
    computed: float = 0.0
    handled: float = 0.0
    occupied: float = 0.0
    occupied_until: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)

    def occupy(self, start: float, end: float) -> None:
        """Add the seconds of work from `start` to `end` that no earlier call has added.

        This is right only if the device was never idle between `start` and `occupied_until`.
        """
        self.occupied += max(0.0, end - max(start, self.occupied_until))
        self.occupied_until = max(end, self.occupied_until)


@dataclass(slots=True, eq=False)
class _MessagePath:
    """One message of a plan: its sender and receiver, and its costs, which are equal in all frames.

    Attributes:
        flow: The connection between the two devices; None if both are on one host.
        seconds: Seconds on the link if no other message uses it.
        latency: Seconds from the end of sending until the receiver is awake.
        is_parallel: Whether the receiver can receive the message while it computes, because it has several cores.
        in_order: Whether messages are sent in the order in which they become ready. Otherwise the messages of older
            frames are sent first.
        readers: Indices of the receiver's jobs (runs of ONNX submodels) that wait for the message.
    """

    name: str
    sender: _SimulatedDevice
    receiver: _SimulatedDevice
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
    """The state of a frame in flight. A job is the run of one segment (an ONNX submodel) for this frame.

    Attributes:
        next_jobs: For each device, the index of its next job.
        missing_messages: Number of messages that each job still waits for.
        last_messages: The message that arrived last, by index of the job, for jobs that wait for no more messages.
        missing_outputs: Number of outputs that are not computed yet.
        started_at: Time at which the first job of the frame started.
    """

    number: int
    replica: _ReplicaJobs
    start: float
    next_jobs: list[int]
    missing_messages: list[int]
    last_messages: dict[int, _MessagePath]
    missing_outputs: int
    started_at: float = float("inf")


_InFlightMessage = tuple[_FrameState, _MessagePath]
_Handler = Callable[[float, _FrameState, Any], object]
"""A method that is called at an event, with its time, its frame, and a device or message.

It returns True if the event was cancelled in the meantime, so that nothing was done.
"""


class _ReplicaJobs:
    """The jobs of one replica (a copy of the plan, or the plan itself), numbered consecutively over all devices.

    A job is a segment (an ONNX submodel) with its predicted seconds. The jobs of device i have the indices from
    `first_jobs[i]` to `job_ends[i]` - 1.
    """

    def __init__(
        self,
        workload: Workload,
        devices: Sequence[_SimulatedDevice],
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
        # By index of each job that reads outputs of the previous frame (states): the indices of the jobs that compute
        # them.
        self.state_makers: dict[int, list[int]] = {}
        for first_job, device in zip(self.first_jobs, workload.devices, strict=True):
            for i, job in enumerate(device.jobs):
                if job.state_makers:
                    self.state_makers[first_job + i] = [first_job + maker for maker in job.state_makers]
        self.initial_sends = [
            (device, work.initial_sends)
            for device, work in zip(devices, workload.devices, strict=True)
            if work.initial_sends
        ]
        self.starting_devices = [
            d for d, device in enumerate(workload.devices) if device.jobs and not device.jobs[0].waits_for
        ]

    def frame(self, number: int, start: float) -> _FrameState:
        return _FrameState(number, self, start, self.first_jobs.copy(), self.missing_messages.copy(), {}, self.outputs)


def _message_path(
    workload: Workload,
    message: Message,
    devices: Sequence[_SimulatedDevice],
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
    """Simulate how the devices of a platform compute frames, and return the predicted times.

    A device computes one segment (ONNX submodel) at a time, of the oldest frame with complete inputs. It sends a
    message after the segment that computed the tensor, and inputs of new frames between two segments. Connections share
    links equally, as in TCP.

    Args:
        workload: The segments of each device with their seconds, and the messages.
        platform: The devices and links.
        frames: Number of frames, which use the plan's replicas in turn.
        in_flight: Largest number of frames in flight, from the oldest unfinished frame on.
        keep_spans: Whether the result lists all busy and idle periods (`SimulationResult.spans`).
        speeds: Changes of the devices' speed of computing, by device name.
        link_speeds: Changes of the links' bandwidth, by name in `Platform.occupied_links`.
    """
    with gc_paused():
        simulator = _EventSimulator(workload, platform, frames, max(1, in_flight), keep_spans, speeds or {})
        return simulator.run(link_speeds or {})


class _EventSimulator:
    """The state of a running simulation: devices, links, frames in flight, and a heap of future events.

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
        self.devices = [_SimulatedDevice(number, device.device) for number, device in enumerate(workload.devices)]
        self.speeds = [speeds.get(device.device) for device in workload.devices]
        self.links: LinkScheduler[_InFlightMessage] = LinkScheduler()
        self.replicas = [_ReplicaJobs(replica, self.devices, platform, self.links) for replica in workload.replicas]
        self.frame_count, self.in_flight = frames, in_flight
        self.input_output_s = sum(replica.input_output_s for replica in workload.replicas) / len(workload.replicas)
        self.released = self.oldest_unfinished = 0
        self.frame_times: dict[int, tuple[float, float, float]] = {}
        self.spans: list[Span] | None = [] if keep_spans else None
        self.events: list[tuple[float, int, _Handler, _FrameState, Any]] = []
        self.event_order = count()
        # Finished jobs (runs of segments) of the frame that started last, by its number. The next frame may read
        # outputs (states) that they computed.
        self.finished_jobs: dict[int, set[int]] = {}
        # By (frame number, job) that computes states (outputs that the next frame reads): the frames and jobs that wait
        # for them.
        self.state_readers: dict[tuple[int, int], list[tuple[_FrameState, int]]] = {}

    def run(self, link_speeds: Mapping[str, Speeds]) -> SimulationResult:
        link_changes = [(at, name, speed) for name, speeds in link_speeds.items() for at, speed in speeds]
        link_changes.sort(reverse=True)
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
        """Start the frames of the stream that may be in flight. A frame without outputs to compute ends at once.

        Frames are in flight from the oldest unfinished one on. Those that finish before it still count, because their
        outputs are given out in order.

        `idle_devices` are the indices of devices that have just become idle. Each starts its next job if one is ready.
        """
        while self.released < min(self.frame_count, self.oldest_unfinished + self.in_flight):
            replica = self.replicas[self.released % len(self.replicas)]
            frame = replica.frame(self.released, now)
            self.released += 1
            if replica.state_makers:
                self._wait_for_states(frame)
            for sender, messages in replica.initial_sends:
                sender.waiting_sends.append((frame, messages))
                if not sender.is_busy:
                    self._send_inputs(now, sender)
            for d in replica.starting_devices:
                if not frame.missing_messages[frame.next_jobs[d]]:
                    heappush(self.devices[d].ready, (frame.number, frame))
            for d in sorted({*replica.starting_devices, *idle_devices}):
                self._advance(now, self.devices[d])
            if not frame.missing_outputs:
                self._finish_frame(frame, (now, now, 0.0))

    def _finish_frame(self, frame: _FrameState, times: tuple[float, float, float]) -> None:
        """Record when a frame started and ended, and how long it waited for its first job."""
        self.frame_times[frame.number] = times
        while self.oldest_unfinished in self.frame_times:
            self.oldest_unfinished += 1

    def _wait_for_states(self, frame: _FrameState) -> None:
        """Make the jobs (runs of ONNX submodels) of a frame wait for states, i.e. outputs of the previous frame."""
        finished = self.finished_jobs.pop(frame.number - 1, set())
        for reader, makers in frame.replica.state_makers.items() if frame.number else ():
            missing = [job for job in makers if job not in finished]
            frame.missing_messages[reader] += len(missing)
            for job in missing:
                self.state_readers.setdefault((frame.number - 1, job), []).append((frame, reader))

    def _record_states(self, frame: _FrameState, job: int, device: _SimulatedDevice) -> None:
        """Record that a job (run of an ONNX submodel) has finished, and release later jobs that wait for it."""
        if frame.number + 1 == self.released:
            self.finished_jobs.setdefault(frame.number, set()).add(job)
        for later, reader in self.state_readers.pop((frame.number, job), ()):
            later.missing_messages[reader] -= 1
            if not later.missing_messages[reader] and reader == later.next_jobs[device.number]:
                heappush(device.ready, (later.number, later))

    def _advance(self, now: float, device: _SimulatedDevice) -> None:
        """Start an idle device's next job (run of an ONNX submodel), or receive a message if no job is ready.

        Of several ready jobs, that of the oldest frame is started.
        """
        if device.is_busy:
            return
        if device.waiting_sends:
            self._send_inputs(now, device)
        if device.ready:
            _, frame = heappop(device.ready)
            number = frame.next_jobs[device.number]
            last = frame.last_messages.pop(number, None)
            if now > device.idle_since:
                self._record_wait(now, device, frame, last)
            device.is_busy, device.started, frame.started_at = True, now, min(frame.started_at, now)
            seconds, speeds = frame.replica.jobs[number].seconds, self.speeds[device.number]
            done = now + seconds if speeds is None else end_of_computing(now, seconds, speeds)
            device.occupy(now, done)
            heappush(self.events, (done, next(self.event_order), self._finish_job, frame, device))
        elif device.inbox:
            self._receive(now, *device.inbox.popleft())

    def _record_wait(self, now: float, device: _SimulatedDevice, frame: _FrameState, path: _MessagePath | None) -> None:
        start, peer = device.idle_since, "" if path is None else path.sender.name
        device.waited[peer] = device.waited.get(peer, 0.0) + (now - start)
        if self.spans is not None:
            name = "a frame" if path is None else path.name
            self.spans.append(Span("wait", device.name, name, frame.number, start, now, peer))

    def _finish_job(self, now: float, frame: _FrameState, device: _SimulatedDevice) -> None:
        replica, number, start = frame.replica, frame.next_jobs[device.number], device.started
        job = replica.jobs[number]
        device.computed += now - start
        if self.spans is not None:
            self.spans.append(Span("compute", device.name, job.name, frame.number, start, now))
        if replica.state_makers:
            self._record_states(frame, number, device)
        frame.next_jobs[device.number] = number = number + 1
        if number < replica.job_ends[device.number] and not frame.missing_messages[number]:
            heappush(device.ready, (frame.number, frame))
        free = self._send_messages(now, frame, job.sends)
        device.is_busy, device.idle_since = free > now, now
        if free > now:
            heappush(self.events, (free, next(self.event_order), self._become_idle, frame, device))
        self._schedule_departures(frame)
        if job.outputs:
            frame.missing_outputs -= job.outputs
            # A frame ends with its last output, even if devices still compute regions for it that nothing reads.
            if not frame.missing_outputs:
                self._finish_frame(frame, (frame.start, now, frame.started_at - frame.start))
                self._start_frames(now, (device.number,))
        self._advance(now, device)

    def _become_idle(self, now: float, _: _FrameState, device: _SimulatedDevice) -> None:
        device.is_busy, device.idle_since = False, now
        self._advance(now, device)

    def _send_inputs(self, now: float, device: _SimulatedDevice) -> None:
        """Send the inputs of the frames that the device sends to other devices and has not sent yet."""
        for frame, messages in device.waiting_sends:
            self._send_messages(now, frame, messages)
            self._schedule_departures(frame)
        device.waiting_sends.clear()

    def _send_messages(self, now: float, frame: _FrameState, messages: Sequence[int]) -> float:
        """Send messages one after another, and return the time at which the sender's processor is done."""
        for message in messages:
            path = frame.replica.paths[message]
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
        for at, flow, version in self.links.departures:
            heappush(self.events, (at, next(self.event_order), self._finish_message, frame, (flow, version)))
        self.links.departures.clear()

    def _finish_message(self, now: float, _: _FrameState, departure: tuple[Flow[_InFlightMessage], int]) -> bool:
        """Finish the sending of a message; return True and do nothing if the event is out of date."""
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
        device: _SimulatedDevice,
        peer: _SimulatedDevice,
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


LayerStep = tuple[str, bool]
"""A step of the barrier model: (name of a layer, or "" for the network's inputs; whether it computes partial sums)."""


@dataclass(frozen=True)
class _SentBox:
    """A region of a tensor that is sent to another device.

    Attributes:
        sender: Device that sends the region.
        receiver: Device that receives the region.
        nbytes: Bytes of the region.
        step: Name of the layer that computes the region, and whether it is a partial sum; ("", False) for a graph
            input.
    """

    sender: str
    receiver: str
    nbytes: int
    step: LayerStep


@dataclass(frozen=True)
class _ReplicaCosts:
    """The costs of one replica (a copy of the plan, or the plan itself).

    Attributes:
        routing: All tasks (one device's part of a layer each) and exchanged regions.
        seconds: Seconds of each task, by (layer, index).
        sent: The regions that are sent to other devices.
    """

    routing: Routing
    seconds: Mapping[tuple[str, int], float]
    sent: Sequence[_SentBox]


def estimate_metrics(
    layers: LayerGraph,
    platform: Platform,
    cost: CostModel,
    plan: Plan,
    runtime_by_device: Mapping[str, RuntimeCosts] = NO_RUNTIMES,
) -> Metrics:
    """Estimate the metrics of a plan without simulating it, by a barrier model.

    Each layer begins when all devices have finished the previous one and all its regions have been sent. In reality and
    in the simulator these periods overlap, so the latency is an overestimate: for VGG16, the simulator's is 6 to 54 %
    lower.

    Args:
        layers: The layers of the network.
        platform: The platform.
        cost: The cost model.
        plan: The plan.
        runtime_by_device: Costs of messages and calls. Default: they are free.

    Raises:
        DicompilerError: The plan does not fit the layers, or names an unknown device.
    """
    routing = route_on_platform(platform, layers, plan)
    replicas = []
    for replica in routing.replica_roles:
        seconds = {task_id(task): task_seconds(replica, platform, cost, task) for task in replica.tasks}
        replicas.append(_ReplicaCosts(replica, seconds, _sent_boxes(replica)))
    latency = sum(_barrier_latency(replica, platform, runtime_by_device) for replica in replicas) / len(replicas)
    sent = [box for replica in replicas for box in replica.sent]
    send_link_s, receive_link_s = Counter[str](), Counter[str]()
    for box in sent:
        link_s = _link_seconds(platform, runtime_by_device, box) / len(replicas)
        send_link_s[box.sender] += link_s  # type: ignore[assignment]
        receive_link_s[box.receiver] += link_s  # type: ignore[assignment]
    devices = tuple(
        replace(entry, send_link_s=send_link_s[entry.device], receive_link_s=receive_link_s[entry.device])
        for entry in _device_metrics(replicas, routing, platform, plan)
    )
    metrics = _build_metrics(replicas, devices, platform, {}, latency, "estimate")
    network_s = _network_seconds(platform, runtime_by_device, sent, len(replicas))
    return replace(metrics, period_s=max(metrics.period_s, network_s))


def metrics_of_simulation(
    simulation: SimulationResult, workload: Workload, routing: Routing, platform: Platform, plan: Plan
) -> Metrics:
    """Return the metrics of a plan from a simulation in which each replica computes one frame, one after another.

    The period (seconds between the ends of two frames) is the time for which the busiest device or link works for a
    frame, averaged over the replicas.
    """
    replica_workloads = workload.replicas
    replicas = [
        _ReplicaCosts(replica, replica_workload.task_seconds, _sent_boxes(replica))
        for replica, replica_workload in zip(routing.replica_roles, replica_workloads, strict=True)
    ]
    frames = len(simulation.frames)
    call_s: dict[str, float] = defaultdict(float)
    for work in (work for replica_workload in replica_workloads for work in replica_workload.devices):
        call_s[work.device] += work.calls_s
    devices = tuple(
        replace(
            entry,
            compute_s=entry.compute_s + call_s[entry.device] / frames,
            runtime_s=simulation.total_seconds("handle", entry.device) / frames,
            send_link_s=simulation.total_seconds("message", entry.device) / frames,
            receive_link_s=simulation.total_seconds("message", entry.device, as_receiver=True) / frames,
            waits={peer: seconds / frames for peer, seconds in simulation.waits.get(entry.device, {}).items()},
            occupied_s=simulation.total_seconds("occupied", entry.device) / frames,
        )
        for entry in _device_metrics(replicas, routing, platform, plan)
    )
    latency = sum(end - start for start, end in simulation.frames) / frames
    link_loads = {name: seconds / frames for name, seconds in simulation.link_s.items()}
    metrics = _build_metrics(replicas, devices, platform, link_loads, latency, "simulation")
    # With states (outputs that the next frame reads), frames wait for previous frames. The busy times of devices and
    # links do not contain this waiting, so a short stream is simulated.
    if any(job.state_makers for device_work in workload.devices for job in device_work.jobs):
        stream = simulate(workload, platform, frames=8, in_flight=4, keep_spans=False)
        metrics = replace(metrics, period_s=max(metrics.period_s, stream.period_s))
    return replace(metrics, input_output_s=simulation.input_output_s, active_s=simulation.end_s / frames)


def _build_metrics(
    replicas: Sequence[_ReplicaCosts],
    devices: tuple[DeviceMetrics, ...],
    platform: Platform,
    link_loads: Mapping[str, float],
    latency: float,
    method: Method,
) -> Metrics:
    host_memory: dict[str, int] = {}
    energy = 0.0
    for entry in devices:
        device = platform.device(entry.device)
        host_memory[device.host] = host_memory.get(device.host, 0) + entry.memory
        idle = max(0.0, latency - entry.busy_s)
        energy += device.power_active * entry.busy_s + device.power_idle * idle + device.power_network * entry.link_s
    period = max((0.0, *link_loads.values(), *(entry.busy_s for entry in devices)))
    total = _mean_rounded_up(sum(box.nbytes for replica in replicas for box in replica.sent), replicas)
    memory = max(host_memory.values(), default=0)
    return Metrics(devices, latency, period, energy, memory, total, method, link_loads=link_loads)


def _layer_step(task: Task) -> LayerStep:
    return task.layer, task.kind == "partial"


def _sent_boxes(routing: Routing) -> list[_SentBox]:
    steps = {task_id(task): _layer_step(task) for task in routing.tasks}
    sent = []
    for box in routing.received_boxes:
        assert box.origin is not None
        step = ("", False) if box.origin.task is None else steps[box.origin.task]
        sent.append(_SentBox(box.origin.device, box.device, routing.nbytes(box), step))
    return sent


def _barrier_latency(replica: _ReplicaCosts, platform: Platform, runtime: Mapping[str, RuntimeCosts]) -> float:
    """Return the seconds of a frame if each layer begins when all devices have finished the previous layer."""
    routing, seconds = replica.routing, replica.seconds
    compute: dict[LayerStep, dict[str, float]] = {("", False): {}}
    for task in sorted(routing.tasks, key=lambda task: (routing.layers.position[task.layer], task.kind != "partial")):
        seconds_by_device = compute.setdefault(_layer_step(task), {})
        seconds_by_device[task.device] = seconds_by_device.get(task.device, 0.0) + seconds[task_id(task)]
    sent: dict[LayerStep, list[_SentBox]] = {}
    for box in replica.sent:
        sent.setdefault(box.step, []).append(box)
    return sum(
        max(devices.values(), default=0.0)
        + _network_seconds(platform, runtime, sent.get(step, ()))
        + _handling_seconds(sent.get(step, ()), runtime)
        for step, devices in compute.items()
    )


def _handling_seconds(boxes: Sequence[_SentBox], runtime: Mapping[str, RuntimeCosts]) -> float:
    """Return the seconds that the busiest sender and the busiest receiver spend on exchanging tensor regions."""
    sending, receiving = dict[str, float](), dict[str, float]()
    for box in boxes if runtime else ():
        sender, receiver = runtime.get(box.sender, FREE_RUNTIME), runtime.get(box.receiver, FREE_RUNTIME)
        sending[box.sender] = sending.get(box.sender, 0.0) + sender.send_seconds(box.nbytes)
        first = receiver.latency + receiver.segment_call_s
        receiving[box.receiver] = receiving.get(box.receiver, first) + receiver.receive_seconds(box.nbytes)
    return max(sending.values(), default=0.0) + max(receiving.values(), default=0.0)


def _network_seconds(
    platform: Platform, runtime: Mapping[str, RuntimeCosts], boxes: Iterable[_SentBox], frames: int = 1
) -> float:
    """Return the seconds that the busiest link needs for the messages of a frame, plus the largest latency.

    `boxes` are the tensor regions that are sent in `frames` frames. A message occupies the links of both hosts for as
    long as the slower one needs.
    """
    busy_s: dict[tuple[str, str], float] = {}
    longest = 0.0
    for box in boxes:
        link = platform.link(box.sender, box.receiver)
        if link is None:
            continue
        longest = max(longest, link.latency)
        link_s = _link_seconds(platform, runtime, box)
        ends = (("out", platform.host_of[box.sender]), ("in", platform.host_of[box.receiver]))
        for end in ends if platform.network.kind == "switch" else (("all", ""),):
            busy_s[end] = busy_s.get(end, 0.0) + link_s
    return max(busy_s.values(), default=0.0) / frames + longest


def _link_seconds(platform: Platform, runtime: Mapping[str, RuntimeCosts], box: _SentBox) -> float:
    link = platform.link(box.sender, box.receiver)
    if link is None:
        return 0.0
    sender = runtime.get(box.sender, FREE_RUNTIME)
    return sender.link_seconds(link, box.nbytes, platform.network.message_overhead_s)


def _device_metrics(
    replicas: Sequence[_ReplicaCosts], routing: Routing, platform: Platform, plan: Plan
) -> tuple[DeviceMetrics, ...]:
    """Return the metrics of each device. Work and sent bytes are averaged over the plan's replicas.

    The memory includes the weights of failure plans (plans for the remaining devices).
    """
    activations = [_peak_activations(role) for role in routing.roles]
    weights: dict[str, dict[tuple[str, Region], int]] = {name: {} for name in plan.devices}
    for task in (task for role in routing.roles for task in role.tasks):
        weights[task.device] |= weight_regions(routing.layers, task)
    sent, received = Counter[str](), Counter[str]()
    for box in (box for replica in replicas for box in replica.sent):
        sent[box.sender] += box.nbytes
        received[box.receiver] += box.nbytes
    work: dict[str, list[tuple[_ReplicaCosts, Task]]] = {name: [] for name in plan.devices}
    for replica in replicas:
        for task in replica.routing.tasks:
            work[task.device].append((replica, task))
    return tuple(
        DeviceMetrics(
            name,
            _mean_rounded_up(sum(task_flops(replica.routing, task) for replica, task in work[name]), replicas),
            sum(replica.seconds[task_id(task)] for replica, task in work[name]) / len(replicas),
            sum(weights[name].values()),
            max(activation_bytes.get(name, 0) for activation_bytes in activations),
            _mean_rounded_up(sent[name], replicas),
            _mean_rounded_up(received[name], replicas),
        )
        for name in (device.name for device in platform.devices if device.name in work)
    )


def _mean_rounded_up(total: int, replicas: Sequence[_ReplicaCosts]) -> int:
    return -(-total // len(replicas))


def _peak_activations(routing: Routing) -> dict[str, int]:
    """Return the largest number of bytes of tensor regions that each device stores at once, by device name.

    A region is stored until its last reader on the device; graph outputs and states (outputs that the next frame reads)
    until the end of the frame.
    """
    first: dict[Box, int] = {}
    last: dict[Box, int] = {}

    def hold(tree: Assembly, step: int) -> None:
        last.update((leaf.box, step) for leaf in assembly_leaves(tree))

    for step, task in enumerate(routing.tasks):
        for key, region in task.outputs.items():
            box = Box(key, region, task.device, task.lane, task_id(task))
            first[box] = last[box] = step
        for tree in routing.reads.get(task_id(task), {}).values():
            hold(tree, step)
    for box in routing.received_boxes:
        # A device with graph inputs also stores the inputs that it only sends and does not read itself.
        if box.origin is not None:
            last.setdefault(box.origin, 0)
    for delivery in routing.deliveries:
        if delivery.assembly is not None:
            hold(delivery.assembly, len(routing.tasks))
    for retention in routing.state_retentions:
        hold(retention.assembly, len(routing.tasks))
    live_ranges: dict[str, list[LiveRange]] = {}
    for box, step in last.items():
        if box.region is not None:
            live_ranges.setdefault(box.device, []).append((first.get(box, 0), step, routing.nbytes(box)))
    return {device: peak_nbytes(ranges) for device, ranges in live_ranges.items()}
