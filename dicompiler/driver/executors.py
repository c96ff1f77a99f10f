"""Executors that evaluate the plans of a search: processes of this host, MPI ranks, or a Dask cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean

T = TypeVar("T")

EXECUTOR_FORMS = {"processes": "processes=N", "dask": "dask=HOST:PORT", "mpi": "mpi"}
MAX_PROCESSES = 1024
MAX_PROCESS_FAILURES = 3
"""`ProcessExecutor.map` raises an error after this number of process failures without a result in between."""


def parse_executor(text: str) -> tuple[str, str]:
    """Return the kind and the value of an executor: "dask=10.0.0.1:8786" ⇒ ("dask", "10.0.0.1:8786")."""
    kind, sign, value = text.partition("=")
    if kind not in EXECUTOR_FORMS:
        raise UsageError(f"executor {text!r}: unknown kind {kind!r}{did_you_mean(kind, EXECUTOR_FORMS)}")
    if bool(value) != ("=" in EXECUTOR_FORMS[kind]) or bool(sign) != bool(value):
        raise UsageError(f"executor {text!r}: wrong form: write {EXECUTOR_FORMS[kind]}")
    if kind == "processes" and not (value.isascii() and value.isdigit() and 1 <= int(value[:5]) <= MAX_PROCESSES):
        raise UsageError(f"executor {text!r}: {value!r} is not a valid number of processes: use 1 to {MAX_PROCESSES}")
    if kind == "dask" and not re.fullmatch(r"((tcp|tls)://)?[^/@ ]+:\d{1,5}", value):
        raise UsageError(
            f"executor {text!r}: {value!r} is not an address: write it as 10.0.0.1:8786 or tls://farm:8786"
        )
    return kind, value


@contextlib.contextmanager
def open_executor(text: str | None) -> Iterator[Executor | None]:
    """Open the executor that a string describes, and close it at the end of the block.

    A script that uses processes must guard its main module with `if __name__ == "__main__":`, because each process
    imports that module again.

    Args:
        text: "processes=4" for processes of this host, "dask=10.0.0.1:8786" for a Dask scheduler, or "mpi" for the
            ranks of mpi4py.futures. None: no executor.

    Yields:
        The executor, or None.

    Raises:
        UsageError: The string is not valid, or a package is missing.
        DicompilerError: The cluster cannot be used.
    """
    if text is None:
        yield None
    else:
        executor = _make_executor(*parse_executor(text))
        try:
            yield executor
        finally:
            executor.shutdown(cancel_futures=True)


def _make_executor(kind: str, value: str) -> Executor:
    if kind == "dask":
        from dicompiler.driver.dask_executor import DaskExecutor

        return DaskExecutor(value)
    return ProcessExecutor(int(value)) if kind == "processes" else _open_mpi_pool()


class ProcessExecutor(Executor):
    """An executor that runs calls in processes of this host, and repeats the calls of a failed process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = self._make_pool()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._pool.submit(fn, *args, **kwargs)

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Return the results of `fn` in order. `timeout` is in seconds per result; `chunksize` is ignored.

        Raises:
            DicompilerError: Several processes failed in a row without any result.
        """
        del chunksize
        calls = list(zip(*iterables, strict=False))
        results: dict[int, T] = {}
        failures = 0
        while len(results) < len(calls):
            previous_count = len(results)
            running: dict[int, Future[T]] = {}
            try:
                running = {i: self._pool.submit(fn, *call) for i, call in enumerate(calls) if i not in results}
                for i, future in running.items():
                    results[i] = future.result(timeout)
            except BrokenProcessPool:
                done = {i: future for i, future in running.items() if future.done() and not future.exception()}
                results |= {i: future.result() for i, future in done.items()}
                failures = failures + 1 if len(results) == previous_count else 1
                self._restart_pool(failures)
            finally:
                for future in running.values():
                    future.cancel()
        return iter([results[i] for i in range(len(calls))])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _restart_pool(self, failures: int) -> None:
        if failures >= MAX_PROCESS_FAILURES:
            raise DicompilerError(
                f"executor processes={self._count}: a process failed {failures} times in a row without any result: if "
                "memory is short, use fewer processes"
            )
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._make_pool()

    def _make_pool(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        # The processes ignore Ctrl-C, because the calling process responds to it.
        return ProcessPoolExecutor(self._count, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def _open_mpi_pool() -> Executor:
    """Return a pool of all MPI ranks that mpirun started, except this one."""
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPIPoolExecutor
    except ImportError as error:
        missing = "mpi4py is not installed: pip install 'dicompiler[mpi4py]'"
        raise UsageError(f"executor mpi: {missing if error.name else error}") from None
    except RuntimeError:
        raise UsageError(
            "executor mpi: mpi4py found no MPI library: install one and start the command with mpirun"
        ) from None
    if "mpi4py.futures" not in sys.orig_argv or MPI.COMM_WORLD.Get_size() < 2:
        line = "mpirun -n 5 python3 -m mpi4py.futures -m dicompiler …"
        raise UsageError(f"executor mpi: the command was not started with several ranks: start it as '{line}'")
    pool: Executor = MPIPoolExecutor()
    return pool
