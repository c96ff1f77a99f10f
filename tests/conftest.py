"""What holds for every test: it has a time limit, can be interrupted, and runs alone where it is marked so."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest
from support.caching import CACHED
from support.limits import LIMIT_S, limited
from support.taking_turns import turn

os.environ |= CACHED

# A shell's background jobs and nohup ignore it, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with turn(item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    with limited(LIMIT_S):
        return (yield)


pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call
