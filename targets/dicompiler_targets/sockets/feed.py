"""Reads a user's frames in a thread of its own, so that outputs are handed on while the next frame is not there yet.

In: an iterable of inputs. Out: the inputs in order, never more than asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class Feed:
    """Frames that were read, in `given`, of which `take` gives the next. `exhausted`: no more will be. `announce` is
    called by the thread whenever that changes. `copy` makes of a frame what does not change when its source uses its
    arrays again. `error`: what reading a frame raised, after which there are no more.

    At most `limit` frames are read that were not released. A list is there already: it takes no thread.
    """

    def __init__(
        self, frames: Iterable[Any], limit: int, announce: Callable[[], None], copy: Callable[[Any], Any]
    ) -> None:
        self._listed = isinstance(frames, list | tuple)
        self.given: deque[Any] = deque(frames if self._listed else ())
        self.exhausted = self._listed
        self.error: BaseException | None = None
        self._room = threading.Semaphore(limit)
        self._stopped = False
        self._announce, self._copy = announce, copy
        if not self._listed:
            threading.Thread(target=self._run, args=(frames,), daemon=True).start()

    def tells(self) -> bool:
        """Whether a frame is there, or none will be."""
        return bool(self.given) or self.exhausted

    def take(self) -> Any:
        """The next frame; None where it cannot be read."""
        item = self.given.popleft()
        if not self._listed:
            return item
        try:
            return self._copy(item)
        except BaseException as error:
            self._fail(error)
            return None

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
                self.given.append(self._copy(next(source)))
                self._announce()
        except StopIteration:
            self.exhausted = True
        except BaseException as error:  # the user's own, which is raised where the outputs are taken
            self._fail(error)
        self._announce()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        if self._listed:
            self.given.clear()
        self.exhausted = True
