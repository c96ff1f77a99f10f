"""Calls a function in another process, whose strings hash to other numbers: what depends on their order shows there."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dicompiler.testing.assertions import require

T = TypeVar("T")

_CHILD_CODE = """
import pickle, sys
from pathlib import Path
place = Path(sys.argv[1])
path, call = pickle.loads(place.read_bytes())
sys.path[:] = path
function, arguments = pickle.loads(call)
place.write_bytes(pickle.dumps(function(*arguments)))
"""


def call_in_subprocess(function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` in a new process. The classes of all arguments must be of modules that can be imported;
    AssertionError where they are not, and where the process fails."""
    for argument in arguments:
        known = type(argument).__module__ != "__main__"
        require(known, f"{type(argument).__name__} is of the script itself: put it into a module that can be imported")
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "call")
        place.write_bytes(pickle.dumps((sys.path, pickle.dumps((function, arguments)))))
        done = subprocess.run(
            [sys.executable, "-c", _CHILD_CODE, str(place)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        *_, last = ["", *done.stderr.strip().splitlines()]
        require(done.returncode == 0, f"another process fails: {last}")
        found: T = pickle.loads(place.read_bytes())
    return found
