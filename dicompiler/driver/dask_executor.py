"""A cluster of Dask distributed as an Executor: calls go to its scheduler, results come back in their order.

The scheduler has the work of a worker that was lost done again. What all calls share travels once, and is a task as
well, so that it is not lost with a worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dicompiler.base.errors import DicompilerError, UsageError, describe_exception
from dicompiler.base.version import package_version

T = TypeVar("T")

CONNECT_TIMEOUT_S = 20.0
"""For a scheduler to answer, and for a first worker to be there."""
MAX_WITHOUT_WORKERS_S = 60.0
"""How long there may be no worker at all before the search gives up."""
MAX_CACHED_FUNCTIONS = 4
"""Functions that stay at the workers: a search has few problems."""


class DaskExecutor(Executor):
    """The workers of the scheduler at `address`. UsageError without Dask; DicompilerError where there is no scheduler,
    where it has no worker, and where it runs other versions than we do."""

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError:
            raise UsageError("executor dask: Dask distributed is not installed: pip install distributed") from None
        for name in ("distributed", *(name for name in logging.root.manager.loggerDict if name[:12] == "distributed.")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters we say, in a line
        self._name = f"executor dask={address}"
        self._functions: dict[str, Any] = {}
        try:
            with warnings.catch_warnings(action="ignore"):
                self._client = distributed.Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
        except Exception as error:
            why = f"no scheduler of Dask {distributed.__version__} answers there ({describe_exception(error)})"
            raise self._error(f"{why}: start one with 'dask scheduler'") from None
        try:
            self._check_cluster()
        except BaseException:
            self.shutdown()
            raise

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """A call, by Dask's own executor."""
        future: Future[T] = self._client.get_executor(pure=False).submit(fn, *args, **kwargs)
        return future

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """The results in order, all at once; timeout and chunksize say nothing here. Raises what `fn` raises first, and
        DicompilerError where the cluster fails."""
        del timeout, chunksize
        calls = list(zip(*iterables, strict=False))
        if not calls:
            return iter(())
        futures: list[Any] = []
        try:
            futures = self._client.map(_call_function, calls, kept=self._send_function(fn), pure=False)
            outcomes = [self._wait_outcome(future) for future in futures]
        except (DicompilerError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise self._cluster_error(error) from None
        finally:
            if self._client.status == "running":
                self._client.cancel([future for future in futures if not future.done()])
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return iter([outcome.value for outcome in outcomes])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves the cluster, which runs on."""
        del wait, cancel_futures
        self._functions.clear()
        self._client.close(timeout=CONNECT_TIMEOUT_S if self._client.status == "running" else 1)

    def _send_function(self, fn: Callable[..., Any]) -> Any:
        """The function as a future: its text travels to the scheduler once."""
        text = pickle.dumps(fn)
        key = hashlib.sha256(text).hexdigest()
        if key not in self._functions:
            self._functions[key] = self._client.submit(
                _load_function, text, source_identity(), key=f"dicompiler-{key}", pure=True
            )
            for old in list(self._functions)[:-MAX_CACHED_FUNCTIONS]:
                del self._functions[old]
        return self._functions[key]

    def _wait_outcome(self, future: Any) -> CallOutcome:
        since = time.monotonic()
        while True:
            try:
                outcome: CallOutcome = future.result(timeout=CONNECT_TIMEOUT_S)
                return outcome
            except TimeoutError:
                if self._client.nthreads():
                    since = time.monotonic()
                elif time.monotonic() - since > MAX_WITHOUT_WORKERS_S:
                    raise self._error("all its workers are gone: start some with 'dask worker'") from None

    def _check_cluster(self) -> None:
        """DicompilerError for other versions and for a cluster without a worker."""
        try:
            self._check_versions(self._client.get_versions())
            with contextlib.suppress(TimeoutError):
                self._client.wait_for_workers(1, timeout=CONNECT_TIMEOUT_S)
            found = self._client.get_versions()
            self._check_versions(found)
        except DicompilerError:
            raise
        except Exception as error:
            raise self._cluster_error(error) from None
        if not found["workers"]:
            raise self._error("the scheduler has no worker: start some with 'dask worker'")

    def _check_versions(self, found: dict[str, Any]) -> None:
        ours = _relevant_versions(found["client"])
        others = {"the scheduler": found["scheduler"], **{f"worker {at}": of for at, of in found["workers"].items()}}
        for who, reported in others.items():
            for name, theirs in _relevant_versions(reported).items():
                if theirs != ours[name]:
                    what = f"{who} runs {name} {theirs}, and {ours[name]} is here"
                    raise self._error(f"{what}: install the same versions on all machines")

    def _cluster_error(self, error: Exception) -> DicompilerError:
        if self._client.status != "running":
            return self._error("the scheduler is gone: start it and its workers, and run this again")
        remedy = "install the same dicompiler and plugins at the scheduler and all workers, and see their logs"
        return self._error(f"{describe_exception(error)}: {remedy}")

    def _error(self, text: str) -> DicompilerError:
        return DicompilerError(f"{self._name}: {text}")


@dataclass(frozen=True)
class CallOutcome:
    """What a call came to: what it raised is told apart from what goes wrong in the cluster."""

    value: Any = None
    error: Exception | None = None


def _call_function(arguments: tuple[Any, ...], kept: Callable[..., Any]) -> CallOutcome:
    """In a worker."""
    try:
        return CallOutcome(kept(*arguments))
    except Exception as error:
        return CallOutcome(error=error)


def _load_function(text: bytes, wanted: str) -> Any:
    """The function, in a worker. DicompilerError where its dicompiler is another one: it might compute otherwise."""
    if source_identity() != wanted:
        raise DicompilerError(
            f"a worker runs dicompiler {source_identity()}, and {wanted} is here: install the same on all machines"
        )
    return pickle.loads(text)


@cache
def source_identity() -> str:
    """The version of dicompiler and a digest of its source."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{package_version()} ({digest.hexdigest()[:12]})"


def _relevant_versions(reported: Mapping[str, Any]) -> dict[str, str]:
    """Of one who takes part: what must be the same for them to understand one another, and to compute the same."""
    python = ".".join(str(reported["host"]["python"]).split(".")[:2])
    return {"Python": python, "Dask distributed": str(reported["packages"]["distributed"])}
