"""Pareto fronts: ranking by objective, known objectives, and values in their units."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_problems import BOARDS, any_plan, random_problem

from dicompiler.base.errors import UsageError
from dicompiler.ir.metrics import DeviceMetrics, Metrics
from dicompiler.ir.plan import Plan
from dicompiler.search.pareto_front import (
    FRONT_OBJECTIVES,
    MeasuredMetrics,
    ParetoFront,
    ParetoPoint,
    build_single_point_front,
    check_objectives,
    objective_values,
)

NUMBERS = st.fixed_dictionaries({"latency": st.floats(0, 9), "energy": st.floats(0, 9)})
METRICS = Metrics(
    (
        DeviceMetrics("a", 10, 0.5, 100, 20, 0, 0, 0.125, 0.125),
        DeviceMetrics("b", 10, 2.0, 70, 60, 0, 0),
    ),
    latency_s=3.0, period_s=2.0, energy_j=4.0, memory=130, total_bytes=8,
)  # fmt: skip


@given(st.lists(NUMBERS, min_size=1, max_size=6), st.sampled_from(["latency", "energy", "latency+2*energy"]))
def test_points_are_ranked_by_an_objective_or_a_sum_of_them(rows: list[dict[str, float]], objective: str) -> None:
    points = tuple(ParetoPoint(Plan({}, (str(index),), ()), row) for index, row in enumerate(rows))
    front = ParetoFront(("latency", "energy"), points)

    def number(point: ParetoPoint) -> float:
        latency, energy = point.objectives["latency"], point.objectives["energy"]
        return {"latency": latency, "energy": energy, "latency+2*energy": latency + 2 * energy}[objective]

    ranked = front.ranked_points(objective)
    assert sorted(map(number, points)) == [number(point) for point in ranked]
    assert {point.plan.source for point in ranked} == {point.plan.source for point in points}
    assert front.best_point(objective) is ranked[0]


def test_each_objective_has_a_value_in_its_unit() -> None:
    assert objective_values(BOARDS, METRICS, FRONT_OBJECTIVES) == {
        "latency": 3.0, "throughput": 2.0, "energy": 4.0, "memory": 130, "communication": 8, "device-memory": 130,
        "device-energy": 5.0 * 2.0,
    }  # fmt: skip
    assert objective_values(BOARDS, METRICS, ["energy"]) == {"energy": 4.0}


def test_uses_measured_energy_if_there_is_one() -> None:
    known = {entry.name: getattr(METRICS, entry.name) for entry in fields(METRICS)}
    measured = MeasuredMetrics(**known, device_energy_j={"a": 99.0})
    assert objective_values(BOARDS, measured, ["device-energy"]) == {"device-energy": 99.0}
    # Of 2 s, device a waits for 1.5 s at 2 W and computes for 0.5 s at 5 W. Device b used the measured 1 J, less than
    # predicted.
    less = MeasuredMetrics(**known, device_energy_j={"b": 1.0})
    assert objective_values(BOARDS, less, ["device-energy"]) == {"device-energy": 0.5 * 5.0 + 1.5 * 2.0}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no objective is given"),
        (["latency", "enrgy"], "unknown objective 'enrgy' (did you mean 'energy'?)"),
        (["latency", "energy", "latency"], "objective 'latency' is given twice"),
    ],
)
def test_rejects_unknown_objectives(names: list[str], message: str) -> None:
    check_objectives(tuple(FRONT_OBJECTIVES))
    with pytest.raises(UsageError) as caught:
        check_objectives(names)
    assert message in str(caught.value)


def test_front_of_one_plan_has_values_of_all_objectives() -> None:
    problem = random_problem(3)
    plan = any_plan(1, problem)
    front = build_single_point_front(problem, plan)
    assert front.objectives == tuple(FRONT_OBJECTIVES)
    assert [point.plan for point in front.points] == [plan]
    assert front.points[0].objectives == objective_values(BOARDS, problem.evaluate(plan), FRONT_OBJECTIVES)


@pytest.mark.parametrize(
    ("first", "second", "dominates"),
    [((1, 2), (2, 2), True), ((1, 2), (2, 1), False), ((1, 2), (1, 2), False), ((2, 2), (1, 2), False)],
)
def test_a_point_dominates_points_that_are_worse_and_nowhere_better(
    first: tuple[float, float], second: tuple[float, float], dominates: bool
) -> None:
    names = ("latency", "memory")
    points = [ParetoPoint(Plan({}, (), ()), dict(zip(names, values, strict=True))) for values in (first, second)]
    assert points[0].dominates(points[1], names) is dominates
