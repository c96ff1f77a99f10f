"""Costs of segment calls: the fast models of the searches agree with the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.layer_graphs import stack

from dicompiler import networks
from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import Problem, plan_workload
from dicompiler.testing import make_cluster
from dicompiler_strategies.genetic.batched_model import build_batched_model
from dicompiler_strategies.tables.choices import ChoiceSet
from dicompiler_strategies.tables.cost_tables import build_cost_tables

COSTS = RuntimeCosts(latency=1e-4, send=3e-4, receive=2e-4, call=5e-4, cold_call=2e-4)


def seconds(posed: Problem, devices: list[int]) -> tuple[float, float]:
    """Return the seconds of whole layers on these devices by the tables and by the batched model."""
    found = build_cost_tables(posed, ChoiceSet(("whole",)))
    labels = [[choice.label for choice in own] for own in found.choices]
    value = found.total_seconds([own.index(f"whole d{d}") for own, d in zip(labels, devices, strict=True)])
    return value, float(build_batched_model(posed).evaluate(np.array([devices])).latency_s[0])


@pytest.mark.parametrize(
    "costs", [COSTS, replace(COSTS, latency=0.0, send=0.0, receive=0.0), replace(COSTS, cold_call=0.0)]
)
def test_alternating_segments_cost_the_same_as_in_the_simulator(costs: RuntimeCosts) -> None:
    """Nothing overlaps in a plan that alternates between two devices.

    The first segment waits for no message, so that the fast models leave its call out of all plans.
    """
    posed = load_problem(networks.build("lenet", 0), make_cluster("switch", 1, 1))
    posed = replace(posed, runtime_costs={device.name: costs for device in posed.platform.devices})
    count = len(posed.layers.layers)
    fro = [i % 2 for i in range(count)]
    plan = build_batched_model(posed).plan(np.array(fro))
    jobs = [len(device.jobs) for device in plan_workload(posed, plan)[1].devices]
    # There is one more job than layers, because an extra last segment returns the output.
    assert min(jobs) > 1 and sum(jobs) == count + 1
    simulated = posed.evaluate(plan).latency_s
    for value in seconds(posed, fro):
        assert value == pytest.approx(simulated - costs.call_seconds(2) / 2)


def test_device_that_computes_once_is_never_cold() -> None:
    posed = load_problem(networks.build("lenet", 0), make_cluster("switch", 1, 1))
    free = posed.evaluate(posed.single_device_plan("d0")).latency_s
    posed = replace(posed, runtime_costs={device.name: COSTS for device in posed.platform.devices})
    assert posed.evaluate(posed.single_device_plan("d0")).latency_s == pytest.approx(free + COSTS.call)
    for value in seconds(posed, [0] * len(posed.layers.layers)):
        assert value == pytest.approx(free)


@pytest.mark.parametrize("latency", [0.0, 1e-3])
def test_message_within_a_host_wakes_its_receiver(latency: float) -> None:
    """Two devices on a host and one on another: with and without a link in between."""
    hosts = (Host("a", 2**30), Host("b", 2**30))
    devices = tuple(Device(f"d{i}", host, 1e9) for i, host in enumerate("aab"))
    platform = Platform("test", hosts, devices, Network("switch", 1e8, latency))
    layers = stack((1, 4, 8, 8), [("conv", 4, 3, 1, 1, 1)] * 4)
    waking = RuntimeCosts(latency=5e-3)
    free = Problem(layers, platform, AnalyticModel())
    posed = replace(free, runtime_costs={device.name: waking for device in devices})
    for where, messages in (([0, 1, 1, 0], 2), ([0, 1, 0, 1], 4), ([0, 2, 1, 0], 3), ([0, 0, 0, 0], 0)):
        before, after = seconds(free, where), seconds(posed, where)
        assert after == pytest.approx([value + messages * waking.latency for value in before])
        plan = build_batched_model(posed).plan(np.array(where))
        assert posed.estimate(plan).latency_s == pytest.approx(after[0])
