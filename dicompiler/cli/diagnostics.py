"""Options of all commands about diagnostics: --debug, --quiet and --log-file.

The handlers of log records are in the module `log_handlers`, because `--help` must not import `logging`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from dicompiler.base.errors import DicompilerError

QUIET_KEY, LOG_FILE_KEY = "dicompiler.quiet", "dicompiler.log_file"
"""Keys of the options in the `meta` of click's context, which a command shares with the command group."""
COMMAND_LOGGED_KEY = "dicompiler.command_logged"
"""Key of a flag in the `meta` of click's context: whether the command line has been written to the log file.

The flag prevents a second entry. Diagnostic options can be given before and after the name of the command, and both set
up the log.
"""


def make_diagnostic_options() -> list[click.Parameter]:
    """Return the options --debug, --quiet and --log-file."""
    return [
        # Commands do not get the value of --debug. The function `main` looks for it in the arguments, because click
        # may fail before it has parsed them.
        click.Option(["--debug"], is_flag=True, expose_value=False, help="Print a traceback with every error."),
        click.Option(
            ["--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_keep_option(QUIET_KEY),
            help="Print no warnings and no progress.",
        ),
        click.Option(
            ["--log-file"],
            metavar="FILE",
            type=click.Path(path_type=Path),
            expose_value=False,
            callback=_keep_option(LOG_FILE_KEY),
            help="Append the steps of the command, warnings and errors, with time and process id, to this file.",
        ),
    ]


def _keep_option(key: str) -> Any:
    """Return a callback that stores the value of --quiet or --log-file in the context.

    Both options may be before or after the name of the command. The command group sets up the log with the options
    before the name. For an option after the name, the callback sets up the log again.
    """

    def keep(context: click.Context, _option: click.Parameter, value: Any) -> None:
        if not value or context.resilient_parsing:
            return
        context.meta[key] = value
        if context.parent is not None:
            set_up_log(context)

    return keep


def set_up_log(context: click.Context) -> None:
    """Direct log records to stderr, unless --quiet is given, and to the file of --log-file."""
    from dicompiler.cli.log_handlers import log, set_handlers

    log_file = context.meta.get(LOG_FILE_KEY)
    set_handlers(context.meta.get(QUIET_KEY, False), log_file)
    if log_file is not None and not context.meta.setdefault(COMMAND_LOGGED_KEY, False):
        context.meta[COMMAND_LOGGED_KEY] = True
        log.info("command: dicompiler %s", shlex.join(context.find_root().obj or []))


def open_log_after_error(arguments: Sequence[str]) -> None:
    """Direct log records to the file of --log-file, if an error has prevented `set_up_log` from doing it.

    This is the case for usage errors: click finds them before it calls the callback of --log-file. If the file cannot
    be written, nothing is done, because the command already fails with another error.
    """
    names = [
        value for name, value in zip_longest(arguments, arguments[1:]) if name == "--log-file" and value is not None
    ] + [name.partition("=")[2] for name in arguments if name.startswith("--log-file=")]
    if not names:
        return
    from dicompiler.cli.log_handlers import is_log_file, log, set_handlers

    log_file = Path(names[-1])
    if not is_log_file(log_file):
        with suppress(DicompilerError):
            set_handlers("--quiet" in arguments, log_file)
            log.info("command: dicompiler %s", shlex.join(arguments))


def is_quiet() -> bool:
    """Return True if the command was called with --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET_KEY))
