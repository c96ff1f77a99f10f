"""For every test: a time limit and an unchanged logger. Slow tests run first, so that none is left at the end."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator

import pytest
from support.caching import CCACHE_VARIABLES

from dicompiler.testing.assertions import TimeLimitError, time_limit

LIMIT_S = 600.0
"""Seconds for each phase of a test: longer than the time limits in the tests themselves."""

os.environ |= CCACHE_VARIABLES
# numpy starts a thread for each processor when it is imported. Processes that tests start need none of them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Idle threads of ncnn would otherwise use the processors that other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# nohup and background jobs of a shell ignore SIGINT. Processes that tests start would inherit that, and tests could
# not interrupt them. So the default action is restored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    # The thousands of collected tests stay until the end, so the garbage collector need not visit them again and again.
    gc.freeze()


LOGGER = logging.getLogger("dicompiler")
UNCHANGED = tuple(LOGGER.handlers), LOGGER.propagate, LOGGER.level


@pytest.fixture(autouse=True)
def unchanged_logger() -> None:
    """Restore the logger before a test: commands that earlier tests and fixtures ran in this process changed it."""
    handlers, LOGGER.propagate, level = UNCHANGED
    LOGGER.handlers = list(handlers)
    LOGGER.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        with time_limit(LIMIT_S):
            return (yield)
    except TimeLimitError as error:  # Without this handler, pytest would end the whole run, as it does after Ctrl-C.
        pytest.fail(str(error))


pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call
