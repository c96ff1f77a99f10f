"""The command line. The `dicompiler` script calls `main`.

This module must contain no other code: the commands are its submodules, and those named `list` and `compile` hide the
built-in functions here.
"""

from dicompiler.cli.entry import main

__all__ = ["main"]
