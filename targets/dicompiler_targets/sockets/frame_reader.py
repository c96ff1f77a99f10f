"""A thread that reads the user's frames. The session can return outputs while the user's iterator waits for a frame."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class FrameReader:
    """Reads the frames that the user passes to `Session.stream`.

    A list or tuple is read directly. Frames of any other iterator are read in a thread, which checks and copies each
    frame with `copy`, because an iterator may reuse its arrays. The thread calls `notify` after each frame and at the
    end. It pauses while `limit` frames are read but not yet released by the session.

    Attributes:
        queue: The frames that were read and not taken.
        is_exhausted: Whether no further frames will be read.
        error: The exception that ended the reading; None without one.
    """

    def __init__(
        self, frames: Iterable[Any], limit: int, notify: Callable[[], None], copy: Callable[[Any], Any]
    ) -> None:
        self._is_list = isinstance(frames, list | tuple)
        self.queue: deque[Any] = deque(frames if self._is_list else ())
        self.is_exhausted = self._is_list
        self.error: BaseException | None = None
        self._free_places = threading.Semaphore(limit)
        self._stopped = False
        self._notify, self._copy = notify, copy
        if not self._is_list:
            threading.Thread(target=self._run, args=(frames,), daemon=True).start()

    def has_frame_or_end(self) -> bool:
        return bool(self.queue) or self.is_exhausted

    def take(self) -> Any:
        """Remove the next frame from the queue and return it.

        If the frame is invalid, set `error` and return None.
        """
        frame = self.queue.popleft()
        if not self._is_list:
            return frame
        try:
            return self._copy(frame)
        except BaseException as error:
            self._fail(error)
            return None

    def release(self) -> None:
        """Allow the thread to read one more frame."""
        self._free_places.release()

    def close(self) -> None:
        """Stop the thread, if necessary after the frame that it is reading."""
        self._stopped = True
        self._free_places.release()

    def _run(self, frames: Iterable[Any]) -> None:
        try:
            source = iter(frames)
            while True:
                self._free_places.acquire()
                if self._stopped:
                    return
                self.queue.append(self._copy(next(source)))
                self._notify()
        except StopIteration:
            self.is_exhausted = True
        except BaseException as error:  # An exception of the user's iterator is raised again by `stream`.
            self._fail(error)
        self._notify()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        if self._is_list:
            self.queue.clear()
        self.is_exhausted = True
