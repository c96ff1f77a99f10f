"""--json of every command has the shape that docs/formats.md shows; progress is for terminals alone."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import onnx
import pytest

from dicompiler.base.schema import validate
from dicompiler.cli import main
from dicompiler.cli.group import COMMANDS
from dicompiler.networks import build

OWN = {"run": "run", "compare": "comparison", "explore": "front"}
"""Commands that print a file of a format of its own."""
SEARCH = "--generations 3 --population 10"
LINES = {
    "compile": "compile tiny.onnx --platform rpi4x2 --strategy modnn -o net",
    "run": "run net --frames 2",
    "keys": "keys net",
    "verify": "verify net",
    "plan": "plan tiny.onnx --platform rpi4x2 --strategy modnn -o plan.json",
    "compare": "compare tiny.onnx --platform rpi4x2 --strategies single,stahl,modnn",
    "explore": f"explore tiny.onnx --platform rpi4x2 {SEARCH} -o front",
    "simulate": "simulate tiny.onnx --platform rpi4x2 --plan plan.json --frames 3",
    "report": "report net -o report.html",
    "profile": "profile tiny.onnx --repeat 1 --tiles 1,2 -o profile.json",
    "opt": "opt tiny.onnx -p infer-shapes,form-layers,tile-height{layers=stem} --timing --statistics"
    " --save-plan own.json -o split.onnx",
    "demo": "demo --network tiny --platform rpi4x2 --strategy modnn",
}
MORE = {
    "profile": "profile tiny.onnx --package package",
    "compare": "compare tiny.onnx --platform rpi4x2 --strategies modnn --objective energy",
    "opt": "opt tiny.onnx -p infer-shapes -o shapes.onnx",
}
KINDS = ("passes", "strategies", "targets", "operators", "cost-models", "platforms", "plugins")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, in any order: there is a network, compiled, and a plan."""
    directory = tmp_path_factory.mktemp("results")
    onnx.save(build("tiny"), directory / "tiny.onnx")
    with contextlib.chdir(directory):
        assert main(LINES["compile"].split()) == main(LINES["plan"].split()) == 0
    return directory


def printed(line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """The document that a command prints, checked against its shape."""
    monkeypatch.chdir(place)
    assert main([*line.split(), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    name = line.split()[0]
    validate({name: document}, "results", line)
    if name in OWN:
        validate({key: value for key, value in document.items() if key != "front"}, OWN[name], line)
    return document


def test_every_command_has_json_and_a_shape(place: Path) -> None:
    for name in COMMANDS:
        options = [word for param in import_module(f"dicompiler.cli.{name}").command.params for word in param.opts]
        assert "--json" in options, name
    file = resources.files("dicompiler.base") / "schemas" / "results.schema.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    assert set(schema["properties"]) == set(COMMANDS)
    # deploy needs hosts: it is looked at where there are some, in tests/targets/test_deploy.py
    assert set(LINES) | {"list", "deploy"} == set(COMMANDS)
    assert place.is_dir()


@pytest.mark.parametrize("name", LINES)
def test_json_is_as_documented(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    document = printed(LINES[name], place, monkeypatch, capfd)
    assert document
    if name in MORE:
        printed(MORE[name], place, monkeypatch, capfd)


@pytest.mark.parametrize("kind", KINDS)
def test_json_of_lists(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(printed(f"list {kind}", place, monkeypatch, capfd)) > 0


def test_a_wrong_shape_would_be_seen() -> None:
    from dicompiler.base.errors import DicompilerError

    with pytest.raises(DicompilerError, match="unknown key 'mode'"):
        validate({"keys": {"keys": "k", "made": [], "mode": 1}}, "results", "keys --json")


def on_terminal(line: str, place: Path) -> tuple[str, str]:
    """(stdout, a pipe; what a terminal got as stderr) of a command."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dicompiler.cli", *line.split()],
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
        except OSError:  # the other end was closed
            break
        if not data:
            break
        said += data
    output, _ = process.communicate(timeout=120)
    os.close(leader)
    assert process.returncode == 0, said
    return output.decode(), said.decode()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("plan tiny.onnx --platform rpi4x2 --strategy genetic{generations=2} -o p.json", "generation"),
        ("compile tiny.onnx --platform rpi4x2 --strategy auto -o built", "auto: "),
        ("compare tiny.onnx --platform rpi4x2 --strategies single,cpsat --json", "cpsat"),
        (f"explore tiny.onnx --platform rpi4x2 {SEARCH} -o explored", "generation"),
        ("profile tiny.onnx --repeat 1 --tiles 1 -o p.json", "measuring layer 1/"),
    ],
)
def test_progress_is_shown_on_a_terminal_and_goes_away(line: str, word: str, place: Path) -> None:
    output, said = on_terminal(line, place)
    assert word in said
    assert "\x1b" not in output
    assert said.endswith("\x1b[2K") and "\x1b[?25h" in said  # the line is wiped out, and the cursor is back


@pytest.mark.parametrize("name", [name for name in LINES if name not in ("demo", "keys", "opt")])
def test_nothing_is_said_into_pipes(name: str, place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dicompiler.cli", *LINES[name].split()],
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
    assert "dicompiler: warning: this plan's predicted latency is worse than that of one device alone" in said.replace(
        "\r\n", " "
    )
