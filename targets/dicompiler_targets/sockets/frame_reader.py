"""A thread that reads the user's frames, so that outputs are returned while the next frame is not available."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class FrameReader:
    """Reads ahead at most `limit` frames that were not released. A list or tuple needs no thread.

    Attributes:
        queue: Frames that were read and not taken.
        is_exhausted: No more frames will be read.
        error: The exception that ended reading, if any.
    """

    def __init__(
        self, frames: Iterable[Any], limit: int, notify: Callable[[], None], copy: Callable[[Any], Any]
    ) -> None:
        """Start to read.

        Args:
            frames: The user's frames.
            limit: Frames that may be read and not released.
            notify: Called by the reading thread after each change.
            copy: Checks and copies a frame, because its source may reuse the arrays.
        """
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
        """Return the next frame, or None if it is invalid (see `error`)."""
        frame = self.queue.popleft()
        if not self._is_list:
            return frame
        try:
            return self._copy(frame)
        except BaseException as error:
            self._fail(error)
            return None

    def release(self) -> None:
        """Allow one more frame to be read."""
        self._free_places.release()

    def close(self) -> None:
        """Stop reading after the frame that is being read."""
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
        except BaseException as error:  # The user's own exception, which is raised where outputs are returned.
            self._fail(error)
        self._notify()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        if self._is_list:
            self.queue.clear()
        self.is_exhausted = True
