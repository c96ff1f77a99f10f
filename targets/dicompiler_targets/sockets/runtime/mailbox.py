"""What came from the connections and the main thread has not taken yet: tensors, and orders that change what it does.

In: items by key, from the thread that drives the connections; why there will be no more. Out: the items, once each.
"""

from __future__ import annotations

from typing import Any

from .event_loop import EventLoop
from .protocol import ProtocolError


class DeviceError(Exception):
    """Why this device cannot go on. `peer` names another device that seems to be the cause."""

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Mailbox:
    """What came, by key, until the main thread takes it; `changes` counts what happened to it, `orders` those changes
    that are about more than a tensor."""

    def __init__(self) -> None:
        self._items: dict[Any, Any] = {}
        self._failure: DeviceError | None = None
        self.changes = self.order_changes = 0

    def put(self, key: Any, item: Any) -> None:
        """ProtocolError if that key is there already."""
        if key in self._items:
            raise ProtocolError(f"a message came twice: {key}")
        self._items[key] = item
        self.changes += 1

    def put_order(self, key: Any, item: Any) -> None:
        """As `put`, of what is no tensor."""
        self.put(key, item)
        self.order_changes += 1

    def drop(self, first: int) -> None:
        """Forgets what came for frames before `first`, and that they were announced; tells the main thread."""
        for key in list(self._items):
            number = key[1] if key[0] in ("frame", "skip") else key[0]
            if isinstance(number, int) and number < first:
                self._items.pop(key, None)
        self._items["drop"] = first
        self.order_changes += 1
        self.changes += 1

    def has(self, key: Any) -> bool:
        """Whether `take` need not wait for it."""
        return key in self._items or self._failure is not None

    def wake(self) -> None:
        """Whoever waits looks again at whether it still has to."""
        self.changes += 1

    def fail(self, error: DeviceError) -> None:
        """Ends all waiting with `error`; the first one counts."""
        self._failure = self._failure or error
        self.changes += 1

    def check(self) -> None:
        """Raises the failure where there is one."""
        if self._failure is not None:
            raise self._failure

    def pop(self, key: Any) -> Any:
        """An item, which is removed; None if it is not there. Raises as `check`."""
        self.check()
        return self._items.pop(key, None)

    def skip_frames(self, frame: int) -> int:
        """The frame itself, or the first one behind it that is not skipped."""
        while (end := self.pop(("skip", frame))) is not None:
            frame = end
        return frame

    def take(self, lines: EventLoop, key: Any, deadline: float, what: str, peer: str | None = None) -> Any:
        """Drives until an item is there, and removes it. DeviceError at the deadline, saying what did not come from
        which peer."""
        lines.run_until(lambda: self.has(key), deadline)
        if (item := self.pop(key)) is None:
            raise DeviceError(f"{what} did not come in time", peer)
        return item
