"""Reads a user's frames in a thread of its own, so that outputs are handed on while the next frame is not there yet.

In: an iterable of inputs. Out: the inputs in order, never more than asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class FrameReader:
    """Frames that were read, in `given`, of which `take` gives the next. `exhausted`: no more will be. `announce` is
    called by the thread whenever that changes. `copy` makes of a frame what does not change when its source uses its
    arrays again. `error`: what reading a frame raised, after which there are no more.

    At most `limit` frames are read that were not released. A list is there already: it takes no thread.
    """

    def __init__(
        self, frames: Iterable[Any], limit: int, announce: Callable[[], None], copy: Callable[[Any], Any]
    ) -> None:
        self._is_list = isinstance(frames, list | tuple)
        self.queue: deque[Any] = deque(frames if self._is_list else ())
        self.is_exhausted = self._is_list
        self.error: BaseException | None = None
        self._free_places = threading.Semaphore(limit)
        self._stopped = False
        self._notify, self._copy = announce, copy
        if not self._is_list:
            threading.Thread(target=self._run, args=(frames,), daemon=True).start()

    def has_frame_or_end(self) -> bool:
        """Whether a frame is there, or none will be."""
        return bool(self.queue) or self.is_exhausted

    def take(self) -> Any:
        """The next frame; None where it cannot be read."""
        item = self.queue.popleft()
        if not self._is_list:
            return item
        try:
            return self._copy(item)
        except BaseException as error:
            self._fail(error)
            return None

    def release(self) -> None:
        """One more frame may be read."""
        self._free_places.release()

    def close(self) -> None:
        """No more frames are read, but the one that is being read."""
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
        except BaseException as error:  # the user's own, which is raised where the outputs are taken
            self._fail(error)
        self._notify()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        if self._is_list:
            self.queue.clear()
        self.is_exhausted = True
