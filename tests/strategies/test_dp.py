"""The strategy `dp`: valid plans with the predicted costs for any network and platform."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import numpy as np
import onnx
import pytest
from support.generators import integers, random_model
from support.layer_graphs import formed, rules, stack, vgg16
from support.planning import FREE, make_cluster, verify

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.driver.prepare import prepare
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare
from dicompiler.ir.platform import Platform
from dicompiler.ir.wire_dtype import with_wire_dtypes
from dicompiler.networks import build
from dicompiler.partition.bounds_inference import make_share_task, output_shape
from dicompiler.partition.segmentation import build_program
from dicompiler.search.problem import Problem
from dicompiler.search.strategy import Strategy
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass
from dicompiler_strategies.dp import Dp
from dicompiler_strategies.dp.box_arrays import DeviceBoxes, missing_elements
from dicompiler_strategies.dp.candidate_runs import CandidateRules, build_candidate_runs, run_parts
from dicompiler_strategies.dp.device_team import DeviceTeam, ProblemFacts, TensorForm
from dicompiler_strategies.dp.row_maps import bounding_rows, build_row_maps
from dicompiler_strategies.dp.search import RunPricing, find_cheapest_path
from dicompiler_strategies.dp.strategy import candidate_counts
from dicompiler_strategies.papers.coopai import ConvolutionalLayer, FullyConnectedLayer, build_chain
from dicompiler_strategies.papers.coopai_plan import Coopai
from dicompiler_strategies.papers.stahl import Stahl
from dicompiler_strategies.tables.link_loads import LinkLoads, build_link_loads


def test_chain_joins_pools_with_their_convolutions() -> None:
    layers = build_chain(vgg16())
    assert [type(layer) for layer in layers] == [ConvolutionalLayer] * 13 + [FullyConnectedLayer] * 3
    assert layers[1].names == ("conv2", "pool3")
    first = layers[1]
    assert isinstance(first, ConvolutionalLayer)
    assert first.computed_rows([(0, 4), (4, 112)]) == [(0, 8), (8, 224)]
    assert first.read_rows([(0, 8), (8, 224)]) == [(0, 9), (7, 224)]


def test_row_maps_equal_the_rules_for_any_interval() -> None:
    graph = stack((1, 2, 23, 9), [("conv", 3, 5, 2, 1, 1), ("pool", 3, 1, 1), ("conv", 3, 3, 1, 1, 1)])
    for layer in graph.layers:
        own = build_row_maps(graph)[layer.name]
        for start, stop in ((0, 1), (2, 5), (own.height - 1, own.height), (0, own.height)):
            region = [(0, 1), (0, 3), (start, stop), (0, 1)]
            region[3] = (0, output_shape(graph, layer)[3])
            task = make_share_task(graph, layer, LayerShare(tuple(region)))
            (need,) = task.needs.values()
            assert own.read_rows(layer.inputs[0], [(start, stop), (0, 0)]) == [need[2], (0, 0)]
    assert bounding_rows([(0, 0), (2, 4), (1, 3)], [(5, 7), (0, 0), (2, 9)]) == [(5, 7), (2, 4), (1, 9)]


def test_rules_are_only_asked_for_the_ends_of_shares() -> None:
    layers = stack((1, 2, 4000, 1), [("conv", 3, 3, 1, 1, 1), ("pool", 3, 1, 1)])
    Dp().plan(Problem(layers, Platform.load("rpi4x4")))
    assert all(len(own.single._known) < 100 for own in build_row_maps(layers).values())


def test_missing_elements_are_needed_and_not_held() -> None:
    held = DeviceBoxes.from_regions((4, 6), [((0, 4), (0, 3)), ((0, 4), (3, 6)), None])
    need = DeviceBoxes.from_regions((4, 6), [((0, 4), (0, 4)), ((1, 4), (2, 6)), ((0, 4), (0, 6))])
    assert missing_elements(need, held).tolist() == [[0, 3, 12], [4, 0, 12], [0, 0, 0]]
    everywhere = DeviceBoxes.from_regions((4, 6), [((0, 4), (0, 6)), ((0, 4), (0, 6)), None])
    assert missing_elements(need, everywhere, has_copies=True).tolist() == [[0, 0, 24], [0, 0, 0], [0, 0, 0]]


def network(platform: Platform, **runtime: RuntimeCosts) -> LinkLoads:
    return build_link_loads(Problem(LayerGraph((), {}, (), ()), platform, runtime_costs=runtime))


def test_transfer_seconds_depend_on_the_kind_of_network() -> None:
    count = np.array([[0, 1000, 0], [3000, 0, 500], [0, 0, 0]], np.float64)
    rate = 8 / 1e6
    for kind, most in (("shared", 4500), ("gateway", 4500), ("switch", 3500)):
        platform = make_cluster(kind, 1, 1, 1, bandwidth=1e6)
        assert network(platform).transfer_seconds(count) == pytest.approx(most * rate)
        slow = replace(platform, network=replace(platform.network, latency=0.1, message_overhead_s=0.01))
        messages = 2 if kind == "switch" else 3
        assert network(slow).transfer_seconds(count) == pytest.approx(most * rate + 0.1 + messages * 0.01)


def test_runtime_costs_count_at_both_ends() -> None:
    """Device 1 sends the messages to 0 and 2, device 0 sends one; the last receiver also joins its pieces."""
    count = np.array([[0, 1000, 0], [3000, 0, 500], [0, 0, 0]], np.float64)
    platform = make_cluster("switch", 1, 1, 1, bandwidth=1e6)
    bytes_s = 3500 * 8 / 1e6
    costs = {
        "send": 0.5,
        "receive": 2.0,
        "per_byte": 1e-3,
        "call": 4.0,
        "header_share": 0.1,
        "gap": 0.25,
        "per_copied_byte": 1e-2,
    }
    costs["per_copy"] = 0.125
    one = {device.name: RuntimeCosts(**costs) for device in platform.devices}
    sending, receiving = 2 * 0.5 + 3.5, 2.0 + 3.0 + 4.0
    lines_s = 1.1 * bytes_s + 2 * 0.25
    assert network(platform, **one).transfer_seconds(count) == pytest.approx(sending + lines_s + receiving)
    joined = network(platform, **one).transfer_seconds(count, np.array([3500.0, 1000, 500]))
    assert joined == pytest.approx(sending + lines_s + receiving + 35.0 + 0.125)


CHAIN = [
    *(("conv", 8, 3, 1, 1, 1), ("conv", 12, 3, 1, 1, 1), ("pool", 2, 2, 0), ("conv", 16, 3, 1, 1, 1)),
    *(("flatten",), ("fc", 40), ("fc", 10)),
]


@pytest.mark.parametrize("kind", ["shared", "switch", "gateway"])
def test_search_finds_the_best_runs_of_a_chain(kind: str) -> None:
    """An exhaustive search over all sequences of runs finds none that is cheaper."""
    problem = Problem(stack((1, 3, 16, 16), CHAIN), make_cluster(kind, 0.05, 0.03), FREE)
    team = DeviceTeam.build(ProblemFacts(problem), ("d0", "d1"))
    known = build_candidate_runs(team, CandidateRules(allow_channels=True))
    layers = problem.layers.layers
    # The output must be complete on d0, the sink.
    output = DeviceBoxes.from_regions((1, 10), [((0, 1), (0, 10)), None])

    def least(place: int, form: TensorForm) -> float:
        """Return the least cost from `place` on, if the previous tensor lies in `form`, by plain recursion."""
        if place == len(layers):
            held = team.stored_boxes(layers[-1].output, form)
            return float(team.link_loads.transfer_seconds(4 * missing_elements(output, held, form == "everywhere")))
        ways = known[place]
        tensor = layers[place].inputs[0]
        return min(move.cost_for_forms(team, {tensor: form})[0] + least(move.stop, move.form) for move in ways)

    assert find_cheapest_path(team, known, RunPricing(problem)).seconds == pytest.approx(least(0, "source"))


def branched(*ops: str) -> LayerGraph:
    """Return a graph with input x. Layer "conv" reads the last tensor, "side" the one before it, and "join" both."""
    random, nodes, weights, made, channels = np.random.default_rng(0), [], [], ["x"], [4]
    for i, op in enumerate(ops):
        if op == "conv":
            weights.append(
                onnx.numpy_helper.from_array(random.normal(size=(4, channels[-1], 3, 3)).astype("f"), f"w{i}")
            )
            nodes.append(onnx.helper.make_node("Conv", [made[-1], f"w{i}"], [f"t{i}"], f"l{i}", pads=[1, 1, 1, 1]))
        elif op == "join":
            nodes.append(onnx.helper.make_node("Concat", made[-2:], [f"t{i}"], f"l{i}", axis=1))
        else:
            nodes.append(onnx.helper.make_node("MaxPool", [made[-2]], [f"t{i}"], f"l{i}", kernel_shape=[1, 1]))
        channels.append(sum(channels[-2:]) if op == "join" else channels[-2] if op == "side" else 4)
        made.append(f"t{i}")
    ends = [
        onnx.helper.make_tensor_value_info(name, 1, [1, count, 8, 8])
        for name, count in (("x", 4), (made[-1], channels[-1]))
    ]
    graph = onnx.helper.make_graph(nodes, "branched", ends[:1], ends[1:], weights)
    return formed(onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 17)]))


@pytest.mark.parametrize("ops", [("conv", "side", "join", "conv"), ("conv", "conv", "join", "side", "join")])
@pytest.mark.parametrize("kind", ["shared", "switch"])
def test_search_finds_the_best_runs_of_a_branched_graph(kind: str, ops: tuple[str, ...]) -> None:
    """An exhaustive search over all runs and forms of tensors finds no cheaper sequence."""
    problem = Problem(branched(*ops), make_cluster(kind, 0.002, 0.001, bandwidth=1e7), FREE)
    team = DeviceTeam.build(ProblemFacts(problem), ("d0", "d1"))
    known = build_candidate_runs(team, CandidateRules(allow_channels=True))
    layers = problem.layers.layers
    shape = output_shape(problem.layers, layers[-1])
    # The output must be complete on d0, the sink.
    output = DeviceBoxes.from_regions(shape, [tuple((0, size) for size in shape), None])

    def least(place: int, forms: dict[str, TensorForm]) -> float:
        if place == len(layers):
            form = forms[layers[-1].output]
            held = team.stored_boxes(layers[-1].output, form)
            return float(team.link_loads.transfer_seconds(4 * missing_elements(output, held, form == "everywhere")))
        costs = []
        for move in known[place]:
            made: dict[str, TensorForm] = {
                name: move.form for layer in layers[place : move.stop] for name in layer.outputs
            }
            costs.append(move.cost_for_forms(team, forms)[0] + least(move.stop, {**forms, **made}))
        return min(costs)

    assert any(len(layer.inputs) > 1 for layer in layers) and len(known[0]) > 3
    assert find_cheapest_path(team, known, RunPricing(problem)).seconds == pytest.approx(least(0, {"x": "source"}))


def test_predicted_bytes_and_seconds_match_the_plan() -> None:
    narrow = with_wire_dtypes(vgg16(), (("*", "bfloat16"),))
    for rates, kind in product(((1, 1, 1, 1), (3, 1, 0.7), (0, 2, 1)), ("shared", "switch")):
        problem = Problem(
            vgg16() if kind == "shared" else narrow, make_cluster(kind, *(10 * rate for rate in rates)), FREE
        )
        team = DeviceTeam.build(ProblemFacts(problem), [device.name for device in problem.platform.computing_devices])
        found = find_cheapest_path(team, build_candidate_runs(team, CandidateRules()), RunPricing(problem))
        plan = problem.build_plan({name: own for move in found.runs for name, own in run_parts(team, move).items()})
        metrics = problem.estimate(plan)
        assert metrics.total_bytes == found.total_bytes > 0
        assert metrics.latency_s == pytest.approx(found.seconds, rel=0.01)
        # The search ignores barriers within blocks, and the estimate counts them, so the estimate is not lower.
        assert metrics.latency_s >= found.seconds * (1 - 1e-9)
        names = [device.name for device in team.problem.platform.devices]
        assert dict(zip(names, found.weights, strict=True)) == {d.device: d.weights for d in metrics.devices}


def test_transfers_within_a_host_are_free() -> None:
    problem = Problem(vgg16(), Platform.load("jetson-nx2"), FREE)
    metrics = problem.estimate(Dp(shares="equal", devices=2).plan(problem))
    assert metrics.latency_s <= problem.estimate(Dp(devices=1).plan(problem)).latency_s
    team = DeviceTeam.build(ProblemFacts(problem), ("nx01_gpu", "nx01_cpu"))
    assert team.link_loads.transfer_seconds(np.array([[0.0, 1e9], [1e9, 0.0]])) == 0


@pytest.mark.parametrize("kind", ["shared", "switch"])
def test_skipped_blocks_would_not_have_been_chosen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for graph, rates in (
        (vgg16(), (5, 3, 3)),
        (stack((1, 3, 32, 32), CHAIN), (0.1, 0.1)),
        (formed(small("tiny")), (0.01, 0.02)),
    ):
        problem = Problem(graph, make_cluster(kind, *rates), FREE)
        team = DeviceTeam.build(ProblemFacts(problem), [device.name for device in problem.platform.devices])
        few = build_candidate_runs(team, CandidateRules())
        with monkeypatch.context() as patch:
            patch.setattr("dicompiler_strategies.dp.candidate_runs._exchange_seconds", lambda *_: float("inf"))
            every = build_candidate_runs(team, CandidateRules())
        assert sum(map(len, few)) < sum(map(len, every))
        least = [find_cheapest_path(team, some, RunPricing(problem)).cost for some in (few, every)]
        assert least[0] == pytest.approx(least[1])


def test_mls_is_no_worse_than_sls_and_better_than_one_device() -> None:
    problem = Problem(vgg16(), Platform.load("rpi4x8"), FREE)
    many, single, printed, one = (
        problem.estimate(strategy.plan(problem)).latency_s
        for strategy in (Dp(), Dp(method="sls"), Coopai(), Dp(devices=1))
    )
    assert many < printed < one
    assert many < single < one
    assert many < 0.717  # The best plan with only height tiles on as many devices takes 0.717 s.
    assert one == pytest.approx(2.275, abs=0.001)


def test_faster_device_gets_more_rows() -> None:
    problem = Problem(vgg16(), make_cluster("switch", 10, 13, 0), FREE)

    def rows(strategy: Dp) -> tuple[int, int]:
        plan = strategy.plan(problem)
        assert set(plan.devices) == {"d0", "d1"}  # The third device computes nothing, because it has no compute rate.
        first, second = (part.region for part in plan.layers["conv2"])
        assert first is not None and second is not None
        return first[2][1] - first[2][0], second[2][1] - second[2][0]

    slow, fast = rows(Dp())
    assert 1.25 < fast / slow < 1.35
    slow, fast = rows(Dp(shares="equal"))
    assert abs(slow - fast) <= 2


SMALL = {
    "lenet": lambda: build("lenet"),
    "tiny": lambda: build("tiny"),
    "quirks": lambda: build("quirks"),
    "vgg16": lambda: build("vgg16", size=32, width=0.05, classes=10),
    "squeezenet": lambda: build("squeezenet", size=64, width=0.1, classes=10),
}


@cache
def small(name: str) -> onnx.ModelProto:
    return SMALL[name]()


@pytest.mark.parametrize(
    ("name", "strategy", "kind", "rates"),
    [
        ("lenet", Dp(), "shared", (0.01, 0.01, 0.01, 0.01)),
        ("lenet", Dp(method="sls"), "switch", (0.01, 0.03, 0.02)),
        ("lenet", Coopai(devices=3), "gateway", (0.01, 0.01, 0.01)),
        ("vgg16", Coopai(devices=2), "gateway", (0.01, 0.01, 0.01)),
        ("vgg16", Coopai(method="sls", devices=4), "gateway", (0.01, 0.01, 0.01, 0.01)),
        ("vgg16", Dp(channels=True), "switch", (0.003, 0.001, 0.001)),
        ("tiny", Dp(), "shared", (0.01, 0.02, 0.01)),
        ("tiny", Dp(method="sls", devices=3), "switch", (0.01, 0.02, 0.01)),
        ("quirks", Dp(channels=True, devices=3), "switch", (0.01, 0.01, 0.01)),
        ("squeezenet", Dp(max_block_layers=6), "switch", (0.01, 0.01, 0.02)),
    ],
)
def test_plans_verify_exactly_and_send_the_predicted_bytes(
    name: str, strategy: Dp | Coopai, kind: str, rates: tuple[float, ...]
) -> None:
    plan = verify(small(name), make_cluster(kind, *rates, bandwidth=1e8), strategy)
    assert len(plan.devices) > 1


def test_branches_are_cut_into_fused_tiles() -> None:
    problem = Problem(formed(build("tiny")), make_cluster("switch", 0.01, 0.01), objective="latency")
    plan = Dp().plan(problem)
    assert sum(len(own) == 2 for own in plan.layers.values()) > len(plan.layers) / 2
    maps = [plan.layers[name] for name in ("stem", "res1", "res2", "concat")]
    rows = [[part.region[2] for part in own if part.region is not None] for own in maps]
    # Tiles of two devices overlap, because halo rows are computed twice.
    assert any(first[1] > second[0] for first, second in rows)


def test_layer_that_cannot_be_cut_stays_whole() -> None:
    graph = formed(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 3, 16, 16] x)
        => (float[1, 8, 16, 16] y, int64[1, 3, 5] k)
        { c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
          f = Reshape (x, s)  t, k = TopK <axis = -1> (f, n)
          y = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c, v) }
        """,
        w=(8, 3, 3, 3),
        v=(8, 8, 3, 3),
        s=(3,),
        n=(1,),
    )
    problem = Problem(graph, make_cluster("switch", 0.001, 0.002))
    plan = Dp().plan(problem)
    problem.estimate(plan)
    assert [len(plan.layers[layer.name]) for layer in graph.layers if layer.whole_reason] == [1] * sum(
        bool(layer.whole_reason) for layer in graph.layers
    )
    assert any(len(own) > 1 for own in plan.layers.values())


