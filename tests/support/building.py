"""Run build systems in tests, and change the modification times of source files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SPLIT = ("--platform", "rpi4x2", "--strategy", "modnn")


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, in which `dicompiler` is the tested one, with `more` variables."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "LC_ALL": "C.UTF-8"} | more


def later(path: Path) -> None:
    """Make a file newer than all other files in its directory and below, so that a build system rebuilds from it."""
    newest = max(entry.stat().st_mtime_ns for entry in path.parent.rglob("*"))
    os.utime(path, ns=(newest + 10**7, newest + 10**7))


def run(directory: Path, *line: object, code: int = 0, **more: str) -> str:
    """Run a command line in `directory`, check its exit code, and return stdout if `code` is 0, else stderr."""
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
    """Run `dicompiler` in `directory` and return its output; if `code` is not 0, check that stderr is one line."""
    said = run(directory, sys.executable, "-m", "dicompiler", *arguments, code=code, **more)
    assert not code or said.count("\n") == 1
    return said
