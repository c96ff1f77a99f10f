"""Strangers at the ports of a run: it ends right, as soon as without them, and blames nobody for what they did."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from support.handmade import Made, halo
from support.running import emit
from support.strangers import Strangers, kinds, listening

from dicompiler.target.records import RunOptions
from dicompiler.target.remote.certificates import make
from dicompiler.verify.executor import run_model
from dicompiler_targets.sockets import SocketsTarget
from dicompiler_targets.sockets.artifact import Artifact

LATER_S = 1.0
FRAMES = 300


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("strangers") / "keys"
    make("abc", directory)
    return directory


def seconds(made: Made, directory: Path, options: RunOptions) -> float:
    """How long a run takes, whose numbers are right."""
    begun = time.monotonic()
    result = SocketsTarget().run(directory, [made[2]] * FRAMES, options)
    took = time.monotonic() - begun
    right = run_model(made[1], made[2])["out"]
    assert len(result.outputs) == FRAMES
    assert all(np.array_equal(outputs["out"], right) for outputs in result.outputs)
    return took


@pytest.mark.parametrize("secure", [False, True], ids=["clear", "tls"])
def test_two_hundred_strangers_do_not_disturb(secure: bool, keys: Path, tmp_path: Path) -> None:
    made = halo()
    directory = emit(made, tmp_path)
    options = RunOptions(timeout_s=60, keys=keys if secure else None, in_flight=3)
    digest = Artifact.load(directory, check=True).digest
    descriptors = len(os.listdir("/proc/self/fd"))
    alone = min(seconds(made, directory, options) for _ in range(2))
    disturbed = []
    for device in "ab":
        ours = listening(directory)
        strangers = Strangers(200, kinds(device, digest), lambda: listening(directory) - ours)  # noqa: B023
        try:
            disturbed.append(seconds(made, directory, options))
        finally:
            strangers.stop()
        assert strangers.left <= 0
        assert len(strangers.hit) > 1  # the coordinator's port, and those of devices
    assert min(disturbed) < alone + LATER_S
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3
