"""The strategy `cpsat`: exact optimum of the joint problem, bound, memory limits, objectives."""

from __future__ import annotations

import itertools
import logging
import math
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.layer_graphs import stack, vgg16
from support.modern_net import Net

import dicompiler
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.platform import Platform
from dicompiler.networks import build
from dicompiler.partition.routing import route
from dicompiler.search.constraints import check_constraints
from dicompiler.search.problem import Problem
from dicompiler.search.work_budget import WorkBudget
from dicompiler_strategies.cpsat import CpSat
from dicompiler_strategies.joint import lagrangian
from dicompiler_strategies.joint.choice_budget import affordable_choices
from dicompiler_strategies.joint.cpsat_solver import SolverEffort, solve_remaining
from dicompiler_strategies.joint.joint_model import JointModel, build_joint_model
from dicompiler_strategies.joint.lagrangian import RelaxedProblem, coordinate_descent, relax_with_prices
from dicompiler_strategies.joint.solve import JointSolution, solve_jointly
from dicompiler_strategies.joint.variable_elimination import build_elimination_order, min_marginals, minimise_exactly
from dicompiler_strategies.modnn import Modnn
from dicompiler_strategies.single import Single
from dicompiler_strategies.tables.choices import ChoiceSet
from dicompiler_strategies.tables.cost_tables import build_cost_tables

PAPERS = AnalyticModel(pools=False, elementwise=False, weights=False)
RPI4 = 13.6e9


def cluster(
    *rates: float, kind: str = "shared", memory: int = 2**40, gateway: bool = False, bandwidth: float = 1e8
) -> Platform:
    names = [f"d{i}" for i in range(len(rates))]
    hosts = [Host(name, memory) for name in names]
    devices = [
        Device(name, name, rate, power_active=4.0, power_idle=2.0) for name, rate in zip(names, rates, strict=True)
    ]
    if gateway:
        hosts.insert(0, Host("gateway", 2**40))
        devices.insert(0, Device("gateway", "gateway", 0.0))
    return Platform("test", tuple(hosts), tuple(devices), Network(kind, bandwidth))  # type: ignore[arg-type]


def small() -> LayerGraph:
    rows = [("conv", 8, 3, 1, 1, 1), ("conv", 8, 3, 1, 1, 1), ("pool", 2, 2, 0), ("flatten",), ("fc", 40)]
    return stack((1, 4, 16, 16), rows)


def solved(strategy: CpSat, problem: Problem) -> JointSolution:
    return strategy.solve(strategy.build_tables(problem))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], dict[tuple[int, int], np.ndarray], list[np.ndarray]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    pairs = [(i, j) for i, j in itertools.combinations(range(len(sizes)), 2) if draw(st.booleans())]
    return sizes, {(i, j): rng.random((sizes[i], sizes[j])) for i, j in pairs}, [rng.random(size) for size in sizes]


@given(graphs())
@settings(max_examples=examples(80), deadline=None)
def test_elimination_finds_the_minimum_and_every_min_marginal(problem: tuple) -> None:  # type: ignore[type-arg]
    sizes, edge, node = problem
    plan = build_elimination_order(sizes, list(edge))
    everything = {
        selection: sum(own[c] for own, c in zip(node, selection, strict=True))
        + sum(table[selection[i], selection[j]] for (i, j), table in edge.items())
        for selection in itertools.product(*map(range, sizes))
    }
    least, chosen = minimise_exactly(plan, node, edge)
    assert least == pytest.approx(min(everything.values())) == pytest.approx(everything[chosen])
    for v, own in enumerate(min_marginals(plan, node, edge)):
        for c, value in enumerate(own):
            assert value == pytest.approx(min(total for s, total in everything.items() if s[v] == c))


