"""Failure plans: one for each failure, all bit-equal and fitting into memory together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.generators import integers, random_plan
from support.random_problems import random_problem

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.memory import memory_timeline, program_memory
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.search.constraints import missing_memory
from dicompiler.search.failover_planning import add_failover_plans, reassignments
from dicompiler.search.failure_cases import FailureSelection, failure_metrics, remove_devices
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.verify.executor import ProgramExecutor, run_model


@dataclass(frozen=True)
class Dice(Strategy):
    """A strategy that finds a random plan for any devices, but none for fewer than `least`."""

    name: ClassVar[str] = "dice"
    seed: int = 0
    least: int = 1

    def plan(self, problem: Problem) -> Plan:
        names = [device.name for device in problem.platform.devices]
        if len(names) < self.least:
            raise DicompilerError("too few")
        return problem.build_plan(random_plan(Random(self.seed), problem.layers, names).layers)


@dataclass(frozen=True)
class Stages(Strategy):
    """A strategy that places layers in order, equally many on each device; `calls` records the platforms."""

    name: ClassVar[str] = "stages"
    calls: tuple[list[str], ...] = ()

    def plan(self, problem: Problem) -> Plan:
        names = [device.name for device in problem.platform.computing_devices]
        for asked in self.calls:
            asked.append(" ".join(names))
        layers = problem.layers.layers
        return problem.build_plan({x.name: (Part(names[i * len(names) // len(layers)]),) for i, x in enumerate(layers)})


def boards(*names: str, memory: int = 2**30, idle: Sequence[str] = ()) -> Platform:
    devices = tuple(Device(name, name, 0.0 if name in idle else 1e9) for name in names)
    return Platform("boards", tuple(Host(name, memory) for name in names), devices, Network("switch", 1e8, 1e-4))


def lenet(platform: Platform) -> Problem:
    return load_problem(networks.build("lenet", 0), platform)


def check_all_roles(problem: Problem, plan: Plan, seed: int) -> None:
    """Check that each role computes the same bits, and that weights are stored once per device."""
    assert problem.model is not None
    program = problem.draft_program(plan).program
    assert program is not None
    inputs = integers(Random(seed), problem.model.proto)
    reference = run_model(problem.model, inputs)
    for role in program.roles:
        assert not any(device.segments for device in role.devices if device.device in role.failed)
        delivered = ProgramExecutor(role).run(inputs).delivered
        assert delivered and not set(role.failed) & set(delivered)
        for outputs in delivered.values():
            assert all(np.array_equal(outputs[name], value) for name, value in reference.items())
    timelines = [memory_timeline(role) for role in program.roles]
    for name, use in program_memory(program).items():
        constants = {key: size for timeline in timelines for key, size in timeline[name].constants.items()}
        assert use.weights == sum(constants.values())
        assert use.buffers + use.activations == max(max(timeline[name].live_bytes) for timeline in timelines)
        assert problem.estimate(plan).device(name) is not None


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 2), least=st.integers(2, 5))
def test_every_failure_gets_a_plan_and_all_plans_are_bit_equal(seed: int, count: int, least: int) -> None:
    problem = random_problem(seed % 50)
    first = Dice(seed).plan(problem)
    plan = add_failover_plans(problem, Dice(seed + 1, least), first, FailureSelection(count))
    used = set(plan.devices)
    expected = [set(lost) for lost in FailureSelection(count).device_sets(problem.platform, used)]
    assert [set(loss.failed) for loss in plan.failures] == expected
    assert replace(plan, failures=(), model_digest="") == first
    check_all_roles(problem, plan, seed)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_reassigned_plans_compute_everything(seed: int) -> None:
    problem = random_problem(seed % 50)
    plan = Dice(seed).plan(problem)
    lost, left = plan.devices[-1], [device.name for device in problem.platform.devices]
    left.remove(lost)
    plan = replace(plan, source=(left[0],), sink=(left[0],))
    for taken in reassignments(problem.layers, plan, {lost}, left):
        assert lost not in taken.devices
        check_all_roles(problem, taken, seed)


def test_source_and_sink_move_to_the_first_remaining_device() -> None:
    problem = lenet(boards("a", "b", "c"))
    plan = add_failover_plans(problem, Stages(), Stages().plan(problem), FailureSelection(1))
    assert [(loss.failed, loss.plan.source, loss.plan.sink) for loss in plan.failures] == [
        (("a",), ("b",), ("b",)),
        (("b",), ("a",), ("a",)),
        (("c",), ("a",), ("a",)),
    ]


@pytest.mark.parametrize(
    ("idle", "ends", "fixed", "why"),
    [
        (("a",), (), False, "a is the source and has no compute"),
        ((), ("a",), False, "a was given as the source"),
        ((), (), True, "a is the source in the given plan"),
    ],
)
def test_given_source_and_sink_stay_with_a_warning(
    idle: Sequence[str], ends: tuple[str, ...], fixed: bool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    problem = replace(lenet(boards("a", "b", "c", idle=idle)), source=ends, sink=ends)
    with caplog.at_level(logging.WARNING):
        plan = add_failover_plans(problem, Stages(), Stages().plan(problem), FailureSelection(1), fixed)
    assert [loss.failed for loss in plan.failures] == [("b",), ("c",)]
    assert [record.getMessage() for record in caplog.records] == [f"tolerate-failures: 1: not covered: {why}"]
    with pytest.raises(DicompilerError, match=f"tolerate-failures: a: no failure can be covered: {why}"):
        add_failover_plans(problem, Stages(), Stages().plan(problem), FailureSelection(devices=("a",)), fixed)


def test_irrelevant_failures_keep_the_plan_and_equal_devices_are_planned_once() -> None:
    calls: list[str] = []
    problem = lenet(boards(*"abcdefgh"))
    plan = add_failover_plans(problem, Stages((calls,)), problem.single_device_plan("a"), FailureSelection(2))
    assert calls == [
        "b c d e f g h",
        "c d e f g h",
    ]  # If two devices fail, the plan for the failure of "b" or the main plan is reused.
    for loss in plan.failures:
        assert "a" in loss.failed or loss.plan.layers == plan.layers
    assert {len(loss.failed) for loss in plan.failures} == {1, 2}


def test_devices_of_a_host_fail_together() -> None:
    devices = tuple(Device(f"{host}{i}", host, 1e9) for host in "ab" for i in range(2))
    problem = lenet(Platform("boards", tuple(Host(name, 2**30) for name in "ab"), devices, Network("switch", 1e8)))
    plan = add_failover_plans(problem, Stages(), Stages().plan(problem), FailureSelection.parse("hosts"))
    assert [loss.failed for loss in plan.failures] == [("a0", "a1"), ("b0", "b1")]


def test_remaining_replicas_continue() -> None:
    problem = replace(lenet(boards("a", "b", "c")), objective="throughput")
    first = replace(problem.single_device_plan("a"), replicas=({}, {"a": "b"}, {"a": "c"}))
    plan = add_failover_plans(problem, Dice(least=4), first, FailureSelection(1))
    assert [tuple(turn.layers["conv1"][0].device for turn in loss.plan.replica_roles) for loss in plan.failures] == [
        ("b", "c"), ("a", "c"), ("a", "b"),
    ]  # fmt: skip


def needed(problem: Problem, plan: Plan) -> int:
    return max(entry.memory for entry in problem.estimate(plan).devices)


def test_little_memory_gets_slower_plans_and_then_an_error() -> None:
    roomy = lenet(boards(*"abcd"))
    first = Stages().plan(roomy)
    generous = add_failover_plans(roomy, Stages(), first, FailureSelection(1))
    least = needed(roomy, first)
    outcomes = []
    for memory in (needed(roomy, generous), least, least // 2):
        problem = replace(roomy, platform=boards(*"abcd", memory=memory))
        try:
            plan = add_failover_plans(problem, Stages(), first, FailureSelection(2))
        except DicompilerError as error:
            outcomes.append(str(error))
        else:
            assert not missing_memory(problem, plan)
            assert len(plan.failures) == 10
            outcomes.append("fits")
    for outcome in outcomes:
        assert outcome == "fits" or (
            outcome.startswith("tolerate-failures: 2: the plan ") and " more than host " in outcome
        )
    assert "the plan without failures needs" in outcomes[-1] and "no failure plan fits" in outcomes[-1]
    assert "together with the other plans, needs" in outcomes[1] and "--tolerate-failures " in outcomes[1]
    tight = replace(roomy, platform=boards(*"abcd", memory=needed(roomy, generous) - 1))
    taken = add_failover_plans(tight, Stages(), first, FailureSelection(1))
    assert not missing_memory(tight, taken) and taken.failures != generous.failures


def test_failure_plans_have_metrics_and_count_their_weights() -> None:
    problem = lenet(boards("a", "b", "c"))
    plan = add_failover_plans(problem, Stages(), Stages().plan(problem), FailureSelection(1))
    alone, *losses = failure_metrics(problem, plan)
    assert (alone.failed, alone.extra_weight_bytes) == ((), 0)
    assert alone.metrics == problem.evaluate(replace(plan, failures=()))
    for loss, told in zip(plan.failures, losses, strict=True):
        assert told.failed == loss.failed
        assert told.metrics.latency_s == remove_devices(problem, loss.failed).evaluate(loss.plan).latency_s
        assert told.extra_weight_bytes > 0
    with_all = problem.evaluate(plan)
    assert (with_all.latency_s, with_all.total_bytes) == (alone.metrics.latency_s, alone.metrics.total_bytes)
    assert sum(e.weights for e in with_all.devices) > sum(e.weights for e in alone.metrics.devices)


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("-1", "ab", "tolerate-failures: -1 is negative"),
        ("1", "a", "tolerate-failures: 1: a device must remain, but only one device computes on boards: use 0"),
        ("2", "ab", "tolerate-failures: 2: a device must remain, but only 2 devices compute on boards: use at most 1"),
        ("two", "ab", "tolerate-failures: 'two' is not a number, 'hosts' or a device"),
        ("a,bb", "ab", "tolerate-failures: 'bb' is not a number"),
        ("", "ab", "tolerate-failures: '' is not a number"),
        ("hosts", "a", "tolerate-failures: hosts: all devices that compute are on one host"),
    ],
)
def test_rejects_failures_that_cannot_be_tolerated(text: str, names: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        FailureSelection.parse(text).check_platform(boards(*names))
    assert message in str(caught.value)
