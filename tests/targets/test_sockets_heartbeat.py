"""Heartbeats: a stopped or unreachable device is detected and named although its connection stays open."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.handmade import halo, partial
from support.running import LIMIT_S, MEMBER, emit, fake, pids, wait_until

import dicompiler
from dicompiler.base.errors import RunError
from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.runtime.channel import EventLoop, MessageChannel
from dicompiler_targets.sockets.runtime.protocol import MessageType
from dicompiler_targets.sockets.runtime.transport import Connection

HEARTBEAT_S = 0.4
FOUND_S = 3.75 * HEARTBEAT_S
"""Three intervals, each tick of a quarter of one counted late by at most as much."""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_names_stopped_device_in_time(victim: str, tmp_path: Path) -> None:
    network = halo()
    session = dicompiler.connect(emit(network, tmp_path), RunOptions(heartbeat_s=HEARTBEAT_S), 60)
    reason = r"no data received for 1\.2 s: the device has stopped, or the network to the device is down"
    remedy = r"compile with --tolerate-failures 1 \(in Python: tolerate_failures=1\)"
    message = rf"^device '{victim}': {reason}; the artifact has no plan for the failure of '{victim}': {remedy}$"
    stream = session.stream([network[2]] * 1_000_000)
    for _ in range(20):
        next(stream)
    stopped = time.monotonic()
    os.kill(pids(tmp_path)[victim], signal.SIGSTOP)
    with pytest.raises(RunError, match=message):
        list(stream)
    assert time.monotonic() - stopped < FOUND_S + LIMIT_S
    assert pids(tmp_path) == {}


def test_waits_for_peer_that_creates_sessions(tmp_path: Path) -> None:
    """The peer has completed the handshake, but sends nothing until its sessions are created."""
    with fake(emit(halo(), tmp_path), "a", heartbeat_s=0.1) as (device, listener), contextlib.ExitStack() as stack:
        peers = {"b": listener.getsockname(), "c": listener.getsockname()}
        device.tell_peers(**peers)
        for name in "bc":
            connection = stack.enter_context(listener.accept()[0])
            channel = MessageChannel(Connection(connection))
            assert channel.receive_greeting(device.end)["device"] == "a"
            hello = {"device": name, "digest": device.digest, **MEMBER.make_proof(name, "a")}
            channel.send_greeting(MessageType.HELLO, hello, device.end)
        device.heard(MessageType.READY)
        time.sleep(1.0)
        assert device.process.poll() is None
        lines = EventLoop(60)
        stack.callback(lines.close)
        channel.start(lines, lambda _: None, lambda *_: None, lambda _: None)
        # The test sends one heartbeat and then no more, so the device must consider the connection lost.
        channel.send(MessageType.HEARTBEAT)
        assert "the connection to 'c' was lost: no data received for 0.3 s" in device.ended()


def test_session_can_be_idle(tmp_path: Path) -> None:
    network = partial()
    with dicompiler.connect(emit(network, tmp_path), RunOptions(heartbeat_s=0.2)) as session:
        before = session.infer(network[2])
        time.sleep(1.5)
        assert np.array_equal(session.infer(network[2])["out"], before["out"])


SCRIPT = """
import sys; sys.path[:0] = sys.argv[2:]
import time, dicompiler
from dicompiler.plugin_api import RunOptions
session = dicompiler.connect(sys.argv[1], RunOptions(heartbeat_s=0.4))
print("ready", flush=True)
time.sleep(60)
"""


def test_devices_end_when_coordinator_is_stopped(tmp_path: Path) -> None:
    paths = [os.path.abspath(entry) for entry in sys.path if entry]
    command = [sys.executable, "-c", SCRIPT, str(emit(partial(), tmp_path)), *paths]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as coordinator:
        assert coordinator.stdout is not None
        assert coordinator.stdout.readline() == b"ready\n"
        coordinator.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        # Processes of ended devices remain as zombies, because the stopped coordinator, their parent, cannot wait for
        # them.
        wait_until(lambda: all(ended(pid) for pid in pids(tmp_path).values()))
        assert time.monotonic() - stopped < FOUND_S + LIMIT_S
        coordinator.kill()


def ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] == "Z"
