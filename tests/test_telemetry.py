"""onnxruntime sends no telemetry, neither when networks are compiled nor on devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dicompiler
from dicompiler import networks


@pytest.mark.parametrize("where", ["here", "on a device"])
def test_onnxruntime_sends_no_telemetry(where: str, tmp_path: Path) -> None:
    dicompiler.compile(networks.build("lenet", 0), "rpi4x2", "modnn", output=tmp_path / "net")
    line = "import dicompiler, onnxruntime" if where == "here" else "import runtime.segments"
    (home := tmp_path / "home").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(home), "TMPDIR": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    subprocess.run([sys.executable, "-c", line], cwd=tmp_path / "net" / "pi01", env=environment, check=True, timeout=60)
    assert list(home.rglob("*")) == []
