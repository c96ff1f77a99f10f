"""Calls in a process with another hash seed, which reveal results that depend on the order of sets."""

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
file = Path(sys.argv[1])
path, call = pickle.loads(file.read_bytes())
sys.path[:] = path
function, arguments = pickle.loads(call)
file.write_bytes(pickle.dumps(function(*arguments)))
"""


def call_in_subprocess(function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, computed in a new process with another hash seed.

    The function and the classes of the arguments must be in modules that can be imported, not in the script that is
    run.

    Raises:
        AssertionError: A class is in the script itself, or the process fails.
    """
    for argument in arguments:
        name = type(argument).__name__
        can_import = type(argument).__module__ != "__main__"
        require(can_import, f"{name} is defined in the script itself: move it to a module that can be imported")
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "call")
        file.write_bytes(pickle.dumps((sys.path, pickle.dumps((function, arguments)))))
        process = subprocess.run(
            [sys.executable, "-c", _CHILD_CODE, str(file)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        *_, last_line = ["", *process.stderr.strip().splitlines()]
        require(process.returncode == 0, f"the call fails in another process: {last_line}")
        result: T = pickle.loads(file.read_bytes())
    return result
