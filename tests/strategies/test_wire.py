"""Narrower wire types: every strategy counts their bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies.test_every_strategy import SPECS

from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.plugin.registry import registry

HALVED = WireFormat((("*", "float16"),))


@pytest.mark.parametrize(
    ("name", "objective"),
    [("auto", "latency"), ("cpsat", "latency"), ("dp", "latency"), ("gradient", "latency"), ("genetic", "throughput")],
)
def test_narrower_wire_type_changes_the_choice(name: str, objective: str) -> None:
    boards = Platform.load("rpi4-gateway-x3")
    boards = replace(boards, network=replace(boards.network, bandwidth=150e6))
    model, strategy = networks.build("resnet8", 1), registry().make("strategies", SPECS[name])
    wide, narrow = (load_problem(model, boards, objective=objective, wire_dtype=wire) for wire in (None, HALVED))

    before, after = strategy.plan(wide), strategy.plan(narrow)

    assert (before.wire_format, after.wire_format) == (WireFormat(), HALVED)
    assert before.layers != after.layers
    same = narrow.evaluate(replace(before, wire_format=HALVED)).objective_value(objective)
    assert narrow.evaluate(after).objective_value(objective) <= same * 1.01


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_estimate_and_simulation_predict_half_the_bytes(spec: str) -> None:
    model = networks.build("lenet", 1)
    problem = load_problem(model, "rpi4-gateway-x3")
    plan = registry().make("strategies", spec).plan(problem)
    narrow = replace(plan, wire_format=HALVED)
    for predict in (problem.estimate, problem.evaluate):
        one, half = predict(plan), predict(narrow)
        assert 2 * half.total_bytes == one.total_bytes
        assert half.latency_s < one.latency_s or not one.total_bytes
