"""Options of all commands for diagnostics: --debug, --quiet and --log-file.

The log handlers are in the module `log_handlers`, because `--help` must not import `logging`.
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
"""Keys of the option values in `meta` of click's context. The group and its commands share `meta`."""
COMMAND_LOGGED_KEY = "dicompiler.command_logged"
"""Key in `meta` of click's context: True if the log file already has the command line.

The log may be set up twice: by options before and by options after the command's name.
"""


def make_diagnostic_options() -> list[click.Parameter]:
    return [
        # `main` looks for --debug in the arguments itself, because click may fail before it has parsed them.
        click.Option(["--debug"], is_flag=True, expose_value=False, help="Print a traceback with every error."),
        click.Option(
            ["--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_keep_option(QUIET_KEY),
            help="Print only errors, and output that an option such as --json asks for.",
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
    """Return a click callback that stores an option value in `meta` of the context.

    For an option after the command's name, the callback also sets up the log again. Options before the name need no
    callback for this, because the command group sets up the log.
    """

    def keep(context: click.Context, _option: click.Parameter, value: Any) -> None:
        if not value or context.resilient_parsing:
            return
        context.meta[key] = value
        if context.parent is not None:
            set_up_log(context)

    return keep


def set_up_log(context: click.Context) -> None:
    """Send log records to stderr (unless --quiet is given) and to the file of --log-file."""
    from dicompiler.cli.log_handlers import log, set_handlers

    log_file = context.meta.get(LOG_FILE_KEY)
    set_handlers(context.meta.get(QUIET_KEY, False), log_file)
    if log_file is not None and not context.meta.setdefault(COMMAND_LOGGED_KEY, False):
        context.meta[COMMAND_LOGGED_KEY] = True
        log.info("command: dicompiler %s", shlex.join(context.find_root().obj or []))


def open_log_after_error(arguments: Sequence[str]) -> None:
    """Open the log file after a usage error, which click may raise before it handles --log-file."""
    names = [
        value for name, value in zip_longest(arguments, arguments[1:]) if name == "--log-file" and value is not None
    ] + [name.partition("=")[2] for name in arguments if name.startswith("--log-file=")]
    if not names:
        return
    from dicompiler.cli.log_handlers import is_log_file, log, set_handlers

    log_file = Path(names[-1])
    if not is_log_file(log_file):
        # If the file cannot be written, say nothing: the command already fails with another error.
        with suppress(DicompilerError):
            set_handlers("--quiet" in arguments, log_file)
            log.info("command: dicompiler %s", shlex.join(arguments))


def is_quiet() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET_KEY))
