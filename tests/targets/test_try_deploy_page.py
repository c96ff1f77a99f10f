"""The page about `deploy` without boards: its script and commands work as they are written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from dicompiler.networks import build

PAGE = Path(__file__).parents[2] / "docs" / "use" / "try-deploy.md"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with a model and the page's script, for commands that use this Python; ends the ssh server."""
    directory = tmp_path / "my boards"
    directory.mkdir()
    onnx.save(build("lenet"), directory / "model.onnx")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in (
        ("python3", sys.executable),
        ("dicompiler", f"{sys.executable} -m dicompiler"),
    ):
        (programs / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (programs / name).chmod(0o755)
    yield directory
    for file in tmp_path.glob("*/boards/sshd.pid"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGTERM)


@pytest.mark.slow
def test_its_commands_run_and_leave_nothing(place: Path) -> None:
    Path("/run/sshd").mkdir(exist_ok=True)  # Tests run as root, and sshd started by root needs this directory.
    script, start, end = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    other = place.parent / "other boards"
    other.mkdir()
    for directory in (place, other):
        (directory / "boards.sh").write_text(script)
    lines = (start + end).splitlines()
    path = os.pathsep.join([str(place.parent / "bin"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(line: str, directory: Path = place) -> str:
        done = subprocess.run(["sh", "-c", line], cwd=directory, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert [line.partition(" ")[0] for line in lines] == ["sh", *["dicompiler"] * 4, "kill", "rm"]
    for line in lines[:4]:
        printed = run(line)
    assert re.search(r"^output on pi01 +ok ", printed, re.MULTILINE)
    for line in (lines[0], f"dicompiler deploy '{place / 'build'}' --hosts boards/hosts.toml --copy-only"):
        run(line, other)  # Clusters in two directories do not disturb each other.
    run(f"{lines[3]} --resident")
    boards = [place / "boards" / name for name in ("pi01", "pi02", "pi03", "pi04")]
    assert all((board / ".keys").is_dir() and (board / ".resident").is_dir() for board in boards)
    assert json.loads(run(f"{lines[4]} --json"))["removed"] == ["pi01", "pi02", "pi03", "pi04"]
    assert not any(board.exists() for board in boards)
    assert json.loads(run(f"{lines[4]} --json"))["removed"] == []
    for line in lines[5:]:
        run(line)
    assert not (place / "boards").exists()
