"""A session's stream for `async for`: what blocks is done in a thread, what is awaited in the caller's loop.

Session + frames, from an iterator or an async one → the outputs of each, asynchronously.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

_END_OF_STREAM: Any = object()


async def stream_async(
    start_stream: Callable[[Iterable[Any]], Iterator[dict[str, Any]]], frames: Iterable[Any] | AsyncIterable[Any]
) -> AsyncIterator[dict[str, Any]]:
    """What `start`, a session's `stream`, makes of the frames; see `Session.astream`."""
    loop = asyncio.get_running_loop()
    source = _BlockingIterator(frames, loop) if isinstance(frames, AsyncIterable) else frames
    outputs, turn = start_stream(source), None
    try:
        while True:
            turn = loop.run_in_executor(None, next, outputs, _END_OF_STREAM)
            found: dict[str, Any] = await asyncio.shield(turn)
            if found is _END_OF_STREAM:
                return
            yield found
    finally:
        if isinstance(source, _BlockingIterator):
            source.stop()
        if turn is not None and not turn.done():  # the session is free for others only then
            await asyncio.wait([turn])
            turn.exception()  # nobody is left to hear of it
        if (close := getattr(outputs, "close", None)) is not None:
            close()


class _BlockingIterator(Iterator[Any]):
    """The items of an async iterator, for another thread than the loop's."""

    def __init__(self, items: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._items, self._loop = aiter(items), loop
        self._next: Future[Any] | None = None
        self._stopped = False

    def __next__(self) -> Any:
        if self._stopped:
            raise StopIteration
        self._next = asyncio.run_coroutine_threadsafe(self._item(), self._loop)
        if self._stopped:
            self._next.cancel()
        with suppress(CancelledError):
            found = self._next.result()
            if found is not _END_OF_STREAM:
                return found
        raise StopIteration

    async def _item(self) -> Any:
        return await anext(self._items, _END_OF_STREAM)

    def stop(self) -> None:
        """No more items: one that is awaited is given up."""
        self._stopped = True
        if self._next is not None:
            self._next.cancel()
