"""Clusters of Dask for tests, in network namespaces, and work that does damage where it is done.

In: boards. Out: a scheduler in the hub's namespace and a worker in each board's, all real processes.
"""

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
"""A scheduler that says that all it runs is of another version."""


def slow(number: int, of: int) -> int:
    """The later ones end first."""
    time.sleep(0.02 * (of - number))
    return number


def killer(victim: int | str) -> None:
    """Ends a process as nobody can prevent, once: the first who can remove a file (a path), or a process by its id."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if isinstance(victim, str):
            os.unlink(victim)
        os.kill(os.getpid() if isinstance(victim, str) else victim, signal.SIGKILL)


def deadly(number: int, path: str, worker: int) -> int:
    """The number, but the first worker at number `worker` is lost over it."""
    if number == worker:
        killer(path)
    return number


def suicide(_number: int) -> None:
    """Nobody ever gets through this."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Deadly(AnalyticModel):
    """What costs one other process its life, that which asks first while the file `path` is there."""

    home: int = 0
    path: str = ""

    def seconds(self, *args: Any, **options: Any) -> float:
        if os.getpid() != self.home:
            killer(self.path)
        return super().seconds(*args, **options)


@contextlib.contextmanager
def dask(boards: Cluster, place: Path, start: str = "") -> Iterator[Mapping[str, subprocess.Popen[bytes]]]:
    """scheduler, and the board's name for each worker → its process. start: what the scheduler runs first."""
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
