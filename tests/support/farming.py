"""Dask clusters in network namespaces, and functions for their workers that kill processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.boards import HUB, Cluster
from support.building import environment

from dicompiler.cost.cost_model import AnalyticModel

PORT = 8786
ADDRESS = f"{HUB}:{PORT}"
OTHER = "from distributed import versions as v; v._version_cached = lambda name: '2024.1.0'; "
"""Code for a scheduler that reports another version of each package."""


def slow(number: int, of: int) -> int:
    """Return `number` after a pause that is shorter for larger numbers, so that later tasks end first."""
    time.sleep(0.02 * (of - number))
    return number


def killer(victim: int | str) -> None:
    """Kill a process with SIGKILL: the process with the ID `victim`, or this one if it can remove the file `victim`.

    Only one process can remove the file, so only the first caller dies.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if isinstance(victim, str):
            os.unlink(victim)
        os.kill(os.getpid() if isinstance(victim, str) else victim, signal.SIGKILL)


def deadly(number: int, path: str, worker: int) -> int:
    """Return `number`; for the number `worker`, first kill this process if it can remove the file at `path`."""
    if number == worker:
        killer(path)
    return number


def suicide(_number: int) -> None:
    """Kill this process, each time."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Deadly(AnalyticModel):
    """The analytic cost model. The first process other than `home` that calls it and can remove `path` kills itself."""

    home: int = 0
    path: str = ""

    def seconds(self, *args: Any, **options: Any) -> float:
        if os.getpid() != self.home:
            killer(self.path)
        return super().seconds(*args, **options)


@contextlib.contextmanager
def dask(boards: Cluster, place: Path, start: str = "") -> Iterator[Mapping[str, subprocess.Popen[bytes]]]:
    """Start a Dask scheduler in the hub's namespace, and a worker on each board.

    The result maps "scheduler" and the boards' names to processes. The scheduler runs the Python code `start` first.
    """
    code = f"{start}from distributed.cli.dask_scheduler import main; main()"
    more = ("--host", HUB, "--port", PORT, "--no-dashboard")
    started = {"scheduler": _start(boards.space, place, code, *more)}
    try:
        for board in boards.boards.values():
            code = "from distributed.cli.dask_worker import main; main()"
            more = (ADDRESS, "--nthreads", 1, "--no-nanny", "--no-dashboard", "--memory-limit", 0)
            started[board.name] = _start(board.space, board.place, code, *more, "--host", board.address)
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def _start(space: str, place: Path, code: str, *words: object) -> subprocess.Popen[bytes]:
    line = ["ip", "netns", "exec", space, sys.executable, "-c", code, *map(str, words)]
    with (place / "log").open("wb") as log:
        return subprocess.Popen(line, cwd=place, env=environment(), stdout=log, stderr=log)
