"""Progress of commands: terminals show and remove it, pipes do not get it, and warnings are complete."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_lines import LINES, SEARCH


def on_terminal(line: str, place: Path) -> tuple[str, str]:
    """Run a command with a pipe as stdout and a terminal as stderr; return both outputs."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dicompiler", *line.split()],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=follower,
    )
    os.close(follower)
    said = b""
    while True:
        try:
            data = os.read(leader, 1 << 16)
        except OSError:  # The process has closed its end of the terminal.
            break
        if not data:
            break
        said += data
    output, _ = process.communicate(timeout=120)
    os.close(leader)
    assert process.returncode == 0, said
    return output.decode(), said.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("plan tiny.onnx --platform rpi4x2 --strategy genetic{generations=2} -o p.json", "generation"),
        ("compile tiny.onnx --platform rpi4x2 --strategy auto -o built", "auto: "),
        ("compare tiny.onnx --platform rpi4x2 --strategies single,cpsat --json", "cpsat"),
        (f"explore tiny.onnx --platform rpi4x2 {SEARCH} -o explored", "generation"),
        ("profile tiny.onnx --repeat 1 --tiles 1 --target none -o p.json", "measuring layer 1/"),
    ],
)
def test_progress_is_shown_on_a_terminal_and_removed(line: str, word: str, place: Path) -> None:
    output, said = on_terminal(line, place)
    assert word in said
    assert "\x1b" not in output
    # The last escape codes erase the progress line and show the cursor again.
    assert said.endswith("\x1b[2K") and "\x1b[?25h" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LINES if name not in ("demo", "keys", "opt")])
def test_pipes_get_no_progress(name: str, place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dicompiler", *LINES[name].split()],
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"},
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert not set(done.stdout + done.stderr) & {0x1B, 0x0D, 0x08}
    warned = [line for line in done.stderr.decode().splitlines() if not line.startswith("dicompiler: warning: ")]
    assert warned == []


def test_progress_keeps_warnings_whole(place: Path) -> None:
    _, said = on_terminal("compile tiny.onnx --platform rpi4x2 --strategy modnn -o warned", place)
    assert "dicompiler: warning: this plan's predicted latency is worse than that of one device" in said.replace(
        "\r\n", " "
    )
