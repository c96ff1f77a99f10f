"""Send pacing: heartbeats are in time on slow links, and fast links are used fully."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest
from support.boards import cluster, shape
from support.handmade import halo
from support.running import emit

import dicompiler
from dicompiler.target.remote.hosts import Hosts
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets.runtime import channel
from dicompiler_targets.sockets.runtime.channel import (
    INITIAL_UNACKED_BYTES,
    MAX_UNACKED_S,
    MIN_UNACKED_BYTES,
    SendPacing,
)
from dicompiler_targets.sockets.target import SocketsTarget


@pytest.mark.slow
def test_healthy_device_does_not_fail_on_slow_link(tmp_path: Path) -> None:
    """64 frames of 12 kB at 64 kbit/s would fill the link for 98 s at once without a limit."""
    network = halo(32)
    right = run_model(network[1], network[2])["out"]
    with cluster(tmp_path, "abc") as boards, boards.inside():
        directory = emit(network, tmp_path / "artifact")
        hosts = Hosts.load(boards.hosts(tmp_path / "hosts.toml"))
        options = RunOptions(timeout_s=300, in_flight=64, hosts=hosts, insecure=True)
        SocketsTarget().install(directory, options)
        shape(boards, "64kbit", "1mb")
        with contextlib.suppress(EndOfTest), dicompiler.connect(directory, options) as session:
            start = time.monotonic()
            for outputs in session.stream([network[2]] * 64):
                assert np.array_equal(outputs["out"], right)
                if time.monotonic() - start > 9:
                    raise EndOfTest


class EndOfTest(Exception):
    """Ends the test without waiting for the frames in flight."""


class SimulatedLink:
    """A simulated link that carries `rate` bytes per second after a burst, with simulated time."""

    def __init__(self, rate: float, burst: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rate, self.burst, self.now, self.given = rate, burst, 0.0, 0
        self.carried = 0.0
        monkeypatch.setattr(channel.time, "monotonic", lambda: self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.carried = min(self.given, max(self.carried + seconds * self.rate, min(self.given, self.burst)))

    def send(self, limit: SendPacing, size: int) -> int:
        """Send as many bytes as allowed and return their number, or let time pass."""
        if count := limit.sendable_bytes(size):
            self.given += count
            limit.record_sent(count)
        else:
            self.advance(limit.pause_s)
        return count

    def unacknowledged_bytes(self) -> int:
        return self.given - int(self.carried)


@pytest.mark.parametrize("rate", [1e3, 8e3, 1e6, 1e8])
def test_limits_unacknowledged_bytes_to_half_a_second(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    link = SimulatedLink(rate, 8192, monkeypatch)
    limit = SendPacing(link.unacknowledged_bytes)
    assert limit.allowed == INITIAL_UNACKED_BYTES
    total, most, start = int(20 * rate), 0.0, 0.0
    left = total
    while left:
        count = link.send(limit, left)
        assert count <= left
        left -= count
        link.advance(1e-5)
        most = max(most, link.unacknowledged_bytes() / rate)
        start = start or link.now
    assert most < max(4 * MAX_UNACKED_S, 8 * INITIAL_UNACKED_BYTES / rate)
    # The limit must not slow down sending: the link was almost never idle.
    assert link.now < 1.1 * total / rate + 1
    assert limit.allowed >= MIN_UNACKED_BYTES


def test_lowers_limit_when_link_becomes_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SimulatedLink(1e7, 0, monkeypatch)
    limit = SendPacing(link.unacknowledged_bytes)
    for rate, seconds in ((1e7, 5), (1e4, 60)):
        link.rate = rate
        end = link.now + seconds
        while link.now < end:
            link.send(limit, 1 << 16)
            link.advance(1e-4)
        assert limit.allowed <= 2 * MAX_UNACKED_S * rate
