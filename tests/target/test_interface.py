"""What a target is if it says nothing of itself: no other hosts, no replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from dicompiler.base.errors import UsageError
from dicompiler.target.interface import Target
from dicompiler.target.records import RunOptions
from dicompiler_targets.sockets import SocketsTarget


def test_a_target_that_says_nothing_of_other_hosts_refuses_them(tmp_path: Path) -> None:
    class Local(SocketsTarget):
        name = "local"
        install = Target.install

    with pytest.raises(UsageError, match="deploy: target 'local' cannot be started on other hosts from here"):
        Local().install(tmp_path, RunOptions())
