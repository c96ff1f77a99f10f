"""Run `dicompiler` as users do, in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

TEXT = """<ir_version: 8, opset_import: ["": 17]>
    g (float[N, 3, 16, 16] x) => (float[N, 4, 16, 16] y) {
      h = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
      r = Relu (h)
      s = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r, w2)
      y = Dropout (s)
    }"""


SHAPE = ("--shape", "x=1x3x16x16")


def command(
    *arguments: object, cwd: Path | None = None, stdout: IO[Any] | int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `dicompiler` in a separate process, with `env` as additional environment variables."""
    return subprocess.run(
        [sys.executable, "-m", "dicompiler", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        cwd=cwd,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


def failed(code: int, *arguments: object, **env: str) -> str:
    """Run `dicompiler`, check that it fails with this exit code, and return the only line that it prints."""
    done = command(*arguments, **env)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr.removesuffix("\n")
