"""Any network with states, cut in any legal way, computes over many frames what onnxruntime does with them fed back."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.generators import integers, random_plan
from support.layer_graphs import rules
from support.stateful import fed_back, random_stateful

from dicompiler.ir.compilation import Compilation
from dicompiler.ir.routing import leaves
from dicompiler.partition.segmentation import cut
from dicompiler.verify.executor import Executor
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import Partition

FRAMES = 4


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48))
def test_states_fed_back_and_kept_in_pieces_give_the_same_bits(seed: int) -> None:
    rng = Random(seed)
    model = random_stateful(rng)
    layers = form_layers(model, rules())
    plan = random_plan(rng, layers)
    placed = Partition().run(Compilation(model=model, layers=layers, plan=plan))
    placed.model.check("partition")
    assert placed.routing is not None
    pasts = {past for past, _ in layers.states}
    frames = [{k: v for k, v in integers(rng, model.proto).items() if k not in pasts} for _ in range(FRAMES)]
    frames[2] |= {k: v for k, v in integers(rng, model.proto).items() if k == "past.1"}  # they begin anew

    executor = Executor(cut(placed.model, plan.devices))

    for reference, frame in zip(fed_back(model, frames), frames, strict=True):
        execution = executor.run(frame)
        assert reference.keys() == execution.outputs.keys()
        assert all(np.array_equal(reference[name], value) for name, value in execution.outputs.items())
        assert sum(execution.sent) == placed.routing.total_bytes
    # What a device both makes and reads of a state does not travel, and inputs that are states never do.
    assert not any(box.key.tensor in pasts for box in placed.routing.received)
    for kept in placed.routing.keepings:
        for leaf in leaves(kept.tree):
            makes = leaf.box if leaf.box.origin is None else leaf.box.origin
            assert (leaf.box.origin is None) == (makes.device == kept.device)
