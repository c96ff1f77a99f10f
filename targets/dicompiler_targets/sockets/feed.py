"""Reads a user's frames in a thread of its own, so that outputs are handed on while the next frame is not there yet.

In: an iterable of inputs. Out: announcements in the run's queue, and the inputs in order, never more than asked for.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

END = object()
"""What comes after the last frame."""


class Feed:
    """Frames that were read, in `given`. `announce` is called by the thread with this feed for each of them; `take`
    then moves one to `given`. `copy` makes of a frame what does not change when its source uses its arrays again.

    At most `limit` frames are read that were not released.
    """

    def __init__(
        self, frames: Iterable[Any], limit: int, announce: Callable[[Feed], None], copy: Callable[[Any], Any]
    ) -> None:
        self.given: deque[Any] = deque()
        self.exhausted = False
        self._read: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(limit)
        self._stopped = False
        self._announce, self._copy = announce, copy
        threading.Thread(target=self._run, args=(frames,), daemon=True).start()

    def take(self) -> None:
        """Moves the next frame to `given`, or notes the end. Raises what reading the frames raised."""
        item = self._read.get_nowait()
        if isinstance(item, _Failed):
            raise item.error
        if item is END:
            self.exhausted = True
        else:
            self.given.append(item)

    def release(self) -> None:
        """One more frame may be read."""
        self._room.release()

    def stop(self) -> None:
        """No more frames are read, but the one that is being read."""
        self._stopped = True
        self._room.release()

    def _run(self, frames: Iterable[Any]) -> None:
        try:
            source = iter(frames)
            while True:
                self._room.acquire()
                if self._stopped:
                    return
                self._put(self._copy(next(source)))
        except StopIteration:
            self._put(END)
        except BaseException as error:  # the user's own, which is raised where the outputs are taken
            self._put(_Failed(error))

    def _put(self, item: Any) -> None:
        self._read.put(item)
        self._announce(self)


class _Failed:
    """Reading the frames raised `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
