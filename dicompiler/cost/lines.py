"""The lines between hosts, shared as TCP shares them: what goes over a line at once gets equal parts of it. For the
simulator."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """ways: that carry a message over it now. load: the sum of what each would take of it if it were alone."""

    __slots__ = ("load", "ways")

    def __init__(self) -> None:
        self.load = 0.0
        self.ways: dict[Way[T], float] = {}

    def take(self, way: Way[T], share: float) -> None:
        self.ways[way] = share
        self.load += share

    def leave(self, way: Way[T]) -> None:
        self.load -= self.ways.pop(way)
        if not self.ways:
            self.load = 0.0  # whatever adding and taking away has left


class Way(Generic[T]):
    """A connection from one device to another: its messages go one after another, those of the lowest rank first, over
    `lines`, with the share of each that it can take. waiting: message, seconds, rank; begun: when the first one went;
    left: seconds that it would still take if it were alone, at `since`; speed: how much of that is done in a second;
    version: counts its changes."""

    __slots__ = ("begun", "left", "lines", "since", "speed", "version", "waiting")

    def __init__(self, lines: dict[Line[T], float]) -> None:
        self.lines = lines
        self.waiting: deque[tuple[T, float, int]] = deque()
        self.begun = self.left = self.speed = self.since = 0.0
        self.version = 0


class Lines(Generic[T]):
    """On a switch a message takes the sender's outgoing and the receiver's incoming line, else the one medium. due:
    when, as things are now, the first messages of ways that have changed will have left, (time, way, version): whoever
    plays them empties it."""

    def __init__(self, switch: bool) -> None:
        self._switch = switch
        self._lines: dict[tuple[str, str], Line[T]] = {}
        self._ways: dict[tuple[object, object], Way[T]] = {}
        self.due: list[tuple[float, Way[T], int]] = []

    def way(self, key: tuple[object, object], hosts: tuple[str, str], shares: tuple[float, float]) -> Way[T]:
        """The way of that key (its ends), from host to host; shares: of both hosts' lines (of a medium the first)."""
        if key not in self._ways:
            ends = (("out", hosts[0]), ("in", hosts[1])) if self._switch else (("all", ""),)
            lines = [self._lines.setdefault(end, Line()) for end in ends]
            self._ways[key] = Way(dict(zip(lines, shares, strict=False)))
        return self._ways[key]

    def queue(self, now: float, way: Way[T], message: T, seconds: float, rank: int = 0) -> None:
        """The message is ready to go, and takes so long if it is alone. It overtakes those of a higher rank that have
        not begun."""
        waiting = way.waiting
        place = len(waiting)
        while place > 1 and waiting[place - 1][2] > rank:
            place -= 1
        waiting.insert(place, (message, seconds, rank))
        if len(waiting) > 1:
            return
        way.begun, way.left, way.since = now, seconds, now
        for line, share in way.lines.items():
            line.take(way, share)
        self._changed(now, way)

    def gone(self, now: float, way: Way[T]) -> tuple[T, float]:
        """The first message of a way has left, and the next one goes; it, and when it went."""
        (message, _, _), begun = way.waiting.popleft(), way.begun
        if way.waiting:  # the lines have as much to carry as before
            way.begun, way.left, way.since = now, way.waiting[0][1], now
            self._plan(now, way)
            return message, begun
        for line in way.lines:
            line.leave(way)
        way.speed, way.version = 0.0, way.version + 1
        self._changed(now, way)
        return message, begun

    def _changed(self, now: float, way: Way[T]) -> None:
        """A way has taken its lines or left them: those that share them are faster or slower from now on."""
        for line in way.lines:
            for one in line.ways:
                load = 1.0
                for other in one.lines:  # quicker than max(), where most of a simulation's time goes
                    if other.load > load:
                        load = other.load
                speed = 1.0 / load
                if speed != one.speed:
                    one.left -= (now - one.since) * one.speed
                    one.since, one.speed = now, speed
                    self._plan(now, one)

    def _plan(self, now: float, way: Way[T]) -> None:
        way.version += 1
        self.due.append((now + max(0.0, way.left) / way.speed, way, way.version))
