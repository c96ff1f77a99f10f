"""The strategy `teams`: its load models against the simulator, its local search, and rejected inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import onnx
import pytest
from support.generators import integers
from support.planning import make_cluster
from support.random_problems import random_problem

from dicompiler import networks
from dicompiler.base.errors import UsageError
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Host
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import Platform
from dicompiler.partition.segmentation import build_program
from dicompiler.search.problem import Problem
from dicompiler.search.work_budget import WorkBudget
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_passes.partition import PartitionPass
from dicompiler_strategies.auto import improve_by_moves
from dicompiler_strategies.pipeline import Pipeline
from dicompiler_strategies.tables.cost_tables import build_cost_tables
from dicompiler_strategies.teams.run_search import RunObjective, RunSearch
from dicompiler_strategies.teams.strategy import Teams, build_objective, list_teams, team_choices


def network(name: str, platform: str | Platform, objective: str) -> Problem:
    return load_problem(Model.load(networks.build(name, 0)), platform, objective=objective)


@pytest.mark.parametrize("platform", ["rpi4-gateway-x4", "rpi4x4", "jetson-nx2"])
@pytest.mark.parametrize(
    ("name", "objective", "tolerance"),
    [
        ("lenet", "throughput", 1e-9),
        ("lenet", "memory", 0.01),
        # Readers of the same tensor may read different regions. The model counts the largest one of them only.
        ("light/squeezenet", "throughput", 0.01),
        ("light/squeezenet", "memory", 0.005),
    ],
)
def test_largest_load_is_the_simulated_objective(name: str, platform: str, objective: str, tolerance: float) -> None:
    problem = network(name, platform, objective)
    tables = build_cost_tables(problem, team_choices(problem))
    model, random = build_objective(tables).model, np.random.default_rng(0)
    for _ in range(10):
        selection = np.array([random.integers(count) for count in tables.choice_counts])
        load = float(model.loads(selection[None]).max())
        simulated = problem.evaluate(tables.plan(selection.tolist())).objective_value(objective)
        assert load == pytest.approx(simulated, rel=tolerance)


def test_values_are_finite_if_a_host_has_no_free_memory() -> None:
    # The runtime of the target needs more memory than the hosts have.
    platform = make_cluster("switch", 1.0, 1.0, memory=2**20)
    problem = load_problem(Model.load(networks.build("lenet", 0)), platform, objective="throughput", target="sockets")
    objective = build_objective(build_cost_tables(problem, team_choices(problem)))
    assert objective.memory is not None and objective.memory_limits.min() == 1
    with np.errstate(all="raise"):
        assert np.isfinite(objective.value(np.zeros(len(problem.layers.layers), np.intp)))


@pytest.mark.parametrize("name", ["lenet", "light/squeezenet"])
def test_loads_of_moved_runs_are_those_of_whole_selections(name: str) -> None:
    assert_moved_loads_equal(network(name, "jetson-nx2", "throughput"), rtol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_of_moved_runs_are_exactly_those_of_whole_selections(seed: int) -> None:
    assert_moved_loads_equal(random_problem(seed, "memory"), rtol=0)


def assert_moved_loads_equal(problem: Problem, rtol: float) -> None:
    tables = build_cost_tables(problem, team_choices(problem))
    model, random = build_objective(tables).model, np.random.default_rng(0)
    layers = len(tables.choices)
    for _ in range(3):
        current = np.array([random.integers(count) for count in tables.choice_counts])
        runs = [range(start, random.integers(start, layers) + 1) for start in random.integers(layers, size=4)]
        moved = np.tile(current, (len(runs), 5, 1))
        for selections, run in zip(moved, runs, strict=True):
            for layer in run:
                selections[:, layer] = random.integers(tables.choice_counts[layer], size=5)
        expected = model.loads(moved.reshape(-1, layers))
        np.testing.assert_allclose(model.moved_loads(current, moved, runs), expected, rtol=rtol)


def test_known_plans_only_add_to_the_plans_that_the_search_finds_alone() -> None:
    problem = network("lenet", "jetson-nx2", "memory")
    known = [problem.single_device_plan(device.name) for device in problem.platform.devices]
    plan, without = Teams(tries=3).plan_from(problem, WorkBudget(), known), Teams(tries=3).plan(problem)
    assert problem.evaluate(plan).memory <= problem.evaluate(without).memory


@pytest.mark.parametrize("objective", ["throughput", "memory"])
@pytest.mark.parametrize("seed", range(12))
def test_plan_is_bit_equal_and_not_worse_than_one_device(seed: int, objective: str) -> None:
    problem = random_problem(seed, objective)
    plan = Teams(tries=2).plan(problem)
    single = problem.best_single_device[1].objective_value(objective)
    assert problem.evaluate(plan).objective_value(objective) <= single * (1 + 1e-9)
    assert problem.model is not None
    inputs = integers(Random(seed), problem.model.proto)
    reference = run_model(problem.model, inputs)
    placed = PartitionPass().run(PipelineState(model=problem.model, layers=problem.layers, plan=plan))
    execution = ProgramExecutor(build_program(placed.model, plan.devices)).run(inputs)
    assert all(np.array_equal(reference[name], execution.outputs[name]) for name in reference)


def test_search_improves_the_value_and_gives_the_same_plan_again() -> None:
    problem = network("lenet", "rpi4-gateway-x4", "memory")
    tables = build_cost_tables(problem, team_choices(problem))
    objective = build_objective(tables)
    search = RunSearch(tables.choices, objective, WorkBudget())
    start = np.zeros(len(tables.choices), np.intp)
    found = search.improve(start)
    assert objective.values(found[None])[0] < objective.values(start[None])[0]
    assert (search.improve(found) == found).all()
    assert Teams(tries=3).plan(problem) == Teams(tries=3).plan(problem)


def test_search_also_begins_with_known_plans() -> None:
    problem = network("lenet", "jetson-nx2", "throughput")
    known = improve_by_moves(problem, problem.best_single_device[0], WorkBudget())
    plan, without = Teams(tries=0).plan_from(problem, WorkBudget(), [known]), Teams(tries=0).plan(problem)
    assert problem.evaluate(plan).period_s < problem.evaluate(without).period_s


def test_search_ends_after_some_random_changes_without_a_better_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network("lenet", "rpi4x4", "memory")
    tables = build_cost_tables(problem, team_choices(problem))
    run_search = RunSearch(tables.choices, build_objective(tables), WorkBudget())
    improved = map(np.array, iter([[5], [6], [4], [4], [3], [3], [3], [2]]))
    monkeypatch.setattr(RunSearch, "improve", lambda *_: next(improved))
    monkeypatch.setattr(RunSearch, "change_randomly", lambda *_: np.zeros(1))
    monkeypatch.setattr(RunObjective, "value", lambda _, plan: float(plan[0]))
    found = Teams(tries=2)._improve_and_change(run_search, [np.zeros(1, np.intp)], math.inf)
    assert [int(plan[0]) for plan in found] == [5, 6, 4, 4, 3, 3, 3]


def test_plan_is_not_worse_than_that_of_pipeline() -> None:
    problem = network("mobilenet_v2", "jetson-nx2", "memory")
    stages, teams = Pipeline().plan(problem), Teams(tries=0).plan(problem)
    assert problem.evaluate(teams).memory <= problem.evaluate(stages).memory


def test_memory_of_squeezenet_is_below_that_of_whole_layers() -> None:
    problem = network("light/squeezenet", "rpi4-gateway-x4", "memory")
    stages, teams = Pipeline().plan(problem), Teams(tries=0).plan(problem)
    assert problem.evaluate(teams).memory < 0.85 * problem.evaluate(stages).memory


def test_teams_on_unequal_devices_are_faster_than_whole_layers() -> None:
    problem = network("light/squeezenet", "jetson-nx2", "throughput")
    stages, teams = Pipeline().plan(problem), Teams(tries=0).plan(problem)
    assert problem.evaluate(teams).period_s < problem.evaluate(stages).period_s


def test_plan_for_throughput_keeps_to_the_memory_of_the_hosts() -> None:
    problem = network("resnet18", "rpi4x4", "throughput")
    limit = int(0.4 * problem.evaluate(problem.single_device_plan("pi01")).memory)
    hosts = tuple(Host(host.name, limit) for host in problem.platform.hosts)
    tight = replace(problem, platform=replace(problem.platform, hosts=hosts))
    assert tight.evaluate(Teams(tries=0).plan(tight)).memory <= limit


def test_states_stay_on_their_device() -> None:
    random = np.random.default_rng(0)
    weights = onnx.numpy_helper.from_array(random.normal(size=(256, 256)).astype("f"), "w")
    values = {
        name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 256])
        for name in ("x", "past", "y", "present")
    }
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "w"], ["a"], "first"),
        onnx.helper.make_node("Add", ["a", "past"], ["present"], "state"),
        onnx.helper.make_node("Gemm", ["present", "w"], ["y"], "last"),
    ]
    graph = onnx.helper.make_graph(
        nodes, "g", [values["x"], values["past"]], [values["y"], values["present"]], [weights]
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    problem = load_problem(Model.load(proto), "rpi4x4", objective="throughput", state=("past=present",))
    assert problem.layers.states
    Teams(tries=3).check_feasible(problem, Teams(tries=3).plan(problem))


def test_small_clusters_have_all_teams_and_large_ones_few() -> None:
    def teams(count: int) -> list[tuple[str, ...]]:
        devices = make_cluster("switch", *[1.0] * count).computing_devices
        return [tuple(device.name for device in team) for team in list_teams(devices)]

    assert teams(1) == []
    assert teams(3) == [("d0", "d1"), ("d0", "d2"), ("d1", "d2"), ("d0", "d1", "d2")]
    assert ("d2", "d3", "d4", "d5") in teams(6) and len(teams(6)) == 8
    assert [len(team) for team in teams(20)] == [20]


def test_exceeded_budget_is_noted_in_a_plan_that_is_not_worse_than_one_device() -> None:
    problem = network("lenet", "rpi4x4", "memory")
    for budget in (1e-6, 0.05):
        plan = Teams(budget=budget).plan(problem)
        assert f"budget of {budget:g} s" in plan.note
        assert problem.evaluate(plan).memory <= problem.best_single_device[1].memory


def test_rejects_other_objectives_and_wrong_options() -> None:
    with pytest.raises(UsageError, match="teams: objective 'latency' is not supported: use throughput or memory"):
        Teams().plan(network("lenet", "rpi4x4", "latency"))
    with pytest.raises(UsageError, match="teams: tries is -1: use 0 or more"):
        Teams(tries=-1)
    with pytest.raises(UsageError, match="teams: budget is 0: use more than 0 s"):
        Teams(budget=0)
