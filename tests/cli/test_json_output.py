"""Each command's --json output has the form that docs/reference/formats shows; only terminals show progress."""

from __future__ import annotations

import json
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import LINES

from dicompiler.base.schema import validate
from dicompiler.cli import main
from dicompiler.cli.command_line import COMMANDS

OWN = {"run": "run", "compare": "comparison", "explore": "front"}
"""Commands that print a file of a format of its own."""


MORE = {
    "profile": "profile tiny.onnx --package package",
    "compare": "compare tiny.onnx --platform rpi4x2 --strategies modnn --objective energy",
    "opt": "opt tiny.onnx -p infer-shapes -o shapes.onnx",
}


KINDS = ("passes", "strategies", "targets", "operators", "cost-models", "platforms", "plugins")


def printed(line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Return the JSON document that a command prints, after a check against its schema."""
    monkeypatch.chdir(place)
    assert main([*line.split(), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    name = line.split()[0]
    validate({name: document}, "results", line)
    if name in OWN:
        validate({key: value for key, value in document.items() if key != "front"}, OWN[name], line)
    return document


@pytest.mark.slow
def test_every_command_has_json_and_a_shape(place: Path) -> None:
    for name in COMMANDS:
        options = [word for param in import_module(f"dicompiler.cli.{name}").command.params for word in param.opts]
        assert "--json" in options, name
    file = resources.files("dicompiler.base") / "schemas" / "results.schema.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    assert set(schema["properties"]) == set(COMMANDS)
    # The four commands named here need hosts, or devices that keep running. Other tests check them:
    # tests/targets/test_deploy.py and test_sockets_resident.py.
    assert set(LINES) | {"list", "deploy", "status", "tune"} == set(COMMANDS)
    assert place.is_dir()


SLOW_COMMANDS = ("calibrate", "demo", "emulate", "profile")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_COMMANDS else []) for name in LINES]
)
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


def test_wrong_shape_would_be_seen() -> None:
    from dicompiler.base.errors import DicompilerError

    with pytest.raises(DicompilerError, match="unknown key 'mode'"):
        validate({"keys": {"keys": "k", "created": [], "mode": 1}}, "results", "keys --json")
