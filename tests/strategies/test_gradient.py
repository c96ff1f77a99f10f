"""gradient and diapason: correct gradients and equations, near-optimal plans."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from random import Random

import numpy as np
import pytest
from support.generators import random_model
from support.layer_graphs import formed, stack, vgg16

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.option_specs import instantiate, parse_spec
from dicompiler.cost.cost_model import AnalyticModel
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import Problem
from dicompiler_strategies import dicompiler_strategies, papers
from dicompiler_strategies.gradient.local_search import LocalSearch
from dicompiler_strategies.gradient.objective_tables import ObjectiveTables
from dicompiler_strategies.gradient.relaxation import DescentSettings, FlatTables, minimise_relaxation
from dicompiler_strategies.gradient.strategy import Gradient, default_device_counts
from dicompiler_strategies.joint.variable_elimination import build_elimination_order, minimise_exactly
from dicompiler_strategies.papers import diapason
from dicompiler_strategies.papers.diapason import Diapason
from dicompiler_strategies.papers.partition_opportunities import OpportunitySpace, build_space, cover_extent
from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.tables.choices import ChoiceSet
from dicompiler_strategies.tables.cost_tables import build_cost_tables

FREE = AnalyticModel(pools=False, elementwise=False, weights=False)
QUICK = Gradient(restarts=8, iterations=10)


def platform(*rates: float, kind: str = "shared", memory: int = 2**30) -> Platform:
    """Return devices d0, d1, … with these rates (GFLOP/s), each on its own host at 100 Mbit/s.

    Devices with higher numbers draw more power.
    """
    names = [f"d{i}" for i in range(len(rates))]
    devices = tuple(
        Device(name, name, rate * 1e9, power_active=4.0 + i, power_idle=1.0 + i / 2, power_network=0.5)
        for i, (name, rate) in enumerate(zip(names, rates, strict=True))
    )
    network = Network("switch" if kind == "switch" else "shared", 1e8)
    return Platform("test", tuple(Host(name, memory) for name in names), devices, network)


def boards(count: int) -> Platform:
    """RPi4 behind a camera on a shared medium: the setting of the papers' figures."""
    pis = Platform.load(f"rpi4x{count}")
    hosts, devices = (Host("cam", 2**30), *pis.hosts), (Device("cam", "cam", 0.0), *pis.devices)
    return Platform(pis.name, hosts, devices, Network("shared", 100e6))


def small() -> LayerGraph:
    """Two convolutions, a pool and a classifier."""
    rows = [("conv", 8, 3, 1, 1, 1), ("conv", 8, 3, 1, 1, 1), ("pool", 2, 2, 0), ("flatten",), ("fc", 10)]
    return stack((1, 3, 16, 16), rows)


