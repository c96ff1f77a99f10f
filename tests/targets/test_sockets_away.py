"""A user who takes longer between two frames than a frame may take, with real processes: it is nobody's fault, and what
is lost meanwhile is no lost frame."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from support.losing import DEVICES, Survivor, kinds, survivor
from support.running import pids

import dicompiler
from dicompiler.base.errors import RunError
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.session import GRACE_S, ClusterSession

TIMEOUT_S = 4.0
AWAY_S = TIMEOUT_S + GRACE_S + 1.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    return survivor(1, [(name,) for name in DEVICES], tmp_path_factory.mktemp("away") / "artifact")


@pytest.mark.parametrize("how", [None, signal.SIGKILL, signal.SIGSTOP], ids=["nothing", "killed", "stopped"])
def test_who_is_away_for_longer_than_a_frame_may_take_loses_none(how: signal.Signals | None, made: Survivor) -> None:
    def plot() -> Iterator[None]:
        yield
        if how is not None:
            os.kill(pids(made.directory)["c"], how)
        time.sleep(AWAY_S)  # frames are on their way
        for _ in range(10):
            yield

    options = RunOptions(in_flight=4, heartbeat_s=0.3)
    with dicompiler.connect(made.directory, options, TIMEOUT_S) as session:
        assert isinstance(session, ClusterSession)
        made.stream(session, plot())
    assert kinds(session)[:2] == ([] if how is None else [("failure", "c"), ("takeover", "c")])


def test_who_hangs_longer_than_a_frame_may_take_is_named_where_losses_are_survived_too(made: Survivor) -> None:
    """Its heartbeats are so slow that it is not lost before: those that wait say for whom."""

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
