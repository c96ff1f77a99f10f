"""Lower bounds: no plan is simulated to be faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_problems import any_plan, random_problem

from dicompiler import networks
from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.driver.prepare import prepare
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir.cluster import Device
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import LayerShare, Part
from dicompiler.ir.platform import Platform, uniform_platform
from dicompiler.plugin.registry import registry
from dicompiler.search.lower_bounds import latency_bound, objective_bound


@pytest.mark.parametrize("name", ["lenet", "resnet18"])
@pytest.mark.parametrize("strategy", ["single", "modnn", "pipeline"])
def test_no_plan_beats_the_bounds(name: str, strategy: str) -> None:
    problem = make_problem(replace(prepare(Model.load(networks.build(name, 0))), platform=Platform.load("rpi4x4")))
    metrics = problem.evaluate(registry().make("strategies", strategy).plan(problem))
    least = objective_bound(problem)
    assert least is not None and 0 < least <= metrics.latency_s * (1 + 1e-9)
    period = objective_bound(replace(problem, objective="throughput"))
    assert period is not None and period <= metrics.period_s * (1 + 1e-9)
    for objective in ("energy", "memory"):
        least = objective_bound(replace(problem, objective=objective))
        assert least is not None and 0 < least <= metrics.objective_value(objective) * (1 + 1e-9)


@dataclass(frozen=True)
class Specialised(AnalyticModel):
    """Cost model in which each of two devices is four times as fast on half of the layers."""

    def seconds(self, layers: LayerGraph, layer: Layer, share: LayerShare, device: Device) -> float:  # noqa: ARG002
        early = layers.position[layer.name] < len(layers.layers) // 2
        return 1.0 if early == (device.name == "d0") else 4.0


def test_bound_holds_for_devices_that_are_good_at_different_layers() -> None:
    model = Model.load(networks.build("lenet", 0))
    posed = make_problem(replace(prepare(model), platform=uniform_platform(2)), "throughput", Specialised())
    count = len(posed.layers.layers)
    half = {layer.name: [Part("d0" if i < count // 2 else "d1")] for i, layer in enumerate(posed.layers.layers)}
    period, least = posed.evaluate(posed.build_plan(half)).period_s, objective_bound(posed)
    assert least is not None and 0 < least <= period == pytest.approx(count // 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_no_random_plan_is_faster_than_the_bounds(network: int, seed: int) -> None:
    problem = random_problem(network)
    metrics = problem.evaluate(any_plan(seed, problem))
    found = latency_bound(problem)
    assert 0 <= max(found.load_s, found.path_s) == found.seconds <= metrics.latency_s * (1 + 1e-9)
    for objective in ("latency", "throughput", "energy", "memory", "2*latency+3*throughput", "latency+energy"):
        least = objective_bound(random_problem(network, objective)) or 0.0
        assert least <= metrics.objective_value(objective) * (1 + 1e-9)


def test_bound_of_a_single_device_is_close_for_energy() -> None:
    """On equal boards, computing everything on the source needs no more energy than the bound."""
    problem = make_problem(replace(prepare(Model.load(networks.build("lenet", 0))), platform=Platform.load("rpi4x4")))
    problem = replace(problem, objective="energy")
    least = objective_bound(problem)
    assert least is not None and problem.best_single_device[1].energy_j == pytest.approx(least)


def test_weights_are_spread_over_the_hosts_at_best() -> None:
    problem = make_problem(replace(prepare(Model.load(networks.build("lenet", 0))), platform=uniform_platform(3)))
    weights = problem.evaluate(problem.single_device_plan("d0")).devices[0].weights
    assert objective_bound(replace(problem, objective="memory")) == pytest.approx(weights / 3)


def test_layer_that_is_added_to_a_strided_one_counts_in_full() -> None:
    """The convolution before an addition that is fused into a strided convolution is read in full."""
    problem = make_problem(
        replace(prepare(Model.load(networks.build("resnet18", 0))), platform=Platform.load("rpi4x4"))
    )
    period = problem.best_single_device[1].period_s
    assert objective_bound(replace(problem, objective="throughput")) == pytest.approx(period / 4)


def test_communication_has_no_bound() -> None:
    assert objective_bound(random_problem(0, "communication")) is None
