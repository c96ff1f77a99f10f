"""single, pipeline and modnn: valid plans for real graphs, optimal or proportional as documented."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layer_graphs import alexnet, formed, stack, vgg16

from dicompiler.base.errors import DicompilerError
from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.plan import Part
from dicompiler.ir.platform import Platform, uniform_platform
from dicompiler.networks import build
from dicompiler.search.problem import Problem
from dicompiler_strategies.balanced_runs import balance_runs
from dicompiler_strategies.modnn import Modnn
from dicompiler_strategies.pipeline import Pipeline
from dicompiler_strategies.single import Single

FREE = AnalyticModel(pools=False, elementwise=False, weights=False)


def platform(*rates: float) -> Platform:
    """Devices d0, d1, … with these rates (GFLOP/s), each on its own host."""
    names = [f"d{i}" for i in range(len(rates))]
    devices = tuple(Device(name, name, rate * 1e9) for name, rate in zip(names, rates, strict=True))
    return Platform("test", tuple(Host(name, 2**30) for name in names), devices, Network("switch", 1e9))


def with_camera(boards: Platform) -> Platform:
    """The boards behind a first device without compute, on a shared medium."""
    hosts = (Host("cam", 2**30), *boards.hosts)
    devices = (Device("cam", "cam", 0.0), *boards.devices)
    return Platform(boards.name, hosts, devices, Network("shared", boards.network.bandwidth))


def shuffled() -> LayerGraph:
    """A convolution, a channel shuffle through five axes, a depthwise convolution and a classifier."""
    return formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 12, 12] x) => (float[1, 5] y)
        <int64[5] s5 = {1, 2, 4, 12, 12}, int64[4] s4 = {1, 8, 12, 12}>
        {
          c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
          r = Reshape (c, s5)  t = Transpose <perm = [0, 2, 1, 3, 4]> (r)  u = Reshape (t, s4)
          d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 8> (u, k)
          g = GlobalAveragePool (d)  f = Flatten (g)  y = Gemm (f, v)
        }""",
        w=(8, 4, 3, 3),
        k=(8, 1, 3, 3),
        v=(8, 5),
    )


def test_single_uses_fastest_device_and_first_of_equals() -> None:
    for rates, expected in (((1, 5, 2), "d1"), ((3, 3, 3), "d0"), ((0, 0, 2), "d2")):
        plan = Single().plan(Problem(shuffled(), platform(*rates)))
        assert {part for parts in plan.layers.values() for part in parts} == {Part(expected)}
        assert plan.source == plan.sink == ("d0",)


def test_single_uses_named_device() -> None:
    problem = Problem(shuffled(), platform(1, 5, 0))
    assert Single(device="d0").plan(problem).layers["conv0"] == (Part("d0"),)
    with pytest.raises(DicompilerError, match=r"unknown device 'd9' \(known: d0, d1, d2\)"):
        Single(device="d9").plan(problem)
    with pytest.raises(DicompilerError, match="single: device 'd2' has no compute"):
        Single(device="d2").plan(problem)


def runs(problem: Problem, strategy: Pipeline) -> list[str]:
    """Return the device of each layer in layer order; every layer is whole."""
    plan = strategy.plan(problem)
    assert all(len(parts) == 1 and parts[0].region is None for parts in plan.layers.values())
    return [plan.layers[layer.name][0].device for layer in problem.layers.layers]


def test_pipeline_uses_consecutive_runs_in_platform_order() -> None:
    stages = runs(Problem(vgg16(), platform(1, 1, 0, 1)), Pipeline())
    assert [stage for stage, _ in itertools.groupby(stages)] == ["d0", "d1", "d3"]
    named = runs(Problem(vgg16(), platform(1, 1, 1, 1)), Pipeline(devices=("d2", "d1")))
    assert [stage for stage, _ in itertools.groupby(named)] == ["d2", "d1"]


def test_faster_device_gets_more_layers() -> None:
    problem = Problem(vgg16(), platform(1, 3))
    metrics = problem.estimate(Pipeline().plan(problem))
    slow, fast = metrics.devices
    # The fast device computes 25.2 GFLOP and the slow one 5.7. A cut one layer earlier would give the slow one 9.4.
    assert 3 < fast.flops / slow.flops < 5


