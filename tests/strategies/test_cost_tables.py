"""Cost tables: equal to the estimate of one plan and to routing, and fast for many plans."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from support.layer_graphs import stack, vgg16

from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.cost.simulator import estimate_metrics
from dicompiler.ir.cluster import Device, Host, Link, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import WireDtypes, with_wire_dtypes
from dicompiler.networks import build
from dicompiler.partition.routing import route
from dicompiler.search.problem import Problem
from dicompiler_strategies.tables.choices import ChoiceSet
from dicompiler_strategies.tables.cost_tables import CostTables, build_cost_tables, sum_tables

RPI4 = 13.6e9
PAPERS = AnalyticModel(pools=False, elementwise=False, weights=False)


def cluster(network: Network, *rates: float, gateway: bool = True) -> Platform:
    """Boards with these rates (FLOP/s) behind a gateway without compute, which holds input and output."""
    names = [f"d{i}" for i in range(len(rates))]
    hosts = [Host(name, 2**40) for name in names]
    devices = [Device(name, name, rate) for name, rate in zip(names, rates, strict=True)]
    if gateway:
        hosts.insert(0, Host("gateway", 2**40))
        devices.insert(0, Device("gateway", "gateway", 0.0))
    return Platform("test", tuple(hosts), tuple(devices), network)


def chain() -> LayerGraph:
    rows = [("conv", 8, 3, 1, 1, 1), ("pool", 2, 2, 0), ("conv", 6, 5, 1, 2, 1), ("conv", 6, 3, 2, 1, 2)]
    return stack((1, 4, 26, 22), [*rows, ("flatten",), ("fc", 9), ("fc", 5)])


NETWORKS = {
    "shared": Network("shared", 1e8),
    "gateway with latency": Network("gateway", 1e8, 1e-3),
    "switch": Network("switch", 1e8),
    "links": Network("shared", 1e8, 0.0, (Link(("d0", "d1"), 1e7, 2e-3),)),
}


APART = ("one", "channels", "rows")  # Merges of partial sums after which each element is stored on only one device.
RUNTIME = RuntimeCosts(latency=1e-4, send=3e-4, receive=2e-4, per_byte=1e-9, gap=5e-5, call=1e-4, header_share=0.05)


def test_messages_and_calls_cost_the_same_as_in_the_estimate() -> None:
    """Copies are left out, because the estimate does not count them.

    If several devices hold an element, the senders may differ.
    """
    platform = cluster(NETWORKS["switch"], 1e9, 2e9, 1e9)
    runtime = {device.name: RUNTIME for device in platform.devices}
    problem = Problem(chain(), platform, PAPERS, runtime_costs=runtime)
    found = build_cost_tables(problem, ChoiceSet(extra_rows=0, merges=APART))
    many = selections(found, 60)
    plans = [found.plan(selection) for selection in many.tolist()]
    pairs = [
        (problem.estimate(plan).latency_s, value)
        for plan, value in zip(plans, found.total_seconds_of(many), strict=True)
        if not route(problem.layers, plan, platform.host_of).dropped_tasks
    ]
    assert len(pairs) > 20
    for estimated, value in pairs:
        assert value == pytest.approx(estimated, rel=1e-9)
    for costs in (replace(RUNTIME, per_copied_byte=1e-6), replace(RUNTIME, per_copy=1e-3)):
        copying = replace(problem, runtime_costs=dict.fromkeys(runtime, costs))
        dearer = build_cost_tables(copying, ChoiceSet(extra_rows=0, merges=APART)).total_seconds_of(many)
        assert (dearer >= found.total_seconds_of(many)).all() and (dearer > found.total_seconds_of(many)).any()


def test_shared_medium_assumes_few_messages() -> None:
    """Senders do not matter on a shared medium; as few messages as possible from all holders are assumed."""
    platform = cluster(NETWORKS["shared"], 1e9, 1e9, 1e9, 1e9)
    free = Problem(chain(), platform, PAPERS)
    costly = replace(free, runtime_costs={device.name: replace(RUNTIME, gap=0.0) for device in platform.devices})
    found = build_cost_tables(costly, ChoiceSet(extra_rows=1, merges=APART))
    many = selections(found, 60)
    before = build_cost_tables(free, ChoiceSet(extra_rows=1, merges=APART)).total_seconds_of(many)
    for selection, value, least in zip(many.tolist(), found.total_seconds_of(many), before, strict=True):
        plan = found.plan(selection)
        # The router drops tasks that nothing reads. The cost tables count them, so their value may be higher.
        dropped = route(costly.layers, plan, platform.host_of).dropped_tasks
        assert least <= value
        assert dropped or value <= costly.estimate(plan).latency_s * (1 + 1e-9)


def selections(found: CostTables, count: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    return np.stack([rng.integers(0, len(own), count) for own in found.choices], axis=1)


@pytest.mark.parametrize("name", ["shared", "gateway with latency"])
@pytest.mark.parametrize("rates", [(1e9, 1e9, 1e9, 1e9), (4e9, 1e9, 2e9)])
@pytest.mark.parametrize(("gateway", "wire"), [(True, ()), (False, ()), (False, (("*", "int8"),))])
def test_values_equal_estimated_latency_and_routed_bytes(
    name: str, rates: tuple[float, ...], gateway: bool, wire: WireDtypes
) -> None:
    """On a chain with fewer extra rows than a share has, so that no part is left out as unread."""
    problem = Problem(with_wire_dtypes(chain(), wire), cluster(NETWORKS[name], *rates, gateway=gateway), PAPERS)
    found = build_cost_tables(problem, ChoiceSet(extra_rows=1))
    many = selections(found, 60)
    values = found.total_seconds_of(many)
    same = 0
    for selection, value in zip(many.tolist(), values, strict=True):
        plan = found.plan(selection)
        routing = route(problem.layers, plan, problem.platform.host_of)
        if routing.dropped_tasks:  # On a chain of layers, only dropped tasks make tables and estimate differ.
            continue
        same += 1
        metrics = estimate_metrics(problem.layers, problem.platform, problem.cost_model, plan)
        assert value == pytest.approx(metrics.latency_s, rel=1e-9)
        assert moved(found, selection) == routing.total_bytes
        weights = {d.name: sum(own[c, i] for own, c in zip(found.weight_bytes, selection, strict=True))
                   for i, d in enumerate(problem.platform.devices)}  # fmt: skip
        assert {entry.device: entry.weights for entry in metrics.devices} == {
            entry.device: weights[entry.device] for entry in metrics.devices
        }
    assert same > 20


def moved(found: CostTables, selection: list[int]) -> int:
    """Return the bytes that are sent for one frame."""
    return round(float(sum_tables(found.node_bytes, found.edge_bytes, np.asarray([selection]))[0]))


@pytest.mark.parametrize("name", ["switch", "links"])
def test_unequal_links_equal_the_estimate_if_shares_are_disjoint(name: str) -> None:
    problem = Problem(chain(), cluster(NETWORKS[name], 1e9, 1e9, 1e9), PAPERS)
    found = build_cost_tables(problem, ChoiceSet(extra_rows=0, merges=APART))
    for selection in selections(found, 40).tolist():
        plan = found.plan(selection)
        if not route(problem.layers, plan, problem.platform.host_of).dropped_tasks:
            expected = estimate_metrics(problem.layers, problem.platform, problem.cost_model, plan).latency_s
            assert found.total_seconds(selection) == pytest.approx(expected, rel=1e-9)


def test_tensor_with_two_readers_counts_for_each() -> None:
    """A residual network is never cheaper than in the estimate, which sends a tensor only once."""
    from dicompiler.driver.prepare import prepare
    from dicompiler.ir.onnx.model import Model

    layers = prepare(Model.load(build("tiny"))).layers
    assert layers is not None
    problem = Problem(layers, cluster(NETWORKS["shared"], 1e9, 1e9, 1e9), PAPERS)
    found = build_cost_tables(problem, ChoiceSet(extra_rows=1))
    more = 0
    for selection in selections(found, 25).tolist():
        routing = route(layers, found.plan(selection), problem.platform.host_of)
        assert moved(found, selection) >= routing.total_bytes
        more += moved(found, selection) > routing.total_bytes
    assert more


def test_reproduces_published_figures_of_vgg16() -> None:
    """One device takes 2.324 s with input and output on a gateway. MoDNN's rows on four devices take 0.907 s."""
    problem = Problem(vgg16(), cluster(NETWORKS["shared"], *[RPI4] * 4), PAPERS)
    found = build_cost_tables(problem)
    assert found.total_seconds([0] * 22) == pytest.approx(2.324, abs=5e-4)
    labels = [[choice.label for choice in own] for own in found.choices]
    rows = [own.index("height 4 near") if "height 4 near" in own else max(own.index(n) for n in own if n == "height 4")
            if "height 4" in own else 0 for own in labels]  # fmt: skip
    rows[18:] = [0, 0, 0, 0]
    assert found.total_seconds(rows) == pytest.approx(0.907, abs=1.5e-3)


def test_evaluates_twenty_thousand_selections_per_second() -> None:
    found = build_cost_tables(Problem(vgg16(), cluster(NETWORKS["shared"], *[RPI4] * 4), PAPERS))
    many = selections(found, 20_000)
    start = time.process_time()
    values = found.total_seconds_of(many)
    assert time.process_time() - start < 1 and len(values) == 20_000


def test_layers_of_equal_structure_share_their_arrays() -> None:
    rows = [("conv", 8, 3, 1, 1, 1)] * 4
    found = build_cost_tables(Problem(stack((1, 8, 16, 16), rows), cluster(NETWORKS["shared"], 1e9, 1e9), PAPERS))
    assert found.edge_seconds[1, 2] is found.edge_seconds[2, 3] and found.footprints[1] is found.footprints[2]
