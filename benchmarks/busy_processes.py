"""Processes that keep the processors of this host busy, for benchmarks under load."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes, each of which keeps a processor busy, until the end of the `with` block."""
    processes = [multiprocessing.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute() -> None:
    """Compute until the process is ended."""
    while True:
        pass
