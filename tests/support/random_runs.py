"""Checks of a target that runs random networks under random plans in separate processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from support.generators import integers
from support.stateful import fed_back, integer_frames, placed_states
from test_random_plans import compiled

from dicompiler.ir.platform import uniform_platform
from dicompiler.partition.segmentation import build_program
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler.target.run_records import RunOptions, RunResult
from dicompiler.target.target_base import Target
from dicompiler.verify.executor import run_model


def sent_bytes(result: RunResult) -> Mapping[int, int]:
    """Return the number of sent bytes by index of the transfer."""
    return {index: count for report in result.reports for index, count in report.sent_bytes.items()}


def check_random(target: Target, seed: int, count: int, place: Path) -> None:
    """Run `count` frames; check that every sink's outputs are bit-equal and that the sent bytes are as predicted."""
    placed, model, _ = compiled(seed)
    assert placed.plan is not None and placed.routing is not None
    program = build_program(placed.model, placed.plan.devices)
    target.emit(replace(placed, program=program, platform=uniform_platform(4)), place)
    write_digests_and_checksum(place)
    frames = [integers(Random(frame), model.proto) for frame in range(count)]

    result = target.run(place, frames, RunOptions(timeout_s=60, in_flight=1 + seed % 4))

    assert len(result.outputs_by_device) == count
    for inputs, delivered in zip(frames, result.outputs_by_device, strict=True):
        reference = run_model(model, inputs)
        assert set(delivered) == set(placed.plan.sink)
        for outputs in delivered.values():
            assert set(outputs) == set(reference)
            assert all(np.array_equal(outputs[name], value) for name, value in reference.items())
    sent = sent_bytes(result)
    assert sent == {transfer.index: count * transfer.value.nbytes for transfer in program.transfers}
    assert sum(sent.values()) == count * placed.routing.total_bytes


def check_random_states(target: Target, seed: int, count: int, place: Path) -> None:
    """Check a network with states, which devices keep between frames, in the same way as `check_random`."""
    rng = Random(seed)
    placed = placed_states(rng)
    model = placed.reference
    assert placed.plan is not None and placed.routing is not None and model is not None
    program = build_program(placed.model, placed.plan.devices)
    assert any(device.states for device in program.devices)
    target.emit(replace(placed, program=program, platform=uniform_platform(4)), place)
    write_digests_and_checksum(place)
    frames = integer_frames(rng, model, count)

    result = target.run(place, frames, RunOptions(timeout_s=60, in_flight=1 + seed % 4))

    for reference, outputs in zip(fed_back(model, frames), result.outputs, strict=True):
        assert set(outputs) == set(reference)
        assert all(np.array_equal(outputs[name], value) for name, value in reference.items())
    assert sent_bytes(result) == {transfer.index: count * transfer.value.nbytes for transfer in program.transfers}
