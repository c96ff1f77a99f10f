"""Calls in a process with another hash seed, which reveal results that depend on the order of sets."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dicompiler.testing.assertions import require

T = TypeVar("T")

HASH_SEED_COUNT = 3
"""Number of hash seeds with which results are compared."""

_CHILD_VARIABLE = "DICOMPILER_TESTING_CHILD"
"""Environment variable that is set in the new process, to report a check that runs there again."""
_CHILD_CODE = """
import pickle, sys
from pathlib import Path
path, call = pickle.loads(Path(sys.argv[1], "call").read_bytes())
sys.path[:] = path
function, arguments = pickle.loads(call)
Path(sys.argv[1], "result").write_bytes(pickle.dumps(function(*arguments)))
"""


def call_with_hash_seeds(function: Callable[..., T], *arguments: Any, limit_s: float) -> Iterator[T]:
    """Yield `function(*arguments)`, computed in HASH_SEED_COUNT processes with different hash seeds.

    With one other seed, a set of two elements often has the same order by chance.

    Args:
        function: The function, from a module that can be imported.
        *arguments: Arguments of the function, which are pickled.
        limit_s: Seconds after which each process is killed.

    Yields:
        The results, one per process. The next process is started when the caller asks for its result.

    Raises:
        AssertionError: As for `call_in_subprocess`.
    """
    for seed in range(1, HASH_SEED_COUNT + 1):
        yield call_in_subprocess(function, *arguments, limit_s=limit_s, seed=seed)


def call_in_subprocess(function: Callable[..., T], *arguments: Any, limit_s: float, seed: int = 1) -> T:
    """Return `function(*arguments)`, computed in a new process with another hash seed.

    Args:
        function: The function, from a module that can be imported.
        *arguments: Arguments of the function, which are pickled.
        limit_s: Seconds after which the process is killed.
        seed: Hash seed of the process. If this process has the same one, another seed is used.

    Raises:
        AssertionError: The class of an argument is defined in the script itself; a module calls the check when it is
            imported; or the process fails, ends without a result, or exceeds the time limit.
    """
    for argument in arguments:
        name = type(argument).__name__
        can_import = type(argument).__module__ != "__main__"
        require(can_import, f"{name} is defined in the script itself: move it to a module that can be imported")
    require(
        _CHILD_VARIABLE not in os.environ,
        "its module calls the check when it is imported: call the check in a test function",
    )
    if os.environ.get("PYTHONHASHSEED") == str(seed):
        seed += HASH_SEED_COUNT
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "call").write_bytes(pickle.dumps((sys.path, pickle.dumps((function, arguments)))))
        try:
            process = subprocess.run(
                [sys.executable, "-c", _CHILD_CODE, directory],
                env={**os.environ, "PYTHONHASHSEED": str(seed), _CHILD_VARIABLE: "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the call in another process did not end within {limit_s:g} s") from None
        *_, last_line = [f"exit code {process.returncode}", *process.stderr.strip().splitlines()]
        require(process.returncode == 0, f"the call fails in another process: {last_line}")
        result_file = Path(directory, "result")
        require(result_file.is_file(), "the call ends the other process with exit code 0, but without a result")
        result: T = pickle.loads(result_file.read_bytes())
    return result