def test_optimum_equals_exhaustive_search() -> None:
    problem = Problem(small(), cluster(2e8, 1e8), PAPERS)
    options = ChoiceSet(extra_rows=1, row_cuts=("balanced",), shares=("equal",))
    found = solve_jointly(build_cost_tables(problem, options))
    known = build_cost_tables(problem, options)
    every = np.array(list(itertools.product(*(range(len(own)) for own in known.choices))))
    assert found.is_proven and found.value == pytest.approx(known.total_seconds_of(every).min())
    assert found.bound == pytest.approx(found.value)
    assert problem.estimate(found.plan).latency_s <= found.value * (1 + 1e-9)
    assert "barrier" in found.text() and "proven optimal" in found.text() and "analytic" in found.text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "kinds", "expected"),
    [(4, (), 0.758), (8, (), 0.600), (4, ("grid",), 0.8325), (8, ("grid",), 0.7215)],
)
def test_proves_vgg16_in_the_published_barrier_model(devices: int, kinds: tuple[str, ...], expected: float) -> None:
    """Published latencies on 4 and 8 boards are 0.757 and 0.600 s, and without grids 0.832 and 0.717 s.

    MoDNN takes 0.907 and 1.001 s.
    """
    problem = Problem(vgg16(), cluster(*[RPI4] * devices, gateway=True), PAPERS)
    allowed = tuple(kind for kind in CpSat().kinds if kind not in kinds)
    found = solved(CpSat(kinds=allowed), problem)
    assert found.is_proven and found.value <= expected
    assert problem.estimate(found.plan).latency_s == pytest.approx(found.value, rel=1e-6)
    assert found.value < problem.estimate(Modnn().plan(problem)).latency_s


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["latency", "throughput", "energy", "memory", "communication"])
@pytest.mark.parametrize("kind", ["shared", "switch"])
def test_no_objective_is_worse_than_one_device(objective: str, kind: str) -> None:
    problem = Problem(small(), cluster(2e8, 1e8, 1e8, kind=kind), PAPERS, objective)
    found = solved(CpSat(time=2), problem)
    route(problem.layers, found.plan)
    assert found.bound <= found.value * (1 + 1e-9)
    single = problem.estimate(Single().plan(problem)).objective_value(objective)
    assert problem.estimate(found.plan).objective_value(objective) <= single * (1 + 1e-9)


def test_cp_sat_proves_the_optimum_of_elimination() -> None:
    """CP-SAT gets the tables only: all choices and no known value."""
    known = build_cost_tables(
        Problem(small(), cluster(2e8, 1e8), PAPERS), ChoiceSet(extra_rows=1, row_cuts=("balanced",))
    )
    whole = build_joint_model(known)
    proof = relax_with_prices(whole)
    nothing = RelaxedProblem(0.0, None, np.inf, whole, tuple(np.zeros(len(own)) for own in whole.node))
    found = solve_remaining(nothing, SolverEffort())
    assert found.best is not None
    assert found.value == pytest.approx(proof.value) and found.bound == pytest.approx(proof.value, rel=1e-5)


def test_memory_is_a_hard_limit_with_a_valid_bound() -> None:
    free = Problem(small(), cluster(2e9, 2e9, 2e9), PAPERS)
    known = build_cost_tables(free, ChoiceSet(extra_rows=0, row_cuts=("balanced",), shares=("equal",)))
    need = free.estimate(solve_jointly(known).plan).memory
    every = np.array(list(itertools.product(*(range(len(own)) for own in known.choices))))
    limit = int(need * 0.7)
    tight = replace(free, platform=cluster(2e9, 2e9, 2e9, memory=limit))
    found = solve_jointly(build_cost_tables(tight, known.options))
    assert tight.estimate(found.plan).memory <= limit
    best = np.inf
    for selection, value in sorted(
        zip(map(tuple, every), known.total_seconds_of(every), strict=True), key=lambda pair: pair[1]
    ):
        if tight.estimate(known.plan(selection)).memory <= limit:
            best = value
            break
    assert found.bound <= best * (1 + 1e-9) and best <= found.value * (1 + 1e-9)
    assert found.is_proven and found.value == pytest.approx(best)


def test_memory_error_names_sufficient_memory_and_the_layer() -> None:
    with pytest.raises(DicompilerError, match=r"layer 'fc5' fits nowhere.* on each host would suffice"):
        CpSat(kinds=("whole",)).plan(Problem(small(), cluster(1e9, 1e9, memory=60_000), PAPERS))
    need = 22_000
    problem = Problem(small(), cluster(1e9, 1e9, memory=need), PAPERS)
    with pytest.raises(DicompilerError, match=r"would suffice|fits nowhere") as refused:
        CpSat().plan(problem)
    assert "\n" not in str(refused.value)


def test_equal_options_give_equal_plans() -> None:
    problem = Problem(small(), cluster(2e8, 1e8, 1e8), PAPERS, "throughput")
    first, second = (solved(CpSat(time=0.5, seed=3), problem) for _ in range(2))
    assert first.plan == second.plan and first.value == second.value
    known = build_cost_tables(problem, ChoiceSet(extra_rows=1, row_cuts=("nearest",)))
    whole = build_joint_model(known)
    start = tuple(0 for _ in known.choices)
    assert whole.value(coordinate_descent(whole, start)) <= whole.value(start)


