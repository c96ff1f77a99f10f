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

from dicompiler.plugin_api import DeviceReport, RunError, RunEvent, RunOptions, UsageError, expect, nearest
from dicompiler_targets.sockets.artifact import Artifact, Role, from_payload, piece, to_payload
from dicompiler_targets.sockets.crew import Crew
from dicompiler_targets.sockets.feed import Feed
from dicompiler_targets.sockets.guarded import Guarded, overdue
from dicompiler_targets.sockets.joining import LOOPBACK, Door
from dicompiler_targets.sockets.kept import Calls
from dicompiler_targets.sockets.leaving import Leaving, Telling
from dicompiler_targets.sockets.processes import Process, Start, here, unreported
from dicompiler_targets.sockets.root_cause import Event
from dicompiler_targets.sockets.runtime.frames import IN_FLIGHT_LIMIT, Kind
from dicompiler_targets.sockets.runtime.line import left

GRACE_S = 1.0
"""Seconds after a deadline in which devices can still say what they were waiting for."""


@dataclass
class Flight:
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
    role: Role = field(init=False, repr=False)
    players: tuple[str, ...] = ()
    due: float = 0.0
    outputs: dict[str, dict[int, Any]] = field(default_factory=dict)
    missing: int = 0
    done: set[str] = field(default_factory=set)

    @property
    def waited_s(self) -> float:
        """Seconds from its inputs on in which no device computed it yet."""
        return max(0.0, min(self.begun_s, self.end_s) - self.start_s)


