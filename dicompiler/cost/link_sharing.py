"""Sharing of network links in the simulator: flows get equal parts, as TCP connections do."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedLink(Generic[T]):
    """A network link with the flows that use it now.

    Attributes:
        load: Sum of the shares that each flow would take of the link if it were alone.
        flows: Share of the link by flow.
    """

    __slots__ = ("flows", "load")

    def __init__(self) -> None:
        self.load = 0.0
        self.flows: dict[Flow[T], float] = {}

    def add_flow(self, way: Flow[T], share: float) -> None:
        self.flows[way] = share
        self.load += share

    def remove_flow(self, way: Flow[T]) -> None:
        self.load -= self.flows.pop(way)
        if not self.flows:
            self.load = 0.0  # whatever adding and taking away has left


class Flow(Generic[T]):
    """A connection from one device to another, which sends its messages one after another.

    Messages of the lowest rank are sent first.

    Attributes:
        links: Links on the way, with the largest share of each that the flow can take.
        queue: Waiting messages: (message, seconds if alone, rank).
        started_at: Time at which the first message started, in seconds.
        remaining_s: Seconds that the first message still needed if alone, at `updated_at`.
        updated_at: Time of the last change of speed, in seconds.
        speed: Share of that work that is done in a second.
        version: Number of changes, which invalidates planned departures.
    """

    __slots__ = ("links", "queue", "remaining_s", "speed", "started_at", "updated_at", "version")

    def __init__(self, lines: dict[SharedLink[T], float]) -> None:
        self.links = lines
        self.queue: deque[tuple[T, float, int]] = deque()
        self.started_at = self.remaining_s = self.speed = self.updated_at = 0.0
        self.version = 0


class LinkScheduler(Generic[T]):
    """All links and flows of a simulation.

    On a switch a message takes the sender's outgoing and the receiver's incoming link, otherwise the one shared medium.

    Attributes:
        departures: Planned departures since the simulator last read them: (time, flow, version).
    """

    def __init__(self, switch: bool) -> None:
        self._switch = switch
        self._links: dict[tuple[str, str], SharedLink[T]] = {}
        self._flows: dict[tuple[object, object], Flow[T]] = {}
        self.departures: list[tuple[float, Flow[T], int]] = []

    def flow(self, key: tuple[object, object], hosts: tuple[str, str], shares: tuple[float, float]) -> Flow[T]:
        """Return the flow between two ends.

        Args:
            key: The two ends.
            hosts: Sending and receiving host.
            shares: Largest share of each host's link (of a medium the first) that the flow can take.
        """
        if key not in self._flows:
            ends = (("out", hosts[0]), ("in", hosts[1])) if self._switch else (("all", ""),)
            lines = [self._links.setdefault(end, SharedLink()) for end in ends]
            self._flows[key] = Flow(dict(zip(lines, shares, strict=False)))
        return self._flows[key]

    def enqueue(self, now: float, way: Flow[T], message: T, seconds: float, rank: int = 0) -> None:
        """Add a message that takes `seconds` if alone, before waiting messages of a higher rank."""
        waiting = way.queue
        place = len(waiting)
        while place > 1 and waiting[place - 1][2] > rank:
            place -= 1
        waiting.insert(place, (message, seconds, rank))
        if len(waiting) > 1:
            return
        way.started_at, way.remaining_s, way.updated_at = now, seconds, now
        for line, share in way.links.items():
            line.add_flow(way, share)
        self._update_speeds(now, way)

    def finish_message(self, now: float, way: Flow[T]) -> tuple[T, float]:
        """Remove the first message of a flow, start the next, and return the removed one with its start time."""
        (message, _, _), begun = way.queue.popleft(), way.started_at
        if way.queue:  # the lines have as much to carry as before
            way.started_at, way.remaining_s, way.updated_at = now, way.queue[0][1], now
            self._plan_departure(now, way)
            return message, begun
        for line in way.links:
            line.remove_flow(way)
        way.speed, way.version = 0.0, way.version + 1
        self._update_speeds(now, way)
        return message, begun

    def _update_speeds(self, now: float, way: Flow[T]) -> None:
        """Update the speeds of all flows that share a link with a flow that has just started or ended."""
        for line in way.links:
            for one in line.flows:
                load = 1.0
                for other in one.links:  # quicker than max(), where most of a simulation's time goes
                    if other.load > load:
                        load = other.load
                speed = 1.0 / load
                if speed != one.speed:
                    one.remaining_s -= (now - one.updated_at) * one.speed
                    one.updated_at, one.speed = now, speed
                    self._plan_departure(now, one)

    def _plan_departure(self, now: float, way: Flow[T]) -> None:
        way.version += 1
        self.departures.append((now + max(0.0, way.remaining_s) / way.speed, way, way.version))
