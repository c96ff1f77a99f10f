"""Ctrl-C and SIGTERM in the command line: one line on stderr and an exit code, at any moment.

Exit codes are 130 for an interrupt (Ctrl-C), 143 for SIGTERM, 129 for SIGHUP. A signal ends the process at once while
nothing has to be cleaned up: until a command starts, and after its end. While a command runs, an interrupt raises
KeyboardInterrupt, and the other signals raise TerminationError. `main` turns them into the line and the exit code.

The module imports only built-in modules and one that imports nothing, so that `install` is called early. Before this
call, an interrupt prints Python's traceback.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long to import.
import _thread
import os
import time

from dicompiler.base.termination import TerminationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

EXIT_INTERRUPTED = 130
INTERRUPTED_MESSAGE, TERMINATED_MESSAGE = "interrupted", "terminated"
_TERMINATION_SIGNALS = (_signal.SIGTERM, _signal.SIGHUP)
RETRY_S, MAX_RETRIES = 0.005, 600
"""An interrupt during an import is delayed by RETRY_S seconds, at most MAX_RETRIES times."""
IMPORT_FILE = "<frozen importlib._bootstrap>"


class InterruptHandler:
    """The handler of SIGINT, SIGTERM and SIGHUP in a process that runs one command.

    Attributes:
        was_raised: Whether an interrupt was raised in the command.
    """

    def __init__(self) -> None:
        self.was_raised = self._is_in_command = False
        self._retries = 0  # Number of times that the current interrupt was delayed.

    def install(self) -> None:
        """Handle SIGINT, SIGTERM and SIGHUP from now on, except signals that the process ignores.

        A process that a shell started in the background, for example, ignores SIGINT. Forked children get the default
        handlers of SIGTERM and SIGHUP.
        """
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
        """Raise KeyboardInterrupt at an interrupt from now on, instead of ending the process at once."""
        self._is_in_command = True

    def end_command(self, is_finished: bool) -> None:
        """Let interrupts end the process from now on.

        Raise KeyboardInterrupt if the command is finished, but an interrupt is still delayed. Interrupts that arrive
        during an import are delayed until the import has ended.
        """
        # `_retries` counts the delays of the current interrupt. It is read before `_is_in_command` changes, because
        # the signal handler may set it to 0 as soon as no command runs.
        is_delayed = self._retries > 0
        self._is_in_command = False
        if is_finished and is_delayed:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_interrupt = number == _signal.SIGINT
        if not self._is_in_command:
            # A delayed interrupt may arrive after the command has ended. The command has then already printed
            # "interrupted" or its error, so the interrupt is ignored.
            if self._retries:
                self._retries = 0
                return
            try:
                message = INTERRUPTED_MESSAGE if is_interrupt else TERMINATED_MESSAGE
                os.write(2, f"dicompiler: {message}\n".encode())
            finally:
                os._exit(128 + number)
        # An interrupt during an import is delayed, because it could get lost: an extension module may turn it into
        # another error, and Python's import system only prints exceptions in its own callbacks.
        if _is_in_import(frame) and self._retries < MAX_RETRIES:
            self._retries += 1
            _thread.start_new_thread(_signal_later, (number,))
            return
        self._retries, self.was_raised = 0, is_interrupt
        raise KeyboardInterrupt if is_interrupt else TerminationError(128 + number)


def _signal_later(number: int) -> None:
    time.sleep(RETRY_S)
    _thread.interrupt_main(number)  # type: ignore[arg-type]  # mypy expects Signals


def _is_in_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_FILE:
            return True
        frame = frame.f_back
    return False


interrupt_handler = InterruptHandler()
"""The handler of SIGINT, SIGTERM and SIGHUP in this process."""
