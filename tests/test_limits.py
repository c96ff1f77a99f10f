"""The time limit that conftest.py sets for every test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LIMIT_S

from dicompiler.testing.assertions import TimeLimitError, time_limit

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    "wait",
    [
        lambda: time.sleep(30),
        lambda: threading.Event().wait(30),
        lambda: subprocess.run([sys.executable, "-c", "import time; time.sleep(30)"], check=True),
    ],
    ids=["sleep", "lock", "process"],
)
def test_fails_after_time_limit_and_restores_outer_limit(wait: Callable[[], object]) -> None:
    handler, begun = signal.getsignal(signal.SIGALRM), time.monotonic()
    with (
        pytest.raises(TimeLimitError, match=r"^it did not end within 0\.2 s \(it is in \S+, \w+\.py\)$"),
        time_limit(0.2),
    ):
        wait()
    assert time.monotonic() - begun < 10
    assert signal.getsignal(signal.SIGALRM) is handler
    assert LIMIT_S - 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= LIMIT_S


@pytest.mark.parametrize("trap", ["", "trap '' INT; "], ids=["heard", "ignored"])
def test_handles_interrupt_that_was_ignored_at_start(trap: str) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import conftest, signal; signal.raise_signal(signal.SIGINT)"
    line = ["sh", "-c", f'{trap}exec "$@"', "sh", sys.executable, "-c", code, str(TESTS)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.endswith("KeyboardInterrupt\n")
