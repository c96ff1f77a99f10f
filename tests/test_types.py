"""The Python code in README.md and docs/start/tutorial.md passes type checkers in their strict modes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import console

ROOT = console.DOCUMENT.parent
SHOWN = [code for page in (console.DOCUMENT, console.TUTORIAL) for code in console.blocks(page.read_text(), "python")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shown")
    for number, code in enumerate(code for code in SHOWN if "dicompiler" in code):
        (directory / f"shown{number}.py").write_text(code)
    return directory


def checked(*words: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_shown_code_passes_mypy(place: Path) -> None:
    checked("mypy", "--strict", *map(str, sorted(place.glob("*.py"))), cwd=ROOT)


def test_shown_code_passes_pyright(place: Path) -> None:
    """basedpyright includes all that it needs; its mode `strict` is that of pyright."""
    paths = [str(ROOT / name) for name in ("", "passes", "targets", "plugins")]
    config = {"typeCheckingMode": "strict", "extraPaths": paths, "pythonVersion": "3.11"}
    (place / "pyrightconfig.json").write_text(json.dumps(config))
    checked("basedpyright", "--pythonpath", sys.executable, cwd=place)
