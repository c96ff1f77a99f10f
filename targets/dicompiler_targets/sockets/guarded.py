"""What all sessions of this target share: the first thing that fails ends them, and later calls say what it was."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Self

from dicompiler.plugin_api import RunError, RunOptions
from dicompiler.plugin_api import Session as AnySession


class FailOnceSession(AnySession):
    """A session that ends once."""

    _end_reason: str | None = None

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
        self._end_reason = self._end_reason or why
        self._stop()

    @contextlib.contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        """Ends everything where the block fails. RunError where it has ended already."""
        if self._end_reason is not None:
            raise RunError(f"the session has ended: {self._end_reason}")
        try:
            yield
        except BaseException as error:
            self._end(str(error) or type(error).__name__)
            raise


def timeout_error(title: str, options: RunOptions, more: str = "") -> RunError:
    """Who did not finish in time."""
    return RunError(f"{title}: did not finish within {options.timeout_s:g} s{more}: allow more time (--timeout)")
