"""The strategy `auto`: never worse than the strategies it asks, reproducible, and interruptible.

Its comparison of these strategies is tested too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from support.alone import posed
from support.planning import make_cluster as rated

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import INTERRUPTED_NOTE, Strategy
from dicompiler.search.work_budget import WorkBudget
from dicompiler_strategies.auto import Auto
from dicompiler_strategies.candidate_search import CandidateSearch, EvaluatedPlan, find_optima, make_neighbours
from dicompiler_strategies.cpsat import CpSat
from dicompiler_strategies.dp.strategy import Dp
from dicompiler_strategies.pipeline import Pipeline
from dicompiler_strategies.tables.cost_tables import CostTables, build_cost_tables

QUICK = ("single", "pipeline", "modnn")


def problem(name: str = "resnet18", platform: str = "rpi4x4", objective: str = "latency") -> Problem:
    return load_problem(Model.load(networks.build(name, 0)), platform, objective=objective)


@pytest.mark.parametrize("objective", ["latency", "throughput", "communication"])
def test_auto_is_never_worse_than_the_strategies_it_asks(objective: str) -> None:
    posed = problem(objective=objective)
    plan = Auto(strategies=QUICK, tries=6).plan(posed)
    assert plan.chosen_strategy in (*QUICK, "layer moves")
    mine = posed.evaluate(plan).objective_value(objective)
    for name in QUICK:
        assert mine <= posed.evaluate(registry().make("strategies", name).plan(posed)).objective_value(objective)


def test_plan_is_reproducible_and_marked_when_time_runs_out(caplog: pytest.LogCaptureFixture) -> None:
    posed = problem("lenet")
    once, again = (Auto(tries=4, strategies=QUICK).plan(posed) for _ in range(2))
    assert once == again and once.note == ""
    with caplog.at_level(logging.WARNING, logger="dicompiler"):
        late = Auto(budget=1e-9).plan(posed)
    assert "budget" in late.note and "best plan so far" in caplog.text
    posed.evaluate(late)


@pytest.mark.parametrize("objective", ["latency", "throughput", "energy", "memory", "communication"])
def test_quick_strategies_are_asked_however_small_the_budget_is(objective: str) -> None:
    posed = problem("lenet", objective=objective)
    plan = Auto(budget=1e-9).plan(posed)
    mine = posed.evaluate(plan).objective_value(objective)
    for name in ("single", "pipeline", "replicate", "modnn"):
        with contextlib.suppress(UsageError):  # The strategy replicate supports only the objective throughput.
            other = registry().make("strategies", name).plan(posed)
            assert mine <= posed.evaluate(other).objective_value(objective)


def test_note_names_the_steps_that_the_budget_ended() -> None:
    plan = Auto(budget=1e-9).plan(problem("lenet"))
    assert plan.note == (
        "the search ended after its budget of 1e-09 s in these steps: cpsat, dp, gradient, small changes "
        "and left out: optima with cheaper messages, plans near the best one, parts in waves"
    )
    memory = Auto(budget=1e-9).plan(problem("lenet", objective="memory"))
    assert "teams, cpsat, small changes" in memory.note


@dataclass(frozen=True)
class Spending(Strategy):
    """Strategy that uses up its budget, and adds the seconds of the budget to `budgets_s`."""

    name: ClassVar[str] = "spending"
    budgets_s: ClassVar[list[float]] = []

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        self.budgets_s.append(budget.remaining_s)
        budget.spend(budget.remaining_s)
        budget.is_exceeded()
        return self.plan(problem)

    def plan(self, problem: Problem) -> Plan:
        return problem.best_single_device[0]


def replace_strategies(monkeypatch: pytest.MonkeyPatch, **classes: type[Strategy]) -> None:
    """Let `auto` use other classes for the strategies with these names."""
    known = registry()
    replaced = {name: replace(known.strategies[name], value=value) for name, value in classes.items()}
    changed = replace(known, strategies={**known.strategies, **replaced})
    monkeypatch.setattr("dicompiler_strategies.auto.registry", lambda: changed)


@pytest.mark.parametrize(("objective", "terms"), [("throughput", 1), ("latency+energy", 2)])
def test_each_strategy_has_the_whole_budget(objective: str, terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy that uses up its budget therefore leaves as much to the next one as if it were asked alone."""
    replaced = dict.fromkeys(("teams", "dp", "cpsat", "genetic"), Spending)
    replace_strategies(monkeypatch, **replaced)
    monkeypatch.setattr(Spending, "budgets_s", [])
    plan = Auto(strategies=("single", *replaced), budget=2, tries=0).plan(problem("lenet", objective=objective))
    assert Spending.budgets_s == [2.0] * len(replaced) * terms
    assert plan.note.startswith("the search ended after its budget of 2 s in these steps: ")


