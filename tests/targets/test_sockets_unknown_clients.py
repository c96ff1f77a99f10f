"""Unknown clients at the ports of a run: the run computes the same in the same time, and blames no device."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from support.failing_devices import survivor
from support.handmade import Made, halo
from support.hostile_device import outcome
from support.running import by_hand, emit, wait_until
from support.unknown_clients import ConnectionFlood, UnknownClients, listening

from dicompiler.target.remote.certificates import make_keys
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets.artifact import SocketsArtifact

LATER_S = 1.0
FRAMES = 300


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("strangers") / "keys"
    make_keys("abcde", directory)
    return directory


def run_seconds(made: Made, directory: Path, options: RunOptions, device: str = "") -> float:
    """Return the seconds of a run, from the manual start of its last device; its outputs must be right.

    Unknown clients connect earlier, and give the name `device`. There are none if it is empty.
    """
    start, strangers = [], []

    def act(message: str) -> None:
        wait_until(lambda: len(listening(directory, os.getpid())) >= 3)
        if device:
            strangers.append(UnknownClients(200, directory, device, SocketsArtifact.load(directory).digest))
            # The unknown clients must have found at least three ports: those of the coordinator and of both devices.
            assert len(strangers[0].hit) >= 3
        start.append(time.monotonic())
        assert by_hand(directory, message.replace("KEYS", f"{options.keys}/devices/c")).wait(30) == 0

    result = outcome(directory, made[2], options, act, FRAMES)
    assert start, result
    took = time.monotonic() - start[0]
    for crowd in strangers:
        crowd.stop()
    right = run_model(made[1], made[2])["out"]
    assert len(result.outputs) == FRAMES
    assert all(np.array_equal(outputs["out"], right) for outputs in result.outputs)
    return took


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["clear", "tls"])
def test_two_hundred_unknown_clients_do_not_disturb(secure: bool, keys: Path, tmp_path: Path) -> None:
    made = halo()
    directory = emit(made, tmp_path)
    options = RunOptions(timeout_s=60, keys=keys if secure else None, in_flight=3, start_manually=("c",))
    run_seconds(made, directory, options)
    descriptors = len(os.listdir("/proc/self/fd"))
    alone = min(run_seconds(made, directory, options) for _ in range(2))
    assert min(run_seconds(made, directory, options, device) for device in "ac") < alone + LATER_S
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["clear", "tls"])
def test_run_survives_flood_of_connections(secure: bool, keys: Path, tmp_path: Path) -> None:
    """The flood lasts from before the last device joins until the end. These devices listen all the time."""
    floods, one = list[ConnectionFlood](), survivor(1, [("a",), ("b",)], tmp_path / "artifact")
    options = RunOptions(timeout_s=120, keys=keys if secure else None, in_flight=3, start_manually=("c",))

    def act(message: str) -> None:
        wait_until(lambda: len(listening(one.directory, os.getpid())) >= 3)
        floods.append(ConnectionFlood(1000, one.directory))
        assert by_hand(one.directory, message.replace("KEYS", f"{options.keys}/devices/c")).wait(60) == 0

    (frame,) = one.frames(1)
    result = outcome(one.directory, frame, options, act, FRAMES)
    count = floods[0].stop()
    assert not isinstance(result, Exception), result
    assert count > 100 and len(result.outputs) == FRAMES and result.events == ()
    right = run_model(one.model, frame)
    assert all(np.array_equal(outputs[name], right[name]) for outputs in result.outputs for name in right)
