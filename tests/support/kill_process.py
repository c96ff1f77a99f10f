"""Kills one process of a `dicompiler run`, and checks the other processes and the output.

An artifact, a victim (a device or the coordinator) and a time ⇒ the outcome.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.running import pids, wait_until

COORDINATOR = "(coordinator)"


@dataclass(frozen=True)
class KillOutcome:
    """The outcome of a kill.

    Attributes:
        victim: The killed process.
        moment_s: Seconds from the start of the victim to the kill.
        seconds: Seconds from the kill to the end of all processes.
        message: The run's last line.
        left: New files next to the artifact.
    """

    victim: str
    moment_s: float
    seconds: float
    message: str
    left: tuple[str, ...]

    def find_fault(self, limit_s: float) -> str:
        """Return a description of the rule that the run violated, or ""."""
        named = (
            self.victim == COORDINATOR or f"device {self.victim!r}: its process was ended by signal 9" in self.message
        )
        if self.seconds > limit_s:
            return f"took {self.seconds:.2f} s"
        if self.left:
            return f"left {', '.join(self.left)}"
        return "" if named else f"said {self.message!r}"


def kill_once(directory: Path, victim: str, moment_s: float) -> KillOutcome:
    """Start a long run, and kill `victim` that many seconds after its process has started."""
    before = set(directory.parent.iterdir())
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    command = [sys.executable, "-m", "dicompiler", "run", str(directory), "--frames", "1000000"]
    command += ["--outputs", str(directory.parent / "y.npz")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}) as run:
        if victim == COORDINATOR:
            wait_until(lambda: pids(directory))
            pid = run.pid
        else:
            pid = wait_until(lambda: pids(directory).get(victim) or run.poll() is not None)
        time.sleep(moment_s)
        assert run.poll() is None, "the run ended before the kill"
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: not pids(directory) and run.poll() is not None)
        seconds = time.monotonic() - killed
        assert run.stderr is not None
        lines = run.stderr.read().decode().strip().splitlines()
    left = tuple(sorted(path.name for path in set(directory.parent.iterdir()) - before))
    return KillOutcome(victim, moment_s, seconds, lines[-1] if lines else "", left)
