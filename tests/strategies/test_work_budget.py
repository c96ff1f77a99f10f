"""Work budgets: searches count their work, stop when the budget is exceeded, and ignore the clock."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.planning import make_cluster

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Host
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem
from dicompiler.search.work_budget import WorkBudget
from dicompiler_strategies.cpsat import CpSat
from dicompiler_strategies.dp.strategy import Dp
from dicompiler_strategies.gradient.strategy import Gradient
from dicompiler_strategies.single import Single
from dicompiler_strategies.transformer_heads import Heads

Search = Callable[[Problem, WorkBudget], Plan]


def by_cpsat(problem: Problem, budget: WorkBudget) -> Plan:
    strategy = CpSat(time=1)
    return strategy.plan_over_tables(strategy.build_tables(problem, budget), budget).plan


SEARCHES: dict[str, Search] = {
    "cpsat": by_cpsat,
    "gradient": lambda problem, budget: Gradient().plan_within(problem, budget),
    "dp": lambda problem, budget: Dp().plan_within(problem, budget),
}


def posed(name: str = "tiny", memory: int = 0) -> Problem:
    problem = load_problem(Model.load(networks.build(name, 0)), make_cluster("switch", 1, 1, 1))
    if not memory:
        return problem
    hosts = tuple(Host(host.name, memory) for host in problem.platform.hosts)
    return replace(problem, platform=replace(problem.platform, hosts=hosts))


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("part", [0.8, 0.5])
def test_search_stops_when_its_budget_is_exceeded_and_notes_it(name: str, part: float) -> None:
    problem, whole = posed(), WorkBudget()
    assert SEARCHES[name](problem, whole).note == ""
    budget = WorkBudget(part * whole.spent_s)
    plan = SEARCHES[name](problem, budget)
    assert budget.spent_s <= 1.1 * budget.limit_s
    said = f"the search ended after its budget of {budget.limit_s:g} s"
    # With a small budget, the cost tables get fewer choices. The search may then end in time, without a note.
    assert plan.note == (said if budget.was_exceeded else "")
    assert budget.was_exceeded or name == "gradient"
    problem.evaluate(plan)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.slow
def test_counted_budget_ignores_the_clock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, whole = posed(), WorkBudget()
    SEARCHES[name](problem, whole)
    expected = SEARCHES[name](problem, WorkBudget(0.6 * whole.spent_s))
    clock = itertools.count(0.0, 1e6)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert SEARCHES[name](problem, WorkBudget(0.6 * whole.spent_s)) == expected


@pytest.mark.parametrize("name", ["cpsat", "gradient"])
@pytest.mark.slow
def test_search_with_memory_limits_stops_too(name: str) -> None:
    problem, whole = posed(memory=60_000), WorkBudget()
    SEARCHES[name](problem, whole)
    budget = WorkBudget(0.7 * whole.spent_s)
    with contextlib.suppress(DicompilerError):  # The search may end before it finds a plan that fits the memory.
        SEARCHES[name](problem, budget)
    assert budget.spent_s <= 1.1 * budget.limit_s


def test_heads_counts_its_work_and_always_finishes_the_first_tables() -> None:
    small = {"size": 3, "layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "vocabulary": 20}
    problem = load_problem(networks.build("llama_small", 1, **small), make_cluster("switch", 1, 1))
    whole = WorkBudget()
    best = Heads().plan_within(problem, whole)
    assert best.note == "" and whole.spent_s > 0 and best == Heads(waves=False).plan(problem)
    late = Heads(budget=1e-9).plan(problem)
    assert late.note == "the search ended after its budget of 1e-09 s"
    least = WorkBudget(1e-9)
    assert Heads().plan_within(problem, least).note == late.note and 0 < least.spent_s < whole.spent_s
    problem.evaluate(late)


def test_note_names_the_clock_if_it_ended_the_search() -> None:
    slow, counted = WorkBudget(10, deadline=0.0), WorkBudget(10, deadline=0.0)
    counted.spend(10)
    assert slow.is_exceeded() and counted.is_exceeded()
    assert counted.note() == "the search ended after its budget of 10 s"
    assert slow.note() == f"{counted.note()} (the clock reached 30 s, because this machine is slow or busy)"


@pytest.mark.parametrize(("budget_s", "clock_s"), [(0.5, 20), (10, 30)])
def test_clock_ends_search_after_three_times_the_budget_but_not_before_20_seconds(
    budget_s: float, clock_s: float
) -> None:
    start = time.monotonic()
    assert clock_s <= WorkBudget.from_seconds(budget_s).deadline - start < clock_s + 10


def test_plan_within_calls_plan_by_default() -> None:
    problem, budget = posed(), WorkBudget(1.0)
    assert Single().plan_within(problem, budget) == Single().plan(problem)
    assert budget.spent_s == 0.0 and not budget.was_exceeded


def test_share_limits_a_step_and_counts_its_work() -> None:
    budget = WorkBudget(10.0, deadline=5.0)
    budget.spend(2.0)
    with budget.share(0.25) as step:
        assert (step.limit_s, step.deadline) == (2.0, 5.0)
        step.spend(1.5)
        assert budget.spent_s == 2.0
    assert budget.spent_s == 3.5


def test_deadline_stops_search() -> None:
    budget = WorkBudget(deadline=0.0)
    assert budget.is_exceeded() and budget.was_exceeded and not budget.try_steps()
    assert budget.spent_s == 0.0
    with pytest.raises(
        DicompilerError, match="cost tables: the budget is used up before they are filled: use a larger budget"
    ):
        Gradient().plan_within(posed(), budget)


@pytest.mark.parametrize("name", [*SEARCHES, "heads"])
def test_budget_must_be_positive(name: str) -> None:
    with pytest.raises(UsageError, match="budget"):
        registry().make("strategies", f"{name}{{budget=0}}")
