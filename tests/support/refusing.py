"""Check that a command line fails with one line on stderr and changes no files."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from dicompiler.cli import main

TEXT = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 3, 12, 12] x) => (float[1, 4, 12, 12] y, float[1, 4, 6, 6] z) {
      h = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
      r = Relu (h)
      y = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r, w2)
      z = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (y)
    }"""


PLATFORM = """
name = "lab"

[network]
kind = "switch"
bandwidth = "100 Mbit/s"

[[host]]
name = "a"
memory = "1 GiB"

[[device]]
name = "a"
rate = "1 GFLOP/s"
"""

COMPILE = ("--platform", "rpi4x2", "-o")


def network(seed: int = 7) -> onnx.ModelProto:
    """Return a network of two convolutions and a pool."""
    proto = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(seed)
    for name, shape in (("w1", (16, 3, 3, 3)), ("w2", (4, 16, 3, 3))):
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return proto


def image(seed: int = 1) -> Any:
    """Return a random input of `network`."""
    return np.random.default_rng(seed).standard_normal((1, 3, 12, 12)).astype(np.float32)


class Refused:
    """A check of commands that must fail, in the directory `place`."""

    def __init__(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.place, self.capsys = place, capsys

    def __call__(self, code: int, *arguments: object) -> str:
        """Run a command, check that it fails with exit code `code` and changes no file, and return its error."""
        before = dict(files(self.place))
        self.capsys.readouterr()
        got = main([str(argument) for argument in arguments])
        out, line = self.capsys.readouterr()
        assert (got, out) == (code, ""), line
        line = "".join(one for one in line.splitlines(True) if not one.startswith("dicompiler: warning: "))
        assert line.count("\n") == 1, line
        assert line.startswith("dicompiler: error: ")
        assert dict(files(self.place)) == before
        return line.rstrip("\n").removeprefix("dicompiler: error: ")


def files(place: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each path below `place`, links included, with the content of files."""
    for path in sorted(place.rglob("*")):
        yield str(path), path.read_bytes() if path.is_file() else b""


@contextmanager
def small_disk(place: Path, room: str) -> Iterator[Path]:
    """Mount a file system in memory at `place`, of the size `room` in mount's notation. Needs root."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> None:
    """Fill the file system of `place` with one file."""
    with (place / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                continue
        except OSError:
            assert file.tell() > 0
