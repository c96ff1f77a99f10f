"""The lines between hosts: which messages wait for them, and which may go. For the simulator."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """Carries one message at a time. parked: ways that waited for it when they were last looked at, with the order of
    entry of their first message: only these need a look when it is free."""

    __slots__ = ("parked", "taken")

    def __init__(self) -> None:
        self.taken = False
        self.parked: list[tuple[int, Way[T]]] = []


class Way(Generic[T]):
    """From one host to another, over two lines (of a shared medium the same one twice). waiting: messages in order of
    entry; while there are any, the way is parked at one line, which is taken."""

    __slots__ = ("first", "second", "waiting")

    def __init__(self, first: Line[T], second: Line[T]) -> None:
        self.first, self.second = first, second
        self.waiting: deque[tuple[int, T]] = deque()


class Lines(Generic[T]):
    """On a switch a message takes the sender's outgoing and the receiver's incoming line, else the one medium. going:
    messages that have got their lines, in this order: whoever starts them empties it."""

    def __init__(self, switch: bool) -> None:
        self._switch = switch
        self._lines: dict[tuple[str, str], Line[T]] = {}
        self._ways: dict[tuple[str, str], Way[T]] = {}
        self._entered = 0
        self.going: list[T] = []

    def way(self, sender: str, receiver: str) -> Way[T]:
        """From one host to another."""
        hosts = (sender, receiver) if self._switch else ("", "")
        if hosts not in self._ways:
            ends = (("out", hosts[0]), ("in", hosts[1])) if self._switch else (("all", ""), ("all", ""))
            first, second = (self._lines.setdefault(end, Line()) for end in ends)
            self._ways[hosts] = Way(first, second)
        return self._ways[hosts]

    def queue(self, way: Way[T], message: T) -> None:
        """The message is ready to go."""
        if not (way.waiting or way.first.taken or way.second.taken):
            way.first.taken = way.second.taken = True
            self.going.append(message)
            return
        self._entered += 1
        way.waiting.append((self._entered, message))
        if len(way.waiting) == 1:
            heappush((way.first if way.first.taken else way.second).parked, (self._entered, way))

    def free(self, way: Way[T]) -> None:
        """A message has left its lines: of those that wait for them and find their other end free, the one that was
        ready first goes."""
        first, second = way.first, way.second
        first.taken = second.taken = False
        while True:
            line = first if first.parked and not first.taken else None
            if second.parked and not second.taken and (line is None or second.parked[0][0] < line.parked[0][0]):
                line = second
            if line is None:
                return
            entered, next_way = heappop(line.parked)
            other = next_way.second if next_way.first is line else next_way.first
            if other.taken:
                heappush(other.parked, (entered, next_way))
            else:
                self._start(next_way)

    def _start(self, way: Way[T]) -> None:
        way.first.taken = way.second.taken = True
        self.going.append(way.waiting.popleft()[1])
        if way.waiting:
            heappush(way.first.parked, (way.waiting[0][0], way))
