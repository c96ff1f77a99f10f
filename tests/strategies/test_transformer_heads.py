"""Attention by heads: correct for any number of heads, groups, devices and rates.

Weights shrink with the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import onnx
import pytest
from support.modern_net import Net
from support.modern_transformers import bert_fused, genai, llama_fused, vit
from support.planning import make_cluster

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.plan import Part
from dicompiler.search.constraints import check_constraints
from dicompiler.testing.plans import check_plan
from dicompiler_strategies.joint.joint_model import activation_bytes
from dicompiler_strategies.tables.channel_runs import cut_channel_run, find_run_before
from dicompiler_strategies.tables.choices import ChoiceSet, list_choices
from dicompiler_strategies.transformer_heads import Heads, reduced_choices


def decoder(heads: int, kv_heads: int, **options: int) -> onnx.ModelProto:
    small = {"size": 3, "layers": 1, "hidden": 4 * heads, "heads": heads, "kv_heads": kv_heads, "vocabulary": 30}
    return networks.build("llama_small", 1, **small | options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_attention_on_random_devices_is_bit_equal(seed: int) -> None:
    random = Random(seed)
    kv_heads = random.randint(1, 4)
    heads = kv_heads * random.randint(1, 3)
    past = random.choice([{}, {"past": 5}, {"past": 5, "static": 1}])
    rates = [random.choice([1.0, 1.0, 2.0, 3.0]) for _ in range(random.randint(2, 5))]
    model = decoder(heads, kv_heads, size=random.choice([1, 3]), **past)
    problem = load_problem(model, make_cluster("switch", *rates), objective=random.choice(["latency", "memory"]))
    check_plan(problem, Heads().plan(problem))
    # Plans with any combination of these choices must be valid.
    offered = [list_choices(problem, layer, ChoiceSet(extra_rows=0)) for layer in problem.layers.layers]
    drawn = {layer.name: random.choice(own).parts for layer, own in zip(problem.layers.layers, offered, strict=True)}
    check_plan(problem, problem.build_plan(drawn))


def test_weights_shrink_with_devices_and_heads_follow_rates() -> None:
    """There is one exchange after the attention and one after the rest of a block."""
    problem = load_problem(decoder(8, 4, layers=2, hidden=64), make_cluster("switch", 2, 1, 1), objective="memory")
    plan = Heads().plan(problem)
    held = [device.weights for device in problem.evaluate(plan).devices]
    whole = max(device.weights for device in problem.best_single_device[1].devices)
    assert max(held) < 0.6 * whole and sum(held) < 1.2 * whole
    run = find_run_before(problem.layers, problem.layers.layer_by_name["layers.0.o_proj.matmul"])
    assert run is not None
    cut = cut_channel_run(problem.layers, run, [2.0, 1.0, 1.0])
    # A head has 8 features. Each key-value head serves two heads, so cuts are at multiples of 16 features.
    assert cut.ranges == ((0, 32), (32, 48), (48, 64))
    regions = {layer.name: [own[i] for own in cut.regions] for i, layer in enumerate(run.cut_layers)}
    assert regions["layers.0.k_proj.matmul"] == [((0, 1), (0, 3), (a, b)) for a, b in ((0, 16), (16, 24), (24, 32))]
    assert not {"layers.0.input_norm.normal", "embed_tokens"} & set(regions)


def test_prefers_fewer_weights_at_similar_latency() -> None:
    """Looking a token up on both devices saves a transfer, but needs the whole embedding on both."""
    problem = load_problem(
        decoder(8, 4, size=1, hidden=64, vocabulary=3000), make_cluster("switch", 1, 1, bandwidth=1e9)
    )
    plan = Heads().plan(problem)
    held = [device.weights for device in problem.evaluate(plan).devices]
    assert max(held) < 0.55 * max(device.weights for device in problem.best_single_device[1].devices)


def test_caches_stay_with_the_heads_that_read_them() -> None:
    """The tables charge states that would be sent, and a plan that sends one is rejected."""
    options: dict[str, Any] = {"size": 1, "past": 3, "static": 1, "hidden": 64}
    problem = load_problem(decoder(8, 4, **options), make_cluster("switch", 1, 1), objective="memory", state=["auto"])
    place = problem.layers.position["cache.0.key.past"]
    assert (
        activation_bytes(reduced_choices(problem, 2, "equal"))[place].max() == 2 * 4 * 3 * 4 * 8
    )  # Two tensors are stored: the cache and the layer's output.
    plan = Heads().plan(problem)
    check_plan(problem, plan)
    assert len(plan.layers["cache.0.key.past"]) == len(plan.layers["cache.0.value"])
    other = Part("d1" if plan.layers["cache.0.key.past"][0].device == "d0" else "d0", None)
    places = r"device 'd\d' computes it in layer 'cache.0.key' and device 'd\d' reads it in layer 'cache.0.key.past'"
    message = rf"^plan: state 'past_key_values.0.key': {places}, but states are not sent: "
    with pytest.raises(DicompilerError, match=message):
        check_constraints(problem, replace(plan, layers={**plan.layers, "cache.0.key.past": (other,)}))


def test_plan_that_cuts_a_head_is_correct() -> None:
    problem = load_problem(decoder(2, 1), make_cluster("switch", 1, 1))
    layers = problem.layers
    parts = {layer.name: (Part("d0"),) for layer in layers.layers}
    parts["layers.0.joined"] = (Part("d0", ((0, 1), (0, 3), (0, 6))), Part("d1", ((0, 1), (0, 3), (6, 8))))
    parts["layers.0.values"] = (
        Part("d0", ((0, 1), (0, 2), (0, 3), (0, 3))),
        Part("d1", ((0, 1), (0, 2), (0, 3), (3, 4))),
    )
    check_plan(problem, problem.build_plan(parts))


def test_heads_on_one_axis_are_units_of_a_run() -> None:
    """One network has four heads of 8 features.

    Another network has two key heads for four heads of 16, and 4-bit weights in blocks of 16 features.
    """
    fused = load_problem(llama_fused(), make_cluster("switch", 1, 1, 1))
    last = next(
        layer
        for layer in fused.layers.layers
        if (run := find_run_before(fused.layers, layer)) and len(run.cut_layers) > 3
    )
    run = find_run_before(fused.layers, last)
    assert run is not None and (run.reduction_length, run.unit_counts[0]) == (32, 4)
    assert cut_channel_run(fused.layers, run, [2.0, 1.0, 1.0]).ranges == ((0, 16), (16, 24), (24, 32))
    problem = load_problem(genai(packed=True), make_cluster("switch", 1, 1), state=["auto"])
    last = next(layer for layer in problem.layers.layers if layer.name == "n7")
    run = find_run_before(problem.layers, last)
    assert run is not None and (run.reduction_length, run.unit_counts[0]) == (4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bert_fused, llama_fused, vit])
def test_fused_attention_and_joint_qkv_are_cut_by_heads(make: Callable[[], onnx.ModelProto]) -> None:
    problem = load_problem(make(), make_cluster("switch", 1, 1, 1), objective="memory")
    plan = Heads(device_counts=(3,)).plan(problem)
    check_plan(problem, plan)
    whole = max(device.weights for device in problem.best_single_device[1].devices)
    assert max(device.weights for device in problem.evaluate(plan).devices) < 0.6 * whole


@pytest.mark.parametrize("packed", [False, True])
def test_caches_of_fused_attention_stay_with_their_heads(packed: bool) -> None:
    """Includes decoders of onnxruntime-genai, with Q, K and V in one product and 4-bit weights."""
    problem = load_problem(genai(packed), make_cluster("switch", 1, 1), objective="memory", state=["auto"])
    assert len(problem.layers.states) == 4
    plan = Heads().plan(problem)
    check_plan(problem, plan)
    held = [device.weights for device in problem.evaluate(plan).devices]
    assert max(held) < 0.55 * max(device.weights for device in problem.best_single_device[1].devices)
    anchors = {layer.name: layer.nodes[layer.anchor].op for layer in problem.layers.layers}
    assert [len(plan.layers[name]) for name, op in anchors.items() if op == "GroupQueryAttention"] == [2, 2]


def test_rejects_a_single_device() -> None:
    problem = load_problem(networks.build("llama_small", size=4, layers=1, hidden=64, vocabulary=50), "rpi4x1")
    with pytest.raises(DicompilerError, match="heads: only one device of the platform computes: use strategy single"):
        Heads().plan(problem)


def test_rejects_network_without_attention() -> None:
    with pytest.raises(DicompilerError, match="heads: the network has no attention"):
        Heads().plan(load_problem(networks.build("lenet"), make_cluster("switch", 1, 1)))


def test_error_names_attention_that_cannot_be_cut() -> None:
    net = Net(23)
    q, k, v = (net.input(name, (1, 3, 16)) for name in "qkv")
    pasts = [net.input(f"past_{name}", (1, 2, 6, 8)) for name in "kv"]
    y = net.op("Attention", q, k, v, "", *pasts, q_num_heads=2, kv_num_heads=2, is_causal=1, outputs=3)
    shapes = {y: (1, 3, 16), **dict.fromkeys(net.nodes[-1].output[1:], (1, 2, 9, 8))}
    model = net.model(types=[onnx.helper.make_tensor_value_info(name, 1, of) for name, of in shapes.items()], ir=10)
    with pytest.raises(DicompilerError, match=r"^heads: attention layer 'n0' cannot be cut: "):
        Heads().plan(load_problem(model, make_cluster("switch", 1, 1)))
