"""Strategies side by side: the best, the bound, what holds the best back, and rows for those that fail."""

from __future__ import annotations

from dataclasses import replace

from dicompiler import networks
from dicompiler.driver.compare import binding, compare
from dicompiler.driver.prepare import load_problem, single_device
from dicompiler.ir.devices import Host, Network
from dicompiler.ir.onnx.model import Model
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem

QUICK = ("single", "pipeline", "modnn")


def problem(name: str = "resnet18", platform: str = "rpi4x4", objective: str = "latency") -> Problem:
    return load_problem(Model.load(networks.build(name, 0)), platform, objective=objective)


def test_a_comparison_names_the_best_and_what_binds() -> None:
    posed = problem("lenet")
    found = compare(posed, {name: registry().make("strategies", name) for name in QUICK})
    assert [row.strategy for row in found.rows] == list(QUICK)
    best = found.best
    assert best is not None and best.metrics is not None and found.bound is not None
    assert found.value(best) == min(found.value(row) for row in found.rows)
    assert found.bound <= found.value(best) * (1 + 1e-9)
    slow = replace(posed, platform=replace(posed.platform, network=Network("shared", 1e4)))
    modnn = slow.evaluate(registry().make("strategies", "modnn").plan(slow))
    assert binding(slow.platform, modnn) == "the shared network is busy 100 % of the time"
    assert binding(slow.platform, single_device(slow)) == "pi01 computes 100 % of the time"


def test_a_strategy_without_a_plan_is_a_row_with_its_error_and_not_the_best() -> None:
    posed = problem("lenet", "rpi4x2")
    tight = replace(
        posed, platform=replace(posed.platform, hosts=tuple(Host(h.name, 1000) for h in posed.platform.hosts))
    )
    told: list[str] = []
    found = compare(tight, {name: registry().make("strategies", name) for name in QUICK}, told.append)
    assert told == list(QUICK)
    assert all(row.plan is None and row.metrics is None and "host pi01 needs" in row.error for row in found.rows)
    assert (found.best, found.binding) == (None, "")


def test_the_first_of_equals_is_the_best() -> None:
    posed = problem("lenet", "rpi4x2")
    found = compare(posed, {name: registry().make("strategies", "single") for name in ("one", "other")})
    assert found.best is found.rows[0]
    assert found.value(found.rows[0]) == found.value(found.rows[1]) == found.single.latency_s
