"""The exception that SIGTERM and SIGHUP raise in a command, so that it cleans up before it ends."""

from __future__ import annotations


class TerminationError(SystemExit):
    """Raised in the main thread when the process was asked to end. Its code is 128 plus the number of the signal.

    Unlike KeyboardInterrupt, it also ends searches that return the best plan so far.
    """
