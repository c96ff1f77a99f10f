"""A problem: defaults of plans, exact bytes, and times by the barrier model."""

from __future__ import annotations

import pytest
from support.layer_graphs import stack, vgg16

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.driver.prepare import prepare
from dicompiler.ir.cluster import Device, Host, Link, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part
from dicompiler.ir.platform import Platform, uniform_platform
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem

FREE = AnalyticModel(pools=False, elementwise=False, weights=False)


def cluster(count: int, kind: str = "switch", links: tuple[Link, ...] = (), latency: float = 0.0) -> Platform:
    """Return a camera `cam` without compute and `count` devices d0, d1, … with 1 GFLOP/s, each on its own host.

    Links have 8 Mbit/s (1 MB/s).
    """
    names = ["cam", *(f"d{i}" for i in range(count))]
    devices = tuple(Device(n, n, 0.0 if n == "cam" else 1e9, 1, 5.0, 1.0) for n in names)
    network = Network(kind, 8e6, latency, links)  # type: ignore[arg-type]
    return Platform("test", tuple(Host(n, 2**30) for n in names), devices, network)


def two_layers() -> LayerGraph:
    """Return two layers: x (1, 2, 4, 4) → conv1 3×3 pad 1, 4 channels → conv2 1×1, 3 channels; float32."""
    return stack((1, 2, 4, 4), [("conv", 4, 3, 1, 1, 1), ("conv", 3, 1, 1, 0, 1)])


def rows(start: int, stop: int, channels: int = 4) -> tuple[tuple[int, int], ...]:
    return ((0, 1), (0, channels), (start, stop), (0, 4))


def test_source_and_sink_default_to_the_first_device_in_layer_order() -> None:
    problem = Problem(two_layers(), cluster(2))
    plan = problem.build_plan({"conv2": (Part("d1"),), "conv1": (Part("d0"),)})
    assert (plan.source, plan.sink) == (("cam",), ("cam",))
    assert list(plan.layers) == ["conv1", "conv2"]
    other = Problem(two_layers(), cluster(2), source=("d0", "d1"), sink=("d1",))
    assert other.build_plan(plan.layers).source == ("d0", "d1")
    assert other.build_plan(plan.layers).sink == ("d1",)


def test_error_suggests_the_nearest_objective_or_device() -> None:
    with pytest.raises(UsageError, match=r"unknown objective 'latancy' \(did you mean 'latency'\?\)"):
        Problem(two_layers(), cluster(2), objective="latancy")
    with pytest.raises(DicompilerError, match="unknown device 'kam'"):
        Problem(two_layers(), cluster(2), source=("kam",))
    problem = Problem(two_layers(), cluster(2))
    with pytest.raises(DicompilerError, match=r"unknown device 'd7'"):
        problem.estimate(problem.build_plan({"conv1": (Part("d7"),), "conv2": (Part("d1"),)}))


def test_pipeline_costs_its_layers_and_transfers() -> None:
    problem = Problem(two_layers(), cluster(2), FREE)
    metrics = problem.estimate(problem.build_plan({"conv1": (Part("d0"),), "conv2": (Part("d1"),)}))
    cam, d0, d1 = metrics.devices
    x, h, y = 4 * 2 * 16, 4 * 4 * 16, 4 * 3 * 16
    assert [(entry.sent, entry.received) for entry in (cam, d0, d1)] == [(x, y), (h, x), (y, h)]
    assert metrics.total_bytes == x + h + y
    assert (d0.flops, d1.flops) == (2 * 4 * 16 * 18, 2 * 3 * 16 * 4)
    assert (d0.weights, d1.weights) == (4 * 4 * 2 * 9, 4 * 3 * 4)
    assert (cam.weights, cam.flops, cam.activations) == (0, 0, x + y)
    assert (d0.activations, d1.activations) == (x + h, h + y)
    seconds = (d0.flops + d1.flops) / 1e9 + (x + h + y) / 1e6
    assert metrics.latency_s == pytest.approx(seconds)
    assert metrics.period_s == pytest.approx(h / 1e6)
    busy = d0.compute_s + d1.compute_s
    assert metrics.energy_j == pytest.approx(4 * busy + 3 * seconds)
    assert metrics.memory == max(d0.memory, d1.memory)


def test_height_tiles_send_halos_and_compute_in_parallel() -> None:
    problem = Problem(two_layers(), cluster(2), FREE, source=("d0",), sink=("d0",))
    plan = problem.build_plan(
        {"conv1": (Part("d0", rows(0, 2)), Part("d1", rows(2, 4))), "conv2": (Part("d0"),)},
    )
    metrics = problem.estimate(plan)
    d0, d1 = metrics.devices
    assert d0.sent == 4 * 2 * 3 * 4  # d0 sends rows 1, 2 and 3 of x: 2 channels × 3 rows × 4 columns of 4 bytes.
    assert d1.sent == 4 * 4 * 2 * 4  # d1 sends rows 2 and 3 of conv1: 4 channels × 2 rows × 4 columns of 4 bytes.
    compute = 4 * 8 * 2 * 18 / 1e9 + 2 * 3 * 16 * 4 / 1e9
    assert metrics.latency_s == pytest.approx(compute + (d0.sent + d1.sent) / 1e6)


