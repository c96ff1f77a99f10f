"""A caller that takes longer between two frames than the timeout of a frame, with real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from support.failing_devices import DEVICES, Survivor, kinds, survivor
from support.running import pids

import dicompiler
from dicompiler.base.errors import RunError
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.cluster_state import GRACE_S
from dicompiler_targets.sockets.session import ClusterSession

# Devices must join within half of this time, even on a busy machine; otherwise they count as failed.
TIMEOUT_S = 16.0
AWAY_S = TIMEOUT_S + GRACE_S + 1.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    return survivor(1, [(name,) for name in DEVICES], tmp_path_factory.mktemp("away") / "artifact")


@pytest.mark.slow
@pytest.mark.parametrize("failure", [None, signal.SIGKILL, signal.SIGSTOP], ids=["nothing", "killed", "stopped"])
def test_slow_caller_loses_no_frame(failure: signal.Signals | None, made: Survivor) -> None:
    def plot() -> Iterator[None]:
        yield
        if failure is not None:
            os.kill(pids(made.directory)["c"], failure)
        time.sleep(AWAY_S)  # Meanwhile, frames are in flight, and the caller takes no output.
        for _ in range(10):
            yield

    options = RunOptions(in_flight=4, heartbeat_s=0.3)
    with dicompiler.connect(made.directory, options, TIMEOUT_S) as session:
        assert isinstance(session, ClusterSession)
        made.stream(session, plot())
    assert kinds(session)[:2] == ([] if failure is None else [("failure", "c"), ("takeover", "c")])


@pytest.mark.slow
def test_names_hanging_device_even_with_failure_plans(made: Survivor) -> None:
    """Heartbeats are too slow to detect the failure, so the waiting devices report it."""

    def plot() -> Iterator[None]:
        yield
        os.kill(pids(made.directory)["c"], signal.SIGSTOP)
        while True:
            yield

    options = RunOptions(in_flight=4, heartbeat_s=60)
    session = dicompiler.connect(made.directory, options, TIMEOUT_S)
    assert isinstance(session, ClusterSession)
    with pytest.raises(
        RunError, match=r"^device 'c': (device '.' reports: tensor '.*' did not arrive in time|did not fin)"
    ):
        made.stream(session, plot())
    assert pids(made.directory) == {}
