"""A run of an artifact: its devices are joined once, then given frames, several at a time, until it is closed.

Whatever goes wrong (a process ends or is silent, a device reports an error, time is up, an interrupt): all processes
are ended and waited for, and one RunError names the device and the cause.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dicompiler.plugin_api import DeviceReport, RunError, RunOptions, UsageError, nearest
from dicompiler_targets.sockets.artifact import Artifact, from_payload, to_payload
from dicompiler_targets.sockets.feed import Feed
from dicompiler_targets.sockets.joining import LOOPBACK, Door
from dicompiler_targets.sockets.processes import Process, Start, end, here, read_report
from dicompiler_targets.sockets.root_cause import CAUSE, Event, Failure, endings, failure_of, root_cause
from dicompiler_targets.sockets.runtime.frames import (
    IN_FLIGHT_LIMIT,
    Gate,
    Header,
    Kind,
    ProtocolError,
    Window,
    check_empty,
    check_message,
    decode,
)
from dicompiler_targets.sockets.runtime.greeting import CONTROL, TOKEN, Membership
from dicompiler_targets.sockets.runtime.line import left
from dicompiler_targets.sockets.runtime.lines import Lines

log = logging.getLogger("dicompiler")

TICK_S = 0.05
"""Seconds between two looks at the processes."""
SETTLE_S = 0.3
"""Seconds in which the cause of a failure can show: that a connection was lost is told before the death behind it."""
MESSAGES = 64
"""Reports and errors that a device can send: they wait here until somebody asks for outputs."""
GRACE_S = 1.0
"""Seconds after a deadline in which devices can still say what they were waiting for."""


@dataclass
class Flight:
    """A frame on its way: until when it must be done, payloads by sink device and index of output, and the devices
    that have finished it. start_s, end_s: of time.perf_counter."""

    number: int
    deadline: float
    start_s: float
    outputs: dict[str, dict[int, Any]]
    missing: int
    end_s: float = 0.0
    done: set[str] = field(default_factory=set)


class Session:
    """The processes of an artifact and the frames on their way. Use it from one thread at a time.

    start: how devices are started, by default on this host, but those that `options.elsewhere` names, which someone
    else starts. `deadline` (of time.monotonic) bounds all of it, if given. Errors: RunError, UsageError for options
    that cannot be.
    """

    def __init__(
        self,
        artifact: Artifact,
        options: RunOptions,
        start: Start | None = None,
        deadline: float | None = None,
    ) -> None:
        self.artifact, self.options, self.deadline = artifact, options, deadline
        self.in_flight = in_flight(options, len(artifact.devices))
        self.processes: dict[str, Process] = {}
        self.reports: tuple[DeviceReport, ...] = ()
        self._roles = artifact.roles
        self._events: deque[Event] = deque()
        self._window, self._flights = Window(None), dict[int, Flight]()
        self._ready: set[str] = set()
        self._ended: str | None = None
        count = len(artifact.devices) - len(options.elsewhere)
        self._start = start or here(artifact.directory, options, max(1, count))
        door = Door(options.listen or LOOPBACK, options.keys, options.insecure)
        self._lines, self._looked = Lines(options.heartbeat_s), 0.0
        with self._guarded(), contextlib.closing(door):
            self._join(door)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end("it was left by an error")

    # -- what a user calls

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of one frame by name. RunError as for the class; DicompilerError for inputs that do not fit."""
        given = self.artifact.arrays(inputs)
        with self._guarded():
            return self.artifact.first(self._collect(self._submit(given)))

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The outputs of each frame by name, in the order of the frames: see `flights`."""
        for _, delivered in self.flights(frames):
            yield self.artifact.first(delivered)

    def flights(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Flight, dict[str, dict[str, Any]]]]:
        """Each frame with its outputs by sink device and name, in the order of `frames`, which a thread reads.

        It reads at most as many frames ahead of what was taken here as may be on their way at once.
        """
        feed, waiting = Feed(frames, self.in_flight, self._lines.wake, self.artifact.copies), deque[Flight]()
        away_s = math.inf
        try:
            while True:
                with self._guarded():
                    flight = self._next_flight(feed, waiting)
                    if flight is None:
                        return
                    delivered = self._collect(flight)
                    self._lines.rest(away_s if self._window_used() else 0.0)
                gone = time.perf_counter()
                yield flight, delivered
                away_s = time.perf_counter() - gone
                feed.release()
        finally:
            feed.stop()

    def close(self) -> None:
        """Ends the run in good order, after the frames that are still on their way; `reports` are there then."""
        if self._ended is not None:
            return
        with self._guarded():
            self._wait(lambda: self._oldest().deadline, lambda: self._unfinished() if self._window_used() else [])
            self._finish()
        self._end("it was closed")

    # -- starting and ending

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Ends everything where the block fails."""
        if self._ended is not None:
            raise RunError(f"the session has ended: {self._ended}")
        try:
            yield
        except BaseException as error:
            self._end(str(error) or type(error).__name__)
            raise

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._lines.end()
        end(list(self.processes.values()))

    def _join(self, door: Door) -> None:
        """Starts the devices and waits until every one is connected to all its peers and has made its sessions."""
        deadline = self._until()
        # With keys, certificates tell who is who.
        member = Membership(secrets.token_hex(8), "" if self.options.keys else secrets.token_hex(16))
        common = ["--control", door.address, "--run", member.run, "--timeout", f"{self.options.timeout_s:g}"]
        common += ["--heartbeat", f"{self.options.heartbeat_s:g}", *["--insecure"] * self.options.insecure]
        door.open(self.processes, member, self.artifact.digest)
        for manifest in self.artifact.manifests:
            name = manifest["device"]
            if name in self.options.elsewhere:
                self.processes[name] = Process(manifest)
                before = "" if self.options.keys else f"{TOKEN}={member.token} "
                after = " --keys KEYS" if self.options.keys else ""
                words = f"{before}python3 -m runtime {' '.join(common)}{after}"
                log.warning("start %s in its directory on its host: %s", name, words)
            else:
                self.processes[name] = self._start(manifest, common)
                self.processes[name].tell(member.token)
        while waiting := [p.device for p in self.processes.values() if p.channel is None]:
            process = door.admit(TICK_S)
            if process is not None:
                self._listen_to(process)
            self._look()
            self._check_time(deadline, waiting, door.refused)
        addresses = {name: process.address for name, process in self.processes.items()}
        for name, process in self.processes.items():
            peers = {"addresses": addresses, "in_flight": self.in_flight, **member.hello(CONTROL, name)}
            process.connection().send_json(Kind.PEERS, peers)
        self._wait(lambda: deadline, lambda: [name for name in self.processes if name not in self._ready])

    def _listen_to(self, process: Process) -> None:
        name = process.device
        expected, *others = (role.outputs[name] for role in self._roles)
        gate = Gate(expected, self._window, others)
        process.connection().start(
            self._lines,
            lambda header: self._admit(process, gate, header),
            lambda header, payload: self._deliver(name, header, payload),
            lambda error: self._events.append(Event(name, None, error)),
        )

    def _admit(self, process: Process, gate: Gate, header: Header) -> None:
        if header.kind is Kind.OUTPUT:
            gate.admit(header)
        elif header.kind is Kind.DONE:
            check_empty(header)
            self._window.check(header.frame, "DONE")
        elif header.kind is Kind.READY:
            check_empty(header)
            if process.device in self._ready:
                raise ProtocolError("READY came twice")
        elif header.kind in (Kind.REPORT, Kind.ERROR):
            check_message(header)
            process.messages += 1
            if process.messages > MESSAGES:
                raise ProtocolError(f"more than {MESSAGES} messages came")
        else:
            raise ProtocolError(f"{header.kind.name} came, which no device sends")

    def _deliver(self, name: str, header: Header, payload: Any) -> None:
        if header.kind is Kind.REPORT:
            payload = read_report(name, decode(payload))
        elif header.kind is Kind.ERROR:
            payload = decode(payload)
        self._events.append(Event(name, header, payload, time.perf_counter()))

    def _finish(self) -> None:
        deadline = self._until()
        for process in self.processes.values():
            process.connection().send(Kind.FINISH, frame=self._window.end)
        self._wait(lambda: deadline, lambda: [p.device for p in self.processes.values() if p.report is None])
        for process in self.processes.values():
            try:
                if process.popen is not None:
                    process.popen.wait(left(deadline))
            except subprocess.TimeoutExpired:
                raise RunError(f"{process.title}: its process does not end in time: allow more (--timeout)") from None
        self.reports = tuple(process.report for process in self.processes.values() if process.report is not None)

    # -- frames

    def _until(self) -> float:
        """The deadline of what begins now."""
        end_s = time.monotonic() + self.options.timeout_s
        return end_s if self.deadline is None else min(end_s, self.deadline)

    def _window_used(self) -> int:
        return self._window.end - self._window.oldest

    def _oldest(self) -> Flight:
        return self._flights[self._window.oldest]

    def _unfinished(self) -> list[str]:
        """The devices that the oldest frame waits for."""
        return [name for name in self.processes if name not in self._oldest().done]

    def _submit(self, inputs: Mapping[str, Any]) -> Flight:
        """Gives a frame to the devices once it may be on its way."""
        while self._window_used() >= self.in_flight:
            self._round(self._oldest().deadline, self._unfinished())
        deadline, number = self._until(), self._window.open()
        role = self._roles[number % len(self._roles)]
        outputs: dict[str, dict[int, Any]] = {name: {} for name, values in role.outputs.items() if values}
        missing = sum(map(len, role.outputs.values()))
        flight = self._flights[number] = Flight(number, deadline, time.perf_counter(), outputs, missing)
        allowed = min(int(1000 * left(deadline)), 2**32 - 1)
        # Those first that can begin at once.
        for process in sorted(self.processes.values(), key=lambda process: not role.inputs[process.device]):
            process.connection().post(Kind.RUN, index=allowed, frame=number)
            for value in role.inputs[process.device]:
                payload = to_payload(inputs[value["name"]], value)
                process.connection().post(Kind.INPUT, payload, value["index"], number)
            self._lines.push()
        return flight

    def _next_flight(self, feed: Feed, waiting: deque[Flight]) -> Flight | None:
        """The next frame of the feed whose outputs are there; None after the last. Gives frames in the meantime."""
        while True:
            while feed.given and self._window_used() < self.in_flight:
                waiting.append(self._submit(feed.take()))
            if waiting and waiting[0].missing == 0:
                return waiting.popleft()
            if feed.exhausted and not waiting and not feed.given:
                return None
            if self._window_used():
                more = None if feed.exhausted or self._window_used() == self.in_flight else feed
                self._round(self._oldest().deadline, self._unfinished(), more)
            else:
                self._round(None, [], feed)

    def _collect(self, flight: Flight) -> dict[str, dict[str, Any]]:
        """Waits for a frame's outputs, by sink device and name."""
        self._wait(lambda: flight.deadline, lambda: self._unfinished() if flight.missing else [])
        delivered: dict[str, dict[str, Any]] = {}
        for device, payloads in flight.outputs.items():
            values = self._roles[flight.number % len(self._roles)].outputs[device]
            try:
                delivered[device] = {v["name"]: from_payload(payloads[i], v) for i, v in values.items()}
            except ValueError as error:
                raise RunError(f"{self.processes[device].title}: it sent what it must not: {error}") from None
        return delivered

    # -- events

    def _wait(self, deadline: Callable[[], float], missing: Callable[[], list[str]]) -> None:
        """Handles events until `missing` names no device any more."""
        while waiting := missing():
            self._round(deadline(), waiting)

    def _round(self, deadline: float | None, waiting: Sequence[str], feed: Feed | None = None) -> None:
        """Handles what has come, or comes soon; does not wait where the feed has something."""
        for event in self._next(feed):
            self._handle(event)
        if time.monotonic() > self._looked + TICK_S:
            self._look()
        if deadline is not None:
            self._check_time(deadline, waiting)

    def _next(self, feed: Feed | None = None) -> Iterator[Event]:
        events = self._events
        self._lines.drive(lambda: events or (feed is not None and feed.tells()), time.monotonic() + TICK_S)
        while events:
            yield events.popleft()

    def _handle(self, event: Event) -> None:
        process, header = self.processes[event.device], event.header
        failure = failure_of(event, self.processes)
        if failure is not None:
            # After its report a device may end its connection.
            if process.report is None:
                self._fail(failure)
        elif header is None:
            return
        elif header.kind is Kind.READY:
            self._ready.add(event.device)
        elif header.kind is Kind.REPORT:
            process.report = event.payload
        elif header.frame in self._flights:
            self._progress(self._flights[header.frame], header, event)

    def _progress(self, flight: Flight, header: Header, event: Event) -> None:
        """An output of a frame came, or a device has finished it."""
        if header.kind is Kind.OUTPUT:
            flight.outputs[event.device][header.index] = event.payload
            flight.missing -= 1
            flight.end_s = event.at
        else:
            flight.done.add(event.device)
        if flight.missing == 0 and len(flight.done) == len(self.processes):
            del self._flights[flight.number]
            self._window.finish(flight.number)

    def _look(self) -> None:
        """Raises RunError if a process has ended badly."""
        self._looked = time.monotonic()
        for failure in endings(self.processes.values()):
            self._fail(failure)

    def _fail(self, first: Failure) -> None:
        """Raises RunError for the failure that is behind the first one that was noticed."""
        failures, until = [first], time.monotonic() + SETTLE_S
        while all(failure.rank > CAUSE for failure in failures) and time.monotonic() < until:
            heard = (failure_of(event, self.processes) for event in self._next())
            failures += [failure for failure in heard if failure is not None]
            failures += endings(self.processes.values())
        raise RunError(root_cause(failures, self.processes))

    def _check_time(self, deadline: float, waiting: Sequence[str], more: str = "") -> None:
        if time.monotonic() > deadline + GRACE_S:
            others = f" (nor did {', '.join(map(repr, waiting[1:]))})" if len(waiting) > 1 else ""
            raise RunError(
                f"{self.processes[waiting[0]].title}: did not finish within {self.options.timeout_s:g} s"
                f"{others}{more}: allow more time (--timeout)"
            )


def in_flight(options: RunOptions, devices: int) -> int:
    """How many frames may be on their way; UsageError for options that cannot be."""
    frames = options.frames_in_flight(devices, IN_FLIGHT_LIMIT)
    if not 0.05 <= options.heartbeat_s <= 3600:
        raise UsageError(f"run: the heartbeat must be between 0.05 and 3600 s, not {options.heartbeat_s:g}")
    return frames


def check_elsewhere(options: RunOptions, artifact: Artifact) -> None:
    """UsageError for a device that the artifact does not have."""
    for name in options.elsewhere:
        if name not in artifact.devices:
            raise UsageError(f"run: there is no device {name!r}{nearest(name, artifact.devices)}")
