"""The strategy `replicate`: the order in which devices get frames, groups of devices, and rejected options."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.alone import alone, posed
from support.planning import FREE, make_cluster
from support.planning import make_cluster as rated

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.driver.prepare import load_problem, prepare
from dicompiler.ir.cluster import Host
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.program import Program
from dicompiler.partition.lowering import lower
from dicompiler.plugin.registry import registry
from dicompiler.search.constraints import check_constraints
from dicompiler.search.problem import Problem
from dicompiler.verify.comparison import check_exact
from dicompiler_strategies.replicate import Replicate, candidate_plans
from dicompiler_strategies.stages.turns import deal_frames


def problem(*rates: float, objective: str = "throughput") -> Problem:
    platform = make_cluster("switch", *rates)
    return load_problem(Model.load(networks.build("lenet", 0)), platform, objective=objective, cost=FREE)


def devices(plan: Plan) -> set[str]:
    return {part.device for parts in plan.layers.values() for part in parts}


def test_frames_go_to_the_device_that_finishes_first() -> None:
    assert deal_frames([1, 1, 1], range(1, 9)) == (0, 1, 2)
    # The devices need 2 s and 1 s for a frame. The fast one computes two of three frames, so three frames take 2 s.
    assert deal_frames([2, 1], range(1, 9)) == (1, 0, 1)
    # The devices need 5 s and 1 s for a frame. The slow one computes one of six frames, but none of three.
    assert sorted(deal_frames([5, 1], range(1, 9))) == [0, 1, 1, 1, 1, 1]
    assert deal_frames([5, 1], range(1, 4)) == (1,)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 16))
def test_period_lies_between_fastest_device_and_all_devices(seconds: list[float], most: int) -> None:
    order = deal_frames(seconds, range(1, most + 1))
    period = max(order.count(d) * own for d, own in enumerate(seconds)) / len(order)
    assert 1 / sum(1 / own for own in seconds) * (1 - 1e-9) <= period <= min(seconds) * (1 + 1e-9)
    assert len(order) <= most


def test_single_devices_each_run_the_whole_network() -> None:
    (plan,) = candidate_plans(problem(1, 1, 1, 1), 1)
    assert [devices(role) for role in plan.roles] == [{"d0"}, {"d1"}, {"d2"}, {"d3"}]
    assert plan.replicas == ({}, {"d0": "d1"}, {"d0": "d2"}, {"d0": "d3"})


def test_unequal_devices_get_frames_by_rate() -> None:
    in_turn, by_rate = candidate_plans(problem(1, 2, 0, 1), 1)
    assert [devices(role) for role in in_turn.roles] == [{"d1"}, {"d0"}, {"d3"}]
    taken = [device for role in by_rate.roles for device in devices(role)]
    assert sorted(taken) == ["d0", "d1", "d1", "d3"]


def test_groups_have_similar_devices_at_each_position() -> None:
    (plan,) = candidate_plans(problem(1, 4, 1, 4, 1), 2)
    first, second = plan.roles
    assert (devices(first), devices(second)) == ({"d1", "d0"}, {"d3", "d2"})
    assert [next(iter(parts)).device for parts in first.layers.values()][:: len(first.layers) - 1] == ["d1", "d0"]


def test_one_group_of_all_has_no_replicas() -> None:
    (plan,) = candidate_plans(problem(1, 1, 1), 3)
    assert devices(plan) == {"d0", "d1", "d2"} and not plan.replicas


@pytest.mark.parametrize("size", [1, 2])
def test_every_role_computes_the_same_bits(size: int) -> None:
    posed = problem(3, 1, 2, 1)
    plan = Replicate(group_size=size).plan(posed)
    assert len(plan.replicas) > 1

    def program(model: Model) -> Program:
        made = lower(replace(prepare(model), plan=plan, platform=posed.platform)).program
        assert made is not None
        return made

    assert posed.model is not None
    check = check_exact(posed.model, program, seeds=(0,))
    assert check.passed and check.applies, check.detail


def test_rejects_unsupported_objectives_and_sizes() -> None:
    with pytest.raises(UsageError, match="objective 'latency' is not supported: use throughput"):
        Replicate().plan(problem(1, 1, objective="latency"))
    with pytest.raises(UsageError, match="groups of 3, but only 2 devices compute"):
        Replicate(group_size=3).plan(problem(1, 0, 1))
    with pytest.raises(ValueError, match="group_size must be 0 or more"):
        Replicate(group_size=-1)


def test_uses_the_size_with_most_frames() -> None:
    # With fast links, each device computes whole frames. At 1 Mbit/s, sending a frame to another device costs more
    # than it gains.
    fast = posed(rated("switch", 1, 1, 1, 1, bandwidth=1e10))
    plan = registry().make("strategies", "replicate").plan(fast)
    assert len(plan.replicas) == 4
    assert fast.evaluate(plan).period_s == pytest.approx(fast.evaluate(alone(fast)).period_s / 4)
    # If a host has memory for only half of the network, a group needs two devices.
    half = fast.evaluate(registry().make("strategies", "pipeline{devices=d0,d1}").plan(fast)).memory
    tight = replace(fast, platform=replace(fast.platform, hosts=tuple(Host(f"d{i}", half) for i in range(4))))
    pairs = registry().make("strategies", "replicate").plan(tight)
    assert len(pairs.replicas) == 2
    check_constraints(tight, pairs)


def test_one_device_computes_all_frames_if_sending_the_inputs_takes_longer() -> None:
    slow = posed(rated("switch", 1, 1, bandwidth=1e3))
    assert Replicate().plan(slow) == slow.best_single_device[0]
    assert Replicate(group_size=1).plan(slow).replicas


def test_rejects_invalid_options() -> None:
    with pytest.raises(DicompilerError, match="group_size must be 0 or more"):
        registry().make("strategies", "replicate{group_size=-1}")


def test_rates_decide_the_turns() -> None:
    problem = posed(rated("switch", 2, 1, bandwidth=1e10))
    plan = registry().make("strategies", "replicate").plan(problem)
    assert problem.evaluate(plan).period_s == pytest.approx(problem.evaluate(alone(problem)).period_s * 2 / 3)
