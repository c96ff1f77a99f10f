"""The exception that SIGTERM and SIGHUP raise in a command, so that it cleans up before it ends."""

from __future__ import annotations


class TerminationError(SystemExit):
    """The exception in the main thread after SIGTERM or SIGHUP. Its exit code is 128 plus the signal's number.

    It ends a search for plans without a plan, whereas KeyboardInterrupt gives the best plan so far.
    """
