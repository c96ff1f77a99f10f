"""The command line. The `dicompiler` script calls `main`.

This module must define nothing else: commands are submodules, and some have names of built-in functions (`list`,
`compile`).
"""

from dicompiler.cli.command_line import main

__all__ = ["main"]
