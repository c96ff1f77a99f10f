"""Random networks with random plans, with a process for each device, and the sent bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.random_runs import check_random

from dicompiler_targets.sockets.target import SocketsTarget


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_processes_compute_same_bits_and_send_predicted_bytes(seed: int, tmp_path: Path) -> None:
    check_random(SocketsTarget(), 7000 + seed, 4, tmp_path)
