"""The exception that SIGTERM and SIGHUP raise in a command, so that it cleans up before it ends."""

from __future__ import annotations


class TerminationError(SystemExit):
    """The exception in the main thread when the process is asked to end. Its code is 128 plus the signal's number.

    Unlike KeyboardInterrupt, it also ends searches that return the best plan so far.
    """
