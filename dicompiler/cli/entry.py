"""The entry point of the `dicompiler` script, which handles interrupts before it imports the command line."""

from __future__ import annotations

from dicompiler.cli.interrupts import interrupt_handler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code. Errors are printed to stderr, one line each.

    Args:
        arguments: The command-line arguments. Default: those of this process (`sys.argv`). Only in this case, Ctrl-C
            ends the process with one line on stderr and exit code 130.
    """
    if arguments is None:
        interrupt_handler.install()
    from dicompiler.cli.command_line import main as run_command_line

    return run_command_line(arguments)
