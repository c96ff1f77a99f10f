"""Received tensors and orders that the main thread has not taken yet.

The thread that runs the event loop puts items; the main thread takes each once, by key.
"""

from __future__ import annotations

from typing import Any

from .event_loop import EventLoop
from .protocol import ProtocolError


class DeviceError(Exception):
    """The reason why this device cannot continue; `peer` names the device that seems to have caused it."""

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Mailbox:
    """Items by key.

    Attributes:
        changes: Number of changes so far.
        order_changes: Number of changes that concern orders, not tensors.
    """

    def __init__(self) -> None:
        self._items: dict[Any, Any] = {}
        self._failure: DeviceError | None = None
        self.changes = self.order_changes = 0

    def put(self, key: Any, item: Any) -> None:
        """Store an item; raise ProtocolError if the key is in use."""
        if key in self._items:
            raise ProtocolError(f"received twice: {key}")
        self._items[key] = item
        self.changes += 1

    def put_order(self, key: Any, item: Any) -> None:
        """Store an item that is not a tensor."""
        self.put(key, item)
        self.order_changes += 1

    def drop(self, first: int) -> None:
        """Discard all items and announcements of frames before `first`, and tell the main thread."""
        for key in list(self._items):
            number = key[1] if key[0] in ("frame", "skip") else key[0]
            if isinstance(number, int) and number < first:
                self._items.pop(key, None)
        self._items["drop"] = first
        self.order_changes += 1
        self.changes += 1

    def has(self, key: Any) -> bool:
        """Return True if `take` would not wait for this key."""
        return key in self._items or self._failure is not None

    def wake(self) -> None:
        """Make waiting threads check their condition again."""
        self.changes += 1

    def fail(self, error: DeviceError) -> None:
        """End all waits with `error`; only the first error counts."""
        self._failure = self._failure or error
        self.changes += 1

    def check(self) -> None:
        """Raise the error given to `fail`, if any."""
        if self._failure is not None:
            raise self._failure

    def pop(self, key: Any) -> Any:
        """Remove and return an item, or return None if it is missing; raise the error given to `fail`."""
        self.check()
        return self._items.pop(key, None)

    def skip_frames(self, frame: int) -> int:
        """Return the first frame from `frame` on that is not skipped."""
        while (end := self.pop(("skip", frame))) is not None:
            frame = end
        return frame

    def take(self, loop: EventLoop, key: Any, deadline: float, description: str, peer: str | None = None) -> Any:
        """Run the loop until the item arrives, then remove and return it; raise DeviceError at the deadline."""
        loop.run_until(lambda: self.has(key), deadline)
        if (item := self.pop(key)) is None:
            raise DeviceError(f"{description} did not arrive in time", peer)
        return item