def branched() -> LayerGraph:
    """Return a residual block that begins with a stride. No slice needs the rows that the stride skips."""
    return formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 3, 24, 24] x) => (float[1, 6, 12, 12] y)
        {
          a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
          b = Conv <kernel_shape = [1, 1], strides = [2, 2]> (a, u)
          c = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (a, v)
          d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c, z)
          y = Add (b, d)
        }""",
        w=(4, 3, 3, 3),
        u=(6, 4, 1, 1),
        v=(6, 4, 3, 3),
        z=(6, 6, 3, 3),
    )


def optimum(tables: ObjectiveTables) -> float:
    """Return the exact minimum over all selections."""
    return minimise_exactly(
        build_elimination_order([len(own) for own in tables.node], list(tables.edge)), tables.node, tables.edge
    )[0]


def random_tables(seed: int, sizes: tuple[int, ...], limits: int = 0) -> ObjectiveTables:
    """Random tables over a chain with one shortcut."""
    rng = np.random.default_rng(seed)
    pairs = [*itertools.pairwise(range(len(sizes))), (0, len(sizes) - 1)]
    return ObjectiveTables(
        tuple(rng.uniform(0, 1, size) for size in sizes),
        {(i, j): rng.uniform(0, 1, (sizes[i], sizes[j])) for i, j in pairs},
        tuple(np.arange(size) for size in sizes),
        tuple(rng.uniform(0, 10, (size, limits)) for size in sizes),
        np.full(limits, 4.0 * len(sizes)),
        tuple(np.arange(size) % 2 for size in sizes),
    )


def test_strategy_is_built_in_and_options_can_be_parsed() -> None:
    assert Gradient in dicompiler_strategies() and Diapason in papers.dicompiler_strategies()
    spec = parse_spec("diapason{partition=proportional fusion_limit=2 learning_rate=0.4 iterations=7 seed=3}")
    expected = Diapason("proportional", 2, learning_rate=0.4, iterations=7, seed=3)
    assert instantiate(Diapason, spec) == expected


def expected_cost(tables: ObjectiveTables, p: np.ndarray, memory: float) -> np.ndarray:
    """Return the expected cost of each restart.

    `p` has the probabilities of all choices, one row for each restart. The cost is Σ p_a · node_a + Σ p_a · edge_ab ·
    p_b + memory · excess.
    """
    rows = np.split(p, np.cumsum([len(costs) for costs in tables.node])[:-1], axis=1)
    cost = p @ np.concatenate(tables.node) + memory * tables.relative_excess(p @ np.concatenate(tables.weights))
    return cost + sum(np.einsum("ri,ij,rj->r", rows[a], table, rows[b]) for (a, b), table in tables.edge.items())


@pytest.mark.parametrize("limits", [0, 2])
def test_relaxed_gradient_equals_finite_differences(limits: int) -> None:
    tables = random_tables(1, (3, 4, 2, 5), limits)
    tables = dataclasses.replace(tables, limits=tables.limits * 0.6)
    relaxed = FlatTables(tables)
    memory = 0.7
    W = np.random.default_rng(2).normal(size=(3, 14))
    p = relaxed.softmax(W)
    found = p * relaxed.centre_gradient(p, relaxed.loss_gradient(p, memory))
    if limits:  # The memory penalty is not 0 in at least one restart.
        assert not np.allclose(relaxed.loss_gradient(p, memory), relaxed.loss_gradient(p))
    for column in range(W.shape[1]):
        step = np.zeros_like(W)
        step[:, column] = 1e-6
        up, down = (expected_cost(tables, relaxed.softmax(W + sign * step), memory) for sign in (1, -1))
        assert found[:, column] == pytest.approx((up - down) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("penalty", [True, False])
def test_diapason_gradient_equals_finite_differences(penalty: bool) -> None:
    made = build_space(Problem(branched(), platform(1, 2, 1.5), FREE), ("equal", "proportional"), 2, not penalty)
    rng = np.random.default_rng(3)
    W = diapason.initial_weights(made, 2, 0, heuristics=False)
    g = diapason.relaxed_loss(made, W, penalty).gradient

    def slope(layer: int | None, place: tuple[int, ...]) -> Floats:
        """Return the central difference of the loss by one weight: in W_l of a layer, or in W_dev."""
        ends = []
        for sign in (1, -1):
            W_l, W_dev = [own.copy() for own in W.W_l], W.W_dev.copy()
            np.moveaxis(W_dev if layer is None else W_l[layer], 0, -1)[place] += sign * 1e-6
            ends.append(diapason.relaxed_loss(made, diapason.RelaxationWeights(tuple(W_l), W_dev), penalty).L)
        return (ends[0] - ends[1]) / 2e-6

    scale = np.abs(g.W_dev).max()
    for layer, own in enumerate(g.W_l):
        for p in range(own.shape[1]):
            assert slope(layer, (p,)) == pytest.approx(own[:, p], abs=1e-6 * scale, rel=1e-5)
    for _ in range(40):
        place = tuple(int(rng.integers(extent)) for extent in g.W_dev.shape[1:])
        assert slope(None, place) == pytest.approx(np.moveaxis(g.W_dev, 0, -1)[place], abs=1e-6 * scale, rel=1e-5)


def by_hand() -> OpportunitySpace:
    """Two layers on two devices.

    Layer 0 is whole (10 or 20 ms) or in two slices (4 or 8 ms, 6 or 12 ms); layer 1 is whole (3 or 5 ms). The input has
    4 bytes, the tensor in between 2 (one for each slice), and the output 6.
    """
    cost = np.zeros((2, 2, 2))
    cost[0, 0], cost[1, 0], cost[1, 1] = (10, 20), (4, 8), (6, 12)
    overlap = np.zeros((2, 2, 1, 2))
    overlap[0, 0, 0, 0], overlap[1, :, 0, 0] = 2, (1, 1)
    return OpportunitySpace(
        problem=Problem(small(), platform(1, 1)),
        devices=platform(1, 1).devices,
        opportunities=((), ()),
        group=(np.array([0, 1]), np.array([2])),
        has_sublayer=(np.array([[True, False], [True, True]]), np.array([[True, False]])),
        cost=(cost, np.array([[[3.0, 5.0], [0.0, 0.0]]])),
        overlap={(0, 1): overlap},
        inputs={0: np.array([[4.0, 0.0], [2.0, 2.0]])},
        outputs={1: np.array([[6.0, 0.0]])},
        B=np.array([[0.0, 3.0], [3.0, 0.0]]),
        B_in=np.array([0.0, 0.5]),
        B_out=np.array([0.25, 0.0]),
        group_sizes=(1, 2, 1),
    )


def test_diapason_equations_equal_hand_computed_values() -> None:
    ln3 = np.log(3.0)
    W_dev = np.zeros((1, 3, 2, 2))
    # With these weights, softmax gives slice 0 the device shares ¾ ¼ and slice 1 the shares ¼ ¾. All others are ½ ½.
    W_dev[0, 1] = [[ln3, 0.0], [0.0, ln3]]
    # Layer 0 is whole with ¼ and sliced with ¾ (softmax); layer 1 has one choice.
    W = diapason.RelaxationWeights((np.array([[0.0, ln3]]), np.zeros((1, 1))), W_dev)
    # Numbers in parentheses are the equations of the paper on DIAPASON; times are in ms.
    # (3) Layer 0, whole: ½·10 + ½·20 = 15. Its slices: ¾·4 + ¼·8 = 5 and ¼·6 + ¾·12 = 10.5. Layer 1: ½·3 + ½·5 = 4.
    # (4) X = ‖(¾ ¼) − (¼ ¾)‖ / √2 = ½. (5), (6) L_pen = ½ · min(5, 10.5) = 2.5. (1) L_part = 15 and 10.5 + 2.5 = 13.
    # (7) L_0 = ¼·15 + ¾·13 = 13.5, L_1 = 4.
    # (8)–(10) Transfers from layer 0, whole: 2 bytes · 3 · (½·½ + ½·½) = 3; from two slices: 1·3·½ twice = 3. (11) 3.
    # (12) Input of layer 0, whole: 4·½·0.5 = 1; of its slices: 2·¼·0.5 + 2·¾·0.5 = 1. (13) 1.
    # (14), (15) Output: 6·½·0.25 = 0.75.
    latency = diapason.relaxed_loss(by_hand(), W).L
    assert latency == pytest.approx([13.5 + 4 + 3 + 1 + 0.75])
    # (2) The energy of layer 0 has no L_pen: ¼·15 + ¾·(5 + 10.5) = 15.375.
    energy = diapason.relaxed_loss(by_hand(), W, penalty=False).L
    assert energy == pytest.approx([15.375 + 4 + 3 + 1 + 0.75])
    assert diapason.decode_weights(by_hand(), W, 0)[0] == (1, (0, 1))


def test_fused_slices_send_only_to_their_parents() -> None:
    made = build_space(Problem(small(), platform(1, 1), FREE), ("equal",), 2, energy=False)
    labels = [[(own.depth, len(own.regions)) for own in pos] for pos in made.opportunities]
    # A layer can be whole, in two slices, or fused with the next one or two layers. The last layer, fc, is always
    # whole.
    basic = [(0, 1), (0, 2)]
    assert labels == [[*basic, (1, 2), (2, 2)], [*basic, (1, 2), (2, 2)], [*basic, (1, 2)], basic, [(0, 1)]]
    overlap = made.overlap[0, 1]
    row = 8 * 16 * 4  # Bytes of a row: 8 channels × 16 columns × 4.
    # If both layers are sliced, one halo row is sent in each direction.
    assert overlap[1, :, 1].tolist() == [[8 * row, row], [row, 8 * row]]
    # A slice fused with the next layer also computes the halo rows, so slices exchange nothing.
    assert overlap[2, :, 1].tolist() == [[9 * row, 0], [0, 9 * row]]
    # The whole layer sends 9 rows to each slice, the halo row included.
    assert overlap[0, 0, 1].tolist() == [9 * row, 9 * row]
    assert overlap[2, :, 0, 0].tolist() == [
        9 * row,
        7 * row,
    ]  # Both slices compute two common rows. Each row is sent to the whole layer only once.


def test_shares_of_slices_cover_every_row_once() -> None:
    assert cover_extent([(0, 5), (3, 8)], 8) == [(0, 4), (4, 8)]
    assert cover_extent([(1, 3), None, (5, 7)], 9) == [(0, 5), None, (5, 9)]


@pytest.mark.parametrize(("count", "expected"), [(4, 0.867), (8, 1.082)])
def test_diapason_reproduces_an_independent_recomputation_on_vgg16(count: int, expected: float) -> None:
    problem = Problem(vgg16(), boards(count), FREE)
    plan = Diapason().plan(problem)
    assert problem.estimate(plan).latency_s == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("count", [3, 8])
def test_vgg16_is_within_3_percent_of_the_optimum(count: int) -> None:
    problem = Problem(vgg16(), boards(count), FREE)
    # A fixed choice set keeps the test fast if the default one grows.
    found = build_cost_tables(
        problem, ChoiceSet(extra_rows=3, shares=("equal",), device_counts=(2, 3, count), each_device=False)
    )
    best = Gradient().search_tables(found)
    exact = minimise_exactly(
        build_elimination_order([len(own) for own in found.node_seconds], list(found.edge_seconds)),
        found.node_seconds,
        found.edge_seconds,
    )[0]
    assert exact <= best.value * (1 + 1e-12)
    assert best.value <= 1.03 * exact
    assert found.total_seconds(best.selection) == pytest.approx(best.value)
    assert problem.estimate(found.plan(best.selection)).latency_s == pytest.approx(best.value)


@pytest.mark.parametrize("kind", ["shared", "switch"])
def test_unequal_devices_and_branches_are_within_3_percent(kind: str) -> None:
    problem = Problem(branched(), platform(0.02, 0.04, 0.01, kind=kind))
    found = build_cost_tables(problem, Gradient().choice_set(problem))
    exact = minimise_exactly(
        build_elimination_order([len(own) for own in found.node_seconds], list(found.edge_seconds)),
        found.node_seconds,
        found.edge_seconds,
    )[0]
    assert Gradient().search_tables(found).value <= 1.03 * exact


def test_descent_and_local_search_usually_find_the_optimum() -> None:
    hits, plain = 0, 0
    for seed in range(20):
        tables = random_tables(seed, (6, 5, 7, 6, 5, 6))
        decoded = minimise_relaxation(tables, DescentSettings(restarts=8, seed=seed))
        polished = LocalSearch(tables).run(decoded)
        assert tables.values(polished)[0] <= tables.values(decoded).min()
        assert tables.values(polished).tolist() == sorted(tables.values(polished))
        plain += bool(tables.values(decoded).min() <= optimum(tables) * (1 + 1e-9))
        hits += bool(tables.values(polished)[0] <= optimum(tables) * (1 + 1e-9))
    assert hits >= 18
    assert plain >= 8  # Without local search, the relaxation finds at least 8 optima.


def test_keeps_memory_limits_if_possible() -> None:
    near = 0
    for seed in range(10):
        tables = random_tables(seed, (5, 5, 5, 5), limits=2)
        every = np.array(list(itertools.product(range(5), repeat=4)))
        fitting = every[tables.relative_excess(tables.weight_loads(every)) == 0]
        best = LocalSearch(tables).run(minimise_relaxation(tables, DescentSettings(restarts=8)))[:1]
        assert tables.relative_excess(tables.weight_loads(best))[0] == 0
        near += bool(tables.values(best)[0] <= 1.1 * tables.values(fitting).min())
    assert near >= 8


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("objective", ["latency", "energy"])
def test_plans_of_random_networks_can_be_routed(seed: int, objective: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # Hide the warnings about dropped parts that nothing reads.
    layers = formed(random_model(Random(seed)))
    problem = Problem(layers, platform(1, 2, 0, 1, kind="switch"), objective=objective)
    for strategy in (
        dataclasses.replace(QUICK, device_counts=(3,)),
        Diapason(partition="all"),
        Diapason(initialisation="random", seed=seed, restarts=2),
    ):
        plan = strategy.plan(problem)
        metrics = problem.estimate(plan)  # The estimate raises an error if a part misses an element.
        assert {entry.device for entry in metrics.devices if entry.compute_s} <= {"d0", "d1", "d3"}


def test_energy_is_the_minimum_over_all_selections() -> None:
    layers = stack((1, 3, 12, 12), [("conv", 64, 3, 1, 1, 1), ("conv", 64, 3, 1, 1, 1)])
    devices = platform(0.01, 0.03)
    quiet = tuple(dataclasses.replace(device, power_network=0.0) for device in devices.devices)
    problem = Problem(layers, dataclasses.replace(devices, devices=quiet), objective="energy")
    found = build_cost_tables(problem, dataclasses.replace(QUICK, fusion_limit=1).choice_set(problem))
    every = [
        problem.estimate(found.plan(selection)).energy_j
        for selection in itertools.product(*(range(len(own)) for own in found.choices))
    ]
    best = QUICK.search_tables(found)
    assert best.value == pytest.approx(min(every))
    assert problem.estimate(found.plan(best.selection)).energy_j == pytest.approx(min(every))


def test_network_power_reduces_sent_bytes() -> None:
    boards = platform(0.001, 0.004)
    sent = []
    for watts in (0.0, 5000.0):
        devices = tuple(dataclasses.replace(device, power_network=watts) for device in boards.devices)
        problem = Problem(small(), dataclasses.replace(boards, devices=devices), objective="energy")
        sent.append(problem.estimate(QUICK.plan(problem)).total_bytes)
    # Without power for the network, all layers run on the faster device; with 5 kW, on the device with the input.
    assert sent[0] > sent[1] == 0


def test_host_with_little_memory_gets_fewer_weights() -> None:
    layers = stack((1, 64), [("fc", 512), ("fc", 512), ("fc", 8)])
    alone = (64 * 512 + 512 * 512 + 512 * 8) * 4
    roomy = Problem(layers, platform(100, 100))
    # With enough memory, splitting would cost more than it gains, so one device stores all weights.
    assert roomy.estimate(QUICK.plan(roomy)).memory > alone
    tight = Problem(layers, platform(100, 100, memory=alone * 2 // 3))
    metrics = tight.estimate(QUICK.plan(tight))
    assert metrics.memory <= alone * 2 // 3
    with pytest.raises(DicompilerError, match=r"gradient: no plan was found .* on host d[01], which has"):
        QUICK.plan(Problem(layers, platform(100, 100, memory=alone // 3)))
    with pytest.raises(DicompilerError, match="the paper's method does not consider memory"):
        Diapason().plan(tight)


def test_same_seed_gives_same_plan() -> None:
    problem = Problem(branched(), platform(0.02, 0.04, 0.01))
    for strategy in (QUICK, Diapason(initialisation="random", restarts=3, seed=5)):
        assert strategy.plan(problem) == strategy.plan(problem)
    starts = [
        minimise_relaxation(random_tables(0, (9,) * 6), DescentSettings(restarts=4, iterations=1, seed=seed))
        for seed in (0, 1)
    ]
    assert (starts[0] != starts[1]).any()


@pytest.mark.parametrize("objective", ["throughput", "memory", "communication"])
@pytest.mark.parametrize("by_paper", [True, False])
def test_rejects_other_objectives(objective: str, by_paper: bool) -> None:
    problem = Problem(small(), platform(1, 1), objective=objective)
    expected = f"objective '{objective}' is not supported: use latency or energy"
    with pytest.raises(UsageError, match=expected):
        (Diapason() if by_paper else Gradient()).plan(problem)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("iterations=0", "gradient: option 'iterations': expected at least 1, got 0"),
        ("restarts=0", "gradient: option 'restarts': expected at least 1, got 0"),
        ("fusion_limit=-1", "gradient: option 'fusion_limit': expected at least 0, got -1"),
        ("seed=-1", "gradient: option 'seed': expected at least 0, got -1"),
        ("learning_rate=0", "gradient: option 'learning_rate': expected a number above 0, got 0.0"),
        ("device_counts=1", "gradient: option 'device_counts': expected integers of at least 2, such as 2,4"),
        ("partition=equel", "partition"),
        ("initialization=random", "initialisation"),
    ],
)
def test_rejects_invalid_options(options: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        instantiate(Gradient, parse_spec(f"gradient{{{options}}}"))


def test_one_device_and_many() -> None:
    alone = Problem(small(), platform(1))
    for strategy in (QUICK, Diapason()):
        plan = strategy.plan(alone)
        assert {part.device for parts in plan.layers.values() for part in parts} == {"d0"}
    assert default_device_counts(1) == ()
    assert default_device_counts(4) == (2, 3, 4)
    assert default_device_counts(20) == (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)
