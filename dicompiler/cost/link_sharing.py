"""Sharing of network links in the simulator: flows on a link get equal shares of it, as TCP connections do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedLink(Generic[T]):
    """A network link and the flows (connections with a message to send) that use it now.

    `flows` maps each flow to the largest share of the link that the flow can use. `load` is the sum of these
    shares. If `load` exceeds 1, all of these flows are slower than alone by this factor. `busy_s` are the
    seconds that the link needs at its full bandwidth for all messages so far. `speed` is the present bandwidth as a
    multiple of the full one; if it is not 1, `flows` and `load` contain shares of the present bandwidth.
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
            self.load = 0.0  # Without flows the load is exactly 0, but repeated subtraction leaves rounding errors.


class Flow(Generic[T]):
    """A connection from one device to another, which sends one message at a time.

    Attributes:
        links: For each link that the flow uses, the largest share of its bandwidth that the flow can use.
        queue: Messages to send, as (message, seconds if it is sent alone, rank). The first one is being sent. Messages
            of a lower rank are sent before those of a higher rank.
        started_at: Time at which the first message started.
        remaining_s: Seconds that the first message still needed at `updated_at` if it were sent alone.
        updated_at: Time of the last change of `speed`.
        speed: Speed of sending as a fraction: 1 if the flow has its links to itself.
        version: Number of times that the departure (the end of sending the first message) has been planned. A
            departure with an older version is invalid, because the speed has changed since then.
    """

    __slots__ = ("links", "queue", "remaining_s", "speed", "started_at", "updated_at", "version")

    def __init__(self, links: dict[SharedLink[T], float]) -> None:
        self.links = links
        self.queue: deque[tuple[T, float, int]] = deque()
        self.started_at = self.remaining_s = self.speed = self.updated_at = 0.0
        self.version = 0


class LinkScheduler(Generic[T]):
    """All links and flows of a simulation.

    Attributes:
        departures: (time, flow, version) of each departure (end of sending a message) that was planned since the
            simulator last read this list.
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
        """Return the flow from one device to another; create it if it does not exist yet.

        Args:
            devices: Indices of the sender and the receiver.
            shares: The links that the flow uses, by name, with the largest share of each that it can use.
        """
        if devices not in self._flows:
            links = {self._links.setdefault(name, SharedLink()): share for name, share in shares.items()}
            self._flows[devices] = Flow(links)
        return self._flows[devices]

    def enqueue(self, now: float, flow: Flow[T], message: T, seconds: float, rank: int = 0) -> None:
        """Insert a message into the queue of a flow (a connection), after the messages of the same or a lower rank.

        The message takes `seconds` if it has its links to itself. It never overtakes the message that is being sent.
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
        """Change the bandwidth of a link to a multiple of its full bandwidth."""
        if name in self._links:
            link = self._links[name]
            link.set_speed(speed)
            self._update_speeds(now, (link,))

    def finish_message(self, now: float, flow: Flow[T]) -> tuple[T, float]:
        """Remove the first message of a flow (a connection), start the next one, and return the removed one.

        The result has the removed message and its start time.
        """
        (message, _, _), started_at = flow.queue.popleft(), flow.started_at
        # If more messages wait, the flow stays on its links, because removing and adding it would change no speed.
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
        """Update the speeds of all flows (connections) on the links `changed_links`, on which the load has changed."""
        for link in changed_links:
            for flow in link.flows:
                load = 1.0
                for used_link in flow.links:  # A loop is faster than max(), and most of a simulation is spent here.
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
