"""Tests of comparisons: the best result, the lower bound, the bottleneck, and strategies that fail."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from dicompiler import networks
from dicompiler.analysis.compare import compare_strategies
from dicompiler.base.units import format_seconds
from dicompiler.cost.cost_model import AnalyticModel, CostModel
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.driver.compile_result import find_bottleneck
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Link, Network
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.metrics import DeviceMetrics, Metrics
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import LayerShare, Part
from dicompiler.plugin.registry import registry
from dicompiler.search.lower_bounds import objective_bound
from dicompiler.search.problem import Problem

QUICK = ("single", "pipeline", "modnn")


def problem(name: str = "resnet18", platform: str = "rpi4x4", objective: str = "latency") -> Problem:
    return load_problem(Model.load(networks.build(name, 0)), platform, objective=objective)


def test_comparison_names_best_result_and_bottleneck() -> None:
    posed = problem("lenet")
    found = compare_strategies(posed, {name: registry().make("strategies", name) for name in QUICK})
    assert [row.strategy for row in found.results] == list(QUICK)
    best = found.best
    assert best is not None and best.metrics is not None and found.lower_bound is not None
    assert found.objective_value(best) == min(found.objective_value(row) for row in found.results)
    assert found.lower_bound <= found.objective_value(best) * (1 + 1e-9)
    slow = replace(posed, platform=replace(posed.platform, network=Network("shared", 1e4)))
    modnn = slow.evaluate(registry().make("strategies", "modnn").plan(slow))
    assert find_bottleneck(modnn, "latency")[1] == "the shared network is busy 100 % of the time"
    assert find_bottleneck(slow.best_single_device[1], "latency")[1] == "pi01 computes 100 % of the time"


def test_time_of_computing_and_messages_at_once_counts_once() -> None:
    costs = RuntimeCosts(latency=1e-4, send=1e-3, receive=1e-3)
    posed = problem()
    posed = replace(posed, runtime_costs={device.name: costs for device in posed.platform.devices})
    found = compare_strategies(posed, {"modnn": registry().make("strategies", "modnn")})
    assert found.best is not None and found.best.metrics is not None
    busiest = found.best.metrics.busiest_device
    assert busiest.occupied_s < busiest.busy_s
    assert f"the busiest device works for {format_seconds(busiest.occupied_s)} of a frame" in found.limit_reason


def test_strategy_without_plan_has_an_error_and_is_not_best() -> None:
    posed = problem("lenet", "rpi4x2")
    tight = replace(
        posed, platform=replace(posed.platform, hosts=tuple(Host(h.name, 1000) for h in posed.platform.hosts))
    )
    told: list[str] = []
    found = compare_strategies(tight, {name: registry().make("strategies", name) for name in QUICK}, told.append)
    assert told == list(QUICK)
    assert all(row.plan is None and row.metrics is None and "host pi01 needs" in row.error for row in found.results)
    assert (found.best, found.bottleneck) == (None, "")


def test_first_of_equal_results_is_best() -> None:
    posed = problem("lenet", "rpi4x2")
    found = compare_strategies(posed, {name: registry().make("strategies", "single") for name in ("one", "other")})
    assert found.best is found.results[0]
    assert (
        found.objective_value(found.results[0])
        == found.objective_value(found.results[1])
        == found.single_device.latency_s
    )


def unequal(objective: str, bandwidth: float) -> Problem:
    """Return a problem with a slow board at the source of frames, and a fast one behind a link."""
    posed = problem("lenet", "rpi4x2", objective)
    devices = (replace(posed.platform.devices[0], rate=posed.platform.devices[0].rate / 2), posed.platform.devices[1])
    return replace(posed, platform=replace(posed.platform, devices=devices, network=Network("switch", bandwidth)))


@pytest.mark.parametrize(
    ("objective", "bandwidth", "best"),
    [("latency", 1e3, "pi01"), ("latency", 1e12, "pi02"), ("throughput", 1e9, "pi02"), ("communication", 1e12, "pi01")],
)
def test_best_single_device_is_the_same_for_all_uses(objective: str, bandwidth: float, best: str) -> None:
    posed = unequal(objective, bandwidth)
    plan, metrics = posed.best_single_device
    assert {part.device for parts in plan.layers.values() for part in parts} == {best}
    plans = [posed.build_plan({one.name: (Part(name),) for one in posed.layers.layers}) for name in ("pi01", "pi02")]
    assert metrics.objective_value(objective) == min(posed.evaluate(one).objective_value(objective) for one in plans)
    found = compare_strategies(posed, {"single": registry().make("strategies", "single")})
    assert found.results[0].plan == plan and found.results[0].metrics == found.single_device == metrics


def test_cost_model_determines_the_best_single_device() -> None:
    @dataclass(frozen=True)
    class SlowThere(CostModel):
        """A cost model in which the device with the highest rate is slow."""

        def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:  # noqa: ARG002
            return 1.0 if device.name == "pi02" else 0.01

    posed = replace(unequal("latency", 1e12), cost_model=SlowThere())
    assert posed.best_single_device[1].device("pi02") is None and posed.best_single_device[1].latency_s < 0.2


def test_finds_best_single_device_of_many() -> None:
    @dataclass(frozen=True)
    class Moody(CostModel):
        """A cost model in which equal devices have different times."""

        def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:  # noqa: ARG002
            return 0.001 * (1 + int(device.name[2:]) * 5 % 7)

    posed = problem("lenet", "rpi4x8", "latency")
    near = replace(posed.platform.network, links=(Link(("pi01", "pi05"), 1e10),))
    cases = [
        posed,
        replace(posed, cost_model=Moody()),
        replace(posed, platform=replace(posed.platform, network=near)),
        replace(posed, source=("pi03",), sink=("pi06",)),
        replace(posed, platform=replace(posed.platform, devices=posed.platform.devices[::-1])),
    ]
    for case in cases:
        plans = [case.single_device_plan(device.name) for device in case.platform.devices]
        found = [case.evaluate(plan).latency_s for plan in plans]
        assert case.best_single_device[0] == plans[found.index(min(found))] and case.best_single_device[
            1
        ].latency_s == min(found)


def test_speedup_follows_the_objective_and_implausible_gains_are_reported() -> None:
    one, both = (Metrics((), s, p, 0.0, 0, 0) for s, p in ((3.0, 3.0), (6.0, 1.0)))
    both = replace(both, devices=tuple(DeviceMetrics(name, 1, 1.0, 0, 0, 0, 0) for name in "ab"))
    assert both.speedup_over(one, "throughput") == 3.0 and both.speedup_over(one, "latency+throughput") == 0.5
    assert both.speedup_over(one, "energy") == 0.5
    assert both.describe_implausible_gain(one, "throughput").startswith(
        "3.00 times as fast as one device with 2 devices: this is only plausible if the memory or the caches"
    )
    assert (
        both.describe_implausible_gain(replace(one, period_s=2.0), "throughput")
        == both.describe_implausible_gain(one, "latency")
        == ""
    )


@dataclass(frozen=True)
class CacheModel(CostModel):
    """A cost model in which half of a layer takes about a third of the layer's time, as if it fitted into a cache."""

    name = "cache"

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:
        return (1e3 * AnalyticModel().seconds(layers, layer, share, device)) ** 1.5


def test_bound_that_a_plan_refutes_is_not_used() -> None:
    posed = replace(problem("lenet"), cost_model=CacheModel())
    found = compare_strategies(posed, {name: registry().make("strategies", name) for name in ("auto{budget=3}", "dp")})
    auto, dp = found.results
    bound = objective_bound(posed)
    assert bound is not None and found.objective_value(auto) < 0.9 * bound
    assert found.lower_bound is None
    assert found.objective_value(auto) <= found.objective_value(dp) * (1 + 1e-9)
