"""The bottleneck of a plan: no device or link is busy for more than all of the time, and the right one is named."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning import FREE
from support.random_problems import any_plan, random_problem

from dicompiler import networks
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.driver.compile_result import find_bottleneck
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Link, Network, NetworkKind
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.plan import Part
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem

OBJECTIVES = ("latency", "throughput")


def random_platform(rng: Random, devices: tuple[str, ...]) -> Platform:
    """Return a platform with one to two devices on a host, and links of different bandwidths."""
    hosts = tuple(Host(f"h{i}", 2**40, rng.choice([None, None, 1e5, 1e6])) for i in range(rng.randint(2, len(devices))))
    names = [host.name for host in hosts]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    links = tuple(
        Link(rng.choice([(a, b), (b, a)]), rng.choice([1e4, 1e6, 1e7]), rng.choice([0.0, 1e-3]))
        for a, b in rng.sample(pairs, rng.randint(0, len(pairs)))
    )
    network = Network(
        rng.choice(["switch", "switch", "shared", "gateway"]), rng.choice([1e5, 1e6]), 0.0, links, rng.choice([0, 1e-4])
    )
    placed = tuple(
        Device(name, names[i % len(names)], rng.choice([1e5, 1e7]), rng.choice([1, 4]))
        for i, name in enumerate(devices)
    )
    return Platform("random", hosts, placed, network)


def random_runtime(rng: Random) -> RuntimeCosts:
    seconds = [rng.choice([0.0, 1e-4, 1e-2]) for _ in range(5)]
    send, receive, latency, call, gap = seconds
    return RuntimeCosts(send=send, receive=receive, latency=latency, call=call, gap=gap, per_byte=1e-7)


def check_shares(metrics: Metrics) -> None:
    """Check that nothing is busy for longer than the time that the summary relates it to."""
    for objective in OBJECTIVES:
        frame_s = metrics.period_s if objective == "throughput" else metrics.active_s
        limit = frame_s * (1 + 1e-9) + 1e-12
        assert max(metrics.link_loads.values(), default=0.0) <= limit
        assert all(entry.compute_s <= entry.occupied_s * (1 + 1e-9) + 1e-12 for entry in metrics.devices)
        assert max(entry.occupied_s for entry in metrics.devices) <= limit
        shares = [int(share) for share in re.findall(r"(\d+) %", find_bottleneck(metrics, objective)[1])]
        # Two shares are rounded separately, so their sum may be 101 %.
        assert 1 <= len(shares) <= 2 and sum(shares) <= 101


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_nothing_is_busy_for_more_than_all_of_the_time(network: int, seed: int) -> None:
    rng, problem = Random(seed), random_problem(network)
    platform = random_platform(rng, tuple(device.name for device in problem.platform.devices))
    names = [device.name for device in platform.devices]
    costs = {name: random_runtime(rng) for name in names} if rng.random() < 0.7 else {}
    problem = replace(problem, platform=platform, runtime_costs=costs)
    plan = any_plan(seed, problem)
    if rng.random() < 0.4:
        plan = replace(plan, replicas=({}, dict(zip(names, rng.sample(names, len(names)), strict=True))))
    check_shares(problem.evaluate(plan))


def split_lenet(bandwidth: float, runtime: RuntimeCosts | None = None) -> tuple[Problem, Metrics]:
    """Return the problem of LeNet on two equal boards, and the metrics of a plan that splits each layer in two."""
    devices = tuple(Device(name, name, 1e6) for name in ("a", "b"))
    hosts = tuple(Host(name, 2**40) for name in ("a", "b"))
    platform = Platform("pair", hosts, devices, Network("switch", bandwidth))
    problem = load_problem(networks.build("lenet", 0), platform, objective="throughput", cost=FREE)
    problem = replace(problem, runtime_costs={} if runtime is None else {"a": runtime, "b": runtime})
    return problem, problem.evaluate(registry().make("strategies", "modnn").plan(problem))


def test_the_two_directions_of_a_link_are_not_added_up() -> None:
    metrics = split_lenet(1e4)[1]
    board = metrics.devices[0]
    assert board.link_s > metrics.period_s > max(board.send_link_s, board.receive_link_s) * (1 - 1e-9)
    busiest = max(metrics.link_loads, key=lambda name: metrics.link_loads[name])
    assert find_bottleneck(metrics, "throughput") == ("network", f"{busiest} is busy 100 % of the time")


def test_the_busiest_resource_is_named() -> None:
    kind, text = find_bottleneck(split_lenet(1e12)[1], "latency")
    assert kind == "computing" and re.fullmatch(r"[ab] computes \d+ % of the time", text)
    kind, text = find_bottleneck(split_lenet(1e12, RuntimeCosts(send=1.0, receive=1.0))[1], "latency")
    assert kind == "messages" and re.fullmatch(r"[ab] computes \d % of the time and handles messages \d+ %", text)
    kind, text = find_bottleneck(split_lenet(1e12, RuntimeCosts(latency=10.0))[1], "latency")
    assert kind == "waiting" and text.endswith("% of the time; otherwise devices wait for each other")


@pytest.mark.parametrize("kind", ["switch", "shared"])
@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_devices_of_a_host_share_its_slow_link_to_another_host(kind: NetworkKind, order: tuple[str, str]) -> None:
    hosts = Host("x", 2**40, 1e6), Host("y", 2**40, 1e5)
    devices = *(Device(name, "x", 1e9) for name in ("x1", "x2")), *(Device(name, "y", 1e9) for name in ("y1", "y2"))
    network = Network(kind, 1e6, 0.0, (Link(order, 2e4),))
    problem = load_problem(networks.build("lenet", 0), Platform("links", hosts, devices, network), cost=FREE)
    parts = {layer.name: (Part("y1"),) for layer in problem.layers.layers}
    plan = replace(problem.build_plan(parts), source=("x1",), sink=("y1",))
    plan = replace(plan, replicas=({}, {"x1": "x2", "y1": "y2", "x2": "x1", "y2": "y1"}))
    image_s = 4 * 32 * 32 * 8 / 2e4
    metrics = problem.evaluate(plan)
    shares = {"switch": ("the outgoing link of x", 1 / 50), "shared": ("the shared network", 1 / 50)}
    name, share = shares[kind]
    assert metrics.link_loads[name] == pytest.approx(share * image_s)
    assert metrics.link_loads["the link from x to y"] == pytest.approx(image_s)
    assert metrics.period_s == pytest.approx(image_s)
    assert problem.simulate(plan, frames=40, in_flight=8).period_s == pytest.approx(image_s, rel=0.05)


def test_states_that_are_computed_after_the_outputs_count() -> None:
    cell = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        cell (float[8, 8] x, float[8, 8] h) => (float[8, 8] y, float[8, 8] hn)
        {
            y = MatMul(x, h)
            a = MatMul(y, y)
            b = MatMul(a, a)
            hn = MatMul(b, b)
        }""")
    platform = Platform("one", (Host("a", 2**40),), (Device("a", "a", 1e6),), Network("switch", 1e6))
    problem = load_problem(cell, platform, state=["h=hn"])
    metrics = problem.evaluate(problem.single_device_plan("a"))
    check_shares(metrics)