def test_search_ends_when_the_best_plan_reaches_the_lower_bound(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dicompiler")
    plan = Auto().plan(posed(rated("switch", 1, 1, bandwidth=1e10)))
    assert len(plan.replicas) == 2 and plan.note == ""
    assert "auto: asks replicate" in caplog.text and "auto: asks pipeline" not in caplog.text


def test_slow_strategies_are_left_out_when_one_reaches_the_lower_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dicompiler")
    replace_strategies(monkeypatch, teams=Pipeline)
    plan = Auto(strategies=("teams", "genetic", "cpsat")).plan(posed(rated("switch", 1, 1, bandwidth=1e10)))
    assert len(plan.replicas) == 2 and plan.note == ""
    assert "auto: asks teams" in caplog.text and "auto: asks genetic" not in caplog.text


@pytest.mark.parametrize("objective", ["throughput", "energy"])
def test_heads_is_asked_for_networks_with_attention(objective: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dicompiler")
    model = networks.build("llama_small", size=4, layers=1, hidden=64, vocabulary=50)
    # The inputs arrive at the slow board, so that no plan reaches the lower bound.
    devices = tuple(Device(name, name, rate, 4, 6.4, 2.7) for name, rate in (("slow", 1e8), ("fast", 1e10)))
    hosts = tuple(Host(device.name, 2**32) for device in devices)
    platform = Platform("boards", hosts, devices, Network("switch", 1e8, 2e-4))
    Auto(budget=0.1, tries=0).plan(load_problem(model, platform, objective=objective))
    assert "auto: asks heads" in caplog.text


def test_cpsat_gets_seed_and_tries_for_each_term_of_a_weighted_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Recording(CpSat):
        def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:  # noqa: ARG002
            asked.append((problem.objective, self.seed, self.tries))
            return problem.best_single_device[0]

    replace_strategies(monkeypatch, cpsat=Recording)
    Auto(strategies=("cpsat",), seed=7, tries=3).plan(problem("lenet", objective="latency+energy"))
    assert asked == [("latency", 7, 3), ("energy", 7, 3)]


def test_plan_remains_if_the_tables_for_small_changes_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> CostTables:
        raise DicompilerError("a layer has no split")

    monkeypatch.setattr(CpSat, "build_tables", refuse)
    assert Auto(strategies=("modnn", "cpsat")).plan(problem()).chosen_strategy == "modnn"


def test_plan_remains_if_the_tables_for_waves_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> CostTables:
        raise DicompilerError("a layer has no split")

    monkeypatch.setattr("dicompiler_strategies.auto.reduced_choices", refuse)
    model = networks.build("llama_small", size=4, layers=1, hidden=64, vocabulary=50)
    plan = Auto(strategies=("single", "heads"), budget=1).plan(load_problem(model, "rpi4x2"))
    assert plan.chosen_strategy == "single"


def test_error_says_why_no_strategy_was_asked() -> None:
    with pytest.raises(DicompilerError) as caught:
        Auto(strategies=("heads",)).plan(problem("lenet"))
    assert str(caught.value) == (
        "auto: no strategy has a plan (it does not ask heads: the network has no attention): add others, such as single"
    )


@pytest.mark.parametrize(("spent_share", "is_repeated"), [(0.5, False), (1.0, True)])
def test_small_changes_are_tried_again_if_the_budget_ended_those_of_cpsat(
    spent_share: float, is_repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def plan_over_tables(self: CpSat, cost_tables: CostTables, budget: WorkBudget) -> EvaluatedPlan:  # noqa: ARG001
        budget.spend(spent_share * budget.remaining_s)
        budget.is_exceeded()
        plan, metrics = cost_tables.problem.best_single_device
        return EvaluatedPlan(plan, metrics, "cpsat")

    monkeypatch.setattr(CpSat, "plan_over_tables", plan_over_tables)
    monkeypatch.setattr(CandidateSearch, "try_neighbours", lambda *_: tried.append(True))
    Auto(strategies=("cpsat",)).plan(problem())
    assert bool(tried) == is_repeated


def test_plan_is_not_noted_as_ended_if_only_its_evaluation_exceeds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thorough(Strategy):
        name: ClassVar[str] = "thorough"

        def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
            assert budget.try_spend(budget.remaining_s * (1 - 1e-9))
            return self.plan(problem)

        def plan(self, problem: Problem) -> Plan:
            return registry().make("strategies", "modnn").plan(problem)

    replace_strategies(monkeypatch, dp=Thorough)
    assert Auto(strategies=("single", "dp"), tries=0).plan(problem("lenet")).note == ""


def test_plan_that_one_budget_refused_is_evaluated_with_the_next() -> None:
    posed = problem()
    search = CandidateSearch(posed, "test", WorkBudget(1e-9))
    split = [(registry().make("strategies", "modnn").plan(posed), "modnn")]
    assert search.try_plans([(posed.best_single_device[0], "single")])
    assert not search.try_plans(split)
    search.budget = WorkBudget()
    assert search.try_plans(split)


def test_nothing_is_searched_if_nothing_is_sent() -> None:
    posed = problem("lenet", objective="communication")
    plan = Auto(budget=1e-9).plan(posed)
    assert plan.note == "" and posed.evaluate(plan).total_bytes == 0


@pytest.mark.slow
def test_strategies_that_serve_the_objective_come_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dicompiler")
    Auto(budget=2, tries=0).plan(problem("lenet", objective="memory"))
    asked = [record.getMessage() for record in caplog.records if "auto: asks" in record.getMessage()]
    names = [message.removeprefix("auto: asks ") for message in asked]
    assert names[:4] == ["single", "replicate", "pipeline", "modnn"] and names[4:5] in ([], ["teams"])
    assert not {"dp", "gradient"} & set(names)


def test_single_device_wins_on_slow_network() -> None:
    slow = replace(Platform.load("rpi4x4"), network=Network("shared", 1e5))
    posed = replace(problem("lenet"), platform=slow)
    plan = Auto(tries=4, strategies=QUICK).plan(posed)
    assert posed.evaluate(plan).latency_s == pytest.approx(posed.best_single_device[1].latency_s)


def test_leaves_out_plans_that_do_not_fit_memory() -> None:
    posed = problem("lenet")
    tight = replace(posed.platform, hosts=tuple(Host(host.name, 265_000) for host in posed.platform.hosts))
    limited = replace(posed, platform=tight)
    plan = Auto(strategies=("single", "pipeline"), tries=0).plan(limited)
    assert len({part.device for parts in plan.layers.values() for part in parts}) > 1
    nothing = replace(posed, platform=replace(tight, hosts=tuple(Host(h.name, 1000) for h in tight.hosts)))
    with pytest.raises(DicompilerError, match="host pi01 needs"):
        Auto(strategies=("single",), tries=0).plan(nothing)


@dataclass(frozen=True)
class Interrupting(Strategy):
    """Strategy that interrupts the search that asks it."""

    name: ClassVar[str] = "interrupting"

    def plan(self, problem: Problem) -> Plan:  # noqa: ARG002
        raise KeyboardInterrupt


@dataclass(frozen=True)
class InterruptedTooLarge(Strategy):
    """Strategy that is interrupted when its best plan does not fit into memory."""

    name: ClassVar[str] = "interrupted"

    def plan(self, problem: Problem) -> Plan:
        return replace(problem.single_device_plan("pi01"), note=INTERRUPTED_NOTE)


def test_interrupt_returns_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_strategies(monkeypatch, modnn=Interrupting)
    plan = Auto(strategies=("single", "modnn")).plan(problem("lenet"))
    assert plan.note == INTERRUPTED_NOTE
    with pytest.raises(KeyboardInterrupt):
        Auto(strategies=("modnn",)).plan(problem("lenet"))


def test_interrupt_ends_the_search_even_if_there_is_no_valid_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_strategies(monkeypatch, modnn=InterruptedTooLarge)
    posed = problem("lenet")
    small = replace(posed, platform=replace(posed.platform, hosts=tuple(Host(h.name, 1) for h in posed.platform.hosts)))
    with pytest.raises(KeyboardInterrupt):
        Auto(strategies=("modnn", "dp")).plan(small)


SEARCH = """
import logging, sys
from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler_strategies.auto import Auto
logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
posed = load_problem(networks.build("resnet18", 0), "rpi4x4")
print(Auto(strategies=("single",), tries=10_000, budget=120).plan(posed).note)
"""


def test_real_interrupt_ends_search_with_a_plan() -> None:
    """Ctrl-C in the middle of a search returns the best plan so far, with a note."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", SEARCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as search:
        assert search.stdout is not None and search.stderr is not None
        while "auto: single" not in search.stderr.readline():
            assert search.poll() is None
        search.send_signal(signal.SIGINT)
        assert search.stdout.read() == "the search was interrupted\n"
        assert "(press Ctrl-C again to end the command)" in search.stderr.read()
        assert search.wait(30) == 0


def test_rejects_invalid_options() -> None:
    with pytest.raises(ValueError, match="budget must be more than 0 s"):
        Auto(budget=0)
    with pytest.raises(UsageError, match="budget"):
        registry().make("strategies", "auto{budget=0}")
    with pytest.raises(UsageError, match="seed must be from 0 to 2147483647, not -1"):
        registry().make("strategies", "auto{seed=-1}")
    with pytest.raises(UsageError, match="unknown strategy 'modn'"):
        Auto(strategies=("modn",)).plan(problem("lenet"))


@pytest.mark.slow
def test_cpsat_tries_improve_the_plan() -> None:
    """SqueezeNet on a shared medium: with overlap a split is better than one device."""
    posed = problem("light/squeezenet", "rpi4x2")
    posed = replace(posed, platform=replace(posed.platform, network=Network("shared", 1e8, 0.0002)))
    none, some = (posed.evaluate(CpSat(tries=tries).plan(posed)).latency_s for tries in (0, 60))
    assert some < 0.97 * none
    auto = posed.evaluate(Auto(strategies=("single", "cpsat"), tries=60).plan(posed)).latency_s
    assert auto <= some  # The plan of auto can be even faster, because auto also tries plans of its own.


def test_neighbours_differ_and_are_valid() -> None:
    posed = problem("lenet", "rpi4x3")
    made = build_cost_tables(posed)
    start = next(find_optima(made))
    moves = make_neighbours(made, start, seed=1)
    for _ in range(12):
        posed.estimate(made.plan(next(moves)))
    assert next(make_neighbours(made, start, 1)) == next(make_neighbours(made, start, 1)) != start


def test_auto_compiles_and_verifies() -> None:
    result = compile(networks.build("lenet", 0), platform="rpi4x2", strategy=Auto(tries=2, strategies=QUICK))
    assert result.metrics is not None and result.metrics.method == "simulation"


@pytest.mark.slow
def test_weighted_sum_is_no_worse_than_plans_of_its_terms() -> None:
    """The best plan of each term is a candidate, so that the result is no worse in the sum."""
    sums = {}
    for objective in ("latency", "energy", "latency+0.1*energy"):
        problem = load_problem(networks.build("lenet", 0), "rpi4x3", objective=objective)
        sums[objective] = problem.evaluate(Auto(tries=8).plan(problem)).objective_value("latency+0.1*energy")
    assert sums["latency+0.1*energy"] <= min(sums["latency"], sums["energy"]) * (1 + 1e-9)


def test_auto_uses_third_party_plan_if_it_is_best() -> None:
    problem = posed(rated("switch", 1, 1, bandwidth=1e10))
    plan = Auto(strategies=("single", "pipeline", "replicate"), tries=2).plan(problem)
    assert len(plan.replicas) == 2
    latency = Auto(strategies=("single", "replicate"), tries=0).plan(replace(problem, objective="latency"))
    assert not latency.replicas


def test_small_budget_has_smaller_tables() -> None:
    posed = problem("lenet")
    asked = CpSat().requested_choices(posed)
    assert CpSat().affordable_choices(posed, 1e3) == asked != CpSat().affordable_choices(posed, 1e-3)


def test_slow_search_ends_with_the_budget() -> None:
    lenet = problem("lenet")
    with pytest.raises(DicompilerError, match="the budget is used up before they are filled"):
        CpSat().build_tables(lenet, WorkBudget(deadline=0.0))
    found = Dp(budget=1e-9).plan(lenet)  # With almost no budget, dp searches only teams of one device.
    assert replace(found, note="") == Dp(devices=1).plan(lenet) and "budget of 1e-09 s" in found.note
