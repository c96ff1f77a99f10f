"""Fixtures of command lines: a model, one with an open dimension, an artifact, and what watches refusals."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.command_lines import LINES
from support.commands import TEXT
from support.refusing import COMPILE, Refused, network

from dicompiler.cli import main
from dicompiler.networks import build


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(network(), path)
    return path


@pytest.fixture
def open_model(tmp_path: Path) -> Path:
    """Two convolutions with a dynamic batch."""
    proto = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(7)
    for name, shape in (("w1", (8, 3, 3, 3)), ("w2", (4, 8, 3, 3))):
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    return path


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network, compiled for two devices."""
    place = tmp_path_factory.mktemp("compiled")
    onnx.save(network(), place / "model.onnx")
    assert main(["compile", str(place / "model.onnx"), "--strategy", "modnn", *COMPILE, str(place / "out")]) == 0
    return place / "out"


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(tmp_path, capsys)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a network, its artifact and a plan."""
    directory = tmp_path_factory.mktemp("results")
    onnx.save(build("tiny"), directory / "tiny.onnx")
    with contextlib.chdir(directory):
        assert [main(LINES[name].split()) for name in ("compile", "plan")] == [0, 0]
    return directory


@pytest.fixture
def place(results: Path, request: pytest.FixtureRequest) -> Path:
    """The directory in which the commands run, in any order. For `calibrate`, it has the log of an emulated run."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "calibrate" in parameters.values() and not (results / "emulated.json").exists():
        with contextlib.chdir(results):
            assert main(LINES["emulate"].split()) == 0
    return results
