"""Waves: the same bits and bytes, in an order with shorter waits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.generators import CLUSTER, integers, random_model, random_plan
from support.layer_graphs import rules
from support.modern_transformers import vit
from support.planning import make_cluster

from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import FailurePlan, Plan
from dicompiler.ir.program import DeviceProgram
from dicompiler.partition.routing import route
from dicompiler.partition.segmentation import build_program
from dicompiler.search.problem import Problem
from dicompiler.testing.plans import check_plan
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass
from dicompiler_strategies.auto import Auto
from dicompiler_strategies.candidate_search import FIRST_WAVE_SHARES, make_plans_in_waves
from dicompiler_strategies.transformer_heads import Heads, best_row_plans, reduced_choices


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**48))
def test_plan_in_waves_is_bit_equal_and_sends_predicted_bytes(seed: int) -> None:
    rng = Random(seed)
    model = Model.load(onnx.shape_inference.infer_shapes(random_model(rng)))
    layers = form_layers(model, rules())
    plan = random_plan(rng, layers)
    plan = replace(plan, layers={n: tuple(replace(p, lane=0) for p in own) for n, own in plan.layers.items()})
    inputs = integers(rng, model.proto)
    reference = run_model(model, inputs)
    for _, waved in make_plans_in_waves(Problem(layers, CLUSTER, model=model), plan):
        placed = PartitionPass().run(PipelineState(model=model, layers=layers, plan=waved))
        execution = ProgramExecutor(build_program(placed.model, waved.devices)).run(inputs)
        assert all(np.array_equal(reference[name], execution.outputs[name]) for name in reference)
        assert sum(execution.sent) == route(layers, waved).total_bytes


def attention() -> Problem:
    """A small vision transformer on two devices. Their link takes as long as their computing."""
    return load_problem(vit(), make_cluster("switch", 0.5, 0.5, bandwidth=2e8))


def rows() -> tuple[Problem, Plan]:
    """Return a small encoder on two devices, by rows, and its plan without waves."""
    model = networks.build("whisper_tiny_encoder", 1, layers=2, width=0.25, size=64)
    problem = load_problem(model, make_cluster("switch", 0.5, 0.5, bandwidth=1e8))
    return problem, best_row_plans(reduced_choices(problem, 2, "equal"))[0]


def test_sends_keys_and_values_first_and_computes_queries_last() -> None:
    """The order: some rows of keys and values, send, the other rows, send, queries, attention of all rows."""
    problem, plan = rows()
    (_, one), (_, two), *_ = make_plans_in_waves(problem, plan)
    before, once, twice = (problem.evaluate(each).latency_s for each in (plan, one, two))
    assert twice < once < before
    check_plan(problem, two)
    program = problem.draft_program(two).program
    assert program is not None
    made = [(kind, _products(problem, two, program.devices[1], i)) for kind, i in _runs(program.devices[1])]
    (at,) = [i for i, (_, names) in enumerate(made) if names == ["layers.1.q_proj.matmul in lane 0"]]
    assert [kind for kind, _ in made[at - 2 : at + 1]] == ["sends", "sends", "keeps"]
    block = ("layers.0.out_proj", "layers.0.fc1", "layers.0.fc2", "layers.1.k_proj", "layers.1.v_proj")
    for lane, (_, names) in ((1, made[at - 2]), (2, made[at - 1])):
        assert names[-5:] == [f"{name}.matmul in lane {lane}" for name in block]
    assert made[at + 1][1][:2] == ["layers.1.attn in lane 1", "layers.1.attn.values in lane 1"]


def _runs(device: DeviceProgram) -> list[tuple[str, int]]:
    """Return for each segment its index, and "sends" if a send follows, else "keeps"."""
    found: list[tuple[str, int]] = []
    for step in device.steps:
        if step.kind == "run":
            found.append(("keeps", step.index))
        elif step.kind == "send" and found:
            found[-1] = ("sends", found[-1][1])
    return found


def _products(problem: Problem, plan: Plan, device: DeviceProgram, index: int) -> list[str]:
    """Return the products of a segment with their lanes."""
    names = dict.fromkeys(mark[0] for mark in device.segments[index].node_marks)
    anchors = {layer.name: layer.nodes[layer.anchor].op for layer in problem.layers.layers}
    return [f"{name} in lane {plan.layers[name][part].lane}" for name, part in names if anchors[name] == "MatMul"]


@pytest.mark.slow
def test_strategies_use_waves_if_the_simulation_is_better() -> None:
    problem = attention()
    lanes = [
        {part.lane for parts in strategy.plan(problem).layers.values() for part in parts}
        for strategy in (Heads(device_counts=(2,), waves=False), Heads(device_counts=(2,)), Auto(budget=3600, tries=0))
    ]
    assert lanes[0] == {0} and all(len(own) > 1 for own in lanes[1:])
    memory = replace(problem, objective="memory")
    assert {part.lane for parts in Heads().plan(memory).layers.values() for part in parts} == {0}


def test_plans_with_their_own_order_stay_unchanged() -> None:
    """Plans have lanes, replicas or failure plans, or no device can compute anything earlier."""
    problem, plan = rows()
    _, waved = next(make_plans_in_waves(problem, plan))
    replicas = replace(plan, replicas=({}, {"d0": "d1", "d1": "d0"}))
    losses = replace(plan, failures=(FailurePlan(("d1",), problem.single_device_plan("d0")),))
    assert [
        list(make_plans_in_waves(problem, one)) for one in (waved, replicas, losses, problem.single_device_plan("d0"))
    ] == [[]] * 4
    assert len(list(make_plans_in_waves(problem, plan))) == len(FIRST_WAVE_SHARES)


def test_parts_without_waiting_readers_come_last() -> None:
    """The first plan has one wave: parts stay as they were, and only the queries have their own lane."""
    problem, plan = rows()
    _, behind = next(make_plans_in_waves(problem, plan))
    regions = {name: [replace(part, lane=0) for part in own] for name, own in behind.layers.items()}
    assert regions == {name: list(own) for name, own in plan.layers.items()}
    late = [name for name, own in behind.layers.items() if own[0].lane == 0]
    block = ("q_proj.matmul", "attn.q.reshape", "attn.q.transpose")
    assert late == [f"layers.{number}.{name}" for number in (0, 1) for name in block]
