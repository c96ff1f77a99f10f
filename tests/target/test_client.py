"""Connecting to an artifact from a program: it takes numpy alone, and what is no artifact is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.handmade import partial
from support.running import emit
from support.tampering import rewrite

import dicompiler
from dicompiler.base.errors import DicompilerError

BLOCKED = "onnx onnxruntime onnx_graphsurgeon jsonschema ml_dtypes pluggy click rich ortools google cryptography"


CLIENT = f"""
import sys
sys.path[:0] = sys.argv[2:]
for name in {BLOCKED.split()}:
    sys.modules[name] = None
import dicompiler, numpy
with dicompiler.connect(sys.argv[1]) as session:
    x = numpy.ones((1, 16), numpy.float32)
    outputs = [session.infer({{"x": x, "x2": x}})] + list(session.stream([{{"x": x, "x2": x}}] * 2))
print([o["out"].shape for o in outputs])
"""


def test_a_client_needs_numpy_only(tmp_path: Path) -> None:
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    command = [sys.executable, "-c", CLIENT, str(emit(partial(), tmp_path)), *paths]
    # The devices, which do need onnxruntime, are processes of their own.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[(1, 24), (1, 24), (1, 24)]\n", "")


def test_what_is_no_artifact_cannot_be_connected_to(tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match=r"no artifact of dicompiler"):
        dicompiler.connect(tmp_path)
    rewrite(emit(partial(), tmp_path) / "artifact.json", lambda document: document.update(target="socket"))
    with pytest.raises(DicompilerError, match=r"target 'socket' wrote \(did you mean 'sockets'\?\)$"):
        dicompiler.connect(tmp_path)
