"""Trimming: unread elements are not computed, and everything else stays as it was."""

from __future__ import annotations

from random import Random

import numpy as np
import onnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.generators import CLUSTER, integers, random_model, random_plan
from support.layer_graphs import rules, stack

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.partition.segmentation import build_program
from dicompiler.search.problem import Problem
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass
from dicompiler_strategies.trim_parts import trim_parts


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48))
@example(172)  # Seed of an earlier fault: trimming made a part read that nothing had read, so device d computed more.
def test_trimmed_plan_is_bit_equal_and_needs_no_more_work(seed: int) -> None:
    rng = Random(seed)
    model = Model.load(onnx.shape_inference.infer_shapes(random_model(rng)))
    layers = form_layers(model, rules())
    problem, plan = Problem(layers, CLUSTER, model=model), random_plan(rng, layers)
    after = trim_parts(problem, plan)

    before_flops, flops = (
        {entry.device: entry.flops for entry in problem.estimate(of_plan).devices} for of_plan in (plan, after)
    )
    assert all(flops[device] <= before_flops.get(device, 0) for device in flops)

    inputs = integers(rng, model.proto)
    reference = run_model(model, inputs)
    placed = PartitionPass().run(PipelineState(model=model, layers=layers, plan=after))
    execution = ProgramExecutor(build_program(placed.model, after.devices)).run(inputs)
    assert all(np.array_equal(reference[name], execution.outputs[name]) for name in reference)


def test_trims_halos_to_strides_and_borders() -> None:
    """Four rows with stride 2 read rows 0:8 of the previous layer, the next four rows 7:16."""
    layers = stack((1, 1, 16, 4), [("conv", 1, 3, 1, 1, 1), ("conv", 1, 3, 2, 1, 1)])
    first, second = (layer.name for layer in layers.layers)
    plan = Plan(
        {
            first: (_rows("a", 0, 10), _rows("b", 6, 16)),
            second: (_rows("a", 0, 4, 2), _rows("b", 4, 8, 2)),
        },
        ("a",),
        ("a",),
    )
    after = trim_parts(Problem(layers, CLUSTER), plan)
    assert after.layers[first] == (_rows("a", 0, 8), _rows("b", 7, 16))
    assert after.layers[second] == plan.layers[second]
    assert trim_parts(Problem(layers, CLUSTER), after) is after


def _rows(device: str, start: int, stop: int, width: int = 4) -> Part:
    return Part(device, ((0, 1), (0, 1), (start, stop), (0, width)))
