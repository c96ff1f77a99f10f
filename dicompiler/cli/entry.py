"""Runs a command line: arguments go in; results come out on stdout, diagnostics on stderr, and an exit code.

0: done; 1: what was given cannot be compiled or run, or a third party's plugin broke; 2: wrong usage; 70: our own
mistake; 130: interrupted. Commands live in modules of their own that are imported when they are called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import click

from dicompiler.base.errors import DicompilerError, nearest, one_line
from dicompiler.cli.group import COMMANDS, root

INTERNAL = 70
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code; errors are one line on stderr.

    None: that of the process, which is watched from outside where third parties' plugins are installed. In any case
    what they print in Python goes to stderr.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Help, which comes at once, loads no plugin.
    if given and given[0] in COMMANDS and "--help" not in given:
        from dicompiler.plugin.entry_points import third_parties

        if plugins := third_parties(os.environ):
            from dicompiler.plugin.guardian import sorted_stdout, watched

            if arguments is None:
                return watched(lambda: _run(given), plugins)
            with sorted_stdout(plugins):
                return _run(given)
    return _run(given)


def _run(given: list[str]) -> int:
    try:
        result = root.main(given, prog_name="dicompiler", standalone_mode=False)
        # A full disk or a reader that went away shows only now.
        sys.stdout.flush()
    except BaseException as error:
        if isinstance(error, BrokenPipeError) or _is_clicks_end(error):
            _silence()
            return 1
        if "--debug" in given:
            import traceback

            traceback.print_exc()
        code, line = _describe(error)
        print(f"dicompiler: {line}", file=sys.stderr)
        return code
    return result if isinstance(result, int) else 0


def _is_clicks_end(error: BaseException) -> bool:
    """Whether click has ended the process: what it makes of a broken pipe."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, SystemExit) and trace is not None and trace.tb_frame.f_globals["__name__"] == "click.core"


def _silence() -> None:
    """Nobody reads stdout any more: lets the interpreter's last flush go nowhere instead of failing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _describe(error: BaseException) -> tuple[int, str]:
    """The exit code and the line for an error."""
    if isinstance(error, DicompilerError):
        return error.exit_code, f"error: {one_line(str(error))}"
    if any(isinstance(one, click.Abort | KeyboardInterrupt) for one in _causes(error)):
        return INTERRUPTED, "interrupted"
    if isinstance(error, click.ClickException):
        return error.exit_code, f"error: {_usage(error)}"
    if line := _culprit(error):
        return 1, f"error: {line}"
    if isinstance(error, OSError) and error.errno is not None:
        place = f"{error.filename}: " if error.filename else ""
        return 1, f"error: {one_line(place + (error.strerror or str(error)))}"
    from dicompiler.plugin.passes import PassFailure

    cause = str(error) if isinstance(error, PassFailure) else f"{type(error).__name__}: {error}"
    return INTERNAL, f"internal error: {one_line(cause)}; run again with --debug for the traceback"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came of: a library that is interrupted while it is loaded says that it cannot be loaded."""
    while error is not None:
        yield error
        error = error.__cause__


def _culprit(error: BaseException) -> str | None:
    """The line for an exception in a third party's code that no guard has seen; None where there is no such code."""
    from dicompiler.plugin.entry_points import is_ours, top
    from dicompiler.plugin.guard import culprit
    from dicompiler.plugin.registry import registry

    try:
        plugins = registry().plugins
    except DicompilerError:  # two plugins collide: nothing was loaded
        return None
    return culprit(error, {top(plugin.value): str(plugin) for plugin in plugins if not is_ours(plugin.distribution)})


def _usage(error: click.ClickException) -> str:
    """click's own errors in our words: the command, what is wrong with it, and the nearest valid name."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "dicompiler"
    place = path.removeprefix("dicompiler").strip()
    if isinstance(error, click.NoSuchOption):
        params = [] if context is None else context.command.get_params(context)
        known = [name for param in params if isinstance(param, click.Option) for name in param.opts]
        message = f"unknown option {error.option_name!r}{nearest(error.option_name, known)}"
    else:
        message = one_line(error.format_message()).rstrip(".")
        for theirs, ours in (("valid integer range", "whole number"), ("valid float range", "number")):
            message = message.replace(theirs, ours)
        message = f"{message[:1].lower()}{message[1:]}; see '{path} --help'"
    return f"{place}: {message}" if place else message
