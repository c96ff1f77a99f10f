"""Evaluation without writing a program: the metrics are those of the written program."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.generators import DEVICES, random_model, random_plan
from support.layer_graphs import rules
from support.weighing import check_weighed

from dicompiler import networks
from dicompiler.driver.prepare import prepare
from dicompiler.driver.problem_setup import make_problem
from dicompiler.ir.cluster import Device, Host, Network, NetworkKind
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry
from dicompiler.search.problem import Problem
from dicompiler_passes.form_layers import form_layers

MORE = (*DEVICES, "e", "f")


def cluster(kind: NetworkKind, each: int) -> Platform:
    """Devices with different rates, `each` of them on a host."""
    devices = tuple(Device(name, f"h{i // each}", 1e6 * (1 + i), 1, 5.0, 2.0) for i, name in enumerate(MORE))
    hosts = tuple(Host(name, 2**30) for name in dict.fromkeys(device.host for device in devices))
    return Platform("test", hosts, devices, Network(kind, 1e6, 1e-3, (), 1e-4))


def dealt(rng: Random, plan: Plan) -> Plan:
    """Return the plan with one to three renamings of its devices."""
    used = sorted({part.device for parts in plan.layers.values() for part in parts})
    return replace(
        plan,
        replicas=tuple(dict(zip(used, rng.sample(MORE, len(used)), strict=True)) for _ in range(rng.randint(1, 3))),
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**48),
    kind=st.sampled_from(["switch", "shared", "gateway"]),
    each=st.integers(1, 3),
    replicas=st.booleans(),
    listed=st.booleans(),
)
def test_metrics_of_random_plans_equal_those_of_written_programs(
    seed: int, kind: NetworkKind, each: int, replicas: bool, listed: bool
) -> None:
    """If `listed` is True, initializers are also graph inputs, as in old model files."""
    rng = Random(seed)
    proto = random_model(rng)
    if listed:
        weights = proto.graph.initializer
        proto.graph.input.extend(onnx.helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in weights)
    model = Model.load(onnx.shape_inference.infer_shapes(proto))
    layers = form_layers(model, rules())
    plan = random_plan(rng, layers)
    check_weighed(Problem(layers, cluster(kind, each), model=model), dealt(rng, plan) if replicas else plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("light/densenet121", "modnn"), ("light/inception_v1", "modnn"), ("light/inception_v1", "pipeline")],
)
def test_metrics_of_networks_equal_those_of_written_programs(name: str, strategy: str) -> None:
    problem = make_problem(replace(prepare(Model.load(networks.build(name, 0))), platform=Platform.load("rpi4x4")))
    plan = registry().make("strategies", strategy).plan(problem)
    assert check_weighed(problem, plan).spans
