"""The genetic search: fast model against estimates, encodings, stages, levels and fronts."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from moocore import hypervolume
from support.layer_graphs import formed, stack

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.ir.cluster import Device, Host, Link, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform, uniform_platform
from dicompiler.ir.wire_dtype import WireDtypes, with_wire_dtypes
from dicompiler.networks import build
from dicompiler.search.pareto_front import (
    AUTODICE_OBJECTIVES,
    FRONT_OBJECTIVES,
    MeasuredMetrics,
    ParetoFront,
    objective_values,
)
from dicompiler.search.problem import Problem
from dicompiler_strategies.genetic.batched_model import build_batched_model
from dicompiler_strategies.genetic.exploration import ExplorationOptions, explore, plan_stages
from dicompiler_strategies.genetic.nsga2 import select_spread
from dicompiler_strategies.genetic.strategy import Genetic
from dicompiler_strategies.papers.autodice import Autodice

SMALL = ExplorationOptions(population=20, generations=12, measured=4)


def branches() -> LayerGraph:
    """A skip connection, readers of different pieces, a shared weight, an unread layer, two outputs."""
    return formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y, float[1, 4, 4, 4] z)
        <int64[1] s0 = {0}, int64[1] s2 = {2}, int64[1] s4 = {4}, int64[1] axis = {1}>
        {
          a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
          b = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a, w)
          unread = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a, w)
          low = Slice (b, s0, s2, axis)  high = Slice (b, s2, s4, axis)
          p = Conv <kernel_shape = [1, 1]> (low, v)  q = Conv <kernel_shape = [1, 1]> (high, u)
          c = Concat <axis = 1> (p, q)
          y = Add (c, x)
          z = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (y)
        }""",
        w=(4, 4, 3, 3),
        v=(2, 2, 1, 1),
        u=(2, 2, 1, 1),
    )


def boards(kind: str = "switch") -> Platform:
    """Three hosts with one or two devices, with different rates and powers, a slower link and latencies."""
    hosts = tuple(Host(name, 2**30) for name in ("a", "b", "c"))
    devices = tuple(
        Device(f"{host}{i}", host, rate * 1e9, power_active=2 + rate, power_idle=1.0)
        for host, i, rate in (("a", 0, 1), ("a", 1, 3), ("b", 0, 2), ("b", 1, 2), ("c", 0, 1))
    )
    links = (Link(("a", "c"), 1e7, 2e-4),)
    return Platform("test", hosts, devices, Network(kind, 1e8, 1e-4, links, 1e-5), "")  # type: ignore[arg-type]


def equal(count: int, memory: int = 2**30) -> Platform:
    """`count` equal boards on a switch."""
    names = [f"d{i}" for i in range(count)]
    devices = tuple(Device(name, name, 1e9, power_active=3.0, power_idle=1.0) for name in names)
    return Platform("equal", tuple(Host(name, memory) for name in names), devices, Network("switch", 1e9))


def chain() -> LayerGraph:
    """Fourteen convolutions and a classifier: the first layers have most work, the last ones most weights."""
    rows: list[tuple[object, ...]] = []
    for channels in (8, 12, 16, 24, 32, 48, 64):
        rows += [("conv", channels, 3, 1, 1, 1), ("conv", channels, 3, 2, 1, 1)]
    return stack((1, 3, 128, 128), [*rows, ("flatten",), ("fc", 100)])


def check_agreement(problem: Problem, rows: np.ndarray) -> None:
    """Check that every value of the batched model equals the plan's own estimate."""
    tables = build_batched_model(problem)
    found = tables.evaluate(rows)
    names = [device.name for device in problem.platform.devices]
    for p, row in enumerate(rows):
        metrics = problem.estimate(tables.plan(row))
        for entry in metrics.devices:
            at = p, names.index(entry.device)
            own = [array[at] for array in (found.weights, found.activations, found.sent, found.received)]
            assert own == [entry.weights, entry.activations, entry.sent, entry.received]
            assert found.compute_s[at] == pytest.approx(entry.compute_s)
        assert sorted(np.flatnonzero(found.used[p])) == sorted(names.index(entry.device) for entry in metrics.devices)
        for name, value in objective_values(problem.platform, metrics, FRONT_OBJECTIVES).items():
            assert found.objective(name)[p] == pytest.approx(value), name