def test_shared_medium_is_serial_and_switch_is_parallel() -> None:
    parts = {"conv1": (Part("d0", rows(0, 2)), Part("d1", rows(2, 4))), "conv2": (Part("d2"),)}
    times = {}
    for kind in ("switch", "shared", "gateway"):
        problem = Problem(two_layers(), cluster(3, kind), FREE, source=("d0", "d1"), sink=("d2",))
        times[kind] = problem.estimate(problem.build_plan(parts))
    part = 4 * 4 * 2 * 4
    assert times["switch"].total_bytes == times["shared"].total_bytes == 2 * part
    assert times["switch"].latency_s == pytest.approx(
        times["shared"].latency_s
    )  # Both messages are sent to d2, which has one link.
    assert times["gateway"] == times["shared"]
    everyone = {"conv1": (Part("d0"),), "conv2": (Part("d1", rows(0, 2, 3)), Part("d2", rows(2, 4, 3)))}
    problem = Problem(two_layers(), cluster(3), FREE, source=("d0",), sink=("d1", "d2"))
    switch = problem.estimate(problem.build_plan(everyone)).latency_s
    shared = Problem(two_layers(), cluster(3, "shared"), FREE, source=("d0",), sink=("d1", "d2"))
    half = 4 * 3 * 2 * 4  # Bytes that d1 and d2 send to each other; a switch sends both at the same time.
    assert shared.estimate(problem.build_plan(everyone)).latency_s - switch == pytest.approx(half / 1e6)


def test_links_and_latency_count_between_hosts_only() -> None:
    parts = {"conv1": (Part("d0"),), "conv2": (Part("d1"),)}
    plain = Problem(two_layers(), cluster(2), FREE, source=("d0",), sink=("d1",))
    slow = Problem(two_layers(), cluster(2, links=(Link(("d1", "d0"), 4e6, 2.0),)), FREE, source=("d0",), sink=("d1",))
    late = Problem(two_layers(), cluster(2, latency=1.5), FREE, source=("d0",), sink=("d1",))
    base = plain.estimate(plain.build_plan(parts))
    sent = 4 * 4 * 16 / 1e6
    assert slow.estimate(plain.build_plan(parts)).latency_s == pytest.approx(base.latency_s + 2.0 + sent)
    assert late.estimate(plain.build_plan(parts)).latency_s == pytest.approx(base.latency_s + 1.5)
    network = Network("switch", 8e6)
    board = Platform("b", (Host("h", 2**30),), (Device("d0", "h", 1e9), Device("d1", "h", 1e9)), network)
    near = Problem(two_layers(), board, FREE, source=("d0",), sink=("d1",))
    metrics = near.estimate(near.build_plan(parts))
    assert metrics.latency_s == pytest.approx(base.latency_s - sent)
    assert metrics.total_bytes == base.total_bytes
    assert metrics.memory == sum(entry.memory for entry in metrics.devices)


def test_partial_sums_are_sent_and_added_up() -> None:
    problem = Problem(two_layers(), cluster(2), FREE, source=("d0", "d1"), sink=("d0",))
    plan = problem.build_plan(
        {"conv1": (Part("d0", None, (0, 1)), Part("d1", None, (1, 2)), Part("d0")), "conv2": (Part("d0"),)}
    )
    metrics = problem.estimate(plan)
    d0, d1 = metrics.devices
    assert d1.sent == metrics.total_bytes == 4 * 4 * 16
    assert d1.flops == 2 * 4 * 16 * 9
    assert d0.flops == 2 * 4 * 16 * 9 + 4 * 16 + 2 * 3 * 16 * 4
    assert d1.weights == 4 * 4 * 1 * 9
    steps = 2 * 4 * 16 * 9 + 4 * 16 + 2 * 3 * 16 * 4
    assert metrics.latency_s == pytest.approx(steps / 1e9 + metrics.total_bytes / 1e6)


def test_vgg16_on_one_rpi4_takes_the_published_time() -> None:
    """CoopAI and the barrier model agree for one device: 2.3235 s with image and result sent."""
    boards = Platform.load("rpi4-gateway-x1")
    cam = (Host("cam", 2**30), *boards.hosts), (Device("cam", "cam", 0.0), *boards.devices)
    problem = Problem(vgg16(), Platform("with cam", *cam, boards.network), FREE)
    plan = problem.build_plan({layer.name: (Part("pi01"),) for layer in problem.layers.layers})
    assert problem.estimate(plan).latency_s == pytest.approx(2.3235, abs=5e-5)


def test_simulation_needs_a_model() -> None:
    layers = prepare(Model.load(networks.build("lenet", 0))).layers
    assert layers is not None
    problem = Problem(layers, uniform_platform(2))
    with pytest.raises(DicompilerError, match="has no model"):
        problem.evaluate(registry().make("strategies", "single").plan(problem))
