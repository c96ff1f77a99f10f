"""Sharing of network links in the simulator: flows get equal parts, as TCP connections do."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedLink(Generic[T]):
    """A network link with the flows that use it now, and their share of it.

    The load is the sum of the shares that each flow would take if it were alone.
    """

    __slots__ = ("flows", "load")

    def __init__(self) -> None:
        self.load = 0.0
        self.flows: dict[Flow[T], float] = {}

    def add_flow(self, flow: Flow[T], share: float) -> None:
        self.flows[flow] = share
        self.load += share

    def remove_flow(self, flow: Flow[T]) -> None:
        self.load -= self.flows.pop(flow)
        if not self.flows:
            self.load = 0.0  # Removes rounding errors.


class Flow(Generic[T]):
    """A connection from one device to another, which sends one message at a time, lowest rank first.

    `links` has the largest share of each link that the flow can take. `remaining_s` are the seconds that the first
    message still needed if alone, at the time `updated_at`; `speed` is the share of that work that is done in a second.
    `version` counts changes, which invalidate planned departures.
    """

    __slots__ = ("links", "queue", "remaining_s", "speed", "started_at", "updated_at", "version")

    def __init__(self, links: dict[SharedLink[T], float]) -> None:
        self.links = links
        self.queue: deque[tuple[T, float, int]] = deque()
        self.started_at = self.remaining_s = self.speed = self.updated_at = 0.0
        self.version = 0


class LinkScheduler(Generic[T]):
    """All links and flows of a simulation.

    On a switch a message takes the sender's outgoing and the receiver's incoming link, otherwise the one shared medium.
    `departures` are planned since the simulator last read them: (time, flow, version).
    """

    def __init__(self, is_switch: bool) -> None:
        self._switch = is_switch
        self._links: dict[tuple[str, str], SharedLink[T]] = {}
        self._flows: dict[tuple[object, object], Flow[T]] = {}
        self.departures: list[tuple[float, Flow[T], int]] = []

    def flow(self, key: tuple[object, object], hosts: tuple[str, str], shares: tuple[float, float]) -> Flow[T]:
        """Return the flow between two ends (`key`).

        `shares` are the largest shares of each host's link (of a medium the first) that the flow can take.
        """
        if key not in self._flows:
            ends = (("out", hosts[0]), ("in", hosts[1])) if self._switch else (("all", ""),)
            links = [self._links.setdefault(end, SharedLink()) for end in ends]
            self._flows[key] = Flow(dict(zip(links, shares, strict=False)))
        return self._flows[key]

    def enqueue(self, now: float, flow: Flow[T], message: T, seconds: float, rank: int = 0) -> None:
        """Add a message that takes `seconds` if alone, before waiting messages of a higher rank."""
        queue = flow.queue
        position = len(queue)
        while position > 1 and queue[position - 1][2] > rank:
            position -= 1
        queue.insert(position, (message, seconds, rank))
        if len(queue) > 1:
            return
        flow.started_at, flow.remaining_s, flow.updated_at = now, seconds, now
        for link, share in flow.links.items():
            link.add_flow(flow, share)
        self._update_speeds(now, flow)

    def finish_message(self, now: float, flow: Flow[T]) -> tuple[T, float]:
        """Remove the first message of a flow, start the next, and return the removed one with its start time."""
        (message, _, _), started_at = flow.queue.popleft(), flow.started_at
        if flow.queue:  # The load of the links stays the same.
            flow.started_at, flow.remaining_s, flow.updated_at = now, flow.queue[0][1], now
            self._plan_departure(now, flow)
            return message, started_at
        for link in flow.links:
            link.remove_flow(flow)
        flow.speed, flow.version = 0.0, flow.version + 1
        self._update_speeds(now, flow)
        return message, started_at

    def _update_speeds(self, now: float, changed: Flow[T]) -> None:
        """Update the speeds of all flows that share a link with a flow that has just started or ended."""
        for link in changed.links:
            for flow in link.flows:
                load = 1.0
                for used_link in flow.links:  # Faster than max(): most of a simulation's time is spent here.
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