@pytest.mark.parametrize("kind", ["switch", "shared", "gateway"])
@pytest.mark.parametrize(
    ("ends", "wire"), [(((), ()), ()), ((("b0",), ("a1", "c0")), ()), ((("b0",), ("a1", "c0")), (("*", "float16"),))]
)
def test_batched_model_equals_the_estimates(kind: str, ends: tuple[tuple[str, ...], ...], wire: WireDtypes) -> None:
    rng = np.random.default_rng(1)
    problem = Problem(with_wire_dtypes(branches(), wire), boards(kind), source=ends[0], sink=ends[1])
    rows = rng.integers(0, 5, (40, len(problem.layers.layers)))
    check_agreement(
        problem, np.concatenate((rows, np.sort(rows[:10], axis=1), np.tile(np.arange(5), (len(rows[0]), 1)).T))
    )


@pytest.mark.parametrize("kind", ["switch", "shared"])
def test_batched_model_equals_the_estimates_with_runtime_costs(kind: str) -> None:
    """Each of the layers in a chain waits for one message, and devices have different runtime costs."""
    layers, platform = stack((1, 4, 16, 16), [("conv", 4, 3, 1, 1, 1)] * 6), boards(kind)
    costs = RuntimeCosts(1e-4, 3e-4, 2e-4, 1e-9, 5e-5, call=1e-4, cold_call=3e-5, header_share=0.05)
    runtime = {device.name: costs.scaled_by(1 + i) for i, device in enumerate(platform.devices)}
    problem = Problem(layers, platform, source=("a0",), runtime_costs=runtime)
    check_agreement(problem, np.random.default_rng(3).integers(0, 5, (30, 6)))


@pytest.mark.parametrize("network", ["resnet18", "squeezenet", "quirks", "light/shufflenet"])
def test_batched_model_equals_the_estimates_with_branches_and_skips(network: str) -> None:
    problem = Problem(formed(build(network)), boards("shared"), source=("a0", "b1"))
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 5, (4, len(problem.layers.layers)))
    check_agreement(problem, np.concatenate((rows, np.sort(rows, axis=1))))


