"""The command line; `main` is what the `dicompiler` script calls.

Nothing else may stand here: commands are submodules, and the names of some (`list`, `compile`) hide built-in functions.
"""

from dicompiler.cli.command_line import main

__all__ = ["main"]
