"""Hooks for every test: a time limit, and exclusive use of the machine for tests that are marked `alone`.

Slow tests run first, so that no worker is left with a long one at the end. Tests that share a fixture of their module
run in one worker, so that the fixture is created once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest
from support.caching import CACHED
from support.taking_turns import turn

from dicompiler.testing.assertions import TimeLimitError, time_limit

LIMIT_S = 600.0
"""Seconds for each phase of a test: longer than the time limits in the tests themselves."""

os.environ |= CACHED

# nohup and background jobs of a shell ignore SIGINT. Processes that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if isinstance(item, pytest.Function) and shares_module_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


def shares_module_fixture(item: pytest.Function) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs
    return any(fixtures[-1].scope == "module" for fixtures in definitions.values())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with turn(item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        with time_limit(LIMIT_S):
            return (yield)
    except TimeLimitError as error:  # Without this, pytest would end as after Ctrl-C.
        pytest.fail(str(error))


pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call