@pytest.mark.parametrize("seed", [34, 45, 51, 56])
@pytest.mark.parametrize("strategy", [Dp(channels=True), Dp(devices=3, shares="equal"), Dp(method="sls"), Stahl()])
def test_plans_of_random_networks_compute_the_same(seed: int, strategy: Strategy) -> None:
    model = Model.load(onnx.shape_inference.infer_shapes(random_model(Random(seed))))
    layers = form_layers(model, rules())
    problem = Problem(layers, make_cluster(("switch", "shared")[seed % 2], 1e-6, 2e-6, 1e-6))
    plan = strategy.plan(problem)
    placed = PartitionPass().run(PipelineState(model=model, layers=layers, plan=plan))
    inputs = integers(Random(seed), model.proto)
    reference = run_model(model, inputs)
    execution = ProgramExecutor(build_program(placed.model, plan.devices)).run(inputs)
    for outputs in execution.delivered.values():
        for name, value in outputs.items():
            np.testing.assert_array_equal(reference[name], value)
    assert sum(execution.sent) == problem.estimate(plan).total_bytes


def test_minimises_energy_and_communication() -> None:
    platform = make_cluster("switch", 0.01, 0.01, power=(5.0, 1.0))
    for objective in ("energy", "communication"):
        problem = Problem(formed(build("tiny")), platform, objective=objective)
        least = problem.estimate(Dp().plan(problem)).objective_value(objective)
        assert least <= problem.estimate(Dp(devices=1).plan(problem)).objective_value(objective)
        assert least <= problem.estimate(Dp().plan(replace(problem, objective="latency"))).objective_value(objective)


