"""Any network with states, cut in any legal way, computes the same over many frames as with states fed back."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.stateful import fed_back, integer_frames, placed_states

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.routing import assembly_leaves
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.executor import ProgramExecutor

FRAMES = 4


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48))
def test_state_pieces_equal_fed_back_states(seed: int) -> None:
    rng = Random(seed)
    placed = placed_states(rng)
    assert isinstance(placed.reference, Model) and placed.plan is not None and placed.routing is not None
    frames = integer_frames(rng, placed.reference, FRAMES)
    executor = ProgramExecutor(build_program(placed.model, placed.plan.devices))

    for reference, frame in zip(fed_back(placed.reference, frames), frames, strict=True):
        execution = executor.run(frame)
        assert reference.keys() == execution.outputs.keys()
        assert all(np.array_equal(reference[name], value) for name, value in execution.outputs.items())
        assert sum(execution.sent) == placed.routing.total_bytes


def test_local_states_are_not_sent() -> None:
    pieces = stay = 0
    for seed in range(60):
        placed = placed_states(Random(seed))
        assert placed.routing is not None
        pasts = {kept.past for kept in placed.routing.state_retentions}
        assert not any(box.key.tensor in pasts for box in placed.routing.received_boxes)
        for kept in placed.routing.state_retentions:
            shape = placed.routing.layers.tensors[kept.past].shape
            pieces += kept.region != tuple((0, extent) for extent in shape or ())
            stay += all(leaf.box.origin is None for leaf in assembly_leaves(kept.assembly))
    assert min(pieces, stay) >= 10
