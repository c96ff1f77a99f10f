"""A clone of this repository in which the README's commands for the installation have run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support import console

ROOT = console.DOCUMENT.parent


def install_clone(directory: Path) -> None:
    """Copy this checkout's files to `directory`, and run the README's commands for the installation there.

    pip finds the dependencies in the environment of the tests, and downloads only the build requirements.
    """
    for name in _list_files():
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    readme = console.DOCUMENT.read_text(encoding="utf-8")
    create, install = console.blocks(readme, "sh")[0].splitlines()[0].split(" && ")
    _run(create, directory)
    (site,) = directory.glob(".venv/lib/python*/site-packages")
    dependencies = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "dependencies.pth").write_text("\n".join(dependencies))
    _run(install, directory)


def _run(line: str, directory: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(line.split(), cwd=directory, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _list_files() -> list[str]:
    """Return the files that are not ignored, relative to the root of this checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")


def programs_of(clone: Path) -> Mapping[str, Sequence[str]]:
    """Return the programs that the README's commands name after `. .venv/bin/activate` in the clone."""
    return {name: [str(clone / ".venv" / "bin" / name)] for name in ("dicompiler", "python")}