def test_keeps_memory_limit_if_possible() -> None:
    graph, whole = vgg16(), 4 * 138_344_128
    for share, possible in ((2.0, True), (0.5, True), (0.3, True), (0.02, False)):
        platform = make_cluster("shared", 13.6, 13.6, 13.6, 13.6, memory=int(share * whole))
        problem = Problem(graph, platform, FREE)
        if not possible:
            message = (
                r"dp: no plan found fits into memory: host d\d has 11.1 MB and would need at least .* MB: .*'fc20'"
            )
            with pytest.raises(DicompilerError, match=message):
                Dp().plan(problem)
            continue
        metrics = problem.estimate(Dp().plan(problem))
        assert metrics.memory <= share * whole
        assert metrics.latency_s < 2.275  # A single device takes 2.275 s, but needs all of the memory.


def test_rejects_invalid_options() -> None:
    problem = Problem(vgg16(), make_cluster("switch", 1, 1))
    with pytest.raises(
        DicompilerError, match=r"dp: devices=3, but only 2 devices of platform 'switch2' compute: use 0"
    ):
        Dp(devices=3).plan(problem)
    with pytest.raises(ValueError, match="devices must be positive, or 0"):
        Dp(devices=-1)
    with pytest.raises(ValueError, match="max_block_layers must be positive, or 0"):
        Dp(max_block_layers=-1)
    with pytest.raises(UsageError, match=r"dp: objective 'memory' .*use one of latency, energy, communication"):
        Dp().plan(replace(problem, objective="memory"))
    with pytest.raises(UsageError, match=r"coopai: objective 'energy' is not supported: use latency"):
        Coopai().plan(replace(problem, objective="energy"))
    with pytest.raises(DicompilerError, match="all devices must have the same rate"):
        Coopai().plan(Problem(vgg16(), make_cluster("switch", 1, 2)))
    with pytest.raises(DicompilerError, match="is on a branch: use strategy 'dp'"):
        Coopai().plan(Problem(formed(build("tiny")), make_cluster("switch", 1, 1)))


def test_candidate_counts_grow_slowly() -> None:
    assert candidate_counts(1, 22) == (1,)
    assert candidate_counts(8, 22) == tuple(range(1, 9))
    assert candidate_counts(64, 22) == (*range(1, 9), 11, 16, 23, 33, 47, 64)
    assert candidate_counts(50, 1000) == (1, 2, 4, 8, 16, 32, 50)


def test_same_problem_gives_same_plan() -> None:
    graph = vgg16()
    plans = [Dp().plan(Problem(graph, Platform.load("rpi4x4"))) for _ in range(2)]
    assert plans[0] == plans[1]


def test_memory_is_evaluated_exactly_if_there_is_a_model() -> None:
    model = Model.load(small("lenet"))
    layers = prepare(model).layers
    assert layers is not None
    platform = make_cluster("switch", 0.01, 0.01, memory=170_000)
    problem = Problem(layers, platform, model=model)
    plan = Dp().plan(problem)
    assert problem.evaluate(plan).memory <= 170_000 < problem.evaluate(Dp(devices=1).plan(
        replace(problem, platform=make_cluster("switch", 0.01, 0.01)))).memory  # fmt: skip
