"""The mailbox of a device: received tensors and orders that wait for the main thread.

The thread that runs the event loop puts items in; the main thread removes each item by its key.
"""

from __future__ import annotations

from typing import Any

from .event_loop import EventLoop
from .protocol import ProtocolError


class DeviceError(Exception):
    """An error after which this device cannot continue.

    Attributes:
        peer: Name of the device that seems to have caused the error, if any.
    """

    def __init__(self, message: str, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Mailbox:
    """Tensors and orders that have arrived for one device, by key.

    DeviceRun creates the object and puts items in. A tensor's key is its frame number and its name; the executor takes
    it out. An order is a message of the coordinator or of a peer without a tensor; its key is a string or starts with
    a string, for example ("frame", 3) for the announcement of frame 3.

    Attributes:
        changes: Number of changes so far, by which a waiting thread notices that something arrived.
        order_changes: Number of orders so far, from `put_order` and `drop`.
    """

    def __init__(self) -> None:
        self._items: dict[Any, Any] = {}
        self._failure: DeviceError | None = None
        self.changes = self.order_changes = 0

    def put(self, key: Any, item: Any) -> None:
        """Store an item; raise ProtocolError if an item with this key is stored."""
        if key in self._items:
            raise ProtocolError(f"received the same item twice: {key}")
        self._items[key] = item
        self.changes += 1

    def put_order(self, key: Any, item: Any) -> None:
        self.put(key, item)
        self.order_changes += 1

    def drop(self, first: int) -> None:
        """Discard all items of frames before `first`, and order the main thread to drop these frames."""
        for key in list(self._items):
            number = key[1] if key[0] in ("frame", "skip") else key[0]
            if isinstance(number, int) and number < first:
                self._items.pop(key, None)
        self._items["drop"] = first
        self.order_changes += 1
        self.changes += 1

    def has(self, key: Any) -> bool:
        """Return True if `pop` would return an item with this key or raise an error."""
        return key in self._items or self._failure is not None

    def wake(self) -> None:
        """Make waiting threads check their condition again, although nothing arrived."""
        self.changes += 1

    def fail(self, error: DeviceError) -> None:
        """Let `check`, `pop` and `take` raise this error from now on; a second error is ignored."""
        self._failure = self._failure or error
        self.changes += 1

    def check(self) -> None:
        """Raise the error that was passed to `fail`, if any."""
        if self._failure is not None:
            raise self._failure

    def pop(self, key: Any) -> Any:
        """Remove and return an item, None if it is missing; raise the error that was passed to `fail`."""
        self.check()
        return self._items.pop(key, None)

    def skip_frames(self, frame: int) -> int:
        """Remove the orders to skip frames from number `frame` on, in which this device has no work.

        Return the number of the first frame that is not skipped.
        """
        while (end := self.pop(("skip", frame))) is not None:
            frame = end
        return frame

    def take(self, loop: EventLoop, key: Any, deadline: float, description: str, peer: str | None = None) -> Any:
        """Run the event loop until the item arrives, then remove and return it.

        At the deadline (time.monotonic), raise a DeviceError that names the item by its `description` and the peer that
        should have sent it.
        """
        loop.run_until(lambda: self.has(key), deadline)
        if (item := self.pop(key)) is None:
            raise DeviceError(f"{description} did not arrive in time", peer)
        return item