def test_memory_of_overlapping_readers_is_never_too_small() -> None:
    layers = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 9, 4, 4] x) => (float[1, 3, 4, 4] y, float[1, 9, 4, 4] z)
        <int64[1] s0 = {0}, int64[1] s3 = {3}, int64[1] s4 = {4}, int64[1] s6 = {6}, int64[1] s7 = {7},
         int64[1] axis = {1}>
        {
          r = Relu (x)  z = Relu (r)
          a = Slice (z, s0, s3, axis)  b = Slice (z, s4, s7, axis)  c = Slice (z, s3, s6, axis)
          d = Add (a, b)  y = Add (d, c)
        }"""
    )
    problem = Problem(layers, equal(2))
    tables = build_batched_model(problem)
    rows = np.array(list(np.ndindex(*(2,) * len(layers.layers))))
    found = tables.evaluate(rows)
    for p, row in enumerate(rows):
        metrics = problem.estimate(tables.plan(row))
        assert metrics.total_bytes == found.objective("communication")[p]
        for d, entry in enumerate(metrics.devices):
            assert found.activations[p, d if len(metrics.devices) == 2 else 0] >= entry.activations


def test_stages_halve_devices_and_keep_all_generations() -> None:
    assert [devices for devices, _ in plan_stages(8, 0, 400)] == [2, 4, 8]
    assert [devices for devices, _ in plan_stages(6, 0, 400)] == [2, 3, 6]
    assert plan_stages(1, 0, 7) == ((1, 7),)
    assert plan_stages(8, 1, 7) == ((8, 7),)
    for devices, generations in ((8, 1), (64, 20), (5, 3)):
        found = plan_stages(devices, 0, generations)
        assert sum(share for _, share in found) == generations
        assert found[-1][0] == devices


def test_spread_contains_the_ends_of_a_front() -> None:
    points = np.array([[0.0, 9.0], [1.0, 8.9], [5.0, 4.0], [5.1, 3.9], [9.0, 0.0]])
    assert select_spread(points, 3) in ([0, 2, 4], [0, 3, 4])
    assert select_spread(points, 9) == [0, 1, 2, 3, 4]


def dominates(a: ParetoFront, i: int, j: int) -> bool:
    first, second = ([a.points[k].objectives[name] for name in a.objectives] for k in (i, j))
    return first != second and all(x <= y for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("encoding", ["split", "naive", "tiles"])
def test_front_is_non_dominated_with_values_of_its_plans(encoding: str) -> None:
    problem = Problem(chain(), equal(4))
    front = explore(problem, replace(SMALL, encoding=encoding, objectives=("latency", "device-memory")))  # type: ignore[arg-type]
    count = range(len(front.points))
    assert count
    assert not any(dominates(front, i, j) for i in count for j in count)
    for point in front.points:
        metrics = problem.estimate(point.plan)
        assert point.objectives == objective_values(problem.platform, metrics, front.objectives)
    assert front.metrics_source == "measured"


def test_seed_determines_the_front() -> None:
    problem = Problem(chain(), equal(4))
    options = Autodice(population=20, generations=12, measured=0)
    assert explore(problem, options) == explore(problem, options)
    assert explore(problem, options) != explore(problem, replace(options, seed=1))


def test_executor_does_not_change_the_front() -> None:
    problem = Problem(chain(), equal(4))
    with ThreadPoolExecutor(2) as threads:
        assert explore(replace(problem, executor=threads), SMALL) == explore(problem, SMALL)


def test_measure_function_decides_on_the_second_level() -> None:
    problem = Problem(chain(), equal(4))
    seen: list[Plan] = []

    def measure(plan: Plan) -> Metrics:
        seen.append(plan)
        own = problem.estimate(plan)
        energy = {entry.device: 100.0 + len(seen) for entry in own.devices}
        return MeasuredMetrics(
            own.devices, own.latency_s, 7.0, own.energy_j, own.memory, own.total_bytes, device_energy_j=energy
        )

    front = explore(problem, SMALL, measure=measure)
    assert 0 < len(seen) <= SMALL.measured
    assert {point.objectives["throughput"] for point in front.points} == {7.0}
    assert min(point.objectives["device-energy"] for point in front.points) >= 101.0


def test_leaves_out_plans_that_cannot_be_measured(caplog: pytest.LogCaptureFixture) -> None:
    problem = Problem(chain(), equal(4))
    single = {(Part("d0"),)}

    def measure(plan: Plan) -> Metrics:
        if set(plan.layers.values()) != single:
            raise DicompilerError("no such board")
        return problem.estimate(plan)

    with caplog.at_level("WARNING", "dicompiler"):
        front = explore(problem, replace(SMALL, objectives=("communication", "device-memory")), measure=measure)
    assert [set(point.plan.layers.values()) for point in front.points] == [single]
    assert "no such board" in caplog.text

    def never(plan: Plan) -> Metrics:
        raise DicompilerError(f"no board for {len(plan.layers)} layers")

    with pytest.raises(DicompilerError, match="none of the plans could be measured"):
        explore(problem, SMALL, measure=never)


def test_ctrl_c_returns_the_front_so_far() -> None:
    problem = Problem(chain(), equal(4))
    told: list[str] = []

    def stop(text: str) -> None:
        told.append(text)
        if len(told) == 5:
            raise KeyboardInterrupt

    front = explore(problem, SMALL, progress=stop)
    assert (front.interrupted, front.metrics_source) == (True, "analytic")
    assert {point.plan.note for point in front.points} == {"the search was interrupted"}

    def interrupted(plan: Plan) -> Metrics:
        raise KeyboardInterrupt(plan)

    front = explore(problem, SMALL, measure=interrupted)
    assert (front.interrupted, front.metrics_source) == (True, "analytic")


def test_ctrl_c_in_a_first_generation_returns_the_previous_front() -> None:
    problem = Problem(chain(), equal(4))

    def stop(text: str) -> None:
        if text.startswith("stage 2 of 2: generation 1 "):
            raise KeyboardInterrupt

    def at_once(text: str) -> None:
        raise KeyboardInterrupt(text)

    second = explore(problem, replace(SMALL, measured=0), progress=stop)
    assert second.interrupted
    with_one = explore(problem, replace(SMALL, measured=0), progress=at_once)
    assert with_one.interrupted
    assert (
        max(len(point.plan.devices) for point in with_one.points)
        <= 2
        < max(len(point.plan.devices) for point in second.points)
    )


def test_one_device_has_one_plan() -> None:
    front = explore(Problem(chain(), uniform_platform(1)), SMALL)
    assert [set(point.plan.layers.values()) for point in front.points] == [{(Part("d0"),)}]


def test_plan_is_best_for_the_objective() -> None:
    for objective in ("throughput", "memory", "communication"):
        problem = Problem(chain(), equal(4), objective=objective)
        genetic = Genetic(population=20, generations=10, measured=4)
        best = problem.estimate(genetic.plan(problem)).objective_value(objective)
        front = genetic.front(problem)
        assert best <= min(problem.estimate(point.plan).objective_value(objective) for point in front.points) * 1.2
        alone = problem.estimate(problem.build_plan({layer.name: (Part("d0"),) for layer in problem.layers.layers}))
        assert best <= alone.objective_value(objective)


def test_memory_is_a_hard_limit() -> None:
    layers = chain()
    whole = Problem(layers, equal(1)).estimate(Genetic(population=2, generations=1).plan(Problem(layers, equal(1))))
    problem = Problem(layers, equal(4, whole.memory * 3 // 4), objective="communication")
    plan = Genetic(population=20, generations=10).plan(problem)
    assert problem.estimate(plan).memory <= whole.memory * 3 // 4
    with pytest.raises(
        DicompilerError, match=r"genetic: no plan was found that fits into memory: .* needs .* on host d\d, which has"
    ):
        Genetic(population=20, generations=4).plan(Problem(layers, equal(4, 1000)))


@pytest.mark.parametrize("small", [1, 2])
def test_plan_that_fits_is_not_hidden_by_an_equal_one_that_does_not(small: int) -> None:
    """Two plans that differ in the order of equal boards have the same objectives, but only one of them fits."""
    platform = equal(3)
    hosts = tuple(replace(host, memory=1000 if i == small else 2**30) for i, host in enumerate(platform.hosts))
    layers = stack((1, 3, 16, 16), [("conv", 8, 3, 1, 1, 1)] * 4)
    plan = Genetic(population=20, generations=8).plan(
        Problem(layers, replace(platform, hosts=hosts), objective="throughput")
    )
    assert {parts[0].device for parts in plan.layers.values()} == {"d0", f"d{3 - small}"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"generations": 0}, "genetic: generations is 0: use at least 1"),
        ({"population": 0}, "genetic: population is 0: use at least 2"),
        ({"mutation": 1.5}, "mutation is 1.5: use a probability"),
        ({"objectives": ("latancy",)}, r"unknown objective 'latancy' \(did you mean 'latency'\?\)"),
        ({"objectives": ("latency", "latency")}, "given twice"),
        ({"objectives": ()}, "no objective is given"),
    ],
)
def test_rejects_invalid_options(options: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        Genetic(**options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_split_points_and_stages_improve_the_hypervolume() -> None:
    rows = [("conv", 8 + 2 * i, 3, 2 if i % 12 == 11 else 1, 1, 1) for i in range(48)]
    problem = Problem(stack((1, 3, 128, 128), rows), equal(8))
    alone = build_batched_model(problem).evaluate(np.zeros((1, len(rows)), int))
    worst = np.array([alone.objective(name)[0] for name in AUTODICE_OBJECTIVES])

    def median(naive: bool, count: int) -> float:
        volumes = []
        for seed in range(5):
            options = Autodice(AUTODICE_OBJECTIVES, "naive" if naive else "split", 40, 15, stages=count, measured=0)
            front = explore(problem, replace(options, seed=seed))
            assert front.evaluations <= 40 * 15
            points = np.array([[point.objectives[name] for name in AUTODICE_OBJECTIVES] for point in front.points])
            volumes.append(hypervolume(points / worst, ref=np.ones(3)))
        return statistics.median(volumes)

    assert median(True, 1) < median(False, 1) < median(False, 0)
