"""Log handlers: warnings and notices are printed to stderr, and --log-file gets all records."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from dicompiler.base.errors import DicompilerError, one_line
from dicompiler.base.notices import NOTICE_LEVEL

log = logging.getLogger("dicompiler")


class _StderrHandler(logging.Handler):
    """A handler that prints each warning or notice to stderr in the form of an error message."""

    def emit(self, record: logging.LogRecord) -> None:
        # Look up sys.stderr for each line, because a progress display replaces it.
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        line = f"dicompiler: {level}{one_line(record.getMessage())}"
        sys.stderr.write(f"{line}\n")


class _FileFormatter(logging.Formatter):
    """A formatter of one line per record: time (UTC), process id, level and message; then the traceback, if any.

    The process id distinguishes the lines of commands that append to the same file.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(process)d %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    @staticmethod
    def converter(seconds: float | None) -> time.struct_time:
        return time.gmtime(seconds)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)


def set_handlers(is_quiet: bool, log_file: Path | None) -> None:
    """Replace the handlers of the log `dicompiler`, and close the log file of an earlier command.

    Raises:
        DicompilerError: The log file cannot be written.
    """
    for handler in log.handlers:
        handler.close()
    # Without any handler, Python's logging would print warnings to stderr itself, so --quiet needs a NullHandler.
    log.handlers, log.propagate = [logging.NullHandler() if is_quiet else _StderrHandler(NOTICE_LEVEL)], False
    log.setLevel(NOTICE_LEVEL)
    if log_file is None:
        return
    try:
        file_handler = logging.FileHandler(log_file, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        cause = f"--log-file: {log_file}: {error.strerror}"
        raise DicompilerError(f"{cause}: give the name of a file that can be written") from None
    file_handler.setFormatter(_FileFormatter())
    log.addHandler(file_handler)
    log.setLevel(logging.INFO)


def is_log_file(path: Path) -> bool:
    """Return True if log records are currently written to the file `path`."""
    files = [handler.baseFilename for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    return str(path.absolute()) in files


def log_error(line: str, error: BaseException | None) -> None:
    """Write an error message to the log file, if there is one, with the traceback of `error`, if given."""
    trace = None if error is None else (type(error), error, error.__traceback__)
    _write_to_file(log.makeRecord(log.name, logging.ERROR, "", 0, line, (), trace))


def log_end(code: int, seconds: float) -> None:
    """Write the exit code and the duration of the command to the log file, if there is one."""
    line = f"end: exit code {code} after {seconds:.1f} s"
    _write_to_file(log.makeRecord(log.name, logging.INFO, "", 0, line, (), None))


def _write_to_file(record: logging.LogRecord) -> None:
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
