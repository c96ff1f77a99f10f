"""`dicompiler verify` and its timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.commands import command, failed
from support.invalid_models import HUGE, loop

from dicompiler.base.errors import DicompilerError
from dicompiler.driver.artifact import verify
from dicompiler.driver.compiler import compile
from dicompiler.ir.onnx.model import Model
from dicompiler.verify.deadline import Deadline, deadline_scope
from dicompiler.verify.executor import run_model


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """An artifact with a network that would run for billions of years."""
    compile(loop(HUGE), platform="rpi4x2", strategy="single", output=tmp_path / "endless")
    return tmp_path / "endless"


def test_timeout_stops_verification_and_names_level_and_cause(endless: Path) -> None:
    line = failed(1, "verify", endless, "--timeout", "2")
    assert line == (
        "dicompiler: error: verify: exact: the whole model: not finished after 2 s in all: allow more time (--timeout; "
        "in Python: timeout)"
    )


def test_reference_run_is_stopped_as_well() -> None:
    inputs = {"x": np.ones((1, 4, 8, 8), np.float32)}
    late = pytest.raises(DicompilerError, match=r"^verify: real: the whole model: not finished after 1 s in all")
    with late, deadline_scope(Deadline(1.0), "verify: real"):
        run_model(Model.load(loop(HUGE)), inputs)
    with deadline_scope(Deadline(60.0), "verify: real"):
        assert (run_model(Model.load(loop(3)), inputs)["y"] == 1).all()


@pytest.mark.slow
def test_interrupt_is_noticed_while_onnxruntime_computes(endless: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dicompiler", "verify", str(endless), "--timeout", "100"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(4)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said.strip()) == (130, "dicompiler: interrupted")


def test_network_that_ends_is_verified_within_its_timeout(tmp_path: Path) -> None:
    made = compile(loop(3), platform="rpi4x2", strategy="single", output=tmp_path / "a")
    assert made.verify(timeout=100).passed and verify(tmp_path / "a", timeout=100).passed
    assert command("verify", tmp_path / "a", "--timeout", "100").returncode == 0
