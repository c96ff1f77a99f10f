"""Commands print and write names with other characters than ASCII in every locale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from support.building import environment
from support.refusing import network

from dicompiler.ir.platform import Platform, platform_to_toml

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a model and a platform file, whose names are not ASCII."""
    directory = tmp_path / "dür"
    directory.mkdir()
    onnx.save(network(), directory / "mödel.onnx")
    text = platform_to_toml(Platform.load("rpi4x2")).replace('name = "rpi4x2"', 'name = "clüster"', 1)
    (directory / "clüster.toml").write_text(text, encoding="utf-8")
    return directory


def run(place: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "dicompiler", *arguments]
    return subprocess.run(command, cwd=place, env=environment(**env), capture_output=True, timeout=120)


@pytest.mark.slow
def test_names_are_printed_and_written_in_an_ascii_locale(place: Path) -> None:
    for line in (
        "compile ../dür/mödel.onnx --platform ../dür/clüster.toml --strategy modnn -o öut",
        "compile ../dür/mödel.onnx --platform ../dür/clüster.toml --strategy modnn -o öut --quiet",
        "run öut --log ../dür/lög.json",
        "verify öut",
        "platform clüster.toml",
        "list strategies",
        "plan mödel.onnx --platform clüster.toml --strategy modnn -o plän.json --json",
    ):
        done = run(place, *line.split(), **ASCII)
        assert done.returncode == 0, done.stderr
        if line.startswith("platform"):
            assert 'name = "clüster"' in done.stdout.decode("utf-8")
        if line.startswith("plan"):
            assert json.loads(done.stdout)["outputs"] == ["plän.json"]
    assert "lög.json" in os.listdir(place) and json.loads((place / "lög.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_invalid_names_are_errors_of_one_line_in_an_ascii_locale(place: Path) -> None:
    (place / "bad.toml").write_text((place / "clüster.toml").read_text("utf-8").replace("pi01", "pü01"), "utf-8")
    for line in (
        "compile mödel.onnx --platform bad.toml -o öut",
        "compile nö.onnx --platform clüster.toml -o öut",
        "run nö",
        "verify nö",
        "list strategies nö",
        "plan mödel.onnx --platform nö -o plan.json",
    ):
        done = run(place, *line.split(), **ASCII)
        assert done.returncode in (1, 2), line
        assert done.stderr.startswith(b"dicompiler: error: ") and done.stderr.count(b"\n") == 1, done.stderr


def test_names_with_bytes_that_are_not_utf_8_are_printed(place: Path) -> None:
    done = run(place, "platform", "clüster.toml", "-o", os.fsdecode(b"\xff.toml"))
    assert done.stdout == b"written: \xff.toml\n", done.stderr
