"""The implementation of `Session.astream`, the asynchronous form of `Session.stream`.

The blocking calls of `stream` run in a thread. An asynchronous iterator of frames is awaited in the caller's event
loop.
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
    """Yield the outputs of each frame that a session computes. `start_stream` is the session's method `stream`."""
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
            # The caller has left its loop over the outputs, and may use the session again. Wait until the thread no
            # longer uses it.
            await asyncio.wait([pending])
            # Reading the thread's exception prevents a log message of asyncio about an exception that was never
            # retrieved.
            pending.exception()
        if (close := getattr(outputs, "close", None)) is not None:
            close()


class _BlockingIterator(Iterator[Any]):
    """A blocking iterator over the items of an asynchronous iterator, which are fetched in the event loop.

    It must be used in a thread outside of the event loop.
    """

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
        self._stopped = True
        if self._next is not None:
            self._next.cancel()
