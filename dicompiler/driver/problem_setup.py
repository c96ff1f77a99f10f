"""The problem that a strategy solves: the layers of a prepared model on a platform, with a cost model and a target.

PipelineState + Platform + CostModel + Target ⇒ Problem
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import onnx

from dicompiler.base.errors import UsageError
from dicompiler.base.objectives import objective_terms
from dicompiler.cost.cost_model import AnalyticModel, CostModel
from dicompiler.cost.runtime_overhead import FREE_RUNTIME, RuntimeCosts, runtime_slowdown
from dicompiler.driver.engines import make_engine
from dicompiler.ir.cluster import DEFAULT_ENGINE, Device
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import Problem
from dicompiler.target.target_base import Target

log = logging.getLogger("dicompiler")

_SHAPE_REMEDIES = {
    "": "the shape depends on values: remove these nodes from the network, or use the prediction of the other layers",
    "com.microsoft": "compile the network as it was before onnxruntime optimized it, or add value_info to the model",
}
"""Remedies for a tensor of unknown shape, by the ONNX domain of the operator that computes it."""
_DEFAULT_REMEDY = "add value_info to the model"


class MissingPowersError(UsageError):
    """Energy is to be minimized, and the platform states no powers of devices."""


def make_problem(
    compilation: PipelineState, objective: str = "latency", cost: CostModel | None = None, target: Target | None = None
) -> Problem:
    """Return the problem of a prepared model on a platform, and warn about layers with unknown cost.

    Args:
        compilation: A state with layers and a platform.
        objective: Quantity to minimize.
        cost: The cost model. Default: `analytic`.
        target: The target, which adds memory and costs of messages and calls. Default: these are 0.
    """
    layers, platform = compilation.layers, compilation.platform
    assert layers is not None and platform is not None
    check_powers(platform, objective)
    for line in layers_without_cost(layers):
        log.warning(line)
    cost_model = cost or AnalyticModel()
    problem = Problem(
        layers, platform, cost_model, objective, model=compilation.model, file_graph=compilation.loaded_graph
    )
    return on_platform(problem, platform, target)


def on_platform(problem: Problem, platform: Platform, target: Target | None) -> Problem:
    costs = {} if target is None else runtime_costs(platform, problem.cost_model, target)
    return replace(problem, platform=platform, target=target, runtime_costs=costs)


def check_powers(platform: Platform, objective: str) -> None:
    """Raise MissingPowersError if energy is to be minimized, and the platform states no powers of devices."""
    # Without powers, the energies of all plans would be 0, and every plan would be the best one.
    if "energy" in objective_terms(objective) and not platform.has_powers:
        raise MissingPowersError(
            f"objective {objective!r}: platform {platform.name!r} states no powers: add power_active and power_idle to "
            "its devices, or use another objective"
        )


def runtime_costs(platform: Platform, cost: CostModel, target: Target) -> dict[str, RuntimeCosts]:
    """Return the runtime's costs on each device (seconds for messages, calls and copies), by device name."""
    costs = {device.name: find_runtime_costs(device, cost, target) for device in platform.devices}
    if len(platform.hosts) == 1:
        return costs
    # Messages between hosts are encrypted (TLS), which costs time.
    return {name: device_costs.with_tls for name, device_costs in costs.items()}


def find_runtime_costs(device: Device, cost: CostModel, target: Target | None) -> RuntimeCosts:
    if target is None:
        return FREE_RUNTIME
    costs = cost.runtime_costs(device, target.runtime_costs, target.name)
    if device.engine == DEFAULT_ENGINE or not costs.call:
        return costs
    extra_s = make_engine(device.engine).extra_call_s * runtime_slowdown(device)
    return replace(costs, call=costs.call + extra_s)


def layers_without_cost(layers: LayerGraph) -> Iterator[str]:
    """Yield a warning for each layer with a tensor of unknown shape."""
    for layer in layers.layers:
        unknown = [(node, name) for node in layer.nodes for name in node.outputs if _has_unknown_shape(layers, name)]
        if unknown:
            node, name = unknown[0]
            effect = f"layer {layer.name!r} ({len(layer.nodes)} nodes) stays whole, and predictions omit its work"
            cause = f"the shape of {name!r}, the output of {node.op}, is unknown"
            yield f"{effect}: {cause}: {_SHAPE_REMEDIES.get(node.domain, _DEFAULT_REMEDY)}"


def _has_unknown_shape(layers: LayerGraph, name: str) -> bool:
    return bool(name) and layers.tensors[name].shape is None and layers.tensors[name].dtype != onnx.TensorProto.STRING
