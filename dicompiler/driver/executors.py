"""Whom the work of a search is given: processes of this machine, ranks of MPI, or a Dask cluster.

Text such as "processes=4" goes in, an Executor for `compile(executor=…)`, `explore` and `Problem.executor` comes out.
"""

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
"""So many lost processes in a row, and no work done in between, are no accident."""


def parse_executor(text: str) -> tuple[str, str]:
    """`dask=10.0.0.1:8786` → its kind and what stands behind the sign. UsageError for what is none of KINDS."""
    kind, sign, value = text.partition("=")
    if kind not in EXECUTOR_FORMS:
        raise UsageError(f"executor {text!r}: there is no {kind!r}{did_you_mean(kind, EXECUTOR_FORMS)}")
    if bool(value) != ("=" in EXECUTOR_FORMS[kind]) or bool(sign) != bool(value):
        raise UsageError(f"executor {text!r}: write {EXECUTOR_FORMS[kind]}")
    if kind == "processes" and not (value.isascii() and value.isdigit() and 1 <= int(value[:5]) <= MAX_PROCESSES):
        raise UsageError(f"executor {text!r}: {value!r} is no number of processes: take 1 to {MAX_PROCESSES}")
    if kind == "dask" and not re.fullmatch(r"((tcp|tls)://)?[^/@ ]+:\d{1,5}", value):
        raise UsageError(f"executor {text!r}: {value!r} is no address: such as 10.0.0.1:8786, or tls://farm:8786")
    return kind, value


@contextlib.contextmanager
def open_executor(text: str | None) -> Iterator[Executor | None]:
    """The executor that `text` names, closed in the end; None for None.

    "processes=4": of this machine (a script that calls this guards its main module, see `multiprocessing`);
    "dask=10.0.0.1:8786": a scheduler of Dask distributed; "mpi": the pool of mpi4py.futures.
    What is computed is the same with any of them and without. UsageError for another text, or where the package that it
    takes is missing; DicompilerError where a cluster cannot be used.
    """
    if text is None:
        yield None
        return
    kind, value = parse_executor(text)
    if kind == "dask":
        from dicompiler.driver.dask_executor import DaskExecutor

        opened: Executor = DaskExecutor(value)
    else:
        opened = ProcessExecutor(int(value)) if kind == "processes" else _open_mpi_pool()
    try:
        yield opened
    finally:
        opened.shutdown(cancel_futures=True)


class ProcessExecutor(Executor):
    """`count` processes of this machine. Where one is lost, `map` has others do again what was not done.

    An interrupt of the terminal is for the process that asks, not for these.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = self._make_pool()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """A call, which fails where a process is lost."""
        return self._pool.submit(fn, *args, **kwargs)

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """The results in order, all at once. timeout: seconds for each; chunksize says nothing here. DicompilerError
        where LOSSES processes in a row end without a result."""
        del chunksize
        calls = list(zip(*iterables, strict=False))
        found: dict[int, T] = {}
        losses = 0
        while len(found) < len(calls):
            before = len(found)
            running: dict[int, Future[T]] = {}
            try:
                running = {i: self._pool.submit(fn, *call) for i, call in enumerate(calls) if i not in found}
                for i, future in running.items():
                    found[i] = future.result(timeout)
            except BrokenProcessPool:
                done = {i: future for i, future in running.items() if future.done() and not future.exception()}
                found |= {i: future.result() for i, future in done.items()}
                losses = losses + 1 if len(found) == before else 1
                self._restart_pool(losses)
            finally:
                for future in running.values():
                    future.cancel()
        return iter([found[i] for i in range(len(calls))])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the processes."""
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _restart_pool(self, losses: int) -> None:
        if losses >= MAX_PROCESS_FAILURES:
            raise DicompilerError(
                f"executor processes={self._count}: {losses} times a process was lost before anything was done: where "
                "memory was short, take fewer processes"
            )
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._make_pool()

    def _make_pool(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._count, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def _open_mpi_pool() -> Executor:
    """The pool of the other ranks that mpirun started."""
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPIPoolExecutor
    except ImportError as error:
        missing = "mpi4py is not installed: pip install mpi4py"
        raise UsageError(f"executor mpi: {missing if error.name else error}") from None
    except RuntimeError:
        raise UsageError("executor mpi: mpi4py finds no library of MPI: start it with mpirun") from None
    if "mpi4py.futures" not in sys.orig_argv or MPI.COMM_WORLD.Get_size() < 2:
        line = "mpirun -n 5 python3 -m mpi4py.futures -m dicompiler.cli …"
        raise UsageError(f"executor mpi: there are no ranks to give work to: start it as '{line}'")
    pool: Executor = MPIPoolExecutor()
    return pool