def test_pipeline_rejects_invalid_devices() -> None:
    problem = Problem(shuffled(), platform(1, 1, 0))
    for devices, expected in (
        (("d0", "d2"), "pipeline: device 'd2' has no compute"),
        (("d0", "d1", "d0"), "pipeline: device 'd0' is named twice"),
        (("d0", "x"), "unknown device 'x'"),
    ):
        with pytest.raises(DicompilerError, match=expected):
            Pipeline(devices=devices).plan(problem)


@given(st.data())
def test_balance_runs_minimises_the_slowest_run(data: st.DataObject) -> None:
    count, devices = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    costs = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=count, max_size=count), min_size=devices, max_size=devices)
    )

    def slowest(ends: tuple[int, ...]) -> int:
        return max(sum(row[a:b]) for row, a, b in zip(costs, (0, *ends), ends, strict=False))

    ends = balance_runs(costs)
    assert len(ends) == devices
    assert list(ends) == sorted(ends)
    assert ends[-1] == count
    every = itertools.combinations_with_replacement(range(count + 1), devices - 1)
    assert slowest(ends) == min(slowest((*cuts, count)) for cuts in every)


def test_modnn_cuts_rows_in_proportion_to_the_rates() -> None:
    layers = stack((1, 3, 112, 112), [("conv", 8, 3, 1, 1, 1)])
    plan = Modnn().plan(Problem(layers, platform(2, 0, 1, 1)))
    rows = [(part.device, part.region[2]) for part in plan.layers["conv1"] if part.region is not None]
    assert rows == [("d0", (0, 56)), ("d2", (56, 84)), ("d3", (84, 112))]


def test_modnn_cuts_rows_through_a_shuffle_and_leaves_the_rest_whole() -> None:
    problem = Problem(shuffled(), platform(1, 2))
    plan = Modnn().plan(problem)
    cut = [name for name, parts in plan.layers.items() if len(parts) == 2]
    assert cut == ["conv0", "reshape1", "transpose2", "reshape3", "conv4"]
    assert {parts for parts in plan.layers.values() if len(parts) == 1} == {(Part("d1"),)}
    assert plan.layers["transpose2"][1].region == ((0, 1), (0, 4), (0, 2), (4, 12), (0, 12))


def test_layer_with_fewer_rows_than_devices_uses_fewer_devices() -> None:
    layers = stack((1, 3, 3, 3), [("conv", 8, 3, 1, 1, 1)])
    plan = Modnn().plan(Problem(layers, uniform_platform(5)))
    assert [part.device for part in plan.layers["conv1"]] == ["d0", "d1", "d2"]


def test_modnn_on_one_device_is_the_single_plan() -> None:
    problem = Problem(alexnet(), platform(1))
    assert problem.estimate(Modnn().plan(problem)) == problem.estimate(Single().plan(problem))


def test_modnn_on_vgg16_is_close_to_an_independent_recomputation() -> None:
    """MoDNN takes 0.907 s on 4 RPi4 and a shared medium of 100 Mbit/s if a pool is cut with its convolution.

    Here, it takes 0.920 s: a pool is a separate layer, and its 7 rows are on other devices than the convolution's 14
    rows.
    """
    problem = Problem(vgg16(), with_camera(Platform.load("rpi4-gateway-x4")), FREE)
    assert problem.estimate(Modnn().plan(problem)).latency_s == pytest.approx(0.907, rel=0.02)
    assert problem.estimate(Single().plan(problem)).latency_s == pytest.approx(2.324, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["resnet50", "quirks", "lenet"])
@pytest.mark.parametrize("strategy", [Single(), Pipeline(), Modnn()])
def test_plans_of_real_networks_can_be_routed(network: str, strategy: Single | Pipeline | Modnn) -> None:
    problem = Problem(formed(build(network)), with_camera(Platform.load("rpi4-gateway-x4")))
    metrics = problem.estimate(strategy.plan(problem))
    alone = problem.estimate(Single().plan(problem))
    assert metrics.total_bytes >= alone.total_bytes
    assert sum(entry.flops for entry in metrics.devices) >= alone.devices[1].flops
    assert max(entry.compute_s for entry in metrics.devices) <= alone.devices[1].compute_s
