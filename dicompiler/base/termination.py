"""The exception that SIGTERM and SIGHUP raise in a command, and the deferral of signals while outputs are replaced."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long to import.


class TerminationError(SystemExit):
    """The exception in the main thread after SIGTERM or SIGHUP. Its exit code is 128 plus the signal's number.

    It ends a search for plans without a plan, whereas KeyboardInterrupt gives the best plan so far.
    """


class SignalDeferral:
    """A context manager that lets signals wait until its block ends. Blocks can be nested.

    Only the signal handler of the command line asks it. Python programs handle signals themselves.

    Attributes:
        is_commit_last: True if the command only finishes its outputs after it has replaced the first one. Signals are
            then ignored from the first replacement on, so that an exit code above 0 means that nothing was written.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new command: signals do not wait, and a replaced output changes nothing."""
        self.is_commit_last = False
        self._depth, self._waiting_signal = 0, 0

    @property
    def is_active(self) -> bool:
        """True if signals wait."""
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and self._waiting_signal:
            number, self._waiting_signal = self._waiting_signal, 0
            _signal.raise_signal(number)

    def postpone(self, number: int) -> bool:
        """Return True if signals wait. The signal `number` is then raised again when they no longer wait."""
        if self.is_active:
            self._waiting_signal = number
        return self.is_active

    def note_commit(self) -> None:
        """Report that an output was replaced. Call it in a block of this context manager."""
        if self.is_commit_last:
            self._depth += 1  # No block ends this one, so signals wait until the process ends.


signal_deferral = SignalDeferral()
"""The deferral of SIGINT, SIGTERM and SIGHUP in this process."""
