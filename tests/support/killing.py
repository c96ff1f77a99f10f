"""Kills one process of a `dicompiler run` at some moment, and sees what becomes of the others and of its output.

In: an artifact, a victim (a device, or the coordinator), a moment. Out: what was found.
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
class Found:
    """seconds: from the kill until no process was left. message: the run's last line. left: files beside the artifact
    that were not there before."""

    victim: str
    moment_s: float
    seconds: float
    message: str
    left: tuple[str, ...]

    def wrong(self, limit_s: float) -> str:
        """What is not as it must be, or ''."""
        named = (
            self.victim == COORDINATOR or f"device {self.victim!r}: its process was ended by signal 9" in self.message
        )
        if self.seconds > limit_s:
            return f"took {self.seconds:.2f} s"
        if self.left:
            return f"left {', '.join(self.left)}"
        return "" if named else f"said {self.message!r}"


def kill_once(directory: Path, victim: str, moment_s: float) -> Found:
    """Starts a long run, and kills `victim` that many seconds after its process was there."""
    before = set(directory.parent.iterdir())
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    command = [sys.executable, "-m", "dicompiler.cli", "run", str(directory), "--frames", "1000000"]
    command += ["--outputs", str(directory.parent / "y.npz")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}) as run:
        if victim == COORDINATOR:
            wait_until(lambda: pids(directory))
            pid = run.pid
        else:
            pid = wait_until(lambda: pids(directory).get(victim) or run.poll() is not None)
        time.sleep(moment_s)
        assert run.poll() is None, "the run was over before"
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: not pids(directory) and run.poll() is not None)
        seconds = time.monotonic() - killed
        assert run.stderr is not None
        lines = run.stderr.read().decode().strip().splitlines()
    left = tuple(sorted(path.name for path in set(directory.parent.iterdir()) - before))
    return Found(victim, moment_s, seconds, lines[-1] if lines else "", left)
