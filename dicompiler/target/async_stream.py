"""The asynchronous form of `Session.stream`.

Blocking calls run in a thread. An asynchronous iterator of frames is awaited in the caller's event loop.
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
    """Yield the outputs of each frame; see `Session.astream`.

    Args:
        start_stream: The session's method `stream`.
        frames: The inputs of each frame.

    Yields:
        The outputs of each frame by name.
    """
    loop = asyncio.get_running_loop()
    source = _BlockingIterator(frames, loop) if isinstance(frames, AsyncIterable) else frames
    outputs, pending = start_stream(source), None
    try:
        while True:
            pending = loop.run_in_executor(None, next, outputs, _END_OF_STREAM)
            frame_outputs: dict[str, Any] = await asyncio.shield(pending)
            if frame_outputs is _END_OF_STREAM:
                return
            yield frame_outputs
    finally:
        if isinstance(source, _BlockingIterator):
            source.stop()
        if pending is not None and not pending.done():
            # The session can be used again only when the thread has returned.
            await asyncio.wait([pending])
            pending.exception()  # marks the exception as retrieved, because the caller has left
        if (close := getattr(outputs, "close", None)) is not None:
            close()


class _BlockingIterator(Iterator[Any]):
    """An iterator over the items of an asynchronous one, for use in another thread than the event loop's."""

    def __init__(self, items: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._items, self._loop = aiter(items), loop
        self._next: Future[Any] | None = None
        self._stopped = False

    def __next__(self) -> Any:
        if self._stopped:
            raise StopIteration
        self._next = asyncio.run_coroutine_threadsafe(self._fetch(), self._loop)
        if self._stopped:
            self._next.cancel()
        with suppress(CancelledError):
            item = self._next.result()
            if item is not _END_OF_STREAM:
                return item
        raise StopIteration

    async def _fetch(self) -> Any:
        return await anext(self._items, _END_OF_STREAM)

    def stop(self) -> None:
        """End the iteration, and cancel the item that is being awaited."""
        self._stopped = True
        if self._next is not None:
            self._next.cancel()
