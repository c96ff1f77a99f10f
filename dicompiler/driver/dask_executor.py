"""An executor that runs calls on a Dask cluster."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from dicompiler.base.errors import DicompilerError, UsageError, describe_exception

T = TypeVar("T")

CONNECT_TIMEOUT_S = 20.0
"""Seconds to wait for the scheduler's answer, and for the first worker."""
MAX_WITHOUT_WORKERS_S = 60.0
"""Seconds without any worker in the cluster after which `map` raises an error."""


class DaskExecutor(Executor):
    """An executor that runs calls on the workers of a Dask scheduler.

    Raises:
        UsageError: Dask is not installed.
        DicompilerError: The scheduler does not answer, has no worker, or uses other versions of packages than this
            host.
    """

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError:
            raise UsageError("executor dask: Dask is not installed: pip install 'dicompiler[dask]'") from None
        for name in ("distributed", *(name for name in logging.root.manager.loggerDict if name[:12] == "distributed.")):
            # Dask's log messages are turned off, because it raises the same errors as exceptions.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._name = f"executor dask={address}"
        try:
            with warnings.catch_warnings(action="ignore"):
                self._client = distributed.Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
        except Exception as error:
            cause = f"no Dask {distributed.__version__} scheduler answers ({describe_exception(error)})"
            raise self._error(f"{cause}: start one with 'dask scheduler'") from None
        try:
            self._check_cluster()
        except BaseException:
            self.shutdown()
            raise

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = self._client.get_executor(pure=False).submit(fn, *args, **kwargs)
        return future

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Return the results of `fn` in order, or raise its first exception. `timeout` and `chunksize` are ignored.

        Raises:
            DicompilerError: The cluster failed.
        """
        del timeout, chunksize
        calls = list(zip(*iterables, strict=False))
        futures: list[Any] = []
        try:
            futures = self._client.map(_call_function, calls, fn=fn, pure=False) if calls else []
            outcomes = [self._wait_outcome(future) for future in futures]
        except (DicompilerError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise self._cluster_error(error) from None
        finally:
            if self._client.status == "running":
                self._client.cancel([future for future in futures if not future.done()])
        for _, raised in outcomes:
            if raised is not None:
                raise raised
        return iter([value for value, _ in outcomes])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect from the cluster, which continues to run."""
        del wait, cancel_futures
        self._client.close(timeout=CONNECT_TIMEOUT_S if self._client.status == "running" else 1)

    def _wait_outcome(self, future: Any) -> tuple[Any, Exception | None]:
        last_seen = time.monotonic()
        while True:
            try:
                outcome: tuple[Any, Exception | None] = future.result(timeout=CONNECT_TIMEOUT_S)
                return outcome
            except TimeoutError:
                if self._client.nthreads():
                    last_seen = time.monotonic()
                elif time.monotonic() - last_seen > MAX_WITHOUT_WORKERS_S:
                    raise self._error("all workers have ended: start workers with 'dask worker'") from None

    def _check_cluster(self) -> None:
        try:
            self._check_versions()
            with contextlib.suppress(TimeoutError):
                self._client.wait_for_workers(1, timeout=CONNECT_TIMEOUT_S)
            workers = self._check_versions()
        except DicompilerError:
            raise
        except Exception as error:
            raise self._cluster_error(error) from None
        if not workers:
            raise self._error("the scheduler has no worker: start workers with 'dask worker'")

    def _check_versions(self) -> Mapping[str, Any]:
        """Return the workers of the cluster by address.

        Raises:
            DicompilerError: The cluster has other versions of packages than this process.
        """
        reports = self._client.get_versions(packages=["dicompiler"])
        workers: Mapping[str, Any] = reports["workers"]
        own = _relevant_versions(reports["client"])
        # The scheduler needs no dicompiler, because it computes nothing. Its version is replaced by this process's.
        scheduler = _relevant_versions(reports["scheduler"]) | {"dicompiler": own["dicompiler"]}
        others = {"the scheduler": scheduler}
        others |= {f"worker {address}": _relevant_versions(report) for address, report in workers.items()}
        for process, versions in others.items():
            for name, version in versions.items():
                if version != own[name]:
                    difference = f"{process} runs {name} {version}, but this host runs {own[name]}"
                    raise self._error(f"{difference}: install the same versions on all machines")
        return workers

    def _cluster_error(self, error: Exception) -> DicompilerError:
        if self._client.status != "running":
            return self._error("the scheduler has ended: start it and its workers, then run the command again")
        remedy = "install the same dicompiler and plugins on the scheduler and all workers, and look at their logs"
        return self._error(f"{describe_exception(error)}: {remedy}")

    def _error(self, text: str) -> DicompilerError:
        return DicompilerError(f"{self._name}: {text}")


def _call_function(arguments: tuple[Any, ...], fn: Callable[..., Any]) -> tuple[Any, Exception | None]:
    """Call a function and return (result, None), or (None, exception) if it fails.

    Returned exceptions are those of the function. Raised ones are errors of the cluster.
    """
    try:
        return fn(*arguments), None
    except Exception as error:
        return None, error


def _relevant_versions(report: Mapping[str, Any]) -> dict[str, str]:
    packages = report["packages"]
    python = ".".join(str(report["host"]["python"]).split(".")[:2])
    versions = {"Python": python, "Dask distributed": packages["distributed"], "dicompiler": packages["dicompiler"]}
    return {name: str(version) for name, version in versions.items()}
