"""Connecting to an artifact from a program: it needs only numpy, and errors name paths that are not artifacts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.handmade import partial
from support.running import emit
from support.tampering import rewrite

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.target.remote.certificates import make_keys

BLOCKED = "onnx onnxruntime onnx_graphsurgeon jsonschema_rs ml_dtypes pluggy click rich ortools google cryptography"


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


BOARDS = """
import sys
sys.path[:0] = sys.argv[4:]
for name in sys.argv[1].split():
    sys.modules[name] = None
from pathlib import Path
import dicompiler
from dicompiler.plugin_api import RunError, RunOptions
from dicompiler.plugin_api.artifacts import Hosts
place = Path(sys.argv[3])
try:
    dicompiler.connect(sys.argv[2], RunOptions(hosts=Hosts.load(place / "hosts.toml"), keys=place / "keys"))
except RunError as error:
    print(error)
"""


def test_client_needs_numpy_only(tmp_path: Path) -> None:
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    command = [sys.executable, "-c", CLIENT, str(emit(partial(), tmp_path)), *paths]
    # The client must run without onnxruntime; only the devices' processes need it.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[(1, 24), (1, 24), (1, 24)]\n", "")


def test_client_of_boards_needs_the_documented_software(tmp_path: Path) -> None:
    """The client gets as far as ssh, to an address without a host."""
    page = (Path(__file__).parents[2] / "docs" / "start" / "install.md").read_text()
    (said,) = re.findall(r"^pip install numpy (.*)$", page, re.MULTILINE)
    artifact = emit(partial(), tmp_path)
    devices = json.loads((artifact / "artifact.json").read_text())["devices"]
    make_keys(devices, tmp_path / "keys")
    entries = (f'[[host]]\nname = "{name}"\nssh = "127.0.0.1"\nport = 1\n' for name in devices)
    (tmp_path / "hosts.toml").write_text("".join(entries))
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    blocked = " ".join({*BLOCKED.split()} - {*said.replace("-", "_").split()})
    command = [sys.executable, "-c", BOARDS, blocked, str(artifact), str(tmp_path), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert re.fullmatch(r"device '\w+' on 127\.0\.0\.1: ssh: .*\n", done.stdout), done.stdout + done.stderr


def test_connect_refuses_a_directory_that_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match=r"not an artifact of dicompiler"):
        dicompiler.connect(tmp_path)
    rewrite(emit(partial(), tmp_path) / "artifact.json", lambda document: document.update(target="socket"))
    with pytest.raises(
        DicompilerError, match=r"target 'socket' does not support sessions \(did you mean 'sockets'\?\): use dicomp"
    ):
        dicompiler.connect(tmp_path)
