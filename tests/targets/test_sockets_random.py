"""Random networks under random plans, for real: a process for each device, bytes counted on the wire."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from generators import integers
from test_random_plans import compiled

from dicompiler.cutting import cut
from dicompiler.executor import run_model
from dicompiler.platform import nameless
from dicompiler.target import RunOptions
from dicompiler_targets.sockets.target import SocketsTarget


@pytest.mark.parametrize("seed", range(40))
def test_processes_compute_the_same_bits_and_send_the_bytes_predicted(seed: int, tmp_path: Path) -> None:
    from dataclasses import replace

    placed, model, _ = compiled(7000 + seed)
    assert placed.plan is not None and placed.routing is not None
    program = cut(placed.model, placed.plan.devices)
    target = SocketsTarget()
    target.emit(replace(placed, program=program, platform=nameless(4)), tmp_path)
    frames = [integers(Random(frame), model.proto) for frame in range(4)]

    result = target.run(tmp_path, frames, 60, RunOptions(in_flight=1 + seed % 4))

    for inputs, delivered in zip(frames, result.delivered, strict=True):
        reference = run_model(model, inputs)
        assert set(delivered) == set(placed.plan.sink)
        for outputs in delivered.values():
            assert set(outputs) == set(reference)
            assert all(np.array_equal(outputs[name], value) for name, value in reference.items())
    sent = {index: count for report in result.reports for index, count in report.sent.items()}
    assert sent == {transfer.index: 4 * transfer.value.nbytes for transfer in program.transfers}
    assert sum(sent.values()) == 4 * placed.routing.total_bytes
