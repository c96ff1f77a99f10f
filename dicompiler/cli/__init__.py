"""The command line. The `dicompiler` script calls `main`.

Keep other code out of this module: its submodules `list` and `compile` hide the built-in functions here.
"""

from dicompiler.cli.entry import main

__all__ = ["main"]
