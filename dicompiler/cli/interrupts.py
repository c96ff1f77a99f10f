"""Ctrl-C, SIGTERM and SIGHUP in the command line: one line on stderr, and exit code 130, 143 or 129.

Before a command starts and after it ends, a signal ends the process at once. While a command runs, an interrupt raises
KeyboardInterrupt and the other signals raise TerminationError, so that the command can clean up. Signals wait while
the command replaces an output or removes temporary files (`signal_deferral`).

The module imports almost nothing, so that the handler is installed early. Until then, Ctrl-C prints a traceback.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long to import.
import _thread
import os
import time

from dicompiler.base.termination import TerminationError, signal_deferral

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

EXIT_INTERRUPTED = 130
INTERRUPTED_MESSAGE, TERMINATED_MESSAGE = "interrupted", "terminated"
_TERMINATION_SIGNALS = (_signal.SIGTERM, _signal.SIGHUP)
RETRY_S, MAX_RETRIES = 0.005, 600
"""An interrupt that would get lost is raised again after RETRY_S seconds, at most MAX_RETRIES times."""
IMPORT_FILE = "<frozen importlib._bootstrap>"
SCHEMA_CALLBACK = "_RejectFloat.validate"
"""Function that the validator of JSON schemas calls. It takes every exception for an error in the document."""


class InterruptHandler:
    """The handler of SIGINT, SIGTERM and SIGHUP in a process that runs one command.

    Attributes:
        was_raised: True if the handler has raised KeyboardInterrupt in the command.
    """

    def __init__(self) -> None:
        self.was_raised = self._is_in_command = False
        self._retries = 0  # Number of times that the current interrupt was delayed.

    def install(self) -> None:
        """Handle SIGINT, SIGTERM and SIGHUP from now on, except signals that the process ignores."""
        # A process that a shell started in the background ignores SIGINT.
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, self._handle)
        for number in _TERMINATION_SIGNALS:
            if _signal.getsignal(number) is _signal.SIG_DFL:
                _signal.signal(number, self._handle)
        os.register_at_fork(after_in_child=self._reset_termination)

    def _reset_termination(self) -> None:
        for number in _TERMINATION_SIGNALS:
            if _signal.getsignal(number) == self._handle:
                _signal.signal(number, _signal.SIG_DFL)

    def begin_command(self) -> None:
        """Let Ctrl-C raise KeyboardInterrupt from now on, instead of ending the process at once."""
        signal_deferral.reset()
        self._is_in_command = True

    def end_command(self, is_finished: bool) -> None:
        """Let Ctrl-C end the process at once from now on.

        Args:
            is_finished: False if the command ended by an exception.

        Raises:
            KeyboardInterrupt: The command is finished, but an interrupt is still delayed.
        """
        if is_finished and signal_deferral.is_active:
            self._ignore_signals()
            return
        # Read `_retries` first: as soon as `_is_in_command` is False, the signal handler may set it to 0.
        is_delayed = self._retries > 0
        self._is_in_command = False
        if is_finished and is_delayed:
            raise KeyboardInterrupt

    def _ignore_signals(self) -> None:
        # The outputs are written, so the exit code must be 0. Python restores the default actions of signals while it
        # exits, except of those that are ignored.
        for number in (_signal.SIGINT, *_TERMINATION_SIGNALS):
            if _signal.getsignal(number) == self._handle:
                _signal.signal(number, _signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if signal_deferral.postpone(number):
            return
        is_interrupt = number == _signal.SIGINT
        if not self._is_in_command:
            # Ignore a delayed interrupt after the end of the command, which has already printed its error.
            if self._retries:
                self._retries = 0
                return
            try:
                message = INTERRUPTED_MESSAGE if is_interrupt else TERMINATED_MESSAGE
                os.write(2, f"dicompiler: {message}\n".encode())
            finally:
                os._exit(128 + number)
        # Delay an interrupt during an import, because it could get lost there: an extension module may replace it by
        # another error, and Python's import system only prints exceptions in its callbacks.
        if _loses_exceptions(frame) and self._retries < MAX_RETRIES:
            self._retries += 1
            _thread.start_new_thread(_signal_later, (number,))
            return
        self._retries, self.was_raised = 0, is_interrupt
        raise KeyboardInterrupt if is_interrupt else TerminationError(128 + number)


def _signal_later(number: int) -> None:
    time.sleep(RETRY_S)
    _thread.interrupt_main(number)  # type: ignore[arg-type]  # mypy expects Signals


def _loses_exceptions(frame: FrameType | None) -> bool:
    """Return True if a caller of the frame may drop an exception, or replace it by another one."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_FILE or frame.f_code.co_qualname == SCHEMA_CALLBACK:
            return True
        frame = frame.f_back
    return False


interrupt_handler = InterruptHandler()
"""The handler of SIGINT, SIGTERM and SIGHUP in this process."""
