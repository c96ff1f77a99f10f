"""Calls build systems for tests, and makes files look newer than what was built from them."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def environment(**more: str) -> dict[str, str]:
    """Ours, in which `dicompiler` is the one that is tested."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": "C.UTF-8"} | more


def later(path: Path) -> None:
    """Makes a file look as if it had been written just after all that is there."""
    newest = max(entry.stat().st_mtime_ns for entry in path.parent.rglob("*"))
    os.utime(path, ns=(newest + 10**7, newest + 10**7))