@pytest.mark.parametrize(
    "options", [{"time": 0}, {"workers": 0}, {"seed": -1}, {"kinds": ("hight",)}, {"extra_rows": -1}]
)
def test_rejects_meaningless_options(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        CpSat(**options)  # type: ignore[arg-type]


def test_ctrl_c_returns_best_plan_so_far(caplog: pytest.LogCaptureFixture) -> None:
    problem = Problem(vgg16(), cluster(*[RPI4] * 4, gateway=True), PAPERS, "throughput")
    known = build_cost_tables(problem, ChoiceSet(extra_rows=0, row_cuts=("nearest",)))
    timer = threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGINT))

    def note(record: logging.LogRecord) -> bool:
        # After this message, the solver CP-SAT runs, so the interrupt reaches it.
        if "choices left" in record.getMessage():
            timer.start()
        return True

    logger = logging.getLogger("dicompiler")
    logger.addFilter(note)
    try:
        with caplog.at_level(logging.INFO, logger="dicompiler"):
            found = solve_jointly(known, SolverEffort(deterministic_s=1e6))
    finally:
        logger.removeFilter(note)
        timer.cancel()
    assert found.interrupted and "interrupted" in found.plan.note and not found.is_proven
    assert "best plan so far" in caplog.text
    route(problem.layers, found.plan)


def test_large_problems_get_a_smaller_choice_set() -> None:
    problem = Problem(small(), cluster(*[1e9] * 16, kind="switch"), PAPERS)
    chosen = affordable_choices(problem, ChoiceSet())
    assert chosen != ChoiceSet() and len(chosen.device_counts) < 15
    found = solved(CpSat(time=1), problem)
    assert found.is_proven and chosen.describe() == found.choice_set


def test_small_budget_gets_a_smaller_choice_set() -> None:
    problem = Problem(small(), cluster(*[1e9] * 4, kind="switch"), PAPERS)
    sizes = [
        sum(CpSat().build_tables(problem, WorkBudget(seconds)).choice_counts) for seconds in (math.inf, 120, 0.1, 0.04)
    ]
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3]


@pytest.mark.slow
def test_compiled_plan_computes_the_same_as_the_network(tmp_path: Path) -> None:
    onnx.save(build("tiny"), tmp_path / "m.onnx")
    platform = cluster(1e8, 1e8, 1e8, bandwidth=1e9)
    result = dicompiler.compile(
        tmp_path / "m.onnx",
        platform=platform,
        strategy="cpsat{time=1}",
        cost="analytic{runtime=0}",
        output=tmp_path / "out",
    )
    assert result.plan is not None
    assert len({part.device for parts in result.plan.layers.values() for part in parts}) > 1
    verification = result.verify()
    assert verification.passed


def test_too_wide_graph_is_eliminated_over_promising_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All pairs of six layers are edges, so that every table has six axes.

    The best selection has low costs.
    """
    random = np.random.default_rng(3)
    node = tuple(random.random(4) for _ in range(6))
    edge = {(i, j): 0.1 * random.random((4, 4)) for i in range(6) for j in range(i + 1, 6)}
    model = JointModel(node, edge, kept_choices=tuple(np.arange(4) for _ in range(6)))
    best = min(model.value(selection) for selection in itertools.product(range(4), repeat=6))
    monkeypatch.setattr(lagrangian, "MAX_TABLE_ELEMENTS", 2**6)
    monkeypatch.setattr(lagrangian, "coordinate_descent", lambda _model, selection, _allowance: selection)
    found = lagrangian.bound_without_elimination(model, [(0,) * 6])
    assert found.bound <= best <= found.value < 1.1 * best < model.value((0,) * 6)


def test_states_that_would_be_sent_are_never_chosen() -> None:
    """The first of three consecutive products reads the output of the last."""
    net = Net()
    past = net.input("past", (1, 1, 64))
    first = net.op("Add", net.op("MatMul", net.input("x", (1, 1, 64)), net.weight(64, 64)), past)
    last = net.op("MatMul", net.op("MatMul", first, net.weight(64, 64)), net.weight(64, 64))
    model = net.model(types=[onnx.helper.make_tensor_value_info(last, 1, (1, 1, 64))])
    platform = cluster(1e3, 1e3, kind="switch")
    problem = load_problem(model, platform, objective="throughput", state=[f"past={last}"])
    filled = CpSat().build_tables(problem)
    whole = [
        {parts[0].device: i for i, choice in enumerate(choices) if len(parts := choice.parts) == 1}
        for choices in filled.choices
    ]
    joint = build_joint_model(filled)
    here, there = (joint.value([whole[0]["d0"], whole[1]["d0"], whole[2][device]]) for device in ("d0", "d1"))
    assert there > 1.5 * here
    check_constraints(problem, CpSat().plan(problem))
