"""Attention by heads: right for any numbers of heads, groups, devices and rates; weights fall with the devices."""

from __future__ import annotations

from random import Random

import pytest
from support.planning import cluster

from dicompiler import networks
from dicompiler.driver.prepare import load_problem
from dicompiler.testing.plans import check_plan
from dicompiler_strategies.heads import Heads
from dicompiler_strategies.tables.choices import ChoiceSet, choices


def decoder(heads: int, kv_heads: int, **options: int) -> networks.onnx.ModelProto:
    small = {"size": 3, "layers": 1, "hidden": 4 * heads, "heads": heads, "kv_heads": kv_heads, "vocabulary": 30}
    return networks.build("llama_small", 1, **small | options)


@pytest.mark.parametrize("seed", range(4))
def test_random_attention_on_random_devices_computes_the_same_to_the_bit(seed: int) -> None:
    random = Random(seed)
    kv_heads = random.randint(1, 4)
    heads = kv_heads * random.randint(1, 3)
    past = random.choice([{}, {"past": 5}, {"past": 5, "static": 1}])
    rates = [random.choice([1.0, 1.0, 2.0, 3.0]) for _ in range(random.randint(2, 5))]
    model = decoder(heads, kv_heads, size=random.choice([1, 3]), **past)
    problem = load_problem(model, cluster("switch", *rates), objective=random.choice(["latency", "memory"]))
    check_plan(problem, Heads().plan(problem))
    # Whatever a table offers for a layer is right beside whatever it offers for others.
    offered = [choices(problem, layer, ChoiceSet(extra=0)) for layer in problem.layers.layers]
    drawn = {layer.name: random.choice(own).parts for layer, own in zip(problem.layers.layers, offered, strict=True)}
    check_plan(problem, problem.plan(drawn))