class Session(Guarded):
    """The processes of an artifact and the frames on their way. Use it from one thread at a time.

    start: how devices are started, by default on this host, but those that `options.elsewhere` names, which someone
    else starts. `deadline` (of time.monotonic) bounds all of it, if given. `events`: what befell it so far; `begun_s`:
    when it began, of time.perf_counter. Errors: RunError, UsageError for options that cannot be.
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
        self.reports: tuple[DeviceReport, ...] = ()
        self._telling = Telling(options.on_event)
        self.events = self._telling.events
        self._roles = artifact.roles
        self._anew = False
        self._flights = dict[int, Flight]()
        self.begun_s, self._replays, self._finished = time.perf_counter(), 0, 0
        self._change_until = math.inf
        self._away_s, self._left_s = 0.0, math.inf
        count = len({*artifact.devices} - {*options.elsewhere, *options.without})
        door = start if isinstance(start, Calls) else Door(options.listen or LOOPBACK, options.keys, options.insecure)
        beside = 0 if start else count
        start = start or here(artifact.directory, options, max(1, count))
        leaving = Leaving(self._telling.explain)
        self._crew = Crew(artifact, options, self.in_flight, start, beside, self._tell, leaving)
        self._window, self._lines = self._crew.window, self._crew.lines
        with self._guarded(), contextlib.ExitStack() as stack:
            stack.callback(door.close)
            self._crew.join(door, self._until(), self._check_time)
            if self._crew.schedule.survives:
                stack.pop_all()  # who was lost may come back

    @property
    def processes(self) -> Mapping[str, Process]:
        """Those of all devices."""
        return self._crew.processes

    # -- what a user calls

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of one frame by name. RunError as for the class; DicompilerError for inputs that do not fit."""
        given = self.artifact.arrays(inputs)
        with self._guarded():
            delivered = self._collect(self._submit(given))
            self._settle()
            return self.artifact.first(delivered)

    def reset(self) -> None:
        """States begin anew, as zeros, with the frame that is given next."""
        self._anew = True

    def stream(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The outputs of each frame by name, in the order of the frames: see `flights`."""
        for _, delivered in self.flights(frames):
            yield self.artifact.first(delivered)

    def flights(self, frames: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Flight, dict[str, dict[str, Any]]]]:
        """Each frame with its outputs by sink device and name, in the order of `frames`, which a thread reads.

        It reads at most as many frames ahead of what was taken here as may be on their way at once. What reading them
        raises is raised after the outputs of those before; the session goes on.
        """
        expect(frames, (Iterable,), "stream: frames", "an iterable of inputs by name")
        feed, waiting = Feed(frames, self.in_flight, self._lines.wake, self.artifact.copies), deque[Flight]()
        away_s = math.inf
        try:
            while True:
                with self._guarded():
                    flight = self._next_flight(feed, waiting)
                    if flight is not None:
                        delivered = self._collect(flight)
                        self._lines.rest(away_s if self._busy() else 0.0)
                    else:
                        self._settle()
                if flight is None:
                    if feed.error is not None:
                        raise feed.error
                    return
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
            self._wait(self._unfinished)
            self._finish()
        self._end("it was closed")

    # -- starting and ending

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        with super()._guarded():
            self._away_s += max(0.0, time.monotonic() - self._left_s)
            yield
            self._left_s = time.monotonic()

    def _stop(self) -> None:
        self._crew.end()
        self._telling.end()

    def _finish(self) -> None:
        crew, deadline = self._crew, self._until()
        self._settle()
        crew.finish()
        self._wait(lambda: [name for name in crew.there if crew.processes[name].report is None], deadline)
        processes = [crew.processes[name] for name in crew.there]
        for process in processes:
            try:
                if process.popen is not None:
                    process.popen.wait(left(deadline))
            except subprocess.TimeoutExpired:
                raise RunError(f"{process.title}: its process does not end in time: allow more (--timeout)") from None
        self.reports = tuple(
            crew.processes[manifest["device"]].report or unreported(manifest) for manifest in self.artifact.manifests
        )

    # -- frames

    def _until(self) -> float:
        """The deadline of what begins now."""
        end_s = time.monotonic() + self.options.timeout_s
        return end_s if self.deadline is None else min(end_s, self.deadline)

    def _full(self) -> bool:
        """Whether no more frames may be on their way for now."""
        return self._crew.void or bool(self._crew.changing) or len(self._window) >= self.in_flight

    def _busy(self) -> bool:
        """Whether anything is on its way."""
        return self._crew.void or bool(self._crew.changing) or len(self._window) > 0

    def _unfinished(self) -> list[str]:
        """The devices that everything waits for: the oldest frame's, or those that have not answered to a change."""
        if not len(self._window):
            return sorted(self._crew.changing)
        oldest = self._flights[self._window.oldest]
        return [name for name in oldest.players if name not in oldest.done]

    def _due(self) -> float:
        """Until when they may take, with the time in which the user was away: nothing was handled then."""
        due = self._flights[self._window.oldest].due if len(self._window) else self._change_until
        return due + self._away_s

    def _submit(self, inputs: Mapping[str, Any]) -> Flight:
        """Gives a frame to the devices once it may be on its way."""
        while self._full():
            self._round(self._unfinished())
        flight = Flight(inputs if self._crew.schedule.survives else None, time.perf_counter())
        self._give(flight, inputs, self._lines.push)
        return flight

    def _give(self, flight: Flight, inputs: Mapping[str, Any], each: Callable[[], object]) -> None:
        """Posts a frame to its devices; `each` is called after every one."""
        crew = self._crew
        flight.number = number = self._window.open()
        flight.role = role = self._roles[crew.schedule.role(number)]
        flight.players = tuple(name for name in crew.there if name in role.players)
        until = self._until()
        flight.done, flight.due = set(), until - self._away_s
        flight.outputs = {name: {} for name, values in role.outputs.items() if values}
        flight.missing = sum(map(len, role.outputs.values()))
        self._flights[number] = flight
        allowed = min(int(1000 * left(until)), 2**32 - 1)
        # Those first that can begin at once.
        for name in sorted(flight.players, key=lambda name: not role.inputs[name]):
            connection = crew.processes[name].connection()
            begins = any(state["name"] in inputs for state in self.artifact.states)
            if role.states[name] and (begins or self._anew):
                connection.post(Kind.ANEW, index=int(begins), frame=number)
            connection.post(Kind.RUN, index=allowed, frame=number)
            for state in role.states[name] if begins else ():
                payload = to_payload(piece(inputs[state["state"]], state), state)
                connection.post(Kind.INPUT, payload, state["index"], number)
            for value in role.inputs[name]:
                payload = to_payload(inputs[value["name"]], value)
                connection.post(Kind.INPUT, payload, value["index"], number)
            each()
        self._anew = False

    def _give_again(self) -> None:
        """Gives what was on its way when a device was lost, together with the word of it: who hears of it sooner tells
        its peers so, before what they would not expect."""
        self._crew.void, self._change_until = False, self._until() - self._away_s
        flights, self._flights = [self._flights[number] for number in sorted(self._flights)], {}
        for flight in flights:
            if flight.missing and flight.inputs is not None:
                self._replays += 1
                self._give(flight, flight.inputs, lambda: None)
        self._lines.push()
        self._lines.hurry()
        if not self._flights:
            self._taken_over()

    def _next_flight(self, feed: Feed, waiting: deque[Flight]) -> Flight | None:
        """The next frame of the feed whose outputs are there; None after the last. Gives frames in the meantime."""
        while True:
            while feed.given and not self._full():
                if (inputs := feed.take()) is not None:
                    waiting.append(self._submit(inputs))
            if waiting and waiting[0].missing == 0:
                return waiting.popleft()
            if feed.exhausted and not waiting and not feed.given:
                return None
            if self._busy():
                self._round(self._unfinished(), None if feed.exhausted or self._full() else feed)
            else:
                self._round([], feed)

    def _collect(self, flight: Flight) -> dict[str, dict[str, Any]]:
        """Waits for a frame's outputs, by sink device and name."""
        self._wait(lambda: self._unfinished() if flight.missing else [])
        delivered: dict[str, dict[str, Any]] = {}
        for device, payloads in flight.outputs.items():
            values = flight.role.outputs[device]
            try:
                delivered[device] = {v["name"]: from_payload(payloads[i], v) for i, v in values.items()}
            except ValueError as error:
                raise RunError(f"{self.processes[device].title}: it sent what it must not: {error}") from None
        return delivered

    # -- events

    def _wait(self, missing: Callable[[], list[str]], deadline: float | None = None) -> None:
        """Handles events until `missing` names no device any more. deadline: by default that of what is on its way."""
        while waiting := missing():
            self._round(waiting, deadline=deadline)

    def _round(self, waiting: Sequence[str], feed: Feed | None = None, deadline: float | None = None) -> None:
        """Handles what has come, or comes soon; does not wait where the feed has something."""
        crew = self._crew
        if deadline is None:
            deadline = self._due() if waiting else math.inf
        for event in crew.events(lambda: feed is not None and feed.tells()):
            if crew.notice(event) and event.header is not None and event.header.frame in self._flights:
                self._progress(self._flights[event.header.frame], event)
            if crew.void:
                self._give_again()
        crew.look()
        if crew.void:
            self._give_again()
        self._check_time(deadline, waiting)

    def _settle(self) -> None:
        """Waits until all is told that has happened: how a lost process ends shows soon."""
        while self._telling:
            self._round([])

    def _progress(self, flight: Flight, event: Event) -> None:
        """An output of a frame came, or a device has finished it."""
        assert event.header is not None
        if event.header.kind is Kind.OUTPUT:
            flight.outputs[event.device][event.header.index] = event.payload
            flight.missing -= 1
            flight.end_s = event.at
            if not flight.missing:
                flight.inputs = None
                self._finished += 1
                self._taken_over()
        else:
            flight.done.add(event.device)
            if event.header.index:
                flight.begun_s = min(flight.begun_s, event.at - event.header.index / 1e6)
        if flight.missing == 0 and len(flight.done) == len(flight.players):
            del self._flights[flight.number]
            self._window.finish(flight.number)

    def _tell(self, kind: Any, device: str, why: str, replays: int = 0, interruption_s: float = 0.0) -> None:
        """Tells the user of a loss, a take-over or a return; of a loss once more is known of why."""
        self._change_until = self._until() - self._away_s
        away = tuple(name for name in self.artifact.devices if name in self._crew.away)
        at_s = time.perf_counter() - self.begun_s
        event = RunEvent(kind, device, why, away, at_s, self._finished, replays, interruption_s)
        self._telling.add(event, known=kind != "loss")

    def _taken_over(self) -> None:
        """After a loss the first frame is finished, or there was none to finish."""
        if self._crew.lost_s:
            seconds, self._crew.lost_s = time.perf_counter() - self._crew.lost_s, 0.0
            replays, self._replays = self._replays, 0
            self._tell("take-over", self._crew.lost, "", replays, seconds)

    def _check_time(self, deadline: float, waiting: Sequence[str], more: str = "") -> None:
        if time.monotonic() > deadline + GRACE_S:
            others = f" (nor did {', '.join(map(repr, waiting[1:]))})" if len(waiting) > 1 else ""
            raise overdue(self.processes[waiting[0]].title, self.options, f"{others}{more}")


def in_flight(options: RunOptions, devices: int) -> int:
    """How many frames may be on their way; UsageError for options that cannot be."""
    frames = options.frames_in_flight(devices, IN_FLIGHT_LIMIT)
    if not 0.05 <= options.heartbeat_s <= 3600:
        raise UsageError(f"run: the heartbeat must be between 0.05 and 3600 s, not {options.heartbeat_s:g}")
    return frames


def check_elsewhere(options: RunOptions, artifact: Artifact) -> None:
    """UsageError for a device that the artifact does not have, or without which it cannot be run."""
    for name in (*options.elsewhere, *options.without):
        if name not in artifact.devices:
            raise UsageError(f"run: there is no device {name!r}{nearest(name, artifact.devices)}")
    if artifact.schedule().covering(options.without) is None:
        names = ", ".join(map(repr, options.without))
        remedy = f"compile it with one (--survive {len(set(options.without))})"
        raise UsageError(f"run: no plan in the artifact does without {names}: {remedy}")
