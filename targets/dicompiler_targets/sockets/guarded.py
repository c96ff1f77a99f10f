"""What all sessions of this target share: the first thing that fails ends them, and later calls say what it was."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Self

from dicompiler.plugin_api import RunError, RunOptions
from dicompiler.plugin_api import Session as AnySession


class Guarded(AnySession):
    """A session that ends once."""

    _ended: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end("it was left by an error")

    @abstractmethod
    def _stop(self) -> None:
        """Ends what it has started; it may be called again."""

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._stop()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Ends everything where the block fails. RunError where it has ended already."""
        if self._ended is not None:
            raise RunError(f"the session has ended: {self._ended}")
        try:
            yield
        except BaseException as error:
            self._end(str(error) or type(error).__name__)
            raise


def overdue(title: str, options: RunOptions, more: str = "") -> RunError:
    """Who did not finish in time."""
    return RunError(f"{title}: did not finish within {options.timeout_s:g} s{more}: allow more time (--timeout)")
