"""Partitioned networks with random plans and replicas, for tests of roles (the normal plan and its replicas)."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import onnx
from support.generators import DEVICES, random_model, random_plan
from support.layer_graphs import rules

from dicompiler import networks
from dicompiler.driver.prepare import prepare
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import plan_from_json, plan_to_text
from dicompiler.ir.platform import Platform
from dicompiler.partition.lowering import lower
from dicompiler.partition.tiling import single_device_plan
from dicompiler_passes.form_layers import form_layers

MORE = (*DEVICES, "e", "f")


def cluster(*names: str, memory: int = 2**30, idle: str = "") -> Platform:
    """Return devices on separate hosts behind a switch; the device `idle` cannot compute."""
    devices = tuple(Device(name, name, 0.0 if name == idle else 1e9) for name in names)
    return Platform("test", tuple(Host(name, memory) for name in names), devices, Network("switch", 1e6))


def dealt(seed: int) -> tuple[PipelineState, Model, Random]:
    """Return a random network lowered under a random plan with one to three replicas, its model, and the generator.

    A replica is the plan with its devices renamed to other ones.
    """
    rng = Random(seed)
    model = Model.load(onnx.shape_inference.infer_shapes(random_model(rng)))
    layers = form_layers(model, rules())
    plan = random_plan(rng, layers)
    used = sorted({part.device for parts in plan.layers.values() for part in parts})
    renamings = [dict(zip(used, rng.sample(MORE, len(used)), strict=True)) for _ in range(rng.randint(1, 3))]
    # A renaming may omit the devices that keep their name.
    replicas = tuple({a: b for a, b in own.items() if a != b or rng.random() < 0.5} for own in renamings)
    plan = plan_from_json(json.loads(plan_to_text(replace(plan, replicas=replicas))))
    return lower(PipelineState(model=model, layers=layers, platform=cluster(*MORE), plan=plan)), model, rng


def lenet(replicas: tuple[dict[str, str], ...], platform: Platform) -> PipelineState:
    """Return LeNet lowered onto the platform's second device; its input and output are on the first device."""
    prepared = replace(prepare(Model.load(networks.build("lenet", 0))), platform=platform)
    assert prepared.layers is not None
    source = platform.devices[0].name
    plan = replace(single_device_plan(prepared.layers, platform.devices[1].name), source=(source,), sink=(source,))
    return lower(replace(prepared, plan=replace(plan, replicas=replicas)))
