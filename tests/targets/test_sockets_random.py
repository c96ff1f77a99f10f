"""Random networks under random plans, for real: a process for each device, bytes counted on the wire."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.random_runs import check_random

from dicompiler_targets.sockets.target import SocketsTarget


@pytest.mark.parametrize("seed", range(40))
def test_processes_compute_the_same_bits_and_send_the_bytes_predicted(seed: int, tmp_path: Path) -> None:
    check_random(SocketsTarget(), 7000 + seed, 4, tmp_path)
