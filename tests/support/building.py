"""Calls build systems for tests, and makes files look newer than what was built from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SPLIT = ("--platform", "rpi4x2", "--strategy", "modnn")


def environment(**more: str) -> dict[str, str]:
    """Ours, in which `dicompiler` is the one that is tested."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": "C.UTF-8"} | more


def later(path: Path) -> None:
    """Makes a file look as if it had been written just after all that is there."""
    newest = max(entry.stat().st_mtime_ns for entry in path.parent.rglob("*"))
    os.utime(path, ns=(newest + 10**7, newest + 10**7))


def run(directory: Path, *line: object, code: int = 0, **more: str) -> str:
    """What a program prints: stdout where it ends well, else stderr."""
    done = subprocess.run(
        [str(word) for word in line],
        cwd=directory,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def dicompiler(directory: Path, *arguments: object, code: int = 0, **more: str) -> str:
    """What `dicompiler` prints; of an error the one line."""
    said = run(directory, sys.executable, "-m", "dicompiler.cli", *arguments, code=code, **more)
    assert not code or said.count("\n") == 1
    return said
