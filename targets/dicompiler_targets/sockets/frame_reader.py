"""Reading of the frames (inference requests) that the user passes to `Session.stream`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dicompiler.plugin_api.artifacts import ReadyFrames

CopyFrame = Callable[[Any], Any]
"""Function that returns a checked copy of a frame, or raises an error."""
_END = object()


def make_frame_reader(
    frames: Iterable[Any], limit: int, notify: Callable[[], None], copy_frame: CopyFrame
) -> FrameReader:
    """Return a reader that reads at most `limit` frames ahead of the outputs that were yielded.

    `ReadyFrames`, lists and tuples are read directly. All other iterables are read by a thread, which calls `notify`
    after each frame and at the end.
    """
    if isinstance(frames, list | tuple):
        return _DirectReader(_ListedFrames(frames), limit, copy_frame)
    if isinstance(frames, ReadyFrames):
        return _DirectReader(frames, limit, copy_frame)
    return _ThreadReader(frames, limit, notify, copy_frame)


class FrameReader(ABC):
    """Reads the frames of a stream.

    Attributes:
        error: The exception that ended the reading; None if there was none.
    """

    error: BaseException | None = None

    @property
    @abstractmethod
    def has_frame(self) -> bool: ...

    @property
    @abstractmethod
    def is_exhausted(self) -> bool:
        """True if no frames follow."""

    @abstractmethod
    def take(self) -> Any:
        """Remove the next frame and return a checked copy of it; None if another thread has just ended the frames.

        If the frame is invalid, set `error` and return None.
        """

    @abstractmethod
    def release(self) -> None:
        """Allow one frame more to be read: the caller has used the outputs of a frame."""

    @abstractmethod
    def close(self) -> None: ...

    def has_frame_or_end(self) -> bool:
        return self.has_frame or self.is_exhausted


class _DirectReader(FrameReader):
    """Reads frames when they are taken, because reading them never waits."""

    def __init__(self, frames: ReadyFrames, limit: int, copy_frame: CopyFrame) -> None:
        self._frames, self._copy_frame = frames, copy_frame
        # A frame keeps its place until the caller has used its outputs. One more place lets the devices compute `limit`
        # frames meanwhile.
        self._free_places = limit + 1

    @property
    def has_frame(self) -> bool:
        return self.error is None and self._free_places > 0 and self._frames.has_frame

    @property
    def is_exhausted(self) -> bool:
        return self.error is not None or self._frames.is_exhausted

    def take(self) -> Any:
        self._free_places -= 1
        try:
            frame = self._frames.take()
            return None if frame is None else self._copy_frame(frame)
        except BaseException as error:
            self.error = error
            return None

    def release(self) -> None:
        self._free_places += 1

    def close(self) -> None:
        pass


class _ThreadReader(FrameReader):
    """Reads, checks and copies frames in a thread. They are copied there, because an iterator may reuse its arrays."""

    def __init__(self, frames: Iterable[Any], limit: int, notify: Callable[[], None], copy_frame: CopyFrame) -> None:
        self._notify, self._copy_frame = notify, copy_frame
        self._free_places = threading.Semaphore(limit)
        self._queue, self._is_read_to_end, self._is_stopped = deque[Any](), False, False
        threading.Thread(target=self._run, args=(frames,), name="frame reader", daemon=True).start()

    @property
    def has_frame(self) -> bool:
        return bool(self._queue)

    @property
    def is_exhausted(self) -> bool:
        return self._is_read_to_end and not self._queue

    def take(self) -> Any:
        return self._queue.popleft()

    def release(self) -> None:
        self._free_places.release()

    def close(self) -> None:
        """Stop the thread; if it is reading a frame, it stops after this frame."""
        self._is_stopped = True
        self._free_places.release()

    def _run(self, frames: Iterable[Any]) -> None:
        try:
            source = iter(frames)
            while self._wait_for_place() and (frame := next(source, _END)) is not _END:
                self._queue.append(self._copy_frame(frame))
                self._notify()
        except BaseException as error:  # `stream` raises the error again, in the user's thread.
            self.error = error
        if not self._is_stopped:
            self._is_read_to_end = True
            self._notify()

    def _wait_for_place(self) -> bool:
        """Wait until another frame may be read; return False if the reader was closed."""
        self._free_places.acquire()
        return not self._is_stopped


class _ListedFrames(ReadyFrames):
    """The frames in a list or tuple."""

    def __init__(self, frames: Iterable[Any]) -> None:
        self._frames = deque(frames)

    @property
    def is_exhausted(self) -> bool:
        return not self._frames

    @property
    def has_frame(self) -> bool:
        return bool(self._frames)

    def take(self) -> Any:
        return self._frames.popleft()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._frames)
