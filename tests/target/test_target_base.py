"""Defaults of a target: it has no other hosts and no replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dicompiler.base.errors import UsageError
from dicompiler.driver.run_log import frames_in_flight
from dicompiler.target.run_records import RunOptions
from dicompiler.target.target_base import Target
from dicompiler_targets.sockets.target import SocketsTarget


def test_target_without_remote_runs_refuses_other_hosts(tmp_path: Path) -> None:
    class Local(SocketsTarget):
        name = "local"
        install = Target.install

    with pytest.raises(UsageError, match="deploy: target 'local' does not support other hosts: compile"):
        Local().install(tmp_path, RunOptions())


def test_with_many_devices_as_many_frames_are_on_their_way_as_a_target_takes() -> None:
    asked = RunOptions()
    assert [asked.resolve_in_flight(devices, 1024) for devices in (2, 341, 342, 1000)] == [6, 1023, 1024, 1024]
    assert asked.resolve_in_flight(4, 8) == 8
    assert frames_in_flight(0, 1000, 5000) == 1024


def test_options_of_a_run_accept_paths_as_strings() -> None:
    options = RunOptions(keys="net.keys", logs="logs")  # type: ignore[arg-type]
    assert (options.keys, options.logs) == (Path("net.keys"), Path("logs"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hosts": "hosts.toml"}, "run: hosts is the path 'hosts.toml': give Hosts.load('hosts.toml')"),
        ({"start_without": "pi03"}, "run: start_without is 'pi03': give the names of devices, such as ('pi01',)"),
        ({"start_manually": True}, "run: start_manually is True: give the names of devices, such as ('pi01',)"),
        ({"timeout_s": "5"}, "run: timeout_s is '5': give a number"),
        ({"timeout_s": -1}, "run: timeout_s must be at least 0, not -1"),
        ({"heartbeat_s": "1"}, "run: heartbeat_s is '1': give a number"),
        ({"in_flight": None}, "run: in_flight is None: give a number"),
        ({"on_frame": 3}, "run: on_frame is 3: give a function or None"),
    ],
)
def test_options_of_a_run_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunOptions(**values)
    assert str(caught.value) == message
