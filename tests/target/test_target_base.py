"""What a target is if it says nothing of itself: no other hosts, no replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from dicompiler.base.errors import UsageError
from dicompiler.driver.run_log import frames_in_flight
from dicompiler.target.run_records import RunOptions
from dicompiler.target.target_base import Target
from dicompiler_targets.sockets import SocketsTarget


def test_target_without_remote_runs_refuses_other_hosts(tmp_path: Path) -> None:
    class Local(SocketsTarget):
        name = "local"
        install = Target.install

    with pytest.raises(UsageError, match="deploy: target 'local' does not support other hosts: compile"):
        Local().install(tmp_path, RunOptions())


def test_with_many_devices_as_many_frames_are_on_their_way_as_a_target_takes() -> None:
    asked = RunOptions(in_flight=0)
    assert [asked.resolve_in_flight(devices, 1024) for devices in (2, 341, 342, 1000)] == [6, 1023, 1024, 1024]
    assert asked.resolve_in_flight(4, 8) == 8
    assert frames_in_flight(0, 1000, 5000) == 1024
