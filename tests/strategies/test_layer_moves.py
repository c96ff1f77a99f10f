"""The local search that moves whole layers to other devices."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_problems import random_problem

from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Host
from dicompiler.ir.onnx.model import Model
from dicompiler.search.problem import Problem
from dicompiler.search.work_budget import WorkBudget
from dicompiler_strategies.auto import improve_by_moves, is_plan_of_whole_layers
from dicompiler_strategies.modnn import Modnn
from dicompiler_strategies.pipeline import Pipeline
from dicompiler_strategies.replicate import Replicate

OBJECTIVES = ("latency", "throughput", "memory", "energy", "communication", "latency+1e-6*memory")


def resnet(objective: str) -> Problem:
    return load_problem(Model.load(networks.build("resnet18", 0)), "rpi4x4", objective=objective)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 60), st.sampled_from(OBJECTIVES))
def test_moved_plan_is_not_estimated_worse(seed: int, objective: str) -> None:
    problem = random_problem(seed, objective)
    plan = problem.best_single_device[0]
    moved = improve_by_moves(problem, plan, WorkBudget())
    assert is_plan_of_whole_layers(moved)
    before, after = (problem.estimate(each).objective_value(objective) for each in (plan, moved))
    assert after <= before * (1 + 1e-9)


def test_layers_that_are_not_consecutive_may_share_a_device() -> None:
    problem = resnet("memory")
    plan = Pipeline().plan(problem)
    moved = improve_by_moves(problem, plan, WorkBudget())
    assert problem.evaluate(moved).memory < problem.evaluate(plan).memory


def test_moves_keep_to_the_memory_of_the_hosts() -> None:
    problem = resnet("throughput")
    limit = int(0.6 * problem.evaluate(problem.single_device_plan("pi01")).memory)
    hosts = tuple(Host(host.name, limit) for host in problem.platform.hosts)
    tight = replace(problem, platform=replace(problem.platform, hosts=hosts))
    moved = improve_by_moves(tight, Pipeline(turns=False).plan(tight), WorkBudget())
    assert problem.evaluate(moved).memory <= limit


def test_exceeded_budget_leaves_the_plan_as_it_is() -> None:
    problem = resnet("memory")
    plan = problem.best_single_device[0]
    assert improve_by_moves(problem, plan, WorkBudget(0.0)) == plan


def test_only_plans_of_whole_layers_without_replicas_are_moved() -> None:
    problem = resnet("throughput")
    assert is_plan_of_whole_layers(problem.single_device_plan("pi01"))
    assert not is_plan_of_whole_layers(Modnn().plan(problem))
    assert not is_plan_of_whole_layers(Replicate().plan(problem))
